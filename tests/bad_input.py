"""What functions of tensors are not given: every bad input, the error, and its words. One list for CPU and GPU.

`tests/test_bad_input.py` also holds that no refusal in their sources is missing here.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

import dualkv
from dualkv import Layout, logprobs
from dualkv.ops import compat, composition, hopper, reference

LAYOUT = Layout.from_lengths([3], [[2]])
GOOD = torch.zeros(5, 4, 16)
LSE = torch.zeros(4, 5)
NAN, INF = float("nan"), float("inf")


def cumulative(*lens):
    return torch.tensor([0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def tensor(rows, heads=2, head_dim=16, dtype=torch.float64, device="cpu"):
    return torch.zeros(rows, heads, head_dim, dtype=dtype, device=device)


@cache
def base(function):
    """(what is called, good arguments of it by name)"""
    op = {"q": GOOD, "k": GOOD, "v": GOOD, "offsets": LAYOUT.offsets, "parent": LAYOUT.parent, "softmax_scale": 1.0}
    mask, batch = torch.ones(2, 2, dtype=torch.int64), dualkv.pack([[1, 2], [3]], [[[4, 5], [6]], [[7]]])
    one = torch.ones(1, dtype=torch.float64)
    return {
        "attention": (dualkv.attention, {"q": GOOD, "k": GOOD, "v": GOOD, "layout": LAYOUT}),
        "fwd": (torch.ops.dualkv.fwd, op),
        "bwd": (torch.ops.dualkv.bwd, {"dout": GOOD, "out": GOOD, "lse": LSE, **op}),
        "compat": (
            dualkv.flash_attn_dualkv_varlen_func,
            {
                "q": tensor(7, 4), "k_context": tensor(3), "v_context": tensor(3), "k_decoded": tensor(4),
                "v_decoded": tensor(4), "cu_seqlens_q": cumulative(5, 2), "cu_seqlens_k_decoded": cumulative(2, 2),
                "max_seqlen_q": 5, "context_seqlen": 3, "max_seqlen_k_decoded": 2, "causal": True,
            },
        ),
        "response_logprobs": (
            dualkv.response_logprobs, {"hidden": torch.zeros(7, 6), "lm_head_weight": torch.zeros(9, 6), "batch": batch}
        ),
        "pack_padded": (
            dualkv.pack_padded,
            {"prompt_ids": mask, "prompt_mask": mask, "response_ids": mask, "response_mask": mask},
        ),
        "unpack": (dualkv.PackedBatch.unpack, {"self": batch, "values": torch.zeros(4)}),
        "unpack_sequences": (dualkv.PackedBatch.unpack_sequences, {"self": batch, "values": torch.zeros(7)}),
        "group_advantages": (dualkv.grpo.group_advantages, {"rewards": torch.ones(3), "group_sizes": [1, 2]}),
        "policy_loss": (
            dualkv.grpo.policy_loss,
            {"logp": one, "old_logp": one, "advantages": one, "weights": one, "clip_low": 0.2, "clip_high": 0.2},
        ),
        "token_weights": (dualkv.grpo.token_weights, {"response_lens": [1, 2], "mean": "token"}),
    }[function]  # fmt: skip


@dataclass(frozen=True)
class Bad:
    """
    Attributes:
        function: see :func:`base`.
        changes: arguments that are not the good ones.
        error, words: what comes back; "on cpu" in the words is where the good tensors are.
        values: whether it is about what tensors hold, which is read (and so waited for) where they are.
    """

    function: str
    changes: dict[str, Any]
    error: type[Exception]
    words: str
    values: bool = False

    def __str__(self):
        return f"{self.function}, {self.words[:50]}"

    def prepare(self, device, lengths="cpu"):
        """The call, its tensors on `device` (meta ones stay) and cumulative lengths on `lengths`."""
        what, arguments = base(self.function)

        def there(name, x):
            if isinstance(x, torch.Tensor):
                if x.device.type == "meta" or name in ("offsets", "parent"):
                    return x
                return x.to(lengths if name.startswith("cu_seqlens") else device)
            return x.to(device) if isinstance(x, dualkv.PackedBatch) else x

        moved = {name: there(name, x) for name, x in {**arguments, **self.changes}.items()}
        if self.function == "bwd":
            moved = {name: moved.pop(name) for name in ("dout", "q", "k", "v", "out", "lse")} | moved
        return lambda: what(**moved)

    def check(self, call, device):
        """That `call` is refused, in one sentence. Returns the error."""
        with pytest.raises(self.error, match=self.words.replace("on cpu", f"on {device}")) as caught:
            call()
        assert "\n" not in str(caught.value)
        return caught.value


def _attention(error, words, q=GOOD, k=GOOD, v=GOOD, **more):
    return Bad("attention", {"q": q, "k": k, "v": v, **more}, error, words)


STRIDED = GOOD.transpose(0, 2).contiguous().transpose(0, 2)
BAD = [
    _attention(ValueError, r"q has shape \(1, 5, 4, 16\), expected \[T, H, D\]: packed", GOOD[None]),
    _attention(ValueError, r"k has shape \(4, 16\), expected \[T, Hk, D\]", k=GOOD[0]),
    _attention(TypeError, "v is a list, expected a torch.Tensor", v=[1.0]),
    _attention(TypeError, "k is torch.float16 and q is torch.float32, expected one dtype", k=GOOD.half()),
    _attention(TypeError, "q is torch.int32, expected bfloat16, float16", *[GOOD.int()] * 3),
    _attention(ValueError, "k is on meta and q on cpu, expected one device", k=GOOD.to("meta")),
    _attention(ValueError, "q has 4 heads and k 3, expected q's to be a multiple", k=GOOD[:, :3], v=GOOD[:, :3]),
    _attention(ValueError, "q has 4 heads and k 0", k=GOOD[:, :0], v=GOOD[:, :0]),
    _attention(ValueError, "v has 4 heads and k 2, expected the same", k=GOOD[:, :2]),
    _attention(ValueError, "k has 4 tokens and q 5, expected the same", k=GOOD[:4]),
    _attention(ValueError, "v has head_dim 8 and q 16, expected the same", v=GOOD[:, :, :8]),
    _attention(ValueError, "k has strides .*, expected a contiguous last dimension", k=STRIDED),
    *(
        _attention(ValueError, f"q has head_dim {d}, expected a multiple of 8 up to 256", *[torch.zeros(5, 4, d)] * 3)
        for d in (0, 12, 264)
    ),
    _attention(ValueError, "q has 6 tokens, the layout 5", *[torch.zeros(6, 4, 16)] * 3),
    *(
        Bad(name, {"softmax_scale": 1e-39}, ValueError, "softmax_scale is 1e-39, expected a number")
        for name in ("fwd", "bwd")
    ),
    _attention(TypeError, "layout is a list, expected a dualkv.Layout", layout=[0, 3, 5]),
    *(
        _attention(ValueError, f"softmax_scale is {scale}, expected a number from 2", softmax_scale=scale)
        for scale in (0.0, -1.0, 1e-46, 1e-39, 2.0**-101, 2**101, NAN, INF)
    ),
    *(
        Bad("fwd", {name: torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, f"{name} is on meta, .* CPU")
        for name in ("offsets", "parent")
    ),
    Bad("bwd", {"dout": GOOD.half()}, ValueError, r"dout is .* torch.float16 on cpu, expected q's \(5, 4, 16\)"),
    Bad("bwd", {"dout": GOOD[:4]}, ValueError, r"dout is \(4, 4, 16\) .*, expected q's"),
    Bad("bwd", {"out": GOOD[:4]}, ValueError, r"out is \(4, 4, 16\) .*, expected q's"),
    Bad("bwd", {"lse": LSE[:, :4]}, ValueError, r"lse has shape \(4, 4\), expected \[H, T\] = \(4, 5\)"),
    Bad("bwd", {"lse": LSE.double()}, ValueError, "lse is torch.float64 on cpu, expected torch.float32"),
    Bad("bwd", {"gradients": "vq"}, ValueError, "gradients is 'vq', expected one of q, k, v, qk"),
]  # fmt: skip


def _compat(error, words, **changes):
    return Bad("compat", changes, error, words)


BAD += [
    _compat(ValueError, r"q has shape \(2, 16\), expected \[sum\(len_q\), H, D\]", q=tensor(7)[0]),
    _compat(ValueError, r"v_context has shape .* expected \[P, Hk, D\]", v_context=tensor(3)[None]),
    _compat(ValueError, r"k_decoded has shape .* expected \[sum\(R\), Hk, D\]", k_decoded=tensor(4)[None]),
    _compat(TypeError, "q is torch.int32, expected bfloat16", q=tensor(7, 4).int()),
    _compat(TypeError, "k_decoded is a list, expected a torch.Tensor", k_decoded=[1.0]),
    _compat(TypeError, "k_context is torch.float16 and q is torch.float64, expected one", k_context=tensor(3).half()),
    _compat(ValueError, "v_decoded is on meta and q on cpu, expected one device", v_decoded=tensor(4, device="meta")),
    _compat(ValueError, "k_decoded has head_dim 8 and q 16, expected the same", k_decoded=tensor(4, head_dim=8)),
    _compat(ValueError, "k_decoded has 1 heads and k_context 2, expected the same", k_decoded=tensor(4, 1)),
    _compat(ValueError, "q has 3 heads and k_context 2, expected q's to be a multiple", q=tensor(7, 3)),
    _compat(ValueError, "v_context has 4 tokens and k_context 3, expected the same", v_context=tensor(4)),
    _compat(ValueError, "v_decoded has 3 tokens and k_decoded 4, expected the same", v_decoded=tensor(3)),
    _compat(ValueError, "context_seqlen is 4, k_context has 3 tokens", context_seqlen=4),
    _compat(
        ValueError, "cu_seqlens_q describes 1 sequences, cu_seqlens_k_decoded 2, expected equally",
        cu_seqlens_q=cumulative(7),
    ),
    _compat(ValueError, "cu_seqlens_q ends at 6, q has 7 tokens", cu_seqlens_q=cumulative(5, 1)),
    _compat(
        ValueError, "cu_seqlens_k_decoded ends at 5, k_decoded has 4 tokens", cu_seqlens_k_decoded=cumulative(2, 3)
    ),
    _compat(
        ValueError, "cu_seqlens_q gives sequence 1 6 queries, it has 5 positions",
        cu_seqlens_q=cumulative(1, 6), max_seqlen_q=6,
    ),
    _compat(ValueError, "cu_seqlens_q must start with 0, got", cu_seqlens_q=cumulative(5, 2)[1:]),
    _compat(ValueError, "cu_seqlens_q must not decrease, got 9 then 7", cu_seqlens_q=torch.tensor([0, 9, 7])),
    _compat(TypeError, "cu_seqlens_q must hold integers", cu_seqlens_q=torch.tensor([0.0, 5.0, 7.0])),
    _compat(ValueError, "cu_seqlens_q must have one dimension", cu_seqlens_q=cumulative(5, 2)[None]),
    _compat(ValueError, "max_seqlen_q is 4, expected at least the longest of cu_seqlens_q, 5", max_seqlen_q=4),
    _compat(ValueError, "max_seqlen_k_decoded is 1, expected at least", max_seqlen_k_decoded=1),
    *(
        _compat(ValueError, f"softmax_scale is {scale}, expected a number from 2", softmax_scale=scale)
        for scale in (0.0, -1.0, 1e-46, 1e-39, 2.0**-101, 2**101, NAN, INF)
    ),
    *(
        _compat(
            ValueError, f"q has head_dim {d}, expected a multiple of 8 up to 256", q=tensor(7, 4, d),
            **{name: tensor(3, head_dim=d) for name in ("k_context", "v_context")},
            **{name: tensor(4, head_dim=d) for name in ("k_decoded", "v_decoded")},
        )
        for d in (0, 12, 264)
    ),
]  # fmt: skip
BAD += [
    Bad(bad.function, {**bad.changes, "causal": False}, bad.error, bad.words) for bad in BAD if bad.function == "compat"
]


def _logprobs(error, words, values=False, **changes):
    return Bad("response_logprobs", changes, error, words, values)


BAD += [
    *(
        _logprobs(ValueError, f"temperature is {t}, expected a finite number above 0", temperature=t)
        for t in (0.0, NAN, INF)
    ),
    _logprobs(ValueError, "chunk_size is 0, expected 1 row or more", chunk_size=0),
    _logprobs(ValueError, r"hidden has shape \(3, 6\), expected \[1, 7, 6\] or", hidden=torch.zeros(3, 6)),
    _logprobs(ValueError, r"hidden has shape .*, expected \[1, 7, 5\]", lm_head_weight=torch.zeros(9, 5)),
    _logprobs(ValueError, r"lm_head_weight must have two dimensions \[V, C\]", lm_head_weight=torch.zeros(6)),
    _logprobs(TypeError, "hidden must be a floating point tensor, got torch.int64", hidden=torch.zeros(7, 6).long()),
    _logprobs(TypeError, "lm_head_weight must be a floating point tensor, got a list", lm_head_weight=[1.0]),
    _logprobs(ValueError, "hidden is on meta, batch on cpu, expected one", hidden=torch.zeros(7, 6, device="meta")),
    _logprobs(
        ValueError, "hidden is torch.float32, lm_head_weight torch.float16, expected one dtype", values=True,
        lm_head_weight=torch.zeros(9, 6).half(),
    ),
    Bad(
        "pack_padded", {"prompt_ids": torch.ones(2)}, TypeError, "prompt_ids must hold integers, got torch.float32"
    ),
    Bad("pack_padded", {"prompt_mask": [[1]]}, TypeError, "prompt_mask must be a tensor, got a list"),
    Bad("pack_padded", {"prompt_ids": torch.tensor([1])}, ValueError, "prompt_ids must have two dimensions"),
    Bad("pack_padded", {"prompt_mask": torch.ones(1, 2)}, ValueError, r"prompt_mask has shape \(1, 2\), expected that"),
    Bad(
        "pack_padded", {"prompt_mask": torch.ones(2, 2, device="meta")}, ValueError,
        "prompt_mask is on meta, prompt_ids on cpu",
    ),
    Bad(
        "pack_padded", {"response_ids": torch.ones(2, 3).long(), "response_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])},
        ValueError, r"response_mask\[1\] has holes, expected the tokens of a row together", values=True,
    ),
    Bad(
        "pack_padded", {"prompt_mask": torch.tensor([[1, 1], [0, 0]])}, ValueError, r"prompts\[1\] is empty",
        values=True,
    ),
    Bad("unpack", {"values": torch.zeros(3)}, ValueError, r"values has shape \(3,\), expected \[4, ...\]"),
    Bad("unpack", {"form": "rows"}, ValueError, "form is 'rows', expected 'list', 'padded' or 'nested'"),
    Bad("unpack_sequences", {"values": torch.zeros(3)}, ValueError, r"values has shape \(3,\), expected \[7, ...\] or"),
    Bad("group_advantages", {"rewards": torch.ones(3).long()}, TypeError, "rewards must be floating point, got torch"),
    Bad("group_advantages", {"rewards": [1.0] * 3}, TypeError, "rewards must be a tensor, got a list"),
    Bad("group_advantages", {"rewards": torch.ones(3, 1)}, ValueError, r"rewards must have one dimension, .* \(3, 1\)"),
    Bad("group_advantages", {"group_sizes": [3, 0]}, ValueError, "group_sizes must be 1 or more, got 0"),
    Bad("group_advantages", {"group_sizes": [3, 1]}, ValueError, "group_sizes add up to 4, rewards holds 3"),
    *(
        Bad(
            "group_advantages", {"rewards": torch.tensor([0.0, x, 1.0])}, ValueError, rf"rewards\[1\] is {x}, expected",
            values=True,
        )
        for x in (NAN, INF)
    ),
    Bad("token_weights", {"response_lens": [1, -1]}, ValueError, "response_lens must be 0 or more, got -1", True),
    Bad("token_weights", {"mean": "batch"}, ValueError, "mean must be 'sequence' or 'token', got 'batch'", True),
    Bad(
        "policy_loss", {"advantages": torch.ones(2)}, ValueError,
        r"advantages has shape \(2,\), logp \(1,\): expected \[M\] for both",
    ),
    *(Bad("policy_loss", {x: -0.1}, ValueError, f"{x} is -0.1, expected 0 or more") for x in ("clip_low", "kl_coef")),
    Bad("policy_loss", {"kl_coef": 0.1}, ValueError, "kl_coef is 0.1 and ref_logp is missing"),
]  # fmt: skip
# On a GPU the answer is an assertion of the device, which would end the process.
BAD_ON_CPU = [
    _logprobs(
        ValueError, "response token 4 is outside the vocabulary, lm_head_weight has 4 rows", values=True,
        lm_head_weight=torch.zeros(4, 6),
    ),
]  # fmt: skip


@contextmanager
def nothing_runs(monkeypatch):
    """Whatever computes fails: errors come before any work."""
    with monkeypatch.context() as patch:
        places = [(module, name) for module in (reference, composition, hopper) for name in ("forward", "backward")]
        for module, name in [*places, (compat, "_unmasked"), (logprobs._HeadLogProbs, "apply")]:
            patch.setattr(module, name, lambda *arguments: pytest.fail("something ran"))
        yield

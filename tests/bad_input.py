"""Bad input of functions that take tensors: the error, and what its message names. One list for CPU and GPU."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

import dualkv
from dualkv import Layout, logprobs
from dualkv.ops import compat, composition, cudnn, flex, hopper, reference

LAYOUT = Layout.from_lengths([3], [[2]])
GOOD = torch.zeros(5, 4, 16)
LSE = torch.zeros(4, 5)
NAN, INF = float("nan"), float("inf")


def cumulative(*lens):
    return torch.tensor([0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def tensor(rows, heads=2, head_dim=16, dtype=torch.float64, device="cpu"):
    return torch.zeros(rows, heads, head_dim, dtype=dtype, device=device)


def check_names(error, *names):
    """Check that the message of an error is one line and has all these names and values, whatever its words are."""
    assert "\n" not in str(error)
    for name in names:
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error)), f"{error} does not name {name}"


@cache
def base(function):
    """(what is called, good arguments of it by name)"""
    op = {"q": GOOD, "k": GOOD, "v": GOOD, "offsets": LAYOUT.offsets, "parent": LAYOUT.parent, "softmax_scale": 1.0}
    mask, batch = torch.ones(2, 2, dtype=torch.int64), dualkv.pack([[1, 2], [3]], [[[4, 5], [6]], [[7]]])
    batch.layout.mark_used()
    one = torch.ones(1, dtype=torch.float64)
    return {
        "attention": (dualkv.attention, {"q": GOOD, "k": GOOD, "v": GOOD, "layout": LAYOUT}),
        "fwd": (torch.ops.dualkv.fwd, op),
        "bwd": (torch.ops.dualkv.bwd, {"dout": GOOD, "out": GOOD, "lse": LSE, **op}),
        "compat": (
            dualkv.flash_attn_dualkv_varlen_func,
            {
                "q": tensor(7, 4),
                **{name: tensor(3) for name in ("k_context", "v_context")},
                **{name: tensor(4) for name in ("k_decoded", "v_decoded")},
                "cu_seqlens_q": cumulative(5, 2),
                "cu_seqlens_k_decoded": cumulative(2, 2),
                "max_seqlen_q": 5,
                "context_seqlen": 3,
                "max_seqlen_k_decoded": 2,
                "causal": True,
            },
        ),
        "response_logprobs": (
            dualkv.response_logprobs,
            {"hidden": torch.zeros(7, 6), "head": torch.zeros(9, 6), "batch": batch},
        ),
        "Head": (dualkv.Head, {"weight": torch.zeros(9, 6)}),
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
    }[function]


@dataclass(frozen=True)
class Bad:
    """
    Attributes:
        function: see :func:`base`.
        changes: arguments that are not the good ones.
        error: its type.
        names: what the message must name, by "|": the argument, what came, what is expected. The rest of its wording is
            free. "cpu" stands for the device of the good tensors.
        values: whether it is about what tensors hold, which is read (and so waited for) where they are.
    """

    function: str
    changes: dict[str, Any]
    error: type[Exception]
    names: str
    values: bool = False

    def __str__(self):
        return f"{self.function}, {self.names}"

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
        """Check that `call` is refused, in one sentence."""
        with pytest.raises(self.error) as caught:
            call()
        check_names(caught.value, *(str(device) if name == "cpu" else name for name in self.names.split("|")))


def _attention(error, names, q=GOOD, k=GOOD, v=GOOD, **more):
    return Bad("attention", {"q": q, "k": k, "v": v, **more}, error, names)


STRIDED = GOOD.transpose(0, 2).contiguous().transpose(0, 2)
BAD = [
    _attention(ValueError, "q|(1, 5, 4, 16)|[T, H, D]", GOOD[None]),
    _attention(ValueError, "k|(4, 16)|[T, Hk, D]", k=GOOD[0]),
    _attention(TypeError, "v|list|torch.Tensor", v=[1.0]),
    _attention(TypeError, "k|torch.float16|q|torch.float32", k=GOOD.half()),
    _attention(TypeError, "q|torch.int32|bfloat16|float16", *[GOOD.int()] * 3),
    _attention(ValueError, "k|meta|q|cpu", k=GOOD.to("meta")),
    _attention(ValueError, "q|4|k|3", k=GOOD[:, :3], v=GOOD[:, :3]),
    _attention(ValueError, "q|4|k|0", k=GOOD[:, :0], v=GOOD[:, :0]),
    _attention(ValueError, "v|4|k|2", k=GOOD[:, :2]),
    _attention(ValueError, "k|4|q|5", k=GOOD[:4]),
    _attention(ValueError, "k|head_dim|8|q|16", k=GOOD[:, :, :8]),
    _attention(ValueError, "v|head_dim|12|8|512", v=torch.zeros(5, 4, 12)),
    Bad("bwd", {"v": GOOD[:, :, :8]}, ValueError, "dout|(5, 4, 16)|[T, H, Dv]|(5, 4, 8)"),
    _attention(ValueError, "k|strides|last dimension", k=STRIDED),
    *(_attention(ValueError, f"q|head_dim|{d}|8|512", *[torch.zeros(5, 4, d)] * 3) for d in (0, 12, 520)),
    _attention(ValueError, "q|6|layout|5", *[torch.zeros(6, 4, 16)] * 3),
    *(Bad(name, {"softmax_scale": 1e-39}, ValueError, "softmax_scale|1e-39") for name in ("fwd", "bwd")),
    _attention(TypeError, "layout|list|dualkv.Layout", layout=[0, 3, 5]),
    *(
        _attention(ValueError, f"softmax_scale|{scale}|2", softmax_scale=scale)
        for scale in (0.0, -1.0, 1e-46, 1e-39, 2.0**-101, 2**101, NAN, INF)
    ),
    *(
        Bad("fwd", {name: torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, f"{name}|meta|CPU")
        for name in ("offsets", "parent")
    ),
    Bad("bwd", {"dout": GOOD.half()}, ValueError, "dout|torch.float16|cpu|q|(5, 4, 16)"),
    Bad("bwd", {"dout": GOOD[:4]}, ValueError, "dout|(4, 4, 16)|q"),
    Bad("bwd", {"out": GOOD[:4]}, ValueError, "out|(4, 4, 16)|q"),
    Bad("bwd", {"lse": LSE[:, :4]}, ValueError, "lse|(4, 4)|[H, T]|(4, 5)"),
    Bad("bwd", {"lse": LSE.double()}, ValueError, "lse|torch.float64|cpu|torch.float32"),
    Bad("bwd", {"gradients": "vq"}, ValueError, "gradients|'vq'|q|k|v"),
    Bad("bwd", {"dlse": LSE[:, :4]}, ValueError, "dlse|(4, 4)|[H, T]|(4, 5)"),
    Bad("bwd", {"dlse": LSE.double()}, ValueError, "dlse|torch.float64|cpu|torch.float32"),
    *(
        Bad(function, {name: value}, error, f"{name}|{value}|{expected}")
        for function in ("attention", "fwd", "bwd")
        for error, name, value, expected in (
            (ValueError, "window", 0, "1"),
            (ValueError, "chunk", -3, "1"),
            *((ValueError, "softcap", cap, "2^-20|2^10") for cap in (0.0, -1.0, 2.0**-21, 2.0**11, NAN, INF)),
        )
    ),
    *(
        Bad(function, changes, error, names)
        for function in ("attention", "fwd", "bwd")
        for error, names, changes in (
            (ValueError, "window|4|chunk|8", {"window": 4, "chunk": 8}),
            (ValueError, "sinks|(5,)|[H]|(4,)", {"sinks": torch.zeros(5)}),
            (ValueError, "sinks|(4, 1)|[H]|(4,)", {"sinks": torch.zeros(4, 1)}),
            (TypeError, "sinks|torch.float16|torch.float32", {"sinks": torch.zeros(4).half()}),
            (ValueError, "sinks|meta|q|cpu", {"sinks": torch.zeros(4, device="meta")}),
        )
    ),
    _attention(TypeError, "window|2.5|integer", window=2.5),
    _attention(TypeError, "window|True|integer", window=True),
    _attention(TypeError, "window|torch.int64|meta|integer", window=torch.tensor(5, device="meta")),
    _attention(ValueError, "softcap|2^-20|2^10", softcap=10**400),
    _attention(ValueError, "softcap|0.1|torch.float16|2^-3|torch.bfloat16", *[GOOD.half()] * 3, softcap=0.1),
    *(_attention(TypeError, f"deterministic|{x!r}|True|False", deterministic=x) for x in (None, 1, "yes")),
    _attention(TypeError, "window|torch.bool|()|integer", window=torch.tensor(True)),
    _attention(TypeError, "chunk|torch.int64|(1,)|integer", chunk=torch.tensor([8])),
    _attention(TypeError, "softmax_scale|str|number", softmax_scale="1"),
    *(
        _attention(TypeError, f"{name}|Tensor|number", **{name: torch.tensor(2.0, requires_grad=True)})
        for name in ("softmax_scale", "softcap")
    ),
    _attention(TypeError, "softcap|str|number", softcap="50"),
    _attention(TypeError, "sinks|list|torch.Tensor", sinks=[0.0] * 4),
    _attention(TypeError, "sinks|torch.sparse_coo|torch.strided", sinks=torch.zeros(4).to_sparse()),
    _attention(TypeError, "k|torch.sparse_coo|torch.strided", k=GOOD.to_sparse()),
    _attention(TypeError, "v|nested|torch.strided", v=torch.nested.nested_tensor([GOOD[:3], GOOD[3:]])),
]


def _compat(error, names, **changes):
    return Bad("compat", changes, error, names)


BAD += [
    _compat(ValueError, "q|(2, 16)|[sum(len_q), H, D]", q=tensor(7)[0]),
    _compat(ValueError, "v_context|[P, Hk, D]", v_context=tensor(3)[None]),
    _compat(ValueError, "k_decoded|[sum(R), Hk, D]", k_decoded=tensor(4)[None]),
    _compat(TypeError, "q|torch.int32|bfloat16", q=tensor(7, 4).int()),
    _compat(TypeError, "k_decoded|list|torch.Tensor", k_decoded=[1.0]),
    _compat(TypeError, "k_context|torch.float16|q|torch.float64", k_context=tensor(3).half()),
    _compat(ValueError, "v_decoded|meta|q|cpu", v_decoded=tensor(4, device="meta")),
    _compat(ValueError, "k_decoded|head_dim|8|q|16", k_decoded=tensor(4, head_dim=8)),
    _compat(ValueError, "v_decoded|head_dim|8|v_context|16", v_decoded=tensor(4, head_dim=8)),
    _compat(ValueError, "k_decoded|1|k_context|2", k_decoded=tensor(4, 1)),
    _compat(ValueError, "q|3|k_context|2", q=tensor(7, 3)),
    _compat(ValueError, "v_context|4|k_context|3", v_context=tensor(4)),
    _compat(ValueError, "v_decoded|3|k_decoded|4", v_decoded=tensor(3)),
    _compat(ValueError, "context_seqlen|4|k_context|3", context_seqlen=4),
    _compat(ValueError, "cu_seqlens_q|1|cu_seqlens_k_decoded|2", cu_seqlens_q=cumulative(7)),
    _compat(ValueError, "cu_seqlens_q|6|q|7", cu_seqlens_q=cumulative(5, 1)),
    _compat(ValueError, "cu_seqlens_k_decoded|5|k_decoded|4", cu_seqlens_k_decoded=cumulative(2, 3)),
    _compat(ValueError, "cu_seqlens_q|1|6|5", cu_seqlens_q=cumulative(1, 6), max_seqlen_q=6),
    _compat(ValueError, "cu_seqlens_q|0", cu_seqlens_q=cumulative(5, 2)[1:]),
    _compat(ValueError, "cu_seqlens_q|9|7", cu_seqlens_q=torch.tensor([0, 9, 7])),
    _compat(TypeError, "cu_seqlens_q|integers", cu_seqlens_q=torch.tensor([0.0, 5.0, 7.0])),
    _compat(ValueError, "cu_seqlens_q|dimension", cu_seqlens_q=cumulative(5, 2)[None]),
    _compat(ValueError, "max_seqlen_q|4|cu_seqlens_q|5", max_seqlen_q=4),
    _compat(ValueError, "max_seqlen_k_decoded|1", max_seqlen_k_decoded=1),
    _compat(ValueError, "softmax_scale|0.0|2", softmax_scale=0.0),
    _compat(
        ValueError, "v_context|head_dim|12|8|512", v_context=tensor(3, head_dim=12), v_decoded=tensor(4, head_dim=12)
    ),
]
BAD += [
    Bad(bad.function, {**bad.changes, "causal": False}, bad.error, bad.names) for bad in BAD if bad.function == "compat"
]


def _logprobs(error, names, values=False, **changes):
    return Bad("response_logprobs", changes, error, names, values)


BAD += [
    *(_logprobs(ValueError, f"temperature|{t}|0", temperature=t) for t in (0.0, NAN, INF)),
    _logprobs(ValueError, "chunk_size|0|1", chunk_size=0),
    _logprobs(TypeError, "chunk_size|2.0|integer", chunk_size=2.0),
    _logprobs(ValueError, "kept_chunks|-1|0", kept_chunks=-1),
    _logprobs(TypeError, "kept_chunks|1.0|integer", kept_chunks=1.0),
    _logprobs(ValueError, "kept_chunks|1|module|0", kept_chunks=1, head=dualkv.Head(module=torch.nn.Linear(6, 9))),
    _logprobs(TypeError, "temperature|None|number", temperature=None),
    _logprobs(ValueError, "temperature|gradient|detach|module", temperature=torch.tensor(2.0, requires_grad=True)),
    _logprobs(ValueError, "temperature|(3,)|one number", temperature=torch.ones(3)),
    _logprobs(TypeError, "batch|Layout|pack", batch=Layout.from_lengths([3], [[2, 2]])),
    _logprobs(ValueError, "hidden|(3, 6)|[1, 7, 6]", hidden=torch.zeros(3, 6)),
    _logprobs(ValueError, "hidden|[1, 7, 5]", head=torch.zeros(9, 5)),
    _logprobs(ValueError, "head|[V, C]", head=torch.zeros(6)),
    _logprobs(TypeError, "hidden|torch.int64", hidden=torch.zeros(7, 6).long()),
    _logprobs(TypeError, "head|list", head=[1.0]),
    _logprobs(ValueError, "hidden|meta|batch|cpu", hidden=torch.zeros(7, 6, device="meta")),
    _logprobs(ValueError, "hidden|torch.float32|head|torch.float16", values=True, head=torch.zeros(9, 6).half()),
    *(
        Bad("Head", changes, error, names)
        for changes, error, names in (
            ({"weight": None}, ValueError, "neither|weight|module"),
            ({"module": torch.nn.Identity()}, ValueError, "both|weight|module"),
            ({"weight": torch.zeros(9)}, ValueError, "weight|(9,)|[V, C]"),
            ({"weight": torch.zeros(9, 6).long()}, TypeError, "weight|torch.int64"),
            ({"bias": torch.zeros(9, 1)}, ValueError, "bias|(9, 1)|[V]"),
            ({"bias": torch.zeros(8)}, ValueError, "bias|(8,)|9"),
            ({"bias": torch.zeros(9).half()}, ValueError, "bias|torch.float16|torch.float32"),
            ({"scale": 0.0}, ValueError, "scale|0.0|0"),
            ({"scale": INF}, ValueError, "scale|inf"),
            ({"scale": "2"}, TypeError, "scale|'2'|number"),
            ({"softcap": -1.0}, ValueError, "softcap|-1.0|0"),
            ({"softcap": "30"}, TypeError, "softcap|'30'|number"),
            ({"softcap": torch.tensor(30.0, requires_grad=True)}, TypeError, "softcap|Tensor|number"),
            ({"weight": None, "module": torch.nn.Identity(), "bias": torch.zeros(9)}, ValueError, "bias|module"),
        )
    ),
    Bad("pack_padded", {"prompt_ids": torch.ones(2)}, TypeError, "prompt_ids|torch.float32"),
    Bad("pack_padded", {"prompt_mask": [[1]]}, TypeError, "prompt_mask|list"),
    Bad("pack_padded", {"prompt_ids": torch.tensor([1])}, ValueError, "prompt_ids|dimensions"),
    Bad("pack_padded", {"prompt_mask": torch.ones(1, 2)}, ValueError, "prompt_mask|(1, 2)"),
    Bad("pack_padded", {"prompt_mask": torch.ones(2, 2, device="meta")}, ValueError, "prompt_mask|meta|prompt_ids|cpu"),
    Bad(
        "pack_padded",
        {"response_ids": torch.ones(2, 3).long(), "response_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])},
        ValueError,
        "response_mask[1]|holes",
        values=True,
    ),
    Bad("pack_padded", {"prompt_mask": torch.tensor([[1, 1], [0, 0]])}, ValueError, "prompts[1]|empty", values=True),
    *(
        Bad("pack_padded", {name: mask}, ValueError, f"{name}[{place}]|{shown}|0|1|mask == 0", values=True)
        for name in ("prompt_mask", "response_mask")
        for mask, place, shown in [
            (torch.tensor([[1.0, 0.25], [1.0, 1.0]]), "0][1", "0.25"),
            (torch.tensor([[0.0, 0.0], [-INF, 0.0]]), "1][0", "-inf"),
            (torch.tensor([[0.0, 0.0], [torch.finfo(torch.float32).min, 0.0]]), "1][0", "-3.4028234663852886e+38"),
            (torch.tensor([[1, 1], [2, 2]]), "1][0", "2"),
            (torch.tensor([[1.0, NAN], [1.0, 1.0]]), "0][1", "nan"),
        ]
    ),
    *(
        Bad("pack_padded", {name: torch.zeros(2, 2)}, ValueError, f"{name}|torch.float32|0|ones", values=True)
        for name in ("prompt_mask", "response_mask")
    ),
    Bad("unpack", {"values": torch.zeros(3)}, ValueError, "values|(3,)|[4, ...]"),
    Bad("unpack", {"values": [0.0] * 4}, TypeError, "values|list|tensor"),
    Bad("unpack_sequences", {"values": [0.0] * 7}, TypeError, "values|list|tensor"),
    Bad("response_logprobs", {"compiled": "no"}, TypeError, "compiled|str|True|False"),
    Bad("Head", {"before": "norm"}, TypeError, "before|str|function"),
    Bad("Head", {"weight": None, "module": 3}, TypeError, "module|int|function"),
    Bad("Head", {"batch_invariant": "no"}, TypeError, "batch_invariant|str|True|False"),
    Bad("policy_loss", {"logp": torch.ones(1).long()}, TypeError, "logp|torch.int64|floating"),
    Bad("policy_loss", {"old_logp": [0.0]}, TypeError, "old_logp|list|tensor"),
    Bad("unpack", {"form": "rows"}, ValueError, "form|'rows'|'list'|'padded'|'nested'"),
    Bad("unpack_sequences", {"values": torch.zeros(3)}, ValueError, "values|(3,)|[7, ...]"),
    Bad("group_advantages", {"rewards": torch.ones(3).long()}, TypeError, "rewards|torch.int64"),
    Bad("group_advantages", {"rewards": [1.0] * 3}, TypeError, "rewards|list"),
    Bad("group_advantages", {"rewards": torch.ones(3, 1)}, ValueError, "rewards|(3, 1)"),
    *(Bad("group_advantages", {"eps": x}, ValueError, f"eps|{x}|0") for x in (-1.0, NAN)),
    Bad("group_advantages", {"group_sizes": [3, 0]}, ValueError, "group_sizes|1|0"),
    Bad("group_advantages", {"group_sizes": [3, 1]}, ValueError, "group_sizes|4|rewards|3"),
    *(
        Bad("group_advantages", {"rewards": torch.tensor([0.0, x, 1.0])}, ValueError, f"rewards[1]|{x}", values=True)
        for x in (NAN, INF)
    ),
    Bad("token_weights", {"response_lens": [1, -1]}, ValueError, "response_lens|0|-1", True),
    Bad("token_weights", {"mean": "batch"}, ValueError, "mean|'sequence'|'token'|'batch'", True),
    Bad("policy_loss", {"advantages": torch.ones(2)}, ValueError, "advantages|(2,)|logp|(1,)|[M]"),
    *(
        Bad("policy_loss", {"weights": torch.ones(1, dtype=dtype)}, TypeError, f"weights|{dtype}|token_weights")
        for dtype in (torch.bool, torch.int64)
    ),
    *(Bad("policy_loss", {x: -0.1}, ValueError, f"{x}|-0.1|0") for x in ("clip_low", "kl_coef")),
    Bad("policy_loss", {"kl_coef": 0.1}, ValueError, "kl_coef|0.1|ref_logp"),
]
# On a GPU the answer is an assertion of the device, which would end the process.
BAD_ON_CPU = [_logprobs(ValueError, "token|4|head", values=True, head=torch.zeros(4, 6))]


@contextmanager
def nothing_runs(monkeypatch):
    """Make everything that computes fail in this context: errors come before any work."""
    with monkeypatch.context() as patch:
        modules = reference, composition, flex, cudnn, hopper
        places = [(module, name) for module in modules for name in ("forward", "backward")]
        for module, name in [*places, (compat, "_unmasked"), (logprobs._HeadLogProbs, "apply")]:
            patch.setattr(module, name, lambda *_, **__: pytest.fail("something ran"))
        yield

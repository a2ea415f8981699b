"""The same attention by other means, for the benchmark: FlashAttention-4, FlexAttention, PyTorch's FlashAttention.

A side is built from the same packed q, k, v. What a peer needs rearranged (sequences replicated, prompts copied) is
rearranged here, outside what is timed, and its cost is offered as a part of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkv import hopper
from dualkv.layout import segments_of
from tools.workloads import Workload

Rows = npt.NDArray[np.int64]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Side:
    """One way to compute a workload.

    Attributes:
        call: runs the forward once; this is what is timed.
        output: the last call's out [T, H, D] in packed order, for a comparison.
        parts: pieces to time apart, by name; `extra` names those that `call` leaves out.
    """

    call: Callable[[], Any]
    output: Callable[[], torch.Tensor]
    parts: dict[str, Callable[[], Any]] = field(default_factory=dict)
    extra: tuple[str, ...] = ()


class Inputs:
    """Random q [T, H, D], k, v [T, Hk, D] of a workload on a device, and the rows of its prompts and responses."""

    def __init__(self, workload: Workload, device: str = "cuda", seed: int = 0) -> None:
        self.workload, self.layout, self.device = workload, workload.layout(device), device
        self.scale = workload.head_dim**-0.5
        generator = torch.Generator(device).manual_seed(seed)

        def draw(heads: int) -> torch.Tensor:
            shape = (self.layout.num_tokens, heads, workload.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[workload.dtype])

        self.q, self.k, self.v = draw(workload.heads), draw(workload.kv_heads), draw(workload.kv_heads)
        offsets, parent = self.layout.offsets.numpy().astype(np.int64), self.layout.parent.numpy()
        rows = [np.arange(a, b) for a, b in itertools.pairwise(offsets)]
        # (prompt rows, rows of each response) of each group
        self.groups: list[tuple[Rows, list[Rows]]] = [
            (rows[s], [rows[r] for r in np.flatnonzero(parent == s)]) for s in np.flatnonzero(parent == -1)
        ]

    def index(self, rows: list[Rows]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows])).to(self.device)

    def cumulative(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=self.device)

    def empty(self) -> torch.Tensor:
        """For out [T, H, D]: NaN until it is written."""
        return torch.full_like(self.q, float("nan"))


def _take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows], without a copy where the rows lie one after another."""
    begin, n = int(rows[0]), len(rows)
    if int(rows[-1]) - begin == n - 1 and bool((rows == torch.arange(begin, begin + n, device=rows.device)).all()):
        return x[begin : begin + n]
    return x[rows]


# ---------------------------------------------------------------- ours
def ours(inputs: Inputs) -> Side:
    """`torch.ops.dualkv.fwd`.

    Raises:
        RuntimeError: this device has no kernel of ours.
    """
    offsets, parent = inputs.layout.offsets, inputs.layout.parent
    reason = hopper.unsupported(inputs.q, segments_of(offsets, parent))
    if reason:
        raise RuntimeError(f"no kernel for {reason}")
    last: list[torch.Tensor] = []

    def call() -> None:
        last[:] = torch.ops.dualkv.fwd(inputs.q, inputs.k, inputs.v, offsets, parent, inputs.scale, False)

    return Side(call, lambda: last[0])


# ---------------------------------------------------------------- FlashAttention-4
class _Varlen:
    """One FlashAttention-4 call over sequences: query rows and key rows of each, as index arrays."""

    out: torch.Tensor  # of the last call: [query rows, H, D]
    lse: torch.Tensor  # [H, query rows]

    def __init__(self, inputs: Inputs, q_rows: list[Rows], k_rows: list[Rows], causal: bool) -> None:
        from flash_attn.cute.interface import _flash_attn_fwd

        kept = [(q, k) for q, k in zip(q_rows, k_rows, strict=True) if len(q) and len(k)]
        self.sequences = len(kept)
        self.q_rows, self.k_rows = inputs.index([q for q, _ in kept]), inputs.index([k for _, k in kept])
        if not kept:
            return
        q_lens, k_lens = [len(q) for q, _ in kept], [len(k) for _, k in kept]
        tensors = _take(inputs.q, self.q_rows), _take(inputs.k, self.k_rows), _take(inputs.v, self.k_rows)
        lengths = {
            "cu_seqlens_q": inputs.cumulative(q_lens), "cu_seqlens_k": inputs.cumulative(k_lens),
            "max_seqlen_q": max(q_lens), "max_seqlen_k": max(k_lens),
        }  # fmt: skip
        self.run = lambda: _flash_attn_fwd(
            *tensors, **lengths, softmax_scale=inputs.scale, causal=causal, return_lse=True
        )

    def __call__(self) -> None:
        if self.sequences:
            self.out, self.lse = self.run()[:2]

    def write(self, out: torch.Tensor) -> None:
        if self.sequences:
            out[self.q_rows] = self.out


def _merge(
    a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two partial results over different keys, out [n, H, D] and lse [H, n], as one."""
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((x - lse).exp().t().unsqueeze(-1) for x in (lse_a, lse_b))
    return (a * share_a + b * share_b).to(a.dtype), lse


def fa4_three_calls(inputs: Inputs) -> Side:
    """Prompts causal, responses against their prompt, responses causal; the merge of the last two apart."""
    prompts = [p for p, _ in inputs.groups]
    responses = [r for _, group in inputs.groups for r in group]
    together = [np.concatenate([np.zeros(0, np.int64), *group]) for _, group in inputs.groups]
    calls = {
        "prompt": _Varlen(inputs, prompts, prompts, causal=True),
        "context": _Varlen(inputs, together, prompts, causal=False),
        "own": _Varlen(inputs, responses, responses, causal=True),
    }
    context, own = calls["context"], calls["own"]
    merge = torch.compile(_merge, dynamic=False)
    place = torch.searchsorted(own.q_rows, context.q_rows)  # the rows of `own` that have a context
    whole = len(place) == len(own.q_rows)

    def call() -> None:
        for part in calls.values():
            part()

    def merged() -> torch.Tensor:
        partial = own.out if whole else own.out[place], own.lse if whole else own.lse[:, place]
        return merge(context.out, context.lse, *partial)[0]

    def output() -> torch.Tensor:
        out = inputs.empty()
        calls["prompt"].write(out)
        own.write(out)
        if context.sequences:
            out[context.q_rows] = merged()
        return out

    parts: dict[str, Callable[[], Any]] = {name: part for name, part in calls.items() if part.sequences}
    return Side(call, output, parts | ({"merge": merged} if context.sequences else {}), extra=("merge",))


def fa4_prompt_copied(inputs: Inputs) -> Side:
    """Prompts causal, then every response against a copy of its prompt's K and V with its own behind it."""
    prompts = [p for p, _ in inputs.groups]
    pairs = [(r, np.concatenate([p, r])) for p, group in inputs.groups for r in group]
    first = _Varlen(inputs, prompts, prompts, causal=True)
    second = _Varlen(inputs, [r for r, _ in pairs], [k for _, k in pairs], causal=True)

    def call() -> None:
        first()
        second()

    def output() -> torch.Tensor:
        out = inputs.empty()
        first.write(out)
        second.write(out)
        return out

    def copy() -> tuple[torch.Tensor, torch.Tensor]:
        return inputs.k[second.k_rows], inputs.v[second.k_rows]

    calls = {name: part for name, part in (("prompt", first), ("responses", second)) if part.sequences}
    return Side(call, output, {**calls, "copy": copy}, extra=("copy",))


def _replicated(inputs: Inputs) -> list[Rows]:
    """The rows of each full sequence: a response behind its prompt, a prompt alone where there is no response."""
    return [np.concatenate([p, r]) for p, group in inputs.groups for r in group or [p[:0]]]


def fa4_replicated(inputs: Inputs) -> Side:
    """Every response behind a prompt of its own."""
    rows = _replicated(inputs)
    call = _Varlen(inputs, rows, rows, causal=True)

    def output() -> torch.Tensor:
        out = inputs.empty()
        call.write(out)
        return out

    return Side(call, output)


# ---------------------------------------------------------------- PyTorch
def flex_attention(inputs: Inputs) -> Side:
    """FlexAttention, compiled, with the visibility rule as its mask; making the block mask apart."""
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()  # every workload is another shape
    visible_end, total = inputs.layout.visible_end, inputs.layout.num_tokens

    def mask(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q < visible_end[k])

    def make_mask() -> Any:
        return torch.compile(flex.create_block_mask)(mask, None, None, total, total, device=inputs.device)

    block_mask = make_mask()
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (inputs.q, inputs.k, inputs.v))
    attend = torch.compile(flex.flex_attention, dynamic=False)
    last: list[torch.Tensor] = []

    def call() -> None:
        last[:] = [attend(q, k, v, block_mask=block_mask, scale=inputs.scale, enable_gqa=True)]

    return Side(call, lambda: last[0][0].transpose(0, 1), {"mask": make_mask}, extra=("mask",))


def torch_flash_replicated(inputs: Inputs) -> Side:
    """The FlashAttention kernel behind PyTorch's scaled_dot_product_attention, every response behind its own prompt."""
    sequences = _replicated(inputs)
    rows, lengths = inputs.index(sequences), [len(r) for r in sequences]
    q, k, v = (_take(x, rows) for x in (inputs.q, inputs.k, inputs.v))
    cu = inputs.cumulative(lengths)
    last: list[torch.Tensor] = []

    def call() -> None:
        last[:] = torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, max(lengths), max(lengths), 0.0, True, False, scale=inputs.scale
        )[:1]

    def output() -> torch.Tensor:
        out = inputs.empty()
        out[rows] = last[0]
        return out

    return Side(call, output)


SIDES: dict[str, Callable[[Inputs], Side]] = {
    "dualkv": ours,
    "fa4-3-calls": fa4_three_calls,
    "fa4-prompt-copied": fa4_prompt_copied,
    "fa4-replicated": fa4_replicated,
    "flex": flex_attention,
    "torch-flash-replicated": torch_flash_replicated,
}
PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "apache-tvm-ffi", "numpy")


def run_checked(side: Side, reference: torch.Tensor | None) -> float | None:
    """Run once; the largest |out - reference|, None without one.

    Raises:
        RuntimeError: an element of the packed output was not written.
    """
    with torch.no_grad():
        side.call()
        out = side.output()
        if out.isnan().any():
            raise RuntimeError("the output holds NaN, or elements that were not written")
        return None if reference is None else (out.float() - reference.float()).abs().max().item()

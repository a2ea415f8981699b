"""Attention over packed groups composed of PyTorch's own FlashAttention calls, for CUDA devices without a kernel.

One call lets every segment attend to itself (causal, one sequence a segment). Then one call for each level of the tree
lets the rows below a segment attend to all of it (no mask, one sequence a segment). Results merge by their log-sum-exp.
The backward runs the same calls with the merged out and lse, whose P = exp(S - lse) is each part's share of the whole
softmax, and adds up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from dualkv.arrays import IntArray, positions
from dualkv.layout import Segments
from dualkv.ops.hopper import tma_ready

aten = torch.ops.aten


def unsupported(q: torch.Tensor) -> str | None:
    """Why PyTorch's FlashAttention does not take q [T, H, D], or None."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{q.dtype} inputs"
    major, minor = torch.cuda.get_device_capability(q.device)
    if major < 8:
        return f"compute capability {major}.{minor}"
    return None


@dataclass(frozen=True)
class Part:
    """One varlen call: the packed rows of its queries and keys (None: all rows), and their cumulative lengths."""

    q_rows: torch.Tensor | None
    k_rows: torch.Tensor | None
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    causal: bool


def _rows(begin: IntArray, length: IntArray) -> IntArray:
    """The rows [begin[i], begin[i] + length[i]) one after another."""
    return np.repeat(begin, length) + positions(length)


def parts(segments: Segments, device: torch.device) -> list[Part]:
    """The calls for a layout, made once: first every segment with itself, then each level with the rows below it."""

    def tensor(array: IntArray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    def cumulative(length: IntArray) -> torch.Tensor:
        return tensor(np.concatenate([[0], np.cumsum(length)]), torch.int32)

    def make() -> list[Part]:
        own = segments.lengths[segments.lengths > 0]
        longest = int(own.max(initial=0))
        found = [Part(None, None, cumulative(own), cumulative(own), longest, longest, True)]
        below = segments.subtree_end - segments.offsets[1:]
        for depth in range(segments.max_depth):
            at = (segments.depth == depth) & (segments.lengths > 0) & (below > 0)
            if not at.any():
                continue
            q_len, k_len = below[at], segments.lengths[at]
            found.append(
                Part(
                    tensor(_rows(segments.offsets[1:][at], q_len), torch.int64),
                    tensor(_rows(segments.offsets[:-1][at], k_len), torch.int64),
                    cumulative(q_len),
                    cumulative(k_len),
                    int(q_len.max()),
                    int(k_len.max()),
                    False,
                )
            )
        return found

    return segments.made(("composition", device), make)


def _take(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x[rows]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out [T, H, D] in q's dtype, lse [H, T] fp32."""
    q, k, v = (tma_ready(x) for x in (q, k, v))  # PyTorch's kernels too read 16 bytes at a time, and do not check

    def call(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            _take(q, part.q_rows), _take(k, part.k_rows), _take(v, part.k_rows), part.cu_q, part.cu_k,
            part.max_q, part.max_k, 0.0, part.causal, False, scale=scale,
        )  # fmt: skip
        return out, lse

    own, *levels = parts(segments, q.device)
    out, lse = call(own)
    if not levels:
        return out, lse
    merged = out.float()
    for part in levels:
        part_out, part_lse = call(part)
        rows = part.q_rows
        old_lse = lse[:, rows]
        new_lse = torch.logaddexp(old_lse, part_lse)
        old, new = ((x - new_lse).exp().t().unsqueeze(-1) for x in (old_lse, part_lse))
        merged[rows] = merged[rows] * old + part_out * new
        lse[:, rows] = new_lse
    return merged.to(q.dtype), lse


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """PyTorch's FlashAttention backward orders its sums only under the global switch."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if not wanted or before:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq [T, H, D], dk and dv [T, Hk, D], in the dtypes of q, k, v; parts are added in fp32."""
    dout, q, k, v, out = (tma_ready(x) for x in (dout, q, k, v, out))
    no_dropout = torch.empty(0, dtype=torch.uint64, device=q.device)  # the state and offset of its random numbers
    sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
    with _deterministic(deterministic):
        for part in parts(segments, q.device):
            grads = aten._flash_attention_backward(
                _take(dout, part.q_rows), _take(q, part.q_rows), _take(k, part.k_rows), _take(v, part.k_rows),
                _take(out, part.q_rows), lse if part.q_rows is None else lse[:, part.q_rows],
                part.cu_q, part.cu_k, part.max_q, part.max_k, 0.0, part.causal, no_dropout, no_dropout, scale=scale,
            )  # fmt: skip
            for total, grad, rows in zip(sums, grads, (part.q_rows, part.k_rows, part.k_rows), strict=True):
                if rows is None:
                    total += grad
                else:
                    total[rows] += grad  # each row occurs once in a part
    dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True))
    return dq, dk, dv

"""Attention over packed groups as a composition of PyTorch's FlashAttention calls, for CUDA devices without a kernel.

One call lets every segment attend to itself (causal, one sequence a segment). Then one call for each level of the tree
lets the rows below each segment attend to the whole segment (no mask, one sequence a segment). Results are merged by
their log-sum-exp. The backward runs the same calls with the merged out and lse, so that P = exp(S - lse) is each call's
share of the whole softmax, and adds the gradients of all calls.

In deep trees a level whose keys are few beside the rows below them has no call of its own: each segment attends to
itself and to a copy of that level's keys above it in one call. With a window this is so for all levels, and copies are
of the keys that a segment's first row sees. With chunks so does every part of a segment that lies in one chunk. A sink
rescales the merged out. PyTorch has no softcapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from codegen import packages
from dualkv.arrays import IntArray, positions, ranges
from dualkv.ops.features import NONE, Features, Window
from dualkv.ops.sinks import dsinks, with_sinks
from dualkv.ops.tensors import Plan, tma_ready
from dualkv.segments import Segments

aten = torch.ops.aten
HEAD_DIM_MAX = 256  # of PyTorch's FlashAttention
COPIED_ROWS = 2**18  # of keys in one call with copies, about: 0.5 GiB of k and as much of v at 8 heads of 128
ELEMENTS = 2**31  # dq of one call has fewer: PyTorch's backward counts them with 32 bits, and would add to other memory
COPIES = 16  # of keys at most, for each row of a tree: an index of 128 bytes a row is kept with the layout
# Counted for each piece of a segment besides its keys. So a call has at most COPIED_ROWS / 128 pieces, far below the
# 65,535 that an axis of a launch takes, however short the pieces are.
ROWS_OF_A_PIECE = 128


def unsupported(q: torch.Tensor, head_dim: int = 0) -> str | None:
    """Say why PyTorch's FlashAttention cannot take q's dtype and device and a head dim (of queries, keys and values,
    the larger one); None if it can."""
    if head_dim > HEAD_DIM_MAX:
        return f"head dims above {HEAD_DIM_MAX}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{q.dtype} inputs"
    if q.device.type != "cuda":
        return f"{q.device.type} devices"
    major, minor = torch.cuda.get_device_capability(q.device)
    if major < 8:
        return f"compute capability {major}.{minor}"
    return None


Rows: TypeAlias = "torch.Tensor | slice"


@dataclass(frozen=True)
class Part:
    """One varlen call: the packed rows of its queries and keys, and their cumulative lengths.

    Rows are an index, a slice where they lie in one piece, so that nothing is copied, or None for all of them.

    A causal call has the last query of a sequence at its last key; `before` is how many keys before its own a query
    sees, all by default.
    """

    q_rows: Rows | None
    k_rows: Rows | None
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    causal: bool
    before: int | None = None

    def window(self) -> dict[str, int | None]:
        """The arguments of PyTorch's calls."""
        return {"window_size_left": self.before, "window_size_right": None if self.before is None else 0}


def _cumulative(length: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(length)])).to(device=device, dtype=torch.int32)


def _rows(begin: IntArray, length: IntArray, device: torch.device) -> Rows:
    """Index the rows of runs that begin at `begin` and have `length` rows, at least one."""
    end = begin + length
    if (begin[1:] == end[:-1]).all():
        return slice(int(begin[0]), int(end[-1]))
    return ranges(begin, length, device)


def parts(segments: Segments, device: torch.device, window: Window | None = None) -> list[Part]:
    """The calls for a layout and a window on the current stream, made once. Together they hold every visible pair
    once.

    First come the causal calls, which together have every row's query once; then one call for each level that is not
    copied.
    """

    def make() -> tuple[list[Part], Plan]:
        copied = _copied(segments) if window is None else np.ones(segments.max_depth, bool)
        if copied.any():
            own = _own_parts(segments, device, window, copied)
        else:
            lengths = segments.lengths[segments.lengths > 0]
            cu, longest = _cumulative(lengths, device), int(lengths.max(initial=0))
            own = [Part(None, None, cu, cu, longest, longest, True)]
        found = [*own, *_level_parts(segments, device, ~copied)]
        of_all = (x for part in found for x in (part.q_rows, part.k_rows, part.cu_q, part.cu_k))
        return found, Plan(*(x for x in of_all if isinstance(x, torch.Tensor)))

    found, plan = segments.cached(("composition", device, window), make)
    if device.type == "cuda":
        plan.use(device)
    return found


def _copied(segments: Segments) -> npt.NDArray[np.bool_]:
    """[max_depth] which levels' keys are copied to the segments below, without a window.

    A level is copied if it has at most as many copies of keys as there are rows below to merge, the largest saving
    first. None if fewer rows are merged there than there are in all: then all keys would be gathered, and their
    gradients added in fp32, for less than one merge of all rows. So trees of two levels have none.
    """
    filled = segments.lengths > 0
    before = np.concatenate([[0], np.cumsum(filled)])  # segments with rows
    last = np.searchsorted(segments.offsets, segments.subtree_end)
    copies = segments.lengths * (before[last] - before[1:])
    merged = np.where(filled, segments.subtree_end - segments.offsets[1:], 0)
    copies, merged = (np.bincount(segments.depth, n, segments.max_depth) for n in (copies, merged))
    order = np.argsort(copies - merged, kind="stable")
    chosen = (merged > 0) & (copies <= merged)
    chosen[order] &= np.cumsum(copies[order]) <= COPIES * segments.total
    return chosen & (merged[chosen].sum() >= segments.total)


def _level_parts(segments: Segments, device: torch.device, levels: npt.NDArray[np.bool_]) -> list[Part]:
    """Each of some levels with the rows below it."""
    found = []
    below = segments.subtree_end - segments.offsets[1:]
    for depth in np.flatnonzero(levels):
        at = (segments.depth == depth) & (segments.lengths > 0) & (below > 0)
        if not at.any():
            continue
        q_len, k_len = below[at], segments.lengths[at]
        found.append(
            Part(
                _rows(segments.offsets[1:][at], q_len, device),
                _rows(segments.offsets[:-1][at], k_len, device),
                _cumulative(q_len, device),
                _cumulative(k_len, device),
                int(q_len.max()),
                int(k_len.max()),
                False,
            )
        )
    return found


def _own_parts(
    segments: Segments, device: torch.device, window: Window | None, copied: npt.NDArray[np.bool_]
) -> list[Part]:
    """Pieces of segments, each with a copy of the keys above, of levels that are copied, that its first row sees;
    pieces end where chunks do."""
    first, end = segments.first_position, segments.first_position + segments.lengths
    owner = np.flatnonzero(segments.lengths)
    begin, stop = first[owner], end[owner]
    if window is not None and window.chunk is not None:
        count = (stop - 1) // window.chunk - begin // window.chunk + 1
        owner = np.repeat(owner, count)
        begin = np.maximum(window.lowest(first[owner]) + positions(count) * window.chunk, first[owner])
        stop = np.minimum(window.end(begin), end[owner])
    q_len = stop - begin
    q_begin = segments.offsets[owner] + begin - first[owner]
    lowest = np.zeros_like(begin) if window is None else window.lowest(begin)
    index, up, up_begin = _runs_above(segments, owner, np.minimum(lowest, first[owner]), copied)
    # The runs above each piece, then the piece itself.
    runs = np.stack([np.append(index, np.arange(len(owner))), np.append(up_begin, q_begin)])
    runs_len = np.append(segments.offsets[up + 1] - up_begin, q_len)
    order = np.argsort(runs[0], kind="stable")
    index, run_begin, run_len = runs[0][order], runs[1][order], runs_len[order]
    k_len = np.bincount(index, run_len, len(owner)).astype(np.int64)
    call = (np.cumsum(k_len + ROWS_OF_A_PIECE) - 1) // COPIED_ROWS
    found = []
    for n in np.unique(call):
        pieces = slice(*np.searchsorted(call, [n, n + 1]))
        of_runs = slice(*np.searchsorted(index, [pieces.start, pieces.stop]))
        found.append(
            Part(
                None if call[0] == call[-1] else ranges(q_begin[pieces], q_len[pieces], device),
                ranges(run_begin[of_runs], run_len[of_runs], device),
                _cumulative(q_len[pieces], device),
                _cumulative(k_len[pieces], device),
                int(q_len[pieces].max()),
                int(k_len[pieces].max()),
                True,
                None if window is None or window.size is None else window.size - 1,
            )
        )
    return found


def _runs_above(segments: Segments, below: IntArray, lowest: IntArray, levels: npt.NDArray[np.bool_]) -> IntArray:
    """The rows above each of n segments at positions `lowest` [n] and later: one run for each segment on its path that
    is of one of the levels.

    `below` [n] are segments, `lowest` at most their first positions. Returns [3, m]: index into `below`, the run's
    segment and its first row, in the order of index and row. A run ends with its segment and may be empty.
    """
    index, up = np.arange(len(below)), segments.parent[below]
    found = [np.zeros((3, 0), np.int64)]
    while (inside := up >= 0).any():
        index, up = index[inside], up[inside]
        hidden = np.maximum(lowest[index] - segments.first_position[up], 0)
        found.append(np.stack([index, up, segments.offsets[up] + hidden])[:, levels[segments.depth[up]]])
        up = np.where(hidden > 0, -1, segments.parent[up])
    runs = np.concatenate(found, 1)
    return runs[:, np.lexsort((runs[1], runs[0]))]


def _take(x: torch.Tensor, rows: Rows | None) -> torch.Tensor:
    return x if rows is None else x[rows]


def merge(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor, rows: Rows) -> None:
    """Merge the results over other keys into `rows` of out [T, H, D] and lse [H, T] fp32, in place.

    part_out is [n, H, D] and part_lse [H, n]. Sums are fp32, and rounded to out's dtype. One kernel where Triton is.
    """
    if out.is_cuda and _has_triton():
        from dualkv.ops import merge as kernel

        kernel.merge(out, lse, part_out, part_lse, rows)
        return
    new_lse = torch.logaddexp(lse[:, rows], part_lse)
    old_weight, weight = ((x - new_lse).exp().t().unsqueeze(-1) for x in (lse[:, rows], part_lse))
    out[rows] = (out[rows] * old_weight + part_out * weight).to(out.dtype)
    lse[:, rows] = new_lse


@cache
def _has_triton() -> bool:
    return packages.lacking("triton") is None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    softmax_scale: float,
    features: Features = NONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out [T, H, D] in q's dtype, lse [H, T] fp32; sinks [H] fp32."""
    q, k, v = (tma_ready(x) for x in (q, k, v))  # PyTorch's kernels too read 16 bytes at a time, without a check

    def call(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            _take(q, part.q_rows), _take(k, part.k_rows), _take(v, part.k_rows), part.cu_q, part.cu_k,
            part.max_q, part.max_k, 0.0, part.causal, False, scale=softmax_scale, **part.window(),
        )  # fmt: skip
        return out, lse

    calls = parts(segments, q.device, features.reach)
    own, levels = ([part for part in calls if part.causal is causal] for causal in (True, False))
    if own[0].q_rows is None:
        out, lse = call(own[0])
    else:
        out, lse = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        for part in own:
            out[part.q_rows], lse[:, part.q_rows] = call(part)
    if len(levels) + (features.sinks is not None) > 1:  # rounded once, at the end
        out = out.float()
    for part in levels:
        assert part.q_rows is not None
        merge(out, lse, *call(part), part.q_rows)
    out, lse = with_sinks(out, lse, features.sinks)
    return out.to(q.dtype), lse


def dq_floats(rows: int, sequences: int, head_dim: int) -> int:
    """Count the dQ floats of one head in PyTorch's backward, at most: it pads sequences by 128 rows and head dims to
    multiples of 64."""
    return (rows + 128 * sequences) * -(-head_dim // 64) * 64


def head_slices(heads: int, kv_heads: int, floats: int) -> list[tuple[slice, slice]]:
    """Query heads and their KV heads, for calls of fewer than ELEMENTS floats where a query head takes `floats`: all of
    them in one, or whole groups of query heads, or parts of a group.

    Raises:
        ValueError: one head takes too many.
    """
    group, at_once = heads // kv_heads, (ELEMENTS - 1) // floats
    if not at_once:
        raise ValueError(f"dq of one head has {floats} floats with padding, expected fewer than 2^31: split the batch")
    if at_once < group:
        return [
            (slice(h, min(h + at_once, (j + 1) * group)), slice(j, j + 1))
            for j in range(kv_heads)
            for h in range(j * group, (j + 1) * group, at_once)
        ]
    step = at_once // group  # KV heads
    ends = [(j, min(j + step, kv_heads)) for j in range(0, kv_heads, step)]
    return [(slice(j * group, end * group), slice(j, end)) for j, end in ends]


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Set PyTorch's global switch: without it the FlashAttention backward adds in any order, and with warnings alone in
    place of errors it does so too."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted:
        yield
        return
    torch.use_deterministic_algorithms(True)
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
    softmax_scale: float,
    features: Features = NONE,
    dlse: torch.Tensor | None = None,
    deterministic: bool = False,
    gradients: str = "qkv",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq [T, H, D], dk and dv [T, Hk, D], in the dtypes of q, k, v, dsinks [H] (without sinks [0]) fp32.

    A gradient of lse adds P * dlse to dS: to dq dlse times what the forward makes of k in the place of v, and to dk
    what the backward makes dv of dlse * q in the place of dout.
    """
    dout, q, k, v, out = (tma_ready(x) for x in (dout, q, k, v, out))
    no_dropout = torch.empty(0, dtype=torch.uint64, device=q.device)  # state and offset of dropout's random numbers

    calls = parts(segments, q.device, features.reach)
    copied = calls[0].k_rows is not None
    # dq is the sum of a causal call's and of levels'. A sum of two is rounded once in its own dtype too, and more are
    # added in fp32. So are dk and dv of copies.
    wide = sum(not part.causal for part in calls) > 1 or dlse is not None

    def of_part(part: Part, dout: torch.Tensor) -> list[torch.Tensor]:
        """Compute the gradients of the rows of q, k and v in a part."""
        of_queries = [_take(x, part.q_rows) for x in (dout, q, out)]
        of_keys = [_take(x, part.k_rows) for x in (k, v)]
        of_rows = lse if part.q_rows is None else lse[:, part.q_rows].contiguous()

        def call(heads: slice, kv_heads: slice) -> list[torch.Tensor]:
            do, query, o = (x[:, heads] for x in of_queries)
            key, value = (x[:, kv_heads] for x in of_keys)
            grads = aten._flash_attention_backward(
                do, query, key, value, o, of_rows[heads], part.cu_q, part.cu_k, part.max_q, part.max_k, 0.0,
                part.causal, no_dropout, no_dropout, scale=softmax_scale, **part.window(),
            )  # fmt: skip
            return list(grads[:3])

        slices = head_slices(q.shape[1], k.shape[1], dq_floats(len(of_queries[0]), len(part.cu_q) - 1, q.shape[2]))
        if len(slices) == 1:
            return call(*slices[0])
        found = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in of_keys]
        dq = torch.empty_like(of_queries[1])
        for heads, kv_heads in slices:
            dq[:, heads], *others = call(heads, kv_heads)
            for total, grad in zip(found, others, strict=True):
                total[:, kv_heads] += grad
        return [dq, *(x.to(q.dtype) for x in found)]

    def summed(dout: torch.Tensor) -> list[torch.Tensor]:
        sums: list[torch.Tensor] = []
        if copied:
            dq = torch.empty(q.shape, dtype=torch.float32 if wide else q.dtype, device=q.device)
            sums = [dq, *(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))]
        for part in calls:
            grads = of_part(part, dout)
            if not part.causal:
                for total, grad, rows in zip(sums, grads, (part.q_rows, part.k_rows, part.k_rows), strict=True):
                    total[rows] += grad
            elif copied:
                assert isinstance(part.k_rows, torch.Tensor)
                sums[0][slice(None) if part.q_rows is None else part.q_rows] = grads[0].to(sums[0].dtype)
                for total, grad in zip(sums[1:], grads[1:], strict=True):
                    total.index_add_(0, part.k_rows, grad.float())  # some rows more than once
            else:  # the only causal call, of all rows
                sums = [grad.float() if wide else grad for grad in grads]
        return sums

    with _deterministic(deterministic):
        sums = summed(dout)
        if dlse is not None:
            # Of size 1 in q's dtype, whatever the size of dlse; a NaN stays in its row.
            size = dlse.abs().nan_to_num(0.0, 0.0).max().clamp(min=torch.finfo(torch.float32).tiny)
            by_row = (dlse / size).t().unsqueeze(-1)
            sums[0] += by_row * (softmax_scale * size) * forward(q, k, k, segments, softmax_scale, features)[0]
            sums[1] += softmax_scale * size * summed((by_row * q).to(q.dtype))[2]
    dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True))
    return dq, dk, dv, dsinks(dout, out, lse, features.sinks, dlse)

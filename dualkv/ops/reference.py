"""Attention over packed groups in plain PyTorch, a chunk of query rows at a time: correct everywhere and slow.

Runs CPU tensors, and dtypes and devices that no other implementation takes. Memory is O(T x chunk), never O(T x T).
Sums are in fp32 (fp64 for fp64 inputs). Trees may have any depth: the code uses the visibility rule
`k <= q < visible_end[k]` and the window's lowest position alone. A chunk reads the keys that one of its rows sees, so a
call with a window of W keys costs about T (W + chunk).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch

from dualkv.arrays import IntArray
from dualkv.ops.features import NONE, Features, Window
from dualkv.segments import Segments

Function = TypeVar("Function", bound=Callable[..., Any])

CHUNK = 128  # query rows; a chunk's scores are [H, CHUNK, visible keys]


@dataclass(frozen=True)
class Chunk:
    """Query rows [begin, end) of one group and the rows of every key that any of them sees.

    The first `full` keys are seen by all rows. For the others `hidden` [end - begin, len(keys) - full] marks the rows
    that do not see them.
    """

    begin: int
    end: int
    keys: torch.Tensor
    full: int
    hidden: torch.Tensor


def chunks(
    segments: Segments,
    device: torch.device,
    by_segment: bool = False,
    window: Window | None = None,
    size: int = CHUNK,
) -> Iterator[Chunk]:
    """The chunks of all groups, which together hold every visible (query, key) pair once.

    Args:
        segments: the layout.
        device: of the chunks' tensors.
        by_segment: no chunk has rows of two segments.
        window: hides keys further back.
        size: query rows a chunk, at most.
    """
    offsets, visible_end, position = segments.offsets, segments.visible_end, segments.position
    lowest = window.lowest(position) if window else np.zeros(segments.total, np.int64)
    roots = segments.roots
    run_begin, run_end = offsets[roots], segments.subtree_end[roots]
    if by_segment:
        run_begin, run_end = offsets[:-1], offsets[1:]
    for run, last in zip(run_begin.tolist(), run_end.tolist(), strict=True):
        for begin in range(run, last, size):
            end = min(begin + size, last)
            key = np.concatenate([*_runs_before(segments, begin, end, lowest[begin:end]), np.arange(begin, end)])
            seen_by_all = (key <= begin) & (visible_end[key] >= end) & (position[key] >= lowest[begin:end].max())
            some, query = key[~seen_by_all], np.arange(begin, end)[:, None]
            hidden = (some > query) | (query >= visible_end[some]) | (position[some] < lowest[begin:end, None])
            yield Chunk(
                begin,
                end,
                torch.from_numpy(np.concatenate([key[seen_by_all], some])).to(device),
                int(seen_by_all.sum()),
                torch.from_numpy(hidden).to(device),
            )


def _runs_before(segments: Segments, begin: int, end: int, lowest: IntArray) -> list[IntArray]:
    """The rows before `begin` that one of the rows [begin, end) sees, as runs. `lowest` [end - begin] are the lowest
    positions that the rows [begin, end) see.

    The tree is in depth-first order. So the runs lie on the path of row `begin`, and the rows [begin, end) that see a
    segment of that path are the first ones.
    """
    found, least = [], np.minimum.accumulate(lowest)
    up = segments.segment_of_row[begin]
    while up >= 0:
        hidden = least[min(end, segments.subtree_end[up]) - begin - 1] - segments.first_position[up]
        found.append(np.arange(segments.offsets[up] + max(hidden, 0), min(segments.offsets[up + 1], begin)))
        if segments.first_position[up] <= least[-1]:  # the segments above have lower positions
            break
        up = segments.parent[up]
    return found[::-1]


def _without_autocast(function: Function) -> Function:
    """Turn autocast off: it stays on inside an op's implementation, and would round the fp32 products here."""

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        first = next(x for x in (*args, *named.values()) if isinstance(x, torch.Tensor))
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **named)

    return cast(Function, run)


def _without_nan_from_others(function: Function) -> Function:
    """Keep a NaN in one response out of the others.

    Hidden pairs of a chunk are multiplied by zero, and 0 * NaN is NaN. So where a result is not finite, the results are
    computed again in chunks of one segment each, with a window of one row each. On the CPU only: the check would wait
    for a GPU.
    """

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        results = function(*args, **named)
        if results[0].device.type != "cpu" or all(x.isfinite().all() for x in results):
            return results
        return function(*args, **named, by_segment=True)

    return cast(Function, run)


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads_first(x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[C, H, D] -> [Hk, G * C, D]: the G query heads of a KV head stacked, so that GQA is one batched product."""
    c, h, d = x.shape
    return x.to(dtype).reshape(c, kv_heads, h // kv_heads, d).permute(1, 2, 0, 3).reshape(kv_heads, -1, d)


def _rows_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[Hk, G * C, D] -> [C, H, D], the inverse of `_heads_first`."""
    return x.reshape(heads, -1, x.shape[-1]).transpose(0, 1)


def _scores(
    query: torch.Tensor, key: torch.Tensor, chunk: Chunk, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled and capped scores [Hk, G * C, K] of `query` [Hk, G * C, D] against `key` [Hk, K, D], -inf where hidden;
    with a cap also their derivative by the scaled scores, 1 - tanh^2."""
    scores = torch.matmul(query, key.transpose(1, 2)).mul_(scale)
    slope = None
    if softcap is not None:
        scores.div_(softcap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(softcap)
    by_head = scores.view(scores.shape[0], -1, chunk.end - chunk.begin, scores.shape[-1])
    by_head[..., chunk.full :].masked_fill_(chunk.hidden, float("-inf"))
    return scores, slope


def _by_row(sinks: torch.Tensor, kv_heads: int, chunk: Chunk) -> torch.Tensor:
    """sinks [H] -> [Hk, G * C, 1], the order of rows of `_heads_first`."""
    return sinks.repeat_interleave(chunk.end - chunk.begin).view(kv_heads, -1, 1)


@_without_autocast
@_without_nan_from_others
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    softmax_scale: float,
    features: Features = NONE,
    by_segment: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out [T, H, Dv] in q's dtype, lse [H, T] (natural log) in fp32, or fp64 for fp64 inputs; sinks [H] in the dtype
    of lse."""
    kv_heads, per_kv = k.shape[1], q.shape[1] // k.shape[1]
    if not features.batch_invariant or kv_heads == 1:
        return _forward(q, k, v, segments, softmax_scale, features, by_segment)
    parts = []  # by KV heads: with several threads a CPU makes one product in another way than two
    for head in range(kv_heads):
        one, own = slice(head, head + 1), slice(per_kv * head, per_kv * (head + 1))
        sinks = None if features.sinks is None else features.sinks[own]
        of_head = features._replace(sinks=sinks)
        parts.append(_forward(q[:, own], k[:, one], v[:, one], segments, softmax_scale, of_head, by_segment))
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts])


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    softmax_scale: float,
    features: Features,
    by_segment: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what :func:`forward` returns, of all heads at once."""
    total, heads, _ = q.shape
    kv_heads, acc, window = k.shape[1], _accumulate_dtype(q.dtype), features.reach
    size = 1 if by_segment and window else CHUNK
    by_segment |= features.batch_invariant  # then the shapes of products follow from a row's path
    out = torch.empty(total, heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, total, dtype=acc, device=q.device)
    for chunk in chunks(segments, q.device, by_segment, window, size):
        here = slice(chunk.begin, chunk.end)
        key, value = (x[chunk.keys].to(acc).transpose(0, 1) for x in (k, v))
        scores, _ = _scores(_heads_first(q[here], kv_heads, acc), key, chunk, softmax_scale, features.softcap)
        row_lse = torch.logsumexp(scores, -1, keepdim=True)
        if features.sinks is not None:
            row_lse = torch.logaddexp(row_lse, _by_row(features.sinks, kv_heads, chunk))
        probs = scores.sub_(row_lse).exp_()
        out[here] = _rows_first(torch.matmul(probs, value), heads).to(q.dtype)
        lse[:, here] = row_lse.view(heads, -1)
    return out, lse


@_without_autocast
@_without_nan_from_others
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
    by_segment: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq [T, H, D], dk [T, Hk, D] and dv [T, Hk, Dv], in the dtypes of q, k, v, dsinks [H] (without sinks [0]) in
    the dtype of lse; the order of all sums is fixed.

    With P = exp(S - lse) and delta = rowsum(dO * O) - dlse: dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K,
    dK = scale dS^T Q (FlashAttention-2, algorithm 2; S depends on lse too, and dlse/dS = P). A cap multiplies dS by
    1 - (S / cap)^2. A sink is a key of every row whose score is given and whose value is zero, so that
    dsink = -sum(exp(sink - lse) * delta).
    """
    heads, kv_heads, acc = q.shape[1], k.shape[1], _accumulate_dtype(q.dtype)
    window, sinks = features.reach, features.sinks
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (k, v))
    dsinks = torch.zeros(0 if sinks is None else heads, dtype=acc, device=q.device)
    for chunk in chunks(segments, q.device, by_segment, window, 1 if by_segment and window else CHUNK):
        here = slice(chunk.begin, chunk.end)
        key, value = (x[chunk.keys].to(acc).transpose(0, 1) for x in (k, v))
        query, grad, result = (_heads_first(x[here], kv_heads, acc) for x in (q, dout, out))
        probs, slope = _scores(query, key, chunk, softmax_scale, features.softcap)
        row_lse = lse[:, here].to(acc).reshape(kv_heads, -1, 1)
        probs.sub_(row_lse).exp_()
        dv.index_add_(0, chunk.keys, torch.matmul(probs.transpose(1, 2), grad).transpose(0, 1))
        delta = (grad * result).sum(-1, keepdim=True)
        if dlse is not None:
            delta -= dlse[:, here].to(acc).reshape(kv_heads, -1, 1)
        if sinks is not None:
            dsinks -= ((_by_row(sinks, kv_heads, chunk) - row_lse).exp() * delta).view(heads, -1).sum(1)
        dscores = torch.matmul(grad, value.transpose(1, 2)).sub_(delta).mul_(probs).mul_(softmax_scale)
        if slope is not None:
            dscores.mul_(slope)
        dq[here] = _rows_first(torch.matmul(dscores, key), heads).to(q.dtype)
        dk.index_add_(0, chunk.keys, torch.matmul(dscores.transpose(1, 2), query).transpose(0, 1))
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks

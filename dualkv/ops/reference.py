"""Attention over packed groups in plain PyTorch, a chunk of query rows at a time: right everywhere, fast nowhere.

Serves CPU tensors, and dtypes and devices that nothing else serves. Memory is O(T x chunk), never O(T x T). Sums are
kept in fp32 (fp64 for fp64 inputs). Works for trees of any depth: it knows nothing but the visibility rule
`k <= q < visible_end[k]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch

from dualkv.layout import Segments

Function = TypeVar("Function", bound=Callable[..., Any])

CHUNK = 128  # query rows; a chunk's scores are [H, CHUNK, visible keys]


@dataclass(frozen=True)
class Chunk:
    """Query rows [begin, end) of one group and the rows of every key that any of them sees.

    The keys that all rows see come first; `hidden` [end - begin, len(keys) - full] marks, for the others, who does not.
    """

    begin: int
    end: int
    keys: torch.Tensor
    full: int
    hidden: torch.Tensor


def chunks(segments: Segments, device: torch.device, apart: bool = False, size: int = CHUNK) -> Iterator[Chunk]:
    """The chunks of all groups, which together hold every visible (query, key) pair once; `apart`: one segment each."""
    roots = np.flatnonzero(segments.parent == -1)
    group_begin = segments.offsets[roots]
    run_begin, run_end = group_begin, segments.subtree_end[roots]
    if apart:
        run_begin, run_end = segments.offsets[:-1], segments.offsets[1:]
        group_begin = group_begin[np.cumsum(segments.parent == -1) - 1]
    for first, run, last in zip(group_begin.tolist(), run_begin.tolist(), run_end.tolist(), strict=True):
        for begin in range(run, last, size):
            end = min(begin + size, last)
            visible_end = segments.visible_end[first:end]
            key = np.arange(first, end)
            seen_by_all = (key <= begin) & (visible_end >= end)
            seen_by_some = (visible_end > begin) & ~seen_by_all
            keys = np.concatenate([key[seen_by_all], key[seen_by_some]])
            some, some_end = key[seen_by_some], visible_end[seen_by_some]
            query = np.arange(begin, end)[:, None]
            hidden = (some > query) | (query >= some_end)
            yield Chunk(
                begin,
                end,
                torch.from_numpy(keys).to(device),
                int(seen_by_all.sum()),
                torch.from_numpy(hidden).to(device),
            )


def _without_autocast(function: Function) -> Function:
    """Autocast stays on inside an op's implementation and would round the fp32 products here."""

    @wraps(function)
    def run(first: torch.Tensor, *args: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *args)

    return cast(Function, run)


def _contained(function: Function) -> Function:
    """Hidden pairs of a chunk are multiplied by zero, and 0 * NaN is NaN: where something is not finite in the results,
    they are made once more, each segment apart from others. (On a CPU: to ask that, a GPU would have to be waited for.)
    """

    @wraps(function)
    def run(*args: Any) -> Any:
        results = function(*args)
        if results[0].device.type != "cpu" or all(x.isfinite().all() for x in results):
            return results
        return function(*args, apart=True)

    return cast(Function, run)


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads_first(x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[C, H, D] -> [Hk, G * C, D]: the G query heads of a KV head stacked, so that GQA is one batched product."""
    c, h, d = x.shape
    return x.to(dtype).reshape(c, kv_heads, h // kv_heads, d).permute(1, 2, 0, 3).reshape(kv_heads, -1, d)


def _rows_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[Hk, G * C, D] -> [C, H, D], the way back."""
    return x.reshape(heads, -1, x.shape[-1]).transpose(0, 1)


def _scores(query: torch.Tensor, key: torch.Tensor, chunk: Chunk, scale: float) -> torch.Tensor:
    """Scaled scores [Hk, G * C, K] of `query` [Hk, G * C, D] against `key` [Hk, K, D], -inf where hidden."""
    scores = torch.matmul(query, key.transpose(1, 2)).mul_(scale)
    by_head = scores.view(scores.shape[0], -1, chunk.end - chunk.begin, scores.shape[-1])
    by_head[..., chunk.full :].masked_fill_(chunk.hidden, float("-inf"))
    return scores


@_without_autocast
@_contained
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float, apart: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out [T, H, D] in q's dtype, lse [H, T] (natural log) in fp32, or fp64 for fp64 inputs."""
    total, heads, _ = q.shape
    kv_heads, acc = k.shape[1], _accumulate_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, total, dtype=acc, device=q.device)
    for chunk in chunks(segments, q.device, apart):
        rows = slice(chunk.begin, chunk.end)
        key, value = (x[chunk.keys].to(acc).transpose(0, 1) for x in (k, v))
        scores = _scores(_heads_first(q[rows], kv_heads, acc), key, chunk, scale)
        row_lse = torch.logsumexp(scores, -1, keepdim=True)
        probs = scores.sub_(row_lse).exp_()
        out[rows] = _rows_first(torch.matmul(probs, value), heads).to(q.dtype)
        lse[:, rows] = row_lse.view(heads, -1)
    return out, lse


@_without_autocast
@_contained
def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    scale: float,
    apart: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq [T, H, D], dk and dv [T, Hk, D], in the dtypes of q, k, v; the order of all sums is fixed.

    With P = exp(S - lse) and delta = rowsum(dO * O): dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K,
    dK = scale dS^T Q (FlashAttention-2, algorithm 2).
    """
    heads, kv_heads, acc = q.shape[1], k.shape[1], _accumulate_dtype(q.dtype)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (k, v))
    for chunk in chunks(segments, q.device, apart):
        rows = slice(chunk.begin, chunk.end)
        key, value = (x[chunk.keys].to(acc).transpose(0, 1) for x in (k, v))
        query, grad, result = (_heads_first(x[rows], kv_heads, acc) for x in (q, dout, out))
        probs = _scores(query, key, chunk, scale)
        probs.sub_(lse[:, rows].to(acc).reshape(kv_heads, -1, 1)).exp_()
        dv.index_add_(0, chunk.keys, torch.matmul(probs.transpose(1, 2), grad).transpose(0, 1))
        delta = (grad * result).sum(-1, keepdim=True)
        dscores = torch.matmul(grad, value.transpose(1, 2)).sub_(delta).mul_(probs).mul_(scale)
        dq[rows] = _rows_first(torch.matmul(dscores, key), heads).to(q.dtype)
        dk.index_add_(0, chunk.keys, torch.matmul(dscores.transpose(1, 2), query).transpose(0, 1))
    return dq, dk.to(k.dtype), dv.to(v.dtype)

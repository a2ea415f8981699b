"""Attention to selected keys: of the keys of its path, a row sees those that an indexer has chosen for it.

A set is a row of bits over the positions of the row's path, in int32 words: bit p % 32 of word p // 32 is the key at
position p. :func:`attend` takes sets [S, t, W] of t rows, the last ones of a layout; query heads share the S sets in
equal, consecutive parts. Its backward reads the same sets. On a GPU FlexAttention computes all keys that rows see under
a mask that reads the bits; elsewhere PyTorch does, a chunk of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from dualkv.integrations import patching
from dualkv.ops import flex
from dualkv.ops.attention import Call
from dualkv.ops.compiling import NotCompiled, refusal, refuse_again
from dualkv.ops.intervals import block_runs, transposed
from dualkv.ops.sinks import dsinks, with_sinks
from dualkv.ops.tensors import Plan
from dualkv.segments import OP_TAGS, Segments, segments_of

ELEMENTS = 2**26  # the most scores of a chunk of rows, over all heads, unless a row has more
BITS = 32  # of a word


def attend(call: Call, sets: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
    """Attention of the last t rows of a layout to the keys of their sets.

    Args:
        call: q [t, H, D], k [T, Hk, D], v [T, Hk, Dv], the scale and sinks.
        sets: [S, t, W] int32; H is a multiple of S.
        offsets, parent: of the layout of T rows.

    Returns:
        out [t, H, Dv] in q's dtype.
    """
    out, _ = torch.ops.dualkv.selected(
        call.q, call.k, call.v, sets, offsets, parent, call.softmax_scale, call.features.sinks
    )
    return out


# ---------------------------------------------------------------- sets
def packed_bits(chosen: torch.Tensor) -> torch.Tensor:
    """Words [..., ceil(n / 32)] int32 of bools [..., n]."""
    words = torch.nn.functional.pad(chosen, (0, -chosen.shape[-1] % BITS)).unflatten(-1, (-1, BITS))
    return (words << torch.arange(BITS, dtype=torch.int32, device=words.device)).sum(-1, dtype=torch.int32)


def unpacked_bits(words: torch.Tensor, n: int) -> torch.Tensor:
    """The first n bools [..., n] of words [..., W]."""
    bits = words[..., None] >> torch.arange(BITS, dtype=torch.int32, device=words.device)
    return (bits & 1).flatten(-2)[..., :n].bool()


def chunks(segments: Segments, begin: int, end: int, size: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Cut the rows [begin, end) into at most `size` rows of one segment, in order.

    Yields:
        the first row and one past the last, and the rows of their path up to the last, as (first, one past the last) of
        each segment that has any.
    """
    path: list[tuple[int, int]] = []
    for depth, first, last in zip(
        segments.depth.tolist(), segments.offsets[:-1].tolist(), segments.offsets[1:].tolist(), strict=True
    ):
        path = [*path[:depth], (first, last)]
        for at in range(max(first, begin), min(last, end), size):
            stop = min(at + size, last, end)
            yield at, stop, [run for run in (*path[:depth], (first, stop)) if run[0] < run[1]]


def rows_of(x: torch.Tensor, runs: list[tuple[int, int]]) -> torch.Tensor:
    """The rows of x in these runs, end to end."""
    return torch.cat([x[first:last] for first, last in runs])


# ---------------------------------------------------------------- the operators
@torch.library.custom_op("dualkv::selected", mutates_args=(), tags=OP_TAGS)
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sets: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor,
    softmax_scale: float, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> out [t, H, Dv], lse [H, t] fp32 (fp64 for fp64 inputs)."""
    segments = segments_of(offsets, parent)
    segments.use.seen = True
    ways = _forward_with_flex, _forward_in_chunks
    return _computed(*ways, q, v, sets, segments, softmax_scale, sinks, q, k, v)  # type: ignore[return-value]


@torch.library.custom_op("dualkv::selected_backward", mutates_args=(), tags=OP_TAGS)
def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    sets: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor, softmax_scale: float, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> dq, dk, dv in the dtypes of q, k, v; dsinks [H] in the dtype of lse ([0] without sinks)."""
    segments = segments_of(offsets, parent)
    ways = _backward_with_flex, _backward_in_chunks
    return _computed(*ways, q, v, sets, segments, softmax_scale, sinks, dout, q, k, v, out, lse)  # type: ignore[return-value]


def _computed(
    with_flex: Callable[..., Any], in_chunks: Callable[..., Any], q: torch.Tensor, v: torch.Tensor, sets: torch.Tensor,
    segments: Segments, scale: float, sinks: torch.Tensor | None, *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The results of FlexAttention where it serves the call, else of PyTorch."""
    made = None if sinks is None else sinks.to(torch.promote_types(q.dtype, torch.float32))
    with torch.autocast(q.device.type, enabled=False):
        if flex.unsupported(q, v) is None and min(q.shape[2], v.shape[2]) >= flex.MIN_HEAD_DIM:
            try:
                return with_flex(sets, segments, scale, made, *tensors)
            except NotCompiled:
                pass
        return in_chunks(sets, segments, scale, made, *tensors)


@_forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sets: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor,
    softmax_scale: float, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    acc = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=acc)


@_backward.register_fake
def _(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    sets: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor, softmax_scale: float, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    found = [x.new_empty(x.shape) for x in (q, k, v)]
    return found[0], found[1], found[2], lse.new_empty(0 if sinks is None else len(sinks))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, sinks = inputs
    ctx.save_for_backward(*tensors, sinks, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, _dlse: Any) -> tuple[torch.Tensor | None, ...]:
    q, k, v, sets, offsets, parent, sinks, out, lse = ctx.saved_tensors
    if dout is None:
        return (None,) * 8
    dq, dk, dv, of_sinks = torch.ops.dualkv.selected_backward(
        dout, q, k, v, out, lse, sets, offsets, parent, ctx.scale, sinks
    )
    return dq, dk, dv, None, None, None, None, None if sinks is None else of_sinks.to(sinks.dtype)


_forward.register_autograd(_gradients, setup_context=_setup)


# ---------------------------------------------------------------- PyTorch, a chunk of rows at a time
def _scores(q: torch.Tensor, k: torch.Tensor, sets: torch.Tensor, scale: float) -> torch.Tensor:
    """Scores [Hk, G, c, n] of q [c, H, D] and k [n, Hk, D], -inf behind keys that are not in the sets [S, c, W]."""
    (heads, kv_heads), seen = (q.shape[1], k.shape[1]), unpacked_bits(sets, len(k))
    of_heads = seen[:, None] if len(sets) == 1 else seen.repeat_interleave(heads // len(sets), 0)
    if len(sets) > 1:
        of_heads = of_heads.unflatten(0, (kv_heads, -1))
    return torch.einsum("chgd,nhd->hgcn", _by_kv_head(q, kv_heads), k).mul_(scale).masked_fill_(~of_heads, -math.inf)


def _by_kv_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """x [c, H, D] -> [c, Hk, G, D]."""
    return x.unflatten(1, (kv_heads, -1))


def _chunk_rows(q: torch.Tensor, segments: Segments) -> int:
    return max(1, ELEMENTS // max(1, q.shape[1] * segments.longest_path))


def _forward_in_chunks(
    sets: torch.Tensor, segments: Segments, scale: float, sinks: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    acc, before = torch.promote_types(q.dtype, torch.float32), segments.total - len(q)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[1], len(q), dtype=acc)
    for first, last, runs in chunks(segments, before, segments.total, _chunk_rows(q, segments)):
        here = slice(first - before, last - before)
        keys, values = (rows_of(x, runs).to(acc) for x in (k, v))
        scores = _scores(q[here].to(acc), keys, sets[:, here], scale)
        of_rows = scores.logsumexp(-1)
        if sinks is not None:
            of_rows = torch.logaddexp(of_rows, sinks.view(*scores.shape[:2], 1))
        lse[:, here] = of_rows.flatten(0, 1)
        probs = scores.sub_(of_rows[..., None]).exp_()
        out[here] = torch.einsum("hgcn,nhd->chgd", probs, values).flatten(1, 2).to(q.dtype)
    return out, lse


def _backward_in_chunks(
    sets: torch.Tensor, segments: Segments, scale: float, sinks: torch.Tensor | None, dout: torch.Tensor,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """P = exp(S - lse) and delta = rowsum(dO * O) make dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K,
    dK = scale dS^T Q (FlashAttention-2, algorithm 2); a sink is a key without a value."""
    acc, before, kv_heads = lse.dtype, segments.total - len(q), k.shape[1]
    dq = q.new_empty(q.shape)
    dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (k, v))
    delta = (dout.to(acc) * out.to(acc)).sum(-1).t()  # [H, t]
    for first, last, runs in chunks(segments, before, segments.total, _chunk_rows(q, segments)):
        here = slice(first - before, last - before)
        keys, values = (rows_of(x, runs).to(acc) for x in (k, v))
        query, grad = (x[here].to(acc) for x in (q, dout))
        of_rows, of_delta = (x[:, here].unflatten(0, (kv_heads, -1))[..., None] for x in (lse, delta))
        probs = _scores(query, keys, sets[:, here], scale).sub_(of_rows).exp_()
        query, grad = _by_kv_head(query, kv_heads), _by_kv_head(grad, kv_heads)
        dscores = torch.einsum("chgd,nhd->hgcn", grad, values).sub_(of_delta).mul_(probs).mul_(scale)
        dq[here] = torch.einsum("hgcn,nhd->chgd", dscores, keys).flatten(1, 2).to(q.dtype)
        of_keys = torch.einsum("hgcn,chgd->nhd", dscores, query), torch.einsum("hgcn,chgd->nhd", probs, grad)
        at = 0
        for begin, end in runs:
            for total, part in zip((dk, dv), of_keys, strict=True):
                total[begin:end] += part[at : at + end - begin]
            at += end - begin
    dsink = lse.new_empty(0) if sinks is None else -((sinks[:, None] - lse).exp() * delta).sum(1)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsink


# ---------------------------------------------------------------- FlexAttention
class _Mask(Plan):
    """The blocks that FlexAttention walks, and the tables of the visibility rule. No block is seen whole, since
    FlexAttention asks the mask in blocks that are seen in part alone.

    Attributes:
        blocks: as of :class:`dualkv.ops.flex.Mask`.
        tables: visible_end [T] and position [T], int32; T padded to whole blocks by keys that no row sees.
    """

    def __init__(self, segments: Segments, device: torch.device) -> None:
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        total = flex._whole_blocks(segments.total)
        n, none = total // flex.BLOCK, np.zeros((0, 3), np.int64)
        seen = np.concatenate(block_runs(segments, None, flex.BLOCK))
        seen = seen[np.lexsort((seen[:, 1], seen[:, 0]))]
        of_keys = flex._listed(seen, none, n, device)
        of_queries = flex._listed(transposed(seen, n), none, n, device)
        made = BlockMask((total, total), *of_keys, *of_queries, (flex.BLOCK, flex.BLOCK), noop_mask)
        self.blocks = made.as_tuple()[2:-3]
        padding = 0, total - segments.total
        tables = (np.pad(x, padding).astype(np.int32) for x in (segments.visible_end, segments.position))
        self.tables = tuple(torch.from_numpy(x).to(device) for x in tables)
        super().__init__(*of_keys, *of_queries, *self.tables)


def _operators(scale: float, heads: int) -> dict[str, Callable[..., Any]]:
    """FlexAttention's operators for tensors [1, H, T, D], a mask's blocks and tables, and sets that so many query heads
    share. Without annotations, and with lse in base 2, as those of :mod:`dualkv.ops.flex`."""
    higher_order = torch.ops.higher_order

    def score(s, _batch, _head, _q, _k):  # type: ignore[no-untyped-def]
        return s

    def of_score(s, _batch, _head, _q, _k, grad):  # type: ignore[no-untyped-def]
        return [grad, None, None, None, None]

    def selected(_batch, head, q, k, visible_end, position, sets):  # type: ignore[no-untyped-def]
        at = position[k]
        bit = (sets[head // heads, q, at >> 5] >> (at & 31)) & 1
        return (k <= q) & (q < visible_end[k]) & (bit == 1)

    def whole(q: Any, blocks: Any) -> tuple[Any, ...]:
        return q.shape[2], q.shape[2], *blocks, flex.BLOCK, flex.BLOCK, selected

    def forward(q: Any, k: Any, v: Any, blocks: Any, tensors: Any) -> Any:
        given = whole(q, blocks)
        out, lse, *_ = higher_order.flex_attention(q, k, v, score, given, scale, flex.OPTIONS, (), tensors)
        return out, lse

    def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, blocks: Any, tensors: Any) -> Any:
        given = whole(q, blocks)
        dq, dk, dv, *_ = higher_order.flex_attention_backward(
            q, k, v, out, lse, dout, None, score, of_score, given, scale, flex.OPTIONS, (), tensors
        )
        return dq, dk, dv

    return {"forward": forward, "backward": backward}


@cache
def _compiled(of: str, scale: float, heads: int, _form: tuple[Any, ...]) -> Callable[..., Any]:
    """An operator compiled for any length; `_form` is what it is compiled for besides."""
    operator = _operators(scale, heads)[of]
    if flex.COMPILER == "eager":
        return operator
    torch.compiler.allow_in_graph(operator)

    def call(*given: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise NotCompiled("torch.compile is switched off")
        return operator(*given)

    # torch.compile counts compilations by code, up to a limit.
    return torch.compile(patching.with_own_code(call), fullgraph=True, dynamic=True, backend=flex.COMPILER)


def _run(of: str, sets: torch.Tensor, segments: Segments, scale: float, *tensors: torch.Tensor) -> Any:
    """An operator's results for rows padded to whole blocks; tensors: q, k, v and others, [T, heads, D] or [heads, T].

    Raises:
        NotCompiled: the operator was not compiled.
    """
    q, k, v = tensors[:3]
    form = (
        q.device, q.dtype, q.shape[1:], k.shape[1:], v.shape[1:], segments.total <= flex.BLOCK,
        torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled(),
        tuple(x.is_inference() for x in (*tensors, sets)),
    )  # fmt: skip
    key = of, scale, q.shape[1] // len(sets), form
    refuse_again(key)
    mask = segments.cached(("selected", q.device), lambda: _Mask(segments, q.device))
    if q.device.type == "cuda":
        mask.use(q.device)
    laid_out = [flex._laid_out(x) for x in tensors]
    missing = flex._whole_blocks(segments.total) - sets.shape[1]
    padded = torch.nn.functional.pad(sets, (0, 0, 0, missing)).contiguous()
    for x in laid_out:
        torch._dynamo.mark_static(x, [0, 1, *range(3, x.dim())])
    torch._dynamo.mark_static(padded, 0)
    with torch.no_grad():
        try:
            return _compiled(*key)(*laid_out, mask.blocks, (*mask.tables, padded))
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as e:
            raise refusal(key, e) from e


def _behind(own: torch.Tensor, rows: int, dim: int = 0) -> torch.Tensor:
    """own behind so many rows of zeros."""
    if not rows:
        return own
    shape = [*own.shape]
    shape[dim] = rows
    return torch.cat([own.new_zeros(shape), own], dim)


def _forward_with_flex(
    sets: torch.Tensor, segments: Segments, scale: float, sinks: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    before = segments.total - len(q)  # rows of a path, which ask for nothing
    out, lse = _run("forward", _behind(sets, before, 1), segments, scale, _behind(q, before), k, v)
    out = flex._rows_first(out, segments.total)[before:]
    return with_sinks(out, lse[0, :, before : segments.total] * math.log(2), sinks)


def _backward_with_flex(
    sets: torch.Tensor, segments: Segments, scale: float, sinks: torch.Tensor | None, dout: torch.Tensor,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    before = segments.total - len(q)
    given = [
        _behind(q, before), k, v, _behind(out, before), _behind(lse / math.log(2), before, 1), _behind(dout, before)
    ]  # fmt: skip
    found = _run("backward", _behind(sets, before, 1), segments, scale, *given)
    dq, dk, dv = (flex._rows_first(x, segments.total) for x in found)
    return dq[before:], dk, dv, dsinks(dout, out, lse, sinks, None)

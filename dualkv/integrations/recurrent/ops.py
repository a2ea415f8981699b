"""Causal convolutions and scans along the paths of a layout, made of functions that know plain sequences only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dualkv import sequence_parallel
from dualkv.integrations.recurrent import waves
from dualkv.integrations.recurrent.walked import Trees

Tensor = torch.Tensor
# (rows of a wave, initial states [N, ...] or None, the wave) -> (results, final states [N, ...] or None)
Run = Callable[[list[Tensor], Tensor | None, waves.Wave], tuple[Tensor, Tensor | None]]


def convolve(
    conv: Callable[..., Tensor], windows: waves.Windows | None, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """A causal convolution along the paths of a layout, or any function that reads a few rows back.

    Args:
        conv: `conv(x, *args, **kwargs)` convolves sequences [N, C, L] to [N, C', L], with zeros before each.
        windows: of the layout's T tokens; None where no row reads another.
        x: [1, C, T].

    Returns:
        [1, C', T].
    """
    if windows is None:
        return conv(x, *args, **kwargs)
    rows, around = _Reread.apply(x.transpose(1, 2), windows.around, windows.halo)
    out = conv(rows.transpose(1, 2), *args, **kwargs)
    around = around.masked_fill(windows.missing[..., None], 0)  # [M, 2 back, C]
    right = conv(around.transpose(1, 2).contiguous(), *args, **kwargs)[:, :, around.shape[1] // 2 :]
    right = right.transpose(1, 2).flatten(0, 1)[windows.results]  # [R, C']
    # Channels become neighbours in memory, as scans read them.
    return out.transpose(1, 2).index_copy(1, windows.rows, right[None]).transpose(1, 2)


def convolve_at_once(
    conv: Callable[..., Tensor],
    windows: waves.Windows | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    """Run :func:`convolve` by a `conv` that takes `initial_state` [M, C, k] and `cu_seqlens` of M sequences in a row.

    A state is the k rows before a sequence, the last one last; its first is not read.
    """
    if windows is None:
        return conv(x, weight, bias, **kwargs)
    back = weight.shape[-1] - 1
    rows, before = _Reread.apply(x.transpose(1, 2), windows.around[:, :back], windows.halo)
    before = before.masked_fill(windows.missing[:, :back, None], 0)  # [M, back, C]
    return conv(
        rows.transpose(1, 2),
        weight,
        bias,
        initial_state=F.pad(before.transpose(1, 2), (1, 0)),
        cu_seqlens=windows.cu_seqlens,
        cu_seqlens_cpu=windows.cu_seqlens_cpu,
        **kwargs,
    )


class _Reread(torch.autograd.Function):
    """x [1, T, C] and `x[0, at]`. PyTorch would write the gradient of the latter into [T, C] zeros and add those.

    With a halo `at` counts its own rows and then those that other ranks send; their gradients are sent back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, halo: waves.Halo | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(at)
        ctx.halo = halo
        rows = x[0]
        if halo is not None:
            received = sequence_parallel.sent(rows[halo.sent], halo.sent_to, halo.received_from, halo.group)
            rows = torch.cat([rows[halo.own], received])
        return x.view_as(x), rows[at]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_of_rows: Tensor) -> tuple[Tensor, None, None]:
        (at,), halo = ctx.saved_tensors, ctx.halo
        grad = grad.clone()
        if halo is None:
            grad[0].index_put_((at,), grad_of_rows, accumulate=True)
            return grad, None, None
        whole = grad.new_zeros(len(halo.own) + sum(halo.received_from), grad.shape[2])
        whole.index_put_((at,), grad_of_rows, accumulate=True)
        grad[0].index_add_(0, halo.own, whole[: len(halo.own)])
        back = sequence_parallel.sent(whole[len(halo.own) :], halo.received_from, halo.sent_to, halo.group)
        # One rank after the other: several may have read the same row, and sums keep their order so.
        for rows, part in zip(halo.sent.split(halo.sent_to), back.split(halo.sent_to), strict=True):
            if len(rows):
                grad[0].index_add_(0, rows, part)
        return grad, None, None


def scan(trees: Trees, rows: Sequence[Tensor], run: Run) -> Tensor:
    """A recurrence along the paths of trees, a call of `run` for each wave.

    Args:
        trees: of T tokens, 1 or more. In a part of a walk the first wave starts from the path's states, and a trunk
            keeps its own. Where ranks share the tokens, T counts those of all ranks.
        rows: tensors [1, T, ...].
        run: takes the rows [1, W, ...] of a wave, in the order of its segments, and makes results [1, W, ...].

    Returns:
        The results [1, T, ...] in the order of the given rows.
    """
    device, key = rows[0].device, trees.scan_key()
    inherited = trees.initial(key, device)
    order = trees.order(device)
    if order.rows is not None:
        rows = [_permuted(x, order.rows) for x in rows]
    results: list[Tensor] = []
    states: Tensor | None = None
    # The gradient of a split is one concatenation, that of slices is a sum of padded ones.
    parts = zip(*(x.split([wave.end - wave.begin for wave in order.waves], 1) for x in rows), strict=True)
    for wave, inputs in zip(order.waves, map(list, parts), strict=True):
        gather = wave.gather
        if gather is None and inherited is not None:
            states, gather = inherited
        if gather is None:
            out, states = run(inputs, None, wave)
        else:
            assert states is not None
            initial = inherit(states, gather)
            with gathered_again(initial, states, gather.parents):
                out, states = run(inputs, initial, wave)
        if trees.keeps:
            assert states is not None
            trees.keep_state(key, wave.end, states)
        results.append(out)
    found = torch.cat(results, 1)
    return found if order.rows is None else _permuted(found, order.rows.inverse)


class _Reordered(torch.autograd.Function):
    """`x[:, order]` of a permutation. Its gradient is gathered too; PyTorch's own would add to zeros by atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(1, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(1, inverse), None, None


def _permuted(x: Tensor, by: waves.Permutation) -> Tensor:
    found: Tensor = _Reordered.apply(x, *by)
    return found


def contiguous(x: Tensor) -> Tensor:
    """Return `x.contiguous()`, copied as by :func:`dualkv.sequence_parallel.contiguous`."""
    return x if x.is_contiguous() else _Contiguous.apply(x)


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return sequence_parallel.contiguous(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Again(NamedTuple):
    """The saved form of a view of `states[parents]`: the states as the surrounding hooks keep them, and the view."""

    states: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def gathered_again(initial: Tensor, states: Tensor, parents: Tensor) -> Iterator[None]:
    """Save `states` for the backward in place of `initial` = `states[parents]`, which is gathered once more there.

    A state of Qwen3.5 takes 2 MB a layer, as much as the rows of a response of 80 tokens; a prompt has one and each of
    its responses would have another. Hooks around this one (gradient checkpointing, offloading) see the states in
    place of the gathered ones, and everything else unchanged: PyTorch calls only the innermost hooks.
    """
    if not torch.is_grad_enabled():
        yield
        return
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)
    keep, find = around or (lambda x: x, lambda x: x)
    storage, kept = initial.untyped_storage().data_ptr(), states.detach()
    dtype, version = initial.dtype, initial._version  # a hook that names `initial` would keep it

    def pack(x: Tensor) -> Any:
        other = x.dtype != dtype or x._version != version  # written to since
        if other or x.is_conj() or x.is_neg() or x.untyped_storage().data_ptr() != storage:
            return keep(x)
        return _Again(keep(kept), x.shape, x.stride(), int(x.storage_offset()))

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, _Again):
            return find(packed)
        found: Tensor = find(packed.states).index_select(0, parents)
        return found.as_strided(packed.size, packed.stride, packed.offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def inherit(states: Tensor, gather: waves.Gather) -> Tensor:
    """The initial states [N, ...] of a wave, from the final states [M, ...] of the wave before."""
    found: Tensor = _Inherit.apply(states, *gather)
    return found


class _Inherit(torch.autograd.Function):
    """`states[parents]`. The gradients of a parent's children are added in their order, so equal from run to run."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, parents: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return states.index_select(0, parents)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        flat = grad.reshape(len(grad), -1)
        summed = torch.segment_reduce(flat, "sum", lengths=counts, axis=0, unsafe=True)
        return summed.reshape(-1, *grad.shape[1:]), None, None


def padded(run: Callable[[list[Tensor], Tensor | None, bool], tuple[Tensor, Tensor | None]]) -> Run:
    """A `run` for :func:`scan` of a function over a batch [N, L, ...], padded on the right with zeros.

    A row of zeros must leave the state as it is. `run` gets whether to return states. It is called for each batch of
    :class:`.waves.Buckets`, so that less than half of the rows are padding where segments are long.
    """

    def of_batch(
        rows: list[Tensor], initial: Tensor | None, batch: waves.Batch, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        _, at, there = batch
        filled = [x[0][at].masked_fill(~there.view(*there.shape, *[1] * (x.dim() - 2)), 0) for x in rows]
        out, states = run(filled, initial, keep)
        return out[there][None], states

    def of_wave(rows: list[Tensor], initial: Tensor | None, wave: waves.Wave) -> tuple[Tensor, Tensor | None]:
        batches, segments, order = wave.buckets
        if segments is None or order is None:
            return of_batch(rows, initial, batches[0], wave.keep)
        parts = zip(*(_permuted(x, order).split([b.rows for b in batches], 1) for x in rows), strict=True)
        initials: Sequence[Tensor | None] = [None] * len(batches)
        again: AbstractContextManager[None] = nullcontext()
        if initial is not None:
            ordered = _permuted(initial[None], segments)[0]
            initials = ordered.split([len(b.at) for b in batches])
            again = gathered_again(ordered, initial, segments.order)
        with again:
            found = [
                of_batch(list(x), state, batch, wave.keep)
                for x, state, batch in zip(parts, initials, batches, strict=True)
            ]
        out = _permuted(torch.cat([out for out, _ in found], 1), order.inverse)
        states = [state for _, state in found if state is not None]
        return out, _permuted(torch.cat(states)[None], segments.inverse)[0] if states else None

    return of_wave

"""Packed groups over the ranks of one sequence-parallel group (DeepSpeed-Ulysses).

Every rank holds an equal share of the packed rows. Attention needs all rows, so it runs on a share of the heads: one
all-to-all turns [rows of this rank, all heads] into [all rows, heads of this rank], another one turns the output back.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, Unpack

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dualkv.arrays import IntArray, outside_inference_mode, positive, to_device
from dualkv.layout import Layout
from dualkv.ops import dispatch
from dualkv.ops.attention import Call, attention, checked
from dualkv.ops.features import FeatureArguments, Features
from dualkv.packed_rows import PackedRows


def padded(layout: Layout, rows: int) -> Layout:
    """`layout` with a segment of `rows` rows behind it that sees itself alone; the same layout for 0 rows."""
    if positive("rows", rows, least=0) == 0:
        return layout
    segments = layout._segments
    offsets = np.append(segments.offsets, layout.num_tokens + rows)
    last = None if segments.last is None else np.append(segments.last, layout.num_segments)
    made = Layout._from_arrays(offsets, np.append(segments.parent, -1), layout.device, last=last)
    return made._serves(layout)


def _compare(kind: type, layout: Layout, group: dist.ProcessGroup) -> None:
    """Raises ValueError on all ranks of the group if they construct other classes or layouts.

    Every construction compares, also of a layout that was compared before: a rank that knew its layout would not wait
    for one that has another. Ranks of gloo compare on the host; in a group of NCCL alone the host waits for the GPU.
    """
    digest = hashlib.blake2b(kind.__name__.encode(), digest_size=7)
    for part in (layout.offsets.numpy(), layout.parent.numpy(), layout._segments.ends_sequence):
        digest.update(part.tobytes())
    number = int.from_bytes(digest.digest(), "big")
    kinds = [one.split(":")[0] for one in dist.get_backend_config(group).split(",")]
    device = "cpu" if "cpu" in kinds else layout.device if layout.device.type in kinds else kinds[0]
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    if ends.sum().item():
        mine = f"this one has a {kind.__name__} of {layout.num_tokens} rows in {len(layout.parent)} segments"
        raise ValueError(
            f"layouts differ between the {dist.get_world_size(group)} ranks of the group ({mine}), expected the same on"
            " all of them"
        )


def check_heads(name: str, heads: int, ranks: int) -> None:
    """Raises ValueError for a number of heads that so many ranks cannot share."""
    if heads % ranks:
        raise ValueError(f"{name} has {heads} heads, expected a multiple of the {ranks} sequence-parallel ranks")


class Shard(PackedRows):
    """This rank's rows of packed groups: rows `[rank * num_tokens, (rank + 1) * num_tokens)`.

    All ranks of the group construct it together. They compare their layouts then, once for all calls.

    Attributes:
        layout: of all rows, padded; the same on every rank.
        group: the ranks that share the rows.
        num_tokens: rows of one rank.

    Args:
        layout: of all rows.
        group: as above; without one this process has all rows.
        multiple: `num_tokens` becomes a multiple of it.

    Raises:
        ValueError: this process is none of the group; a multiple below 1; on all ranks, if their layouts or multiples
            differ.
        TypeError: another layout, a multiple that is no integer.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup | None, multiple: int = 1) -> None:
        self.group = group
        self.rank, self.world_size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        if self.rank < 0:
            raise ValueError("this process is none of the ranks of group, expected one of them or group=None")
        if not isinstance(layout, Layout):
            raise TypeError(f"layout is a {type(layout).__name__}, expected a dualkv.Layout")
        self.layout = padded(layout, -layout.num_tokens % (self.world_size * positive("multiple", multiple)))
        self.num_tokens = self.layout.num_tokens // self.world_size
        if group and self.world_size > 1:
            _compare(type(self), self.layout, group)

    def to(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> Self:
        """Copy with the layout's per-token tensors on `device`, None for the present one, as :meth:`Layout.to`."""
        layout = self.layout.to(device, non_blocking)
        if layout is self.layout:
            return self
        found = copy.copy(self)
        found.layout = layout
        for name in ("order", "places"):  # made again, on that device
            vars(found).pop(name, None)
        return found

    @cached_property
    def _row_counts(self) -> frozenset[int]:
        """The row counts of the layout with all, some or none of the segments that may pad it."""
        nested = np.flatnonzero(self.layout.parent.numpy() >= 0)
        return frozenset(self.layout.offsets[nested[-1] + 1 if len(nested) else 0 :].tolist())

    def pads(self, rows: int) -> bool:
        """Whether the layout has so many rows, without some or all of the segments that may pad it."""
        return rows in self._row_counts

    @cached_property
    def host_order(self) -> IntArray:
        """[rows of the layout]: the packed rows of all ranks, one rank after another, on the host."""
        return np.arange(self.layout.num_tokens)

    @cached_property
    @outside_inference_mode
    def order(self) -> torch.Tensor:
        """[rows of the layout] int64: `host_order` on the layout's device."""
        return torch.from_numpy(self.host_order).to(self.layout.device)

    @cached_property
    @outside_inference_mode
    def places(self) -> torch.Tensor:
        """[rows of the layout] int64: where `order` has each packed row."""
        return self.order.argsort()

    @property
    def whole(self) -> Layout:
        """The layout of the rows of all ranks."""
        return self.layout

    @property
    def rows(self) -> torch.Tensor:
        """[num_tokens] int64: this rank's packed rows."""
        return self.order[self.rank * self.num_tokens :][: self.num_tokens]

    @property
    def position_ids(self) -> torch.Tensor:
        """[num_tokens] int64: the position of each of this rank's rows in its own unpacked sequence."""
        return self.layout.position_ids[self.rows]

    def attention_of(self, layer: Hashable) -> Callable[..., torch.Tensor]:
        """:meth:`attention`."""
        return self.attention

    def split(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's num_tokens rows of x along `dim`; zeros where the layout is padded behind the rows of x."""
        rows, whole = x.shape[dim], self.layout.num_tokens
        missing = whole - rows
        if missing and not self.pads(rows):
            raise ValueError(
                f"x has {rows} rows in dimension {dim}, expected {whole}, the layout's, or fewer by rows that pad it"
            )
        if missing:
            behind = [0] * (2 * x.dim())
            behind[2 * (x.dim() - 1 - dim % x.dim()) + 1] = missing
            x = F.pad(x, behind)
        return x.index_select(dim, self.rows.to(x.device))

    def gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Gather num_tokens rows of each rank along `dim`: all rows on every rank, also those that pad the layout.

        Each rank's rows get their part of the gradient that the rank itself computes: right where every rank computes
        the same loss of all rows, and gradients of weights are summed over ranks.
        """
        if x.shape[dim] != self.num_tokens:
            raise ValueError(
                f"x has {x.shape[dim]} rows in dimension {dim}, each rank of this layout holds {self.num_tokens}"
            )
        return self.join(x, dim)

    def join(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """:meth:`gather` of anything that every rank has equally many of along `dim`, such as values of some rows."""
        if self.world_size == 1:
            return x
        whole: torch.Tensor = _Gather.apply(x.movedim(dim, 0), self.group, self.rank)
        return whole.movedim(0, dim)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        deterministic: bool = False,
        **features: Unpack[FeatureArguments],
    ) -> torch.Tensor:
        """:func:`dualkv.attention` of all rows, for those of this rank; every rank of the group calls it.

        Args:
            q: [num_tokens, H, D], H a multiple of the number of ranks.
            k, v: [num_tokens, Hk, D or Dv]. Where Hk is no multiple of the number of ranks, several get the same heads.
            softmax_scale, deterministic, features: as for :func:`dualkv.attention`. Sinks [H] are of all heads and the
                same on every rank. A rank's gradient is that of its share of the heads, and zero elsewhere.

        Returns:
            out [num_tokens, H, Dv].

        Raises:
            ValueError, TypeError: heads that the ranks cannot share, another number of rows, and what
                :func:`dualkv.attention` refuses. Before anything is sent.
        """
        return self.by_heads(attention, q, k, v, softmax_scale, deterministic, **features)

    def by_heads(
        self,
        run: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        deterministic: bool = False,
        **features: Unpack[FeatureArguments],
    ) -> torch.Tensor:
        """:meth:`attention` by a function with the arguments of :func:`dualkv.attention`, for some of the heads."""
        call = self._checked(q, k, v, softmax_scale, features)
        check_heads("q", q.shape[1], self.world_size)
        if self.world_size == 1:
            return run(q, k, v, self.layout, call.softmax_scale, deterministic, **features)
        q, k, v = self.to_heads([call.q, call.k, call.v])
        if (sinks := call.features.sinks) is not None:
            features["sinks"] = self.share(sinks)
        out = run(q, k, v, self.layout, call.softmax_scale, deterministic, **features)
        return self.to_rows(out)

    def to_heads(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange rows for heads, by an all-to-all for each tensor: what arrives is contiguous, as scans want it;
        the columns of one wide exchange would not be.

        A rank's heads read consecutive heads of tensors that have fewer of them. These are repeated until every rank
        gets equally many, each in order.

        Args:
            rows: tensors [num_tokens, H, ...] of this rank's rows. All numbers of heads divide the largest one, and
                that is a multiple of the ranks.

        Returns:
            Tensors [rows of the layout, heads of this rank, ...]; rows are in the order of :attr:`order`.
        """
        check_heads("rows", max(x.shape[1] for x in rows), self.world_size)
        return [_ToHeads.apply(self._shares(x, 1), self.group) for x in rows]

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange heads for rows, the inverse of :meth:`to_heads`: [rows of the layout, heads of this rank, ...] ->
        [num_tokens, all heads, ...]."""
        back: torch.Tensor = _ToRows.apply(x, self.world_size, self.group)
        return back.flatten(1, 2)

    def share(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's heads of a weight [H, ...]. Its gradient is zero for heads of other ranks."""
        return self._shares(weight, 0)[self.rank]

    def _shares(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The heads along `dim` as two dimensions: ranks, and the heads of each."""
        repeats = self.world_size // math.gcd(x.shape[dim], self.world_size)
        return (x.repeat_interleave(repeats, dim) if repeats > 1 else x).unflatten(dim, (self.world_size, -1))

    def _checked(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None,
        features: FeatureArguments,
    ) -> Call:
        """All that :func:`dualkv.attention` checks, before anything is sent: no rank waits for one that raised."""
        call = checked(q, k, v, softmax_scale, Features.given(**features))
        dispatch.check_tensors(call.q, call.k, call.v)
        call.features.check(call.q)
        if q.shape[0] != self.num_tokens:
            raise ValueError(f"q has {q.shape[0]} rows, each rank of this layout holds {self.num_tokens}")
        return call


@dataclass(frozen=True)
class HeadRows:
    """The rows of the decoder's output that reach the head, on one of the ranks that share the packed rows.

    Attributes:
        rows: [K] int64: indices into this rank's rows. K is the same on every rank, 1 or more.
        values: [U] int64: for each of the U rows that predict, the index of its value among the values of all ranks,
            concatenated.
    """

    rows: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, predict_rows: torch.Tensor, rank: int, shard_rows: int, ranks: int) -> HeadRows:
        """predict_rows: [U], on the host, indices into the rows of all ranks, one rank after another."""
        order = predict_rows.argsort()
        owner = predict_rows[order] // shard_rows
        counts = torch.bincount(owner, minlength=ranks)
        width = max(int(counts.max()), 1)
        start = counts.cumsum(0) - counts
        mine = predict_rows[order][owner == rank] - rank * shard_rows
        rows = F.pad(mine, (0, width - len(mine)))  # the values of the padding rows are dropped
        values = torch.empty_like(order)
        values[order] = owner * width + torch.arange(len(owner)) - start[owner]
        return cls(rows, values)

    def to(self, device: torch.device) -> HeadRows:
        """Copy to a device, without waiting for it."""
        return HeadRows(to_device(self.rows, device), to_device(self.values, device))


class _ToHeads(torch.autograd.Function):
    """[t, ranks, ...] -> [ranks * t, ...]: x[:, r] goes to rank r. The inverse of :class:`_ToRows`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.ranks, ctx.group = x.shape[1], group
        return all_to_all(contiguous(x.transpose(0, 1)), group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _ToRows.apply(grad, ctx.ranks, ctx.group), None


class _ToRows(torch.autograd.Function):
    """[ranks * t, ...] -> [t, ranks, ...]: the r-th t rows go to rank r, and result[:, r] comes from there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return contiguous(all_to_all(contiguous(x).unflatten(0, (ranks, -1)), group).transpose(0, 1))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _ToHeads.apply(grad, ctx.group), None, None


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x [ranks, ...], contiguous: x[r] goes to rank r, result[r] comes from there."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return `x.contiguous()`, without a gradient. Rows of small elements are copied in elements of 8 bytes where they
    lie so: of strided tensors PyTorch's copies move one element after the other."""
    if x.is_contiguous():
        return x
    many = 8 // x.element_size()
    *apart, last = x.stride()
    if many < 2 or last != 1 or any(n % many for n in (x.shape[-1], x.storage_offset(), *apart)):
        return x.contiguous()
    return x.view(torch.int64).contiguous().view(x.dtype)


def sent(rows: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Send so many rows to each rank, in order. Returns those of the others, so many from each."""
    received = rows.new_empty(sum(of), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), of, to, group=group)
    return received


def exchanged(rows: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """:func:`sent`, with gradients: those of received rows go back to the ranks that sent them."""
    received: torch.Tensor = _Sent.apply(rows, to, of, group)
    return received


class _Sent(torch.autograd.Function):
    """rows [sum(to), ...] -> [sum(of), ...] of the other ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.run = to, of, group
        return sent(rows, to, of, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        to, of, group = ctx.run
        return exchanged(grad, of, to, group), None, None, None


class _Gather(torch.autograd.Function):
    """x [n, ...] -> [ranks * n, ...] of all ranks; the gradient of a rank's rows is that of the rank's own loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
        ctx.mine = slice(rank * len(x), (rank + 1) * len(x))
        out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad[ctx.mine], None, None

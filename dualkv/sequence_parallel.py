"""Packed groups over the ranks of one sequence-parallel group (DeepSpeed-Ulysses).

Every rank holds an equal share of the packed rows. Attention needs all rows, so it runs on a share of the heads: one
all-to-all turns [rows of this rank, all heads] into [all rows, heads of this rank], another one turns the output back.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, Self, Unpack

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dualkv.arrays import outside_inference_mode
from dualkv.layout import Layout
from dualkv.ops import dispatch
from dualkv.ops.attention import Call, attention, checked
from dualkv.ops.features import FeatureArguments, Features
from dualkv.packed_rows import PackedRows


def padded(layout: Layout, rows: int) -> Layout:
    """`layout` with a segment behind it that sees itself alone; the same layout for 0 rows.

    Args:
        layout: of T rows.
        rows: of that segment, 0 or more.

    Returns:
        A layout of T + rows rows.

    Raises:
        ValueError: fewer rows than 0.
    """
    if rows == 0:
        return layout
    segments = layout._segments
    offsets = np.append(segments.offsets, layout.num_tokens + rows)
    made = Layout._from_arrays(offsets, np.append(segments.parent, -1), layout.device, last=segments.last)
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
        ValueError: this process is none of the group; on all ranks, if their layouts or multiples differ.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup | None, multiple: int = 1) -> None:
        self.group = group
        self.rank, self.world_size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        if self.rank < 0:
            raise ValueError("this process is none of the ranks of group, expected one of them or group=None")
        self.layout = padded(layout, -layout.num_tokens % (self.world_size * multiple))
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

    @cached_property
    @outside_inference_mode
    def order(self) -> torch.Tensor:
        """[rows of the layout] int64: the packed rows of all ranks, one rank after another."""
        return torch.arange(self.layout.num_tokens, device=self.layout.device)

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
        """:meth:`attention`, the same for every layer."""
        return self.attention

    def split(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's rows of x; zeros where the layout is padded behind them.

        Args:
            x: T rows along `dim`: as many as `layout` has, or fewer by what it is padded with.
            dim: of the rows.

        Returns:
            num_tokens rows along `dim`.

        Raises:
            ValueError: another number of rows.
        """
        rows, whole = x.shape[dim], self.layout.num_tokens
        missing = whole - rows
        if missing and rows not in self._row_counts:
            raise ValueError(
                f"x has {rows} rows in dimension {dim}, expected {whole}, the layout's, or fewer by rows that pad it"
            )
        if missing:
            behind = [0] * (2 * x.dim())
            behind[2 * (x.dim() - 1 - dim % x.dim()) + 1] = missing
            x = F.pad(x, behind)
        return x.index_select(dim, self.rows.to(x.device))

    def gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The rows of all ranks, on every rank. Each rank's rows get their part of the gradient that the rank itself
        computes: right where every rank computes the same loss of all rows, and gradients of weights are summed over
        ranks.

        Args:
            x: num_tokens rows along `dim`.
            dim: of the rows.

        Returns:
            `layout.num_tokens` rows along `dim`, also those that pad the layout.

        Raises:
            ValueError: another number of rows.
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
            k: [num_tokens, Hk, D]. Where Hk is no multiple of the number of ranks, heads are sent to several of them.
            v: [num_tokens, Hk, Dv].
            softmax_scale: as for :func:`dualkv.attention`.
            deterministic: as for :func:`dualkv.attention`.
            features: as for :func:`dualkv.attention`. Sinks [H] are of all heads and the same on every rank. The
                gradient that a rank gets is the one of its share of the heads, and zero elsewhere: the sum over ranks
                is whole, as for every weight whose rows are shared.

        Returns:
            out [num_tokens, H, Dv].

        Raises:
            ValueError, TypeError: heads that the ranks cannot share, another number of rows, and what
                :func:`dualkv.attention` refuses. Before anything is sent.
        """
        call = self._checked(q, k, v, softmax_scale, features)
        heads, kv_heads = q.shape[1], k.shape[1]
        if heads % self.world_size:
            raise ValueError(
                f"q has {heads} heads, expected a multiple of the {self.world_size} sequence-parallel ranks"
            )
        if self.world_size == 1:
            return attention(q, k, v, self.layout, call.softmax_scale, deterministic, **features)
        q, k, v = call.q, call.k, call.v
        # A rank's query heads read consecutive key heads: repeated until every rank gets equally many, each in order.
        repeats = self.world_size // math.gcd(kv_heads, self.world_size)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        head_dims = [x.shape[2] for x in (q, k, v)]
        shares = [x.unflatten(1, (self.world_size, -1)).flatten(2) for x in (q, k, v)]
        sizes = [x.shape[2] for x in shares]
        mine = _Exchange.apply(torch.cat(shares, 2).transpose(0, 1), self.group)
        columns = zip(mine.flatten(0, 1).split(sizes, 1), head_dims, strict=True)
        q, k, v = (x.unflatten(1, (-1, head_dim)) for x, head_dim in columns)
        if (sinks := call.features.sinks) is not None:
            features["sinks"] = sinks.unflatten(0, (self.world_size, -1))[self.rank]
        out = attention(q, k, v, self.layout, call.softmax_scale, deterministic, **features)
        back = _Exchange.apply(out.unflatten(0, (self.world_size, -1)), self.group)
        return back.transpose(0, 1).flatten(1, 2).contiguous()  # a view of one head a rank is not; models call .view

    def _checked(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None,
        features: FeatureArguments,
    ) -> Call:
        """All that :func:`dualkv.attention` checks, before anything is sent: else ranks would wait for one that raised
        an error."""
        call = checked(q, k, v, softmax_scale, Features.given(**features))
        dispatch.check_tensors(call.q, call.k, call.v)
        call.features.check(call.q)
        if q.shape[0] != self.num_tokens:
            raise ValueError(f"q has {q.shape[0]} rows, each rank of this layout holds {self.num_tokens}")
        return call


class _Exchange(torch.autograd.Function):
    """x [ranks, ...] -> [ranks, ...]: x[r] goes to rank r, result[r] comes from there. Its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None


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

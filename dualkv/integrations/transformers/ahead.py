"""Rows of images that see the rows of their image behind them, as in Gemma 3 and 4."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch

from dualkv.branches import Branch
from dualkv.context_parallel import ContextShard
from dualkv.data.parts import TreePart
from dualkv.layout import Layout
from dualkv.ops.attention import attention as causal_attention
from dualkv.packed_rows import packed_rows
from dualkv.sequence_parallel import Shard, exchanged


class Ahead(NamedTuple):
    """The extra keys that rows of images see after themselves, encoded as causal attention over each image in reverse.

    Row i of an image of n rows sees rows i + 1 to n - 1 of it. Backwards, these queries n - 2, ..., 0 and keys
    n - 1, ..., 1 are causal: the query at index j sees the keys up to j.

    Attributes:
        queries: [A] packed rows.
        keys: [A] packed rows.
        layout: of A rows, a segment for each image.
        windows: only layers with a window see these keys.
        spread: how ranks that share rows exchange these keys; None where a rank has all rows.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    layout: Layout
    windows: bool
    spread: Spread | None = None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Ahead:
        """Copy with all tensors on `device`."""
        queries, keys = (x.to(device, non_blocking=non_blocking) for x in (self.queries, self.keys))
        spread = None if self.spread is None else self.spread.to(device, non_blocking)
        return Ahead(queries, keys, self.layout.to(device), self.windows, spread)

    def of_part(self, part: TreePart) -> Ahead | None:
        """Return the keys behind the rows of a part of a walk, by their places among its rows; None without any.

        Raises:
            ValueError: the part has some rows of an image, and not all.
        """
        queries, keys = (torch.from_numpy(part.local)[x.cpu()] for x in (self.queries, self.keys))
        lengths = self.layout.offsets.diff()
        image = torch.arange(len(lengths)).repeat_interleave(lengths)
        own = image.bincount((queries >= 0).double() + (keys >= 0), minlength=len(lengths)) / 2
        if (cut := (own > 0) & (own < lengths)).any():
            raise ValueError(
                f"an image of {int(lengths[cut].max()) + 1} rows, which see each other, is cut by a part of"
                f" {len(part.rows)} rows of a walk, expected parts that hold it: raise the budget"
            )
        if not own.any():
            return None
        here, there = (x[queries >= 0].to(self.queries.device) for x in (queries, keys))
        held = lengths[own > 0].tolist()
        return Ahead(here, there, Layout.from_lengths(held, [[]] * len(held), self.queries.device), self.windows)

    def over(self, shard: Shard) -> Ahead:
        """Plan how ranks that share the rows exchange these keys."""
        if not isinstance(shard, ContextShard) or shard.world_size == 1:
            return self
        return self._replace(spread=Spread.of(self.queries, self.keys, shard))


class Spread(NamedTuple):
    """The keys of :class:`Ahead` and its queries, among the rows of ranks of a :class:`ContextShard`.

    Every rank gets all keys, and computes its own queries in their places among all.

    Attributes:
        counts: the keys that each rank has.
        sent: [keys of this rank] int64: their rows among this rank's.
        order: [A] int64: the index of each key among those of all ranks, one rank after another.
        places: [a] int64: the indices of this rank's queries among all A.
        own: [a] int64: the rows of these queries among this rank's.
    """

    counts: list[int]
    sent: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    own: torch.Tensor

    @classmethod
    def of(cls, queries: torch.Tensor, keys: torch.Tensor, shard: Shard) -> Spread:
        at_queries, at_keys = (shard.places.to(x.device)[x] for x in (queries, keys))
        places = (at_queries // shard.num_tokens == shard.rank).nonzero()[:, 0]
        owner = at_keys // shard.num_tokens
        sent = at_keys[owner == shard.rank] % shard.num_tokens
        counts = owner.bincount(minlength=shard.world_size).tolist()
        order = owner.argsort(stable=True).argsort()
        return cls(counts, sent, order, places, at_queries[places] % shard.num_tokens)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Spread:
        """Copy with all tensors on `device`."""
        return Spread(self.counts, *(x.to(device, non_blocking=non_blocking) for x in self[1:]))

    def keys_of(self, x: torch.Tensor, shard: Shard) -> torch.Tensor:
        """[A, ...] the keys of all ranks, of this rank's rows x [t, ...]; gradients go back and are summed."""
        to_all = x.index_select(0, self.sent).expand(shard.world_size, -1, *x.shape[1:]).flatten(0, 1)
        mine = [len(self.sent)] * shard.world_size
        return exchanged(to_all, mine, self.counts, shard.group).index_select(0, self.order)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Layout | Shard | Branch,
    ahead: Ahead,
    layer: Hashable = None,
    **features: Any,
) -> torch.Tensor:
    """:func:`dualkv.attention`, in which rows of images also see the rows of their image behind them.

    Args:
        q, k, v: [t, H, D] and [t, Hk, D] of this call's rows.
        rows: the layout of all rows, or this rank's or part's rows of it.
        ahead: the keys behind rows of images.
        layer: names the layer in a walk.
        features: as for :func:`dualkv.attention`. A window or chunk hides no key behind a row.

    Returns:
        out [t, H, D].
    """
    if features.get("batch_invariant"):
        raise ValueError("batch_invariant is True of rows that see ahead, whose results are merged: expected False")
    if ahead.windows and features.get("window") is None:
        return packed_rows(rows).attention_of(layer)(q, k, v, **features)
    run = partial(_looking_ahead, ahead=ahead, layer=layer)
    if isinstance(rows, Layout | Branch):
        return run(q, k, v, rows, **features)
    if not isinstance(rows, ContextShard) or ahead.spread is None:
        return rows.by_heads(run, q, k, v, **features)
    out, lse = rows.attention_with_lse(q, k, v, **features)
    mine, theirs = (ahead.spread.keys_of(x, rows) for x in (k, v))
    places, own = ahead.spread.places, ahead.spread.own
    queries = q.new_zeros(len(ahead.queries), *q.shape[1:]).index_copy(0, places, q.index_select(0, own))
    more, its_lse = _behind(queries, mine, theirs, ahead.layout, features)
    return _merged(out, lse, own, more.index_select(0, places), its_lse.index_select(1, places))


def _looking_ahead(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Layout | Branch,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    *,
    ahead: Ahead,
    layer: Hashable,
    **features: Any,
) -> torch.Tensor:
    """:func:`attention` of all rows of a layout or part [t, H, D]."""
    features |= {"softmax_scale": softmax_scale, "deterministic": deterministic}
    if isinstance(rows, Branch):
        out, lse = rows.attention_with_lse(q, k, v, **features, layer=layer)
    else:
        out, lse = causal_attention(q, k, v, rows, **features, return_lse=True)
    mine, theirs = (x.index_select(0, ahead.keys) for x in (k, v))
    more, its_lse = _behind(q.index_select(0, ahead.queries), mine, theirs, ahead.layout, features)
    return _merged(out, lse, ahead.queries, more, its_lse)


def _behind(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, features: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [A, H, D] and lse [H, A] of the keys behind rows of images."""
    features = features | {"window": None, "chunk": None, "sinks": None}  # a sink takes its part once
    return causal_attention(queries, keys, values, layout, **features, return_lse=True)


def _merged(
    out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, more: torch.Tensor, its_lse: torch.Tensor
) -> torch.Tensor:
    """`out`, in which `rows` [A] see further keys, whose out is `more` [A, H, D]."""
    share = torch.sigmoid(its_lse - lse.index_select(1, rows)).t()[..., None]
    merged = torch.lerp(out.index_select(0, rows).to(share.dtype), more.to(share.dtype), share)
    return out.index_copy(0, rows, merged.to(out.dtype))

"""The host side of a layout: checked arrays, what is derived from them, and how the ops find it by tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from cute_kernels.abi import MAX_ROWS
from dualkv.arrays import IntArray, cumulative_array, int_array

Value = TypeVar("Value")

# Of every op that takes a layout's host tensors: what it launches follows from their values, which a CUDA graph would
# not read again. So inductor cuts its CUDA graphs there, and runs the op between them with memory of its own.
OP_TAGS = (torch.Tag.cudagraph_unsafe,)


class Use:
    """Whether attention ran on a layout, or on one that was made of it: `seen` by the ops, or as a caller says
    `elsewhere`."""

    __slots__ = ("elsewhere", "seen")

    def __init__(self) -> None:
        self.seen = self.elsewhere = False


# The living `Segments`: by the contents of offsets and parent, then by id. Dictionaries compare contents, not hashes.
_LIVING: WeakValueDictionary[tuple[bytes, bytes], WeakValueDictionary[int, Segments]] = WeakValueDictionary()


def living() -> int:
    """The number of `Segments` that are alive."""
    return sum(len(alike) for alike in _LIVING.values())


class Segments:
    """The host side of a layout: checked numpy arrays, and values derived from them, each computed once.

    `offsets` [S+1] and `parent` [S] are int64. Layouts that differ only in their device share one `Segments`. So do all
    calls of the ops: they find the `Segments` by the storage of the layout's host tensors (see :func:`segments_of`).
    What is kept here is freed with the last reference, at once: it must not refer to the `Segments`.
    """

    def __init__(
        self, offsets: IntArray, parent: IntArray, silent: IntArray | None = None, last: IntArray | None = None
    ) -> None:
        """silent: [G] rows without queries at each group's beginning, of any segments; None if all rows have queries.
        last: the last segments of all sequences, where they are known: some may have segments below them."""
        self.offsets, self.parent, self.silent, self.last = offsets, parent, silent, last
        self.use = Use()
        self.depth = self._checked_depth()
        # Tokens of the longest path: one more than the highest position id. Compiled models read it in their graphs.
        self.longest_path = int((self.first_position + self.lengths).max(initial=0))
        self._cache: dict[Any, Any] = {}
        self._of_copies: Segments | None = None
        self._alike = _LIVING.setdefault(_contents(offsets, parent), WeakValueDictionary())
        self._alike[id(self)] = self

    @classmethod
    def of_copies(cls, offsets: IntArray, parent: IntArray) -> Segments:
        """The host state of tensors that belong to no known layout: all rows ask, and sequences end with leaves. It
        has the plans of a layout of equal contents, but a `use` of its own."""
        alike = _LIVING.get(_contents(offsets, parent))
        refs = [] if alike is None else alike.valuerefs()[::-1]  # the latest layout first: it is most likely in use
        others = [x for ref in refs if (x := ref()) is not None]
        for other in others:
            if other.silent is None and (other.last is None or other.is_leaf[other.last].all()):
                twin = copy.copy(other)
                twin.use = Use()
                twin._alike[id(twin)] = twin
                return twin
        made = cls(offsets, parent)
        if others:  # keep it, as hooks make a copy in each layer
            others[0]._of_copies = made
        return made

    def _checked_depth(self) -> IntArray:
        offsets, parent, n = self.offsets, self.parent, len(self.parent)
        if len(offsets) != n + 1:
            raise ValueError(
                f"offsets has {len(offsets)} entries for {n} segments in parent, expected {n + 1} (one more)"
            )
        if offsets[-1] > MAX_ROWS:
            raise ValueError(f"offsets ends at {offsets[-1]} tokens, at most {MAX_ROWS} are supported")
        index = np.arange(n)
        if (parent < -1).any() or (parent >= index).any():
            at = int(np.argmax((parent < -1) | (parent >= index)))
            raise ValueError(f"parent[{at}] is {parent[at]}, expected -1 or an earlier segment (0 to {at - 1})")
        # Doubling: steps to the 1st, 2nd, 4th, ... ancestor, until all segments are past their root.
        depth, up = (parent >= 0).astype(np.int64), parent
        while (above := up >= 0).any():
            depth += np.where(above, depth[up], 0)
            up = np.where(above, up[up], -1)
        # Depth-first: no level is skipped, and a segment continues the last one of the level above.
        order = np.argsort(depth, kind="stable")
        place = np.searchsorted((depth * n + index)[order], (depth - 1) * n + index) - 1
        wrong = (depth > 0) & (parent != order[place])
        wrong[1:] |= np.diff(depth) > 1
        if wrong.any():
            at = int(np.argmax(wrong))
            closed = int(np.flatnonzero(depth[:at] < depth[at])[-1])
            raise ValueError(
                f"parent[{at}] is {parent[at]}, but segments are in depth-first order and a later segment "
                f"({closed}) has closed it: a parent may not cross groups"
            )
        return depth

    @property
    def total(self) -> int:
        """Packed tokens T."""
        return int(self.offsets[-1])

    @cached_property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)

    @cached_property
    def max_depth(self) -> int:
        """Levels of the deepest tree: 1 for prompts alone, 2 for prompts with responses."""
        return int(self.depth.max(initial=-1)) + 1

    @cached_property
    def levels(self) -> list[IntArray]:
        """The segments of each depth, in order."""
        order = np.argsort(self.depth, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.depth))[:-1])

    @cached_property
    def roots(self) -> IntArray:
        """[G] the segments without a parent: prompts."""
        return np.flatnonzero(self.parent == -1)

    @cached_property
    def group_of_segment(self) -> IntArray:
        """[S]."""
        return np.cumsum(self.parent == -1) - 1

    @cached_property
    def subtree_end(self) -> IntArray:
        """[S] first packed row after the subtree of each segment."""
        end = self.offsets[1:].copy()
        for level in reversed(self.levels[1:]):
            end[self.parent[level]] = end[level]  # numpy keeps the last child's value for each parent
        return end

    @cached_property
    def first_position(self) -> IntArray:
        """[S] position id of each segment's first token: the number of tokens on the path above."""
        start = np.zeros(len(self.parent), np.int64)
        for level in self.levels[1:]:
            up = self.parent[level]
            start[level] = start[up] + self.lengths[up]
        return start

    @cached_property
    def position(self) -> IntArray:
        """[T] position id of each row on its path."""
        return np.arange(self.total) + (self.first_position - self.offsets[:-1])[self.segment_of_row]

    @cached_property
    def first_query(self) -> IntArray:
        """[G] the first row of each group that kernels compute. Rows without queries are skipped, except the last row
        of a group that has no other rows. See Layout.without_prompt_queries and without_queries."""
        begin, end = self.offsets[self.roots], self.subtree_end[self.roots]
        return begin if self.silent is None else np.minimum(begin + self.silent, np.maximum(end - 1, begin))

    @cached_property
    def is_leaf(self) -> npt.NDArray[np.bool_]:
        leaf = np.ones(len(self.parent), bool)
        leaf[self.parent[self.parent >= 0]] = False
        return leaf

    @cached_property
    def ends_sequence(self) -> npt.NDArray[np.bool_]:
        """[S] whether a sequence ends with the segment: leaves, and what sequences that others continue end with."""
        ends = self.is_leaf.copy()
        if self.last is not None:
            ends[self.last] = True
        return ends

    @cached_property
    def nominal(self) -> int:
        """Tokens of the replicated sequences: the path of each in full, to its last segment if that is known, else to
        every leaf."""
        return int((self.first_position + self.lengths)[self.is_leaf if self.last is None else self.last].sum())

    @cached_property
    def segment_of_row(self) -> IntArray:
        return np.repeat(np.arange(len(self.parent)), self.lengths)

    @cached_property
    def group_rows(self) -> IntArray:
        """[G] rows of each group."""
        return self.subtree_end[self.roots] - self.offsets[self.roots]

    @cached_property
    def group_of_row(self) -> IntArray:
        return np.repeat(np.arange(len(self.group_rows)), self.group_rows)

    @cached_property
    def visible_end(self) -> IntArray:
        """[T] of the visibility rule `k <= q < visible_end[k]`."""
        return self.subtree_end[self.segment_of_row]

    def cached(self, key: Any, make: Callable[[], Value]) -> Value:
        """The result of `make()` at the first call with this `key` (a plan, an index tensor)."""
        found = self._cache.get(key)
        if found is None:
            if torch.compiler.is_compiling():  # numpy on the host is nothing for a graph
                make = torch.compiler.disable(make)
            with torch.inference_mode(False):  # later calls may record it for their backward
                found = make()
            if not pytree.tree_any(lambda x: isinstance(x, FakeTensor), found):  # their mode ends before the layout
                self._cache[key] = found
        return found


def _contents(offsets: IntArray, parent: IntArray) -> tuple[bytes, bytes]:
    return offsets.tobytes(), parent.tobytes()


class _Known(NamedTuple):
    """The object that the storage of `offsets` refers to: copies of the tensors at the time, and their `Segments`."""

    offsets: torch.Tensor
    parent: torch.Tensor
    segments: Segments


def remember(offsets: torch.Tensor, parent: torch.Tensor, segments: Segments) -> None:
    """Make these the host state of the tensors, as long as the storage of `offsets` lives. The storage belongs to the
    Layout, or to an autograd graph that saved the tensor and outlives the Layout."""
    offsets.untyped_storage().dualkv = _Known(offsets.clone(), parent.clone(), segments)  # type: ignore[attr-defined]


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y)


def segments_of(offsets: torch.Tensor, parent: torch.Tensor) -> Segments:
    """The host state of an op's `offsets` and `parent` (CPU int32); checked and remembered if new.

    Copies of a layout's tensors, as hooks on saved tensors make them, are found by their contents and have its plans.
    """
    known = getattr(offsets.untyped_storage(), "dualkv", None)
    # The storages may have been written to, or the tensors may be views of a part: so the contents are compared.
    if known is not None and _same(offsets, known.offsets) and _same(parent, known.parent):
        segments: Segments = known.segments
        return segments
    found = Segments.of_copies(cumulative_array("offsets", offsets), int_array("parent", parent))
    remember(offsets, parent, found)
    return found

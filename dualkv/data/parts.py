"""A tree larger than memory in parts, which run one after another and read the keys and values of their paths.

Trunks are runs of a path: a part reads what the trunks above it left, and they stay until all below them is done. Whole
subtrees that fit into the budget are parts without anything below, many of them in one, wherever they leave the path.
Trunks run twice in training, so the end of a leaf is never a part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from dualkv.arrays import IntArray, outside_inference_mode, positive, to_device
from dualkv.data.gain import PAIRS_A_BORDER
from dualkv.data.media import OF_TOKENS
from dualkv.data.memory import Memory
from dualkv.data.trees import PackedSequences
from dualkv.layout import Layout
from dualkv.segments import Segments

Piece = tuple[int, int, int]  # tokens [begin, end) of a segment
Hanging = tuple[int, int, int]  # (tokens of the path above it, segment, its first token): a subtree to be done


@dataclass(frozen=True)
class TreePart:
    """Rows of a tree that run together. Made by :func:`plan_parts`.

    It has P rows on the path above and t own rows.

    Attributes:
        batch: the whole tree.
        index: of the part, in the order of running.
        path: the parts above, with the number of rows that it reads of each, which are their first ones.
        rows: [t] packed rows of the batch, in the order of the part.
        is_trunk: whether later parts read its keys and values.
        offsets, parent: segments of P + t rows, those of the path first.
        cuts: of a trunk, ascending: the numbers of own rows after which parts below hang or segments end.
        keeps: the share of checkpointed layers that keep everything in this part: the last ones.
    """

    batch: PackedSequences
    index: int
    path: tuple[tuple[int, int], ...]
    rows: IntArray
    is_trunk: bool
    offsets: IntArray
    parent: IntArray
    cuts: tuple[int, ...] = ()
    keeps: float = 0.0

    @property
    def path_rows(self) -> int:
        """P."""
        return sum(rows for _, rows in self.path)

    @property
    def device(self) -> torch.device:
        return self.batch.device

    @property
    def positions(self) -> IntArray:
        """[t] the position of each own row in its sequence."""
        return self.seen._segments.position[self.path_rows :]

    @cached_property
    def seen(self) -> Layout:
        """The layout of the path's rows, which have no queries, and of the part's own rows."""
        layout = Layout.from_segments(self.offsets, self.parent, self.device)
        return layout.without_queries([self.path_rows]) if self.path_rows else layout

    @cached_property
    def layout(self) -> Layout:
        """The layout of the own rows as one segment, for what counts rows."""
        return Layout.from_segments([0, len(self.rows)], [-1], self.device)._serves(self.seen)

    @cached_property
    def _first_own(self) -> int:
        """Segments of the path."""
        return int(np.searchsorted(self.offsets, self.path_rows))

    @cached_property
    def own(self) -> Layout:
        """The layout of the own rows in segments, which begin where the path's rows end; a trunk is a chain of them."""
        if self.is_trunk:
            chain = [0, *self.cuts], range(-1, len(self.cuts) - 1)
            return Layout.from_segments(*chain, self.device)._serves(self.seen)
        parent = np.maximum(self.parent[self._first_own :] - self._first_own, -1)
        offsets = self.offsets[self._first_own :] - self.path_rows
        return Layout.from_segments(offsets, parent, self.device)._serves(self.seen)

    @cached_property
    def hangs_at(self) -> IntArray:
        """[segments of `own`] the number of the path's rows that the segment continues, if no own segment precedes it;
        else -1."""
        above = self.parent[self._first_own :]
        found = np.where(above >= self._first_own, -1, np.where(above >= 0, self.offsets[above + 1], 0))
        return np.append(found[:1], np.full(len(self.cuts) - 1, -1)) if self.is_trunk else found

    @cached_property
    @outside_inference_mode
    def input_ids(self) -> torch.Tensor:
        """[1, t] int64."""
        return self.batch.input_ids[:, to_device(torch.from_numpy(self.rows), self.device)]

    # ------------------------------------------------------------------ the tokens that its rows predict
    @cached_property
    def local(self) -> IntArray:
        """[T] the index in the part of each row of the batch, -1 for other rows."""
        local = np.full(self.batch.layout.num_tokens, -1, np.int64)
        local[self.rows] = np.arange(len(self.rows))
        return local

    @cached_property
    def _tokens(self) -> IntArray:
        """[m] the trained tokens of the batch that rows of the part predict. The tokens' own rows may lie below the
        part."""
        return np.flatnonzero(self.local[self.batch._before[self.batch._trained]] >= 0)

    @cached_property
    def _predicting(self) -> IntArray:
        return self.local[self.batch._before[self.batch._trained[self._tokens]]]

    @cached_property
    def _tokens_of_row(self) -> IntArray:
        """The number of tokens that each row predicts, like that of :class:`PackedSequences`."""
        predicted = np.bincount(self._predicting)
        return predicted[predicted > 0]

    @property
    def num_trained(self) -> int:
        """m."""
        return len(self._tokens)

    @cached_property
    @outside_inference_mode
    def predict_rows(self) -> torch.Tensor:
        """[m] int64: the own row that predicts each trained token."""
        return to_device(torch.from_numpy(self._predicting), self.device)

    @cached_property
    @outside_inference_mode
    def targets(self) -> torch.Tensor:
        """[m] int64: the trained tokens."""
        return self.batch.targets[to_device(torch.from_numpy(self._tokens), self.device)]

    @cached_property
    def _copies(self) -> tuple[IntArray, IntArray]:
        """Locate this part's tokens in the values that `batch.unpack` makes, end to end: (their indices there, index in
        [m] of each)."""
        of_values = (np.cumsum(self.batch._is_trained) - 1)[self.batch._rows[self.batch._mask]]
        mine = np.full(len(self.batch._trained), -1, np.int64)
        mine[self._tokens] = np.arange(len(self._tokens))
        places = np.flatnonzero(mine[of_values] >= 0)
        return places, mine[of_values[places]]

    @cached_property
    @outside_inference_mode
    def places(self) -> torch.Tensor:
        """[n] int64: where the values of :meth:`expand` stand in `torch.cat(batch.unpack(...))`; every place there
        belongs to one part."""
        return to_device(torch.from_numpy(self._copies[0]), self.device)

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the part's trained tokens for each rollout that trains on them, [m, ...] -> [n, ...];
        differentiable."""
        return values[to_device(torch.from_numpy(self._copies[1]), values.device)]


def plan_parts(batch: PackedSequences, budget: int | Memory, *, values_first: bool = False) -> list[TreePart]:
    """The parts of a tree, or of several, in the order in which they run.

    Args:
        batch: of any depth.
        budget: own rows that a part may have; or a limit of memory, for which the number of rows is chosen that takes
            the least time, and for each part how many of its layers keep all.
        values_first: plan for :func:`dualkv.walk_values`, where several parts run forward once more.

    Raises:
        ValueError: a budget below 1, or memory that does not hold the smallest parts.
        TypeError: another batch.
    """
    if not isinstance(batch, PackedSequences):
        raise TypeError(
            f"batch is a {type(batch).__name__}, expected what pack_sequences or PackedSequences.from_batch returns"
        )
    if not isinstance(budget, Memory):
        rows = positive("budget", budget)
        return _Plan(batch, lambda *_: rows).parts
    return fitted(batch, budget, values_first).parts


def numbered(parts: Sequence[TreePart], first: int) -> list[TreePart]:
    """Number parts on from `first`, so that those of several batches can run one after another."""
    return [
        replace(part, index=part.index + first, path=tuple((above + first, rows) for above, rows in part.path))
        for part in parts
    ]


SMALLEST = 16  # rows of the smallest parts that a limit of memory may lead to,
MOST_TRUNKS = 64  # and so many trunks on the longest path
HALVINGS = 8  # of the whole tree's rows: the fewest rows that parts may have to keep all
SOME = 0.875, 0.75, 0.5  # of the layers

Rows = Callable[[int, int, bool], int]
"""(rows of trunks that wait, rows of the path, whether it is a trunk) -> the most own rows that a part may have."""


class Fitting(NamedTuple):
    """Parts that fit into memory.

    Attributes:
        parts: in the order of running.
        bytes: the most that a pass takes.
        time: of all passes, in rows.
    """

    parts: list[TreePart]
    bytes: float
    time: float

    @property
    def rows(self) -> int:
        """The most rows that a part has."""
        return max(len(part.rows) for part in self.parts)

    def __str__(self) -> str:
        sizes: dict[tuple[bool, float], list[int]] = {}
        for part in self.parts:
            sizes.setdefault((part.is_trunk, part.keeps), []).append(len(part.rows))
        said = []
        for (is_trunk, keeps), rows in sizes.items():
            span = f"{min(rows):,}" if min(rows) == max(rows) else f"{min(rows):,} to {max(rows):,}"
            what = f"trunk{'s' * (len(rows) > 1)}" if is_trunk else f"part{'s' * (len(rows) > 1)} behind them"
            how = "keep all layers" if keeps == 1 else f"recompute {1 - keeps:.0%} of layers"
            said.append(f"{len(rows)} {what} of {span} rows {how}")
        return f"{', '.join(said)}, in {self.bytes / 2**30:.2f} GiB"


def fitting(batch: PackedSequences, memory: Memory, values_first: bool = False, least: int = 1) -> Fitting | None:
    """Make the parts that take the least time within the memory; None if none fit that may have `least` rows. For
    `values_first` see :func:`plan_parts`.

    Each part has as many rows as the memory holds behind its path if its layers keep all, and where these would be too
    few, as many as it holds if they are recomputed. What is too few is tried: half of the tree's rows, a quarter and so
    on. So are parts of as many rows as fit if some layers are recomputed, of leaves alone or of all.
    """
    found: list[Fitting] = []
    total = batch.layout.num_tokens
    least = max(_least(batch), min(least, total))
    tried: set[tuple[int, ...]] = set()
    halves = [total + 1, *dict.fromkeys(max(least, total >> i) for i in range(1, HALVINGS))]
    partly = [(least, share, of_trunks) for share in SOME for of_trunks in (1.0, share)]
    for too_few, share, of_trunks in [*((rows, 1.0, 1.0) for rows in halves), *partly]:

        def rows(
            waiting: int, path: int, is_trunk: bool, too_few: int = too_few, of_leaves: float = share,
            of_trunks: float = of_trunks,
        ) -> int:  # fmt: skip
            shares = of_trunks if is_trunk else of_leaves, 0.0
            keeping, recomputed = (memory.most_rows(waiting, path, keeps, is_trunk) for keeps in shares)
            return max(least, min(keeping if keeping >= min(too_few, total) else recomputed, total))

        parts = _Plan(batch, rows).parts
        sizes = tuple(len(part.rows) for part in parts)
        if sizes not in tried and (made := costed(parts, memory, None, values_first)) is not None:
            found.append(made)
        tried.add(sizes)
    return min(found, key=lambda one: one.time, default=None)


def fitted(batch: PackedSequences, memory: Memory, values_first: bool = False) -> Fitting:
    """:func:`fitting`; raises ValueError if none fit."""
    found = fitting(batch, memory, values_first)
    if found is None:
        raise ValueError(
            f"budget is {memory.bytes:,.0f} bytes, expected {_needed(batch, memory):,.0f} at least: parts of"
            f" {_least(batch)} rows take so much with the keys and values of their paths"
        )
    return found


def _least(batch: PackedSequences) -> int:
    """Rows of the smallest parts."""
    segments = batch.layout._segments
    return min(segments.total, max(SMALLEST, -(-segments.longest_path // MOST_TRUNKS)))


def costed(
    parts: list[TreePart], memory: Memory, keeps: float | None = None, values_first: bool = False
) -> Fitting | None:
    """Count what parts take, in the order of running; None if one does not fit. `keeps` is the share of layers that
    keep all, None: chosen for each part; for `values_first` see :func:`plan_parts`."""
    segments = parts[0].batch.layout._segments
    seen = segments.position + 1 + PAIRS_A_BORDER * segments.depth[segments.segment_of_row]
    chosen, most, time = list[TreePart](), 0.0, 0.0
    for part in parts:
        own, path = len(part.rows), part.path_rows
        waiting, has_head = _waiting(parts, part), part.num_trained > 0 or not len(part.batch._trained)
        share = memory.most_kept(waiting, path, own, has_head) if keeps is None else keeps
        if share is None:
            return None
        most = max(most, memory.of_pass(waiting, path, own, share, has_head))
        pairs = float(seen[part.rows].sum())
        time += memory.time(path, own, pairs, share, part.is_trunk)
        is_first_trunk = part.is_trunk and all(above.is_trunk for above in parts[: part.index])
        if values_first and len(parts) > 1 and not is_first_trunk:
            time += memory.forward_time(path, own, pairs)
        chosen.append(replace(part, keeps=share))
    return Fitting(chosen, most, time)


def _waiting(parts: list[TreePart], part: TreePart) -> int:
    """Count the rows of trunks that keep tensors while a part runs."""
    return sum(len(parts[above].rows) for above, _ in part.path) + part.is_trunk * len(part.rows)


def _needed(batch: PackedSequences, memory: Memory) -> float:
    """Bytes that the smallest parts take."""
    least = _least(batch)
    parts = _Plan(batch, lambda *_: least).parts
    return max(memory.of_pass(_waiting(parts, p), p.path_rows, len(p.rows), False) for p in parts)


class _Plan:
    """The parts of budgets of rows, in `parts`."""

    def __init__(self, batch: PackedSequences, rows: Rows) -> None:
        self.batch, self._rows = batch, rows
        self.segments: Segments = batch.layout._segments
        self.parts: list[TreePart] = []
        self.children: list[list[int]] = [[] for _ in self.segments.parent]
        for segment, up in enumerate(self.segments.parent.tolist()):
            if up >= 0:
                self.children[up].append(segment)
        self.size = self.segments.subtree_end - self.segments.offsets[:-1]
        self.last = np.arange(1, len(self.children) + 1)  # behind the last segment of each subtree
        for segment in range(len(self.children) - 1, -1, -1):
            if self.children[segment]:
                self.last[segment] = self.last[self.children[segment][-1]]
        kinds = next((batch.media[name][0].cpu() for name in OF_TOKENS if name in batch.media), None)
        self.is_image = np.zeros(self.segments.total, bool) if kinds is None else (kinds != 0).numpy()
        running = [self._visit((), [(0, int(root), 0) for root in self.segments.roots])]
        while running:  # in place of recursion, because paths may have many trunks
            below = next(running[-1], None)
            if below is None:
                running.pop()
            else:
                running.append(below)

    def _budget(self, path: tuple[tuple[int, int], ...], attached: int, more: int = 0, is_trunk: bool = False) -> int:
        """Return the most rows of a part behind so many rows of a path, with trunks of `more` rows in between."""
        waiting = sum(len(self.parts[index].rows) for index, _ in _up_to(path, attached))
        return self._rows(waiting + more, attached + more, is_trunk)

    def _visit(self, path: tuple[tuple[int, int], ...], hanging: list[Hanging]) -> Iterator[Any]:
        """Make the parts of all subtrees that hang on a path; yields the visit of each trunk's."""
        while hanging:
            small = [h for h in hanging if self.size[h[1]] - h[2] <= self._budget(path, h[0])]
            for some in self._together(path, small):
                self._add(_up_to(path, some[0][0]), some, [], False)
            large, hanging = [h for h in hanging if h not in small], []
            for one in large:
                above = _up_to(path, one[0])
                trunk, below = self._trunk(above, *one)
                if rows := sum(end - begin for _, begin, end in trunk):
                    self._add(above, [one], trunk, True)
                    yield self._visit((*above, (len(self.parts) - 1, rows)), [h for h in below if h[0] > one[0]])
                hanging += [h for h in below if h[0] == one[0]]  # behind empty segments: on the path, not the trunk

    def _together(self, path: tuple[tuple[int, int], ...], hanging: list[Hanging]) -> Iterator[list[Hanging]]:
        """Group subtrees that fit into one part, the deepest first. Subtrees without a path share no part with
        others."""
        some: list[Hanging] = []
        rows, budget = 0, 0
        for one in sorted(hanging, key=lambda h: -h[0]):
            size = int(self.size[one[1]]) - one[2]
            if rows + size > budget or (one[0] == 0) != (some[0][0] == 0 if some else one[0] == 0):
                if rows:
                    yield some
                some, rows, budget = [], 0, self._budget(path, one[0])
            some.append(one)
            rows += size
        if rows:
            yield some

    def _beside_image(self, segment: int, least: int, end: int, most: int) -> int:
        """Move the end of a trunk's run of a segment to where an image begins or ends, from `least` to `most`. An image
        that is longer is cut, and a model runs its tower for both parts."""
        start, length = int(self.segments.offsets[segment]), int(self.segments.lengths[segment])
        is_image = self.is_image[start : start + length]
        if not (0 < end < length and is_image[end - 1] and is_image[end]):
            return end
        text = np.flatnonzero(~is_image)
        begins, ends = int(text[text < end].max(initial=-1)) + 1, int(text[text > end].min(initial=length))
        return begins if begins >= least else ends if ends <= most and ends < length else end

    def _trunk(
        self, path: tuple[tuple[int, int], ...], attached: int, segment: int, first: int
    ) -> tuple[list[Piece], list[Hanging]]:
        """A run of a path within the budget, as long as one subtree alone is larger than the budget; and all that hangs
        on it. The last rows of a leaf, as many as a part may have, hang on it."""
        trunk: list[Piece] = []
        below: list[Hanging] = []
        begin, most = attached, self._budget(path, attached, is_trunk=True)
        while True:
            length, room = int(self.segments.lengths[segment]), most - (attached - begin)
            end = min(first + room, length)
            if not self.children[segment]:
                here = attached - begin
                end = min(end, length - min(self._budget(path, begin, here + x) for x in (0, length - first)))
            end = self._beside_image(segment, first + (attached == begin), end, first + room)
            trunk.append((segment, first, end))
            attached, room = attached + end - first, room - (end - first)
            if end < length:
                return trunk, [*below, (attached, segment, end)]
            others = sorted(self.children[segment], key=lambda child: -int(self.size[child]))
            budget = self._budget(path, begin, attached - begin)
            stop = not room or sum(self.size[child] > budget for child in others) != 1
            below += [(attached, child, 0) for child in (others if stop else others[1:])]
            if stop:
                return trunk, below
            segment, first = others[0], 0

    def _add(
        self, path: tuple[tuple[int, int], ...], hanging: list[Hanging], trunk: list[Piece], is_trunk: bool
    ) -> None:
        """A part of a trunk, or of whole subtrees that hang on the path, the deepest first."""
        ends = sorted({attached for attached, _, _ in hanging} - {0})  # where the path's rows are cut
        lengths = np.diff([0, *ends]).tolist()
        parent = list(range(-1, len(ends) - 1))
        at = {end: i for i, end in enumerate(ends)} | {0: -1}
        starts, rows, cuts = self.segments.offsets, [], list[int]()
        if is_trunk:
            cuts = np.unique(np.cumsum([end - begin for _, begin, end in trunk])).tolist()
            lengths.append(sum(end - begin for _, begin, end in trunk))
            parent.append(at[hanging[0][0]])
            rows = [np.arange(starts[s] + begin, starts[s] + end) for s, begin, end in trunk]
        else:
            for attached, segment, first in hanging:
                place = len(parent) - segment
                for s in range(segment, int(self.last[segment])):
                    parent.append(at[attached] if s == segment else int(self.segments.parent[s]) + place)
                    lengths.append(int(self.segments.lengths[s]) - (first if s == segment else 0))
                rows.append(np.arange(starts[segment] + first, starts[segment] + self.size[segment]))
        offsets = np.append(0, np.cumsum(lengths))
        own = np.concatenate(rows), is_trunk, offsets, np.array(parent, np.int64), tuple(cut for cut in cuts if cut)
        made = TreePart(self.batch, len(self.parts), path, *own)
        self.parts.append(made)


def _up_to(path: tuple[tuple[int, int], ...], rows: int) -> tuple[tuple[int, int], ...]:
    """The first rows of a path."""
    found: list[tuple[int, int]] = []
    for part, count in path:
        if rows <= 0:
            break
        found.append((part, min(count, rows)))
        rows -= count
    return tuple(found)

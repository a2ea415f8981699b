"""Context parallelism by gathered keys: which rows each rank has, what they see, and what ranks send to each other.

Made on the host, once a layout, a number of ranks and a window; :mod:`dualkv.context_parallel` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from dualkv.arrays import IntArray
from dualkv.layout import Layout
from dualkv.ops.features import Window
from dualkv.segments import Segments

Range = tuple[int, int]  # packed rows [begin, end)
UNEVEN = 1.02  # a rank's most visible pairs over the mean from which on rows are shared in another order


# ---------------------------------------------------------------- who holds which rows
def shares(segments: Segments, ranks: int) -> list[list[list[Range]]]:
    """Rows for each rank: equally many, and about equally many visible pairs.

    The rows are put into an order, and each rank in turn takes rows from both ends of what is left of it. Later rows of
    a group see more keys, so some number of rows from the beginning gives the rank the mean number of pairs. The order
    is the packed one, which leaves short groups whole. If large groups make that uneven, the rows of all groups are
    ordered by their numbers of visible keys.

    Pairs are those of attention without a window, as the rows are the same in all layers.

    Returns:
        For each rank two lists of ranges, each ascending and with one range of a group at most.
    """
    keys, group = segments.position + 1, segments.group_of_row
    order = np.arange(segments.total)
    most, found = _from_both_ends(keys, ranks)
    if most > UNEVEN:
        # The most keys of a group until then: rows keep their order in it, so that a rank's are a range.
        until_then = np.maximum.accumulate(keys + group * segments.total) - group * segments.total
        by_keys = np.argsort(until_then, kind="stable")
        other_most, other = _from_both_ends(keys[by_keys], ranks)
        if other_most < most:
            order, found = by_keys, other
    return [[_ranges(segments, np.sort(order[slice(*one)])) for one in of_rank] for of_rank in found]


def _from_both_ends(keys: IntArray, ranks: int) -> tuple[float, list[tuple[Range, Range]]]:
    """Give each rank a range from the beginning and one from the end of the remaining rows. Returns the largest number
    of pairs of a rank over the mean, and the ranges; keys: [T] keys that each row sees."""
    pairs = np.concatenate([[0], np.cumsum(keys)])
    rows, begin, end = len(keys) // ranks, 0, len(keys)
    first, most = np.arange(rows + 1), 0
    found = []
    for left in range(ranks, 0, -1):
        of_rank = pairs[begin + first] - pairs[begin] + pairs[end] - pairs[end - rows + first]
        chosen = int(np.abs(of_rank * left - (pairs[end] - pairs[begin])).argmin())
        found.append(((begin, begin + chosen), (end - rows + chosen, end)))
        most = max(most, int(of_rank[chosen]))
        begin, end = begin + chosen, end - rows + chosen
    return most * ranks / max(int(pairs[-1]), 1), found


def _ranges(segments: Segments, rows: IntArray) -> list[Range]:
    """Turn ascending rows into ranges that do not cross groups."""
    if not len(rows):
        return []
    cut = 1 + np.flatnonzero((np.diff(rows) != 1) | (np.diff(segments.group_of_row[rows]) != 0))
    return [(int(some[0]), int(some[-1]) + 1) for some in np.split(rows, cut)]


def _meet(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Rows of both; each of the two is ascending."""
    found, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if begin < end:
            found.append((begin, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def _without(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Rows of the first that are none of the second; each of the two is ascending."""
    found = []
    for begin, end in some:
        for other_begin, other_end in _meet([(begin, end)], others):
            if begin < other_begin:
                found.append((begin, other_begin))
            begin = other_end
        if begin < end:
            found.append((begin, end))
    return found


def rows_of(ranges: Sequence[Range]) -> IntArray:
    """List the rows of all ranges, in order."""
    return np.concatenate([np.arange(0), *(np.arange(*one) for one in ranges)])


# ---------------------------------------------------------------- what a range of rows sees
def _above(segments: Segments, own: Range, window: Window | None) -> list[tuple[int, Range]]:
    """The segments on the path of a range's first row, from the root on, and the keys of each that the range's rows see
    before the range. Rows that the window hides from all of them are left out."""
    offsets, begin = segments.offsets, own[0]
    upwards = [int(segments.segment_of_row[begin])]
    while segments.parent[upwards[-1]] >= 0:
        upwards.append(int(segments.parent[upwards[-1]]))
    lost = 0 if window is None else int(window.lowest(segments.position[slice(*own)]).min())  # positions
    found = []
    for s in reversed(upwards):
        stop = int(min(offsets[s + 1], begin))
        found.append((s, (min(stop, int(offsets[s]) + max(0, lost - int(segments.first_position[s]))), stop)))
    return found


def path_of(segments: Segments, own: Range, window: Window | None = None) -> list[Range]:
    """The rows that a range's rows see and that precede it, ascending."""
    return [one for _, one in _above(segments, own, window) if one[0] < one[1]]


def _segments_of(segments: Segments, own: Range, window: Window | None) -> tuple[list[int], list[int]]:
    """(lengths, parents): segments of the path's rows and the range's."""
    offsets, parent, (begin, end) = segments.offsets, segments.parent, own
    first, last = (int(s) for s in segments.segment_of_row[[begin, end - 1]])
    above = _above(segments, own, window)
    lengths = [stop - start for _, (start, stop) in above]
    lengths[-1] += min(end, int(offsets[first + 1])) - begin
    later = np.arange(first + 1, last + 1)
    lengths += (np.minimum(offsets[later + 1], end) - offsets[later]).tolist()
    place = {s: i for i, s in enumerate([*(s for s, _ in above), *later.tolist()])}
    return lengths, [*range(-1, len(above) - 1), *(place[int(s)] for s in parent[later])]


class Part(NamedTuple):
    """Ranges of rows with the rows above that they see.

    Attributes:
        keys: [n] packed rows: for each range the rows of its path, then its own.
        asked: [m] the indices of the own rows in `keys`.
        layout: of `keys`; the paths' rows have no queries. None without ranges.
    """

    keys: IntArray
    asked: IntArray
    layout: Layout | None


NOTHING = Part(np.arange(0), np.arange(0), None)


def part_of(layout: Layout, ranges: Sequence[Range], window: Window | None = None) -> Part:
    """Attention of some rows of a layout: one or more ranges, one of a group at most."""
    keys: list[IntArray] = []
    asked: list[IntArray] = []
    lengths: list[int] = []
    parents: list[int] = []
    above: list[int] = []  # rows of each path
    rows = 0
    for own in ranges:
        path = path_of(layout._segments, own, window)
        keys.append(rows_of([*path, own]))
        above.append(sum(end - begin for begin, end in path))
        asked.append(np.arange(rows + above[-1], rows + len(keys[-1])))
        rows += len(keys[-1])
        of_range = _segments_of(layout._segments, own, window)
        parents += [s + len(lengths) if s >= 0 else -1 for s in of_range[1]]
        lengths += of_range[0]
    made = Layout.from_segments(np.concatenate([[0], np.cumsum(lengths)]), parents, layout.device)
    if any(above):
        made = made.without_queries(above)
    return Part(np.concatenate(keys), np.concatenate(asked), made)


# ---------------------------------------------------------------- what is sent
class Stage(NamedTuple):
    """One of the two parts of every rank: what its attention needs from others, and this rank's attention.

    Attributes:
        sent: [n] int64: own rows that are sent, in the order of the ranks that get them.
        sent_to, received_from: rows for each rank.
        own: the part's rows among this rank's rows.
        keys: [path's rows and own ones] int64: among the own rows and all that were received until then.
        asked: [rows of `own`] int64: their indices in `keys`.
        layout: of `keys`; None where the part is empty.
    """

    sent: torch.Tensor
    sent_to: list[int]
    received_from: list[int]
    own: slice
    keys: torch.Tensor
    asked: torch.Tensor
    layout: Layout | None

    def among_keys(self, x: torch.Tensor) -> torch.Tensor:
        """The own rows of x at their indices among the keys, and zeros for the rows of the paths."""
        return x.new_zeros(len(self.keys), *x.shape[1:]).index_copy(0, self.asked, x[self.own])


def stages(layout: Layout, of_ranks: list[list[list[Range]]], rank: int, window: Window | None = None) -> list[Stage]:
    """Plan the stages of a rank's attention, one for each of its two parts; of_ranks: :func:`shares`."""
    segments, device = layout._segments, layout.device
    own = [sorted(chain.from_iterable(of_rank)) for of_rank in of_ranks]
    place = np.full(segments.total, -1)
    rows = np.concatenate([rows_of(part) for part in of_ranks[rank]])
    place[rows] = np.arange(len(rows))
    known, begin = len(rows), 0
    came: list[list[Range]] = [[] for _ in of_ranks]  # in earlier stages
    found = []
    for number in range(2):
        paths = [[above for one in of_rank[number] for above in path_of(segments, one, window)] for of_rank in of_ranks]
        wanted = [_without(_without(paths[r], own[r]), came[r]) for r in range(len(of_ranks))]
        came = paths
        sent = [rows_of(_meet(some, own[rank])) for some in wanted]
        received = [rows_of(_meet(wanted[rank], of_rank)) for of_rank in own]
        for some in received:
            place[some] = known + np.arange(len(some))
            known += len(some)
        ranges = of_ranks[rank][number]
        part = part_of(layout, ranges, window) if ranges else NOTHING
        end = begin + len(part.asked)
        indices = (place[np.concatenate(sent)], place[part.keys], part.asked)
        sent_rows, keys, asked = (torch.from_numpy(x).to(device) for x in indices)
        sent_to, received_from = ([len(x) for x in those] for those in (sent, received))
        found.append(Stage(sent_rows, sent_to, received_from, slice(begin, end), keys, asked, part.layout))
        begin = end
    return found

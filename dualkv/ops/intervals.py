"""The keys that rows and blocks of rows see, as intervals: what masks of general attention kernels are made of.

A group's rows are one sequence of a kernel. The keys that a row of it sees are one run of every segment on the row's
path: all of a segment above it, the row's own segment up to the row. With a window the first runs are cut or empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dualkv.arrays import IntArray
from dualkv.ops.features import Window
from dualkv.segments import Segments


def group_lengths(segments: Segments) -> IntArray:
    """[G] rows of each group that has any."""
    roots = segments.roots
    length = segments.subtree_end[roots] - segments.offsets[roots]
    return length[length > 0]


def visible_runs(segments: Segments, window: Window | None = None, rows: IntArray | None = None) -> IntArray:
    """[R, levels, 2]: begin and end of the packed rows that each of `rows` [R] (all) sees, one run a level, ascending.

    A row whose path has fewer levels has empty runs behind its own. Every run begins where the one before ends, or
    later, so that the numbers of a row never fall.
    """
    rows = np.arange(segments.total) if rows is None else rows
    runs = np.repeat((rows + 1)[:, None, None], max(segments.max_depth, 1), 1).repeat(2, 2)
    lowest = np.zeros(len(rows), np.int64) if window is None else window.lowest(segments.position[rows])
    segment = segments.segment_of_row[rows]
    depth = segments.depth[segment]
    inside, end = np.arange(len(rows)), rows + 1
    while len(inside):
        up = segment[inside]
        first = segments.offsets[up]
        begin = first + np.maximum(lowest[inside] - segments.first_position[up], 0)
        runs[inside, depth[inside]] = np.stack([np.minimum(begin, end), end], 1)
        inside = inside[segments.parent[up] >= 0]
        segment[inside], depth[inside] = segments.parent[segment[inside]], depth[inside] - 1
        end = segments.offsets[1:][segment[inside]]
    return runs


def interval_ends(segments: Segments, window: Window | None = None) -> IntArray:
    """[1, n, T] int32, n odd: ends F that never fall; a row sees [0, F0), [F1, F2), [F3, F4) ... of its group's rows.

    Two intervals a row for prompts with responses, as many as levels for trees. With a window no interval begins at the
    first row of the group, so that there is one more.
    """
    runs = visible_runs(segments, window)
    roots = segments.roots
    first = np.repeat(segments.offsets[roots], segments.subtree_end[roots] - segments.offsets[roots])
    ends = (runs - first[:, None, None]).reshape(segments.total, runs.shape[1] * 2)
    # The first run begins at row 0 of its group, and F holds no number for that; with a window [0, 0) comes before it.
    ends = ends[:, 1:] if window is None else np.concatenate([np.zeros_like(ends[:, :1]), ends], 1)
    return np.ascontiguousarray(ends.T[None].astype(np.int32))


# ---------------------------------------------------------------- blocks of rows and keys
# Runs [R, 3] of blocks: the row of blocks that a run is in, its first column and one past its last, in ascending order.
# No run overlaps another.
def block_runs(segments: Segments, window: Window | None, block: int) -> tuple[IntArray, IntArray]:
    """(partial, whole), runs of blocks of keys for each block of queries. Each of the `block` queries sees every key of
    a whole block, by one run of its own; some query sees some key of a partial one."""
    total, n = segments.total, -(-segments.total // block)
    # The queries of a segment in a block are taken together. A window's lowest key never falls along them: what any of
    # them sees begins with the first one's run and ends with the last one's, what all see is the other way round.
    # Levels below the segment's own add nothing: between their empty runs is a part of the own one.
    first = np.union1d(segments.offsets, np.arange(0, total, block))
    first = first[first < total]
    last = np.append(first, total)[1:] - 1
    of_first, of_last = (visible_runs(segments, window, x) for x in (first, last))

    def blocks(begin: IntArray, end: IntArray, *weights: Any) -> IntArray:
        """[R, 5]: runs and two weights, without the empty ones."""
        return np.stack(np.broadcast_arrays((first // block)[:, None], begin, end, *weights), -1)[begin < end]

    begin, end = of_first[..., 0], np.where(of_first[..., 0] < of_last[..., 1], of_last[..., 1], 0)
    seen = blocks(begin // block, -(-end // block), 1, 0)
    queries = (last + 1 - first)[:, None]
    whole = blocks(-(-of_last[..., 0] // block), of_first[..., 1] // block, 0, queries)
    given = np.concatenate([seen, whole])
    runs, (any_sees, queries_see) = _overlaid(given[:, :3], given[:, 3:], n)
    return runs[(any_sees > 0) & (queries_see < block)], runs[queries_see == block]


def transposed(runs: IntArray, n: int) -> IntArray:
    """Runs of rows in columns; n: rows and columns."""
    # In each row, the columns that the row before has not, and the columns that only the row before has.
    both = np.concatenate([runs, runs + np.array([1, 0, 0])])
    changed, (change,) = _overlaid(both, np.repeat([[1], [-1]], len(runs), 0), n)
    changed, change = changed[change != 0], change[change != 0]
    row, begin, end = changed.T
    length = end - begin
    column = np.arange(length.sum()) + np.repeat(begin - (np.cumsum(length) - length), length)
    row, change = np.repeat(row, length), np.repeat(change, length)
    order = np.lexsort((row, column))
    begins, ends = order[change[order] > 0], order[change[order] < 0]
    return np.stack([column[begins], row[begins], row[ends]], 1)


def _overlaid(runs: IntArray, weights: IntArray, n: int) -> tuple[IntArray, IntArray]:
    """(runs, [W, R]): runs which may overlap, cut where any begins or ends; the sums of their weights [.., W]."""
    row, begin, end = runs.T
    at, which = np.unique(np.concatenate([begin, end]) + np.tile(row * (n + 1), 2), return_inverse=True)
    steps = np.zeros((len(at), weights.shape[1]), np.int64)
    np.add.at(steps, which, np.concatenate([weights, -weights]))
    row, begin = np.divmod(at[:-1], n + 1)
    return np.stack([row, begin, begin + np.diff(at)], 1), steps.cumsum(0)[:-1].T

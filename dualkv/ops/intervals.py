"""The keys that each row sees, as intervals: what masks of general attention kernels are made of.

A group's rows are one sequence of a kernel. The keys that a row of it sees are one run of every segment on the row's
path: all of a segment above it, the row's own segment up to the row. With a window the first runs are cut or empty.
"""

from __future__ import annotations

import numpy as np

from dualkv.arrays import IntArray
from dualkv.layout import Segments
from dualkv.ops.window import Window


def group_lengths(segments: Segments) -> IntArray:
    """[G] rows of each group that has any."""
    roots = segments.roots
    length = segments.subtree_end[roots] - segments.offsets[roots]
    return length[length > 0]


def visible_runs(segments: Segments, window: Window | None = None) -> IntArray:
    """[T, levels, 2]: begin and end of the packed rows that each row sees, one run a level, in ascending order.

    A row whose path has fewer levels has empty runs behind its own. Every run begins where the one before ends, or
    later, so that the numbers of a row never fall.
    """
    rows, levels = np.arange(segments.total), max(segments.max_depth, 1)
    runs = np.repeat((rows + 1)[:, None, None], levels, 1).repeat(2, 2)
    lowest = np.zeros(segments.total, np.int64) if window is None else window.lowest(segments.position)
    segment = segments.segment_of_row.copy()
    depth = segments.depth[segment]
    inside, end = rows, rows + 1
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

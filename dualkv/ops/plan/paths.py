"""The forward's work plan for trees of any depth: numpy on the host, once a batch.

`cute_kernels.abi.PathFields` says what the tables hold. Plans of two levels have two regions a tile: `dualkv.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cute_kernels.abi import PathFields as items
from dualkv.arrays import IntArray, positions
from dualkv.layout import Segments
from dualkv.ops.plan.forward import MASKED, longest_first, segment_at, visible_end_over

NEAR_ROWS = 2**14  # as plan.L2_ROWS: K and V of head_dim 128 are 8 MB; 2**13 and 2**15 are slower

Table = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PathWork:
    """
    Attributes:
        items: [n, PathFields.NUM_FIELDS] int32, longest first; the same tiles serve every KV head.
        regions: [m, 2] int32, at least one row.
    """

    items: Table
    regions: Table


def path_work(segments: Segments, tokens: int, tile_n: int) -> PathWork:
    """The work items of a layout: every packed row that is asked for lies in exactly one tile, tiles end where their
    group ends.

    Args:
        segments: the layout, of any depth.
        tokens: packed rows a tile (`ForwardTile.tokens`).
        tile_n: keys a block.
    """
    offsets, subtree_end, parent, depth = segments.offsets, segments.subtree_end, segments.parent, segments.depth
    roots = np.flatnonzero(parent == -1)
    count = -(-(subtree_end[roots] - segments.first_query) // tokens)  # tiles of each group
    row = np.repeat(segments.first_query, count) + positions(count) * tokens
    row_end = np.minimum(row + tokens, np.repeat(subtree_end[roots], count))

    # The deepest segment on all rows' paths: the first row's, or the parent of the highest that begins in the tile.
    first, last = segment_at(offsets, row), segment_at(offsets, row_end - 1)
    by_depth = np.append(depth * len(depth) + np.arange(len(depth)), 0)
    highest = np.minimum.reduceat(by_depth, np.stack([first + 1, last + 1], 1).reshape(-1))[::2] % max(len(depth), 1)
    inside = (first == last) | (depth[highest] > depth[first])
    shared = np.where(inside, first, parent[highest])
    whole_end = np.minimum(row, offsets[shared + 1])  # keys of the path before it are seen by all rows

    # The keys of each tile as intervals, from the root on: those of its first row's path, the last as far as its rows.
    begin_of, above, number_of = _intervals(segments)
    number = number_of[first]
    start = np.cumsum(number) - number
    tile = np.repeat(np.arange(len(row)), number)
    begin, end = (np.empty(len(tile), np.int64) for _ in range(2))
    segment = first.copy()
    for step in range(int(number.max(initial=0))):
        at = np.flatnonzero(number > step)
        place, of = start[at] + number[at] - 1 - step, segment[at]
        begin[place], end[place], segment[at] = begin_of[of], offsets[of + 1], above[of]
    end[start + number - 1] = row_end

    # Blocks from each interval's first key that the blocks before have not reached.
    from_key, covered = begin.copy(), np.zeros(len(row), np.int64)
    for step in range(int(number.max(initial=0))):
        at = np.flatnonzero(number > step)
        place = start[at] + step
        from_key[place] = np.maximum(begin[place], covered[at])
        covered[at] = from_key[place] + _blocks(from_key[place], end[place], tile_n) * tile_n
    blocks = _blocks(from_key, end, tile_n)
    whole = np.clip((np.minimum(whole_end[tile], end) - from_key) // tile_n, 0, blocks)

    # Masked blocks, the last one first. The first of these is in the work item: it waits for no table.
    masked = blocks - whole
    which = np.repeat(np.arange(len(tile)), masked)
    key = (from_key[which] + (whole[which] + positions(masked)) * tile_n)[::-1]
    which = which[::-1]
    owner, key_end = tile[which], np.minimum(key + tile_n, end[which])
    next_begin = np.append(begin, 0)[which + 1]
    alone = (np.append(tile, -1)[which + 1] != owner) | (key + tile_n <= next_begin)  # in one interval
    to_all = alone & (visible_end_over(np.minimum, segments, key, key_end) >= row_end[owner])
    limit = np.where(to_all, key_end, -row_end[owner])

    work = np.empty((len(row), items.NUM_FIELDS), np.int32)
    work[:, items.ROW], work[:, items.ROW_END] = row, row_end
    first_of = np.append(-1, owner)[:-1] != owner
    work[owner[first_of], items.KEY], work[owner[first_of], items.LIMIT] = key[first_of], limit[first_of]
    key, limit, owner = key[~first_of], limit[~first_of], owner[~first_of]

    runs = np.flatnonzero(whole)
    owner = np.concatenate([owner, tile[runs], [len(row)]])  # a row that nobody reads: kernels take no empty table
    regions = np.stack([np.concatenate([key, from_key[runs], [0]]), np.concatenate([limit, whole[runs], [0]])], 1)
    regions = regions[np.argsort(owner, kind="stable")].astype(np.int32)

    rows_of = np.bincount(owner)[: len(row)]
    work[:, items.REGION] = np.cumsum(rows_of) - rows_of
    work[:, items.MASKED] = np.bincount(tile, masked, len(row))
    work[:, items.BLOCKS] = np.bincount(tile, blocks, len(row))
    # Longest first, so that all clusters end together; but tiles far apart, whose paths have little in common, come one
    # after another: keys and values of those that run together stay in L2 (the agent tree of the bench: 4 % faster).
    order = longest_first(work[:, items.BLOCKS])
    order = order[np.argsort(row[order] // NEAR_ROWS, kind="stable")]
    return PathWork(work.take(order, axis=0), regions)


def tile_cost(work: Table) -> npt.NDArray[np.float64]:
    """[n] time that the tiles take, in whole blocks."""
    return work[:, items.BLOCKS] + MASKED * work[:, items.MASKED]


def _intervals(segments: Segments) -> tuple[IntArray, IntArray, IntArray]:
    """Each segment's path as intervals of packed rows, segments that follow one another as one.

    Returns:
        [S] each: the first row of the interval that ends with the segment; the segment with which the interval above
        ends, -1 for none; the number of intervals up to the root. Of segments with rows.
    """
    offsets, parents = segments.offsets.tolist(), segments.parent.tolist()
    begin, above, number, present = ([0] * len(parents) for _ in range(4))
    for s, parent in enumerate(parents):
        up = present[parent] if parent >= 0 else -1  # the nearest with rows
        present[s] = s if offsets[s] < offsets[s + 1] else up
        if up < 0:
            begin[s], above[s], number[s] = offsets[s], -1, 1
        elif offsets[up + 1] == offsets[s]:
            begin[s], above[s], number[s] = begin[up], above[up], number[up]
        else:
            begin[s], above[s], number[s] = offsets[s], up, number[up] + 1
    return np.array(begin, np.int64), np.array(above, np.int64), np.array(number, np.int64)


def _blocks(begin: IntArray, end: IntArray, tile_n: int) -> IntArray:
    """Blocks that reach from `begin` to `end`, none if there is nothing between."""
    return np.maximum(-(-(end - begin) // tile_n), 0)

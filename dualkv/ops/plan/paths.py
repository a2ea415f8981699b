"""The forward's work plan for trees of any depth. Made on the host with numpy, once a batch.

`cute_kernels.abi.PathFields` says what the tables hold. Prompts with responses need two regions a tile only, and have a
plan of their own: `dualkv.ops.plan.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cute_kernels.abi import PathFields as items
from dualkv.arrays import IntArray, positions
from dualkv.layout import Segments
from dualkv.ops.plan.shared import MASKED_COST, Table, longest_first, segment_at, visible_end_over

NEAR_ROWS = 2**14  # like forward.L2_ROWS: K and V of head_dim 128 are 8 MB; 2**13 and 2**15 are slower


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
    """The work items of a layout: every packed row whose result is needed lies in exactly one tile, and no tile reaches
    into the next group.

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

    # The deepest segment that is on the path of every row: the first row's segment, or the parent of the highest one
    # that begins within the tile.
    first, last = segment_at(offsets, row), segment_at(offsets, row_end - 1)
    by_depth = np.append(depth * len(depth) + np.arange(len(depth)), 0)
    highest = np.minimum.reduceat(by_depth, np.stack([first + 1, last + 1], 1).reshape(-1))[::2] % max(len(depth), 1)
    inside = (first == last) | (depth[highest] > depth[first])
    shared = np.where(inside, first, parent[highest])
    whole_end = np.minimum(row, offsets[shared + 1])  # every row sees the keys of the path before this one

    # The keys of each tile as intervals, from the root on: the path of its first row, with the last interval extended
    # to the end of the tile.
    begin_of, above, number_of = _intervals(segments)
    number = number_of[first]
    start = np.cumsum(number) - number
    tile = np.repeat(np.arange(len(row)), number)
    begin, end = (np.empty(len(tile), np.int64) for _ in range(2))
    segment = first.copy()
    for step in range(int(number.max(initial=0))):
        at = np.flatnonzero(number > step)
        i, s = start[at] + number[at] - 1 - step, segment[at]
        begin[i], end[i], segment[at] = begin_of[s], offsets[s + 1], above[s]
    end[start + number - 1] = row_end

    # An interval's blocks begin at its first key that the blocks of the intervals before do not cover.
    from_key, covered = begin.copy(), np.zeros(len(row), np.int64)
    for step in range(int(number.max(initial=0))):
        at = np.flatnonzero(number > step)
        i = start[at] + step
        from_key[i] = np.maximum(begin[i], covered[at])
        covered[at] = from_key[i] + _blocks(from_key[i], end[i], tile_n) * tile_n
    blocks = _blocks(from_key, end, tile_n)
    whole = np.clip((np.minimum(whole_end[tile], end) - from_key) // tile_n, 0, blocks)

    # Masked blocks, the last one first. The first of them is in the work item, so that the tile begins without waiting
    # for the table of regions.
    masked = blocks - whole
    which = np.repeat(np.arange(len(tile)), masked)
    key = (from_key[which] + (whole[which] + positions(masked)) * tile_n)[::-1]
    which = which[::-1]
    owner, key_end = tile[which], np.minimum(key + tile_n, end[which])
    next_begin = np.append(begin, 0)[which + 1]
    one_interval = (np.append(tile, -1)[which + 1] != owner) | (key + tile_n <= next_begin)
    to_all = one_interval & (visible_end_over(np.minimum, segments, key, key_end) >= row_end[owner])
    limit = np.where(to_all, key_end, -row_end[owner])

    work = np.empty((len(row), items.NUM_FIELDS), np.int32)
    work[:, items.ROW], work[:, items.ROW_END] = row, row_end
    first_of = np.append(-1, owner)[:-1] != owner
    work[owner[first_of], items.KEY], work[owner[first_of], items.LIMIT] = key[first_of], limit[first_of]
    key, limit, owner = key[~first_of], limit[~first_of], owner[~first_of]

    runs = np.flatnonzero(whole)
    owner = np.concatenate([owner, tile[runs], [len(row)]])  # and an unused row, as kernels take no empty table
    regions = np.stack([np.concatenate([key, from_key[runs], [0]]), np.concatenate([limit, whole[runs], [0]])], 1)
    regions = regions[np.argsort(owner, kind="stable")].astype(np.int32)

    rows_of = np.bincount(owner)[: len(row)]
    work[:, items.REGION] = np.cumsum(rows_of) - rows_of
    work[:, items.MASKED] = np.bincount(tile, masked, len(row))
    work[:, items.BLOCKS] = np.bincount(tile, blocks, len(row))
    # Longest first, so that all clusters finish together. But tiles far apart, whose paths have little in common, come
    # one after another, so that keys and values of the tiles that run together stay in L2 (the benchmark's agent tree:
    # 4 % faster).
    order = longest_first(work[:, items.BLOCKS])
    order = order[np.argsort(row[order] // NEAR_ROWS, kind="stable")]
    return PathWork(work.take(order, axis=0), regions)


def tile_cost(work: Table) -> npt.NDArray[np.float64]:
    """[n] time that each tile takes, in unmasked blocks."""
    return work[:, items.BLOCKS] + MASKED_COST * work[:, items.MASKED]


def _intervals(segments: Segments) -> tuple[IntArray, IntArray, IntArray]:
    """Each segment's path as intervals of packed rows; segments whose rows follow one another are one interval.

    Returns:
        Three arrays [S]: the first row of the interval that ends with the segment; the segment with which the interval
        above ends, -1 for none; the number of intervals up to the root. Meaningful for segments with rows.
    """
    offsets, parents = segments.offsets.tolist(), segments.parent.tolist()
    begin, above, number, present = ([0] * len(parents) for _ in range(4))
    for s, parent in enumerate(parents):
        up = present[parent] if parent >= 0 else -1  # the nearest ancestor with rows
        present[s] = s if offsets[s] < offsets[s + 1] else up
        if up < 0:
            begin[s], above[s], number[s] = offsets[s], -1, 1
        elif offsets[up + 1] == offsets[s]:
            begin[s], above[s], number[s] = begin[up], above[up], number[up]
        else:
            begin[s], above[s], number[s] = offsets[s], up, number[up] + 1
    return np.array(begin, np.int64), np.array(above, np.int64), np.array(number, np.int64)


def _blocks(begin: IntArray, end: IntArray, tile_n: int) -> IntArray:
    """Blocks that cover [begin, end); 0 if that is empty."""
    return np.maximum(-(-(end - begin) // tile_n), 0)

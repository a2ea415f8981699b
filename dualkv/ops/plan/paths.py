"""The forward's work plan for trees of any depth, for windows and chunks. Made on the host with numpy, once a batch.

`cute_kernels.abi.PathFields` says what the tables hold. Without a window, prompts with responses need two regions a
tile only, and have a plan of their own: `dualkv.ops.plan.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cute_kernels.abi import PathFields as items
from dualkv.arrays import IntArray, positions
from dualkv.ops.features import Window
from dualkv.ops.plan.forward import MASKED_COST_OF_SOME
from dualkv.ops.plan.shared import Table, longest_first, segment_at, visible_end_over
from dualkv.segments import Segments

SHORTEST_GAP = 2  # blocks that a warp group skips between others; to skip one costs as much as it saves
NEAR_ROWS = 2**14  # like forward.L2_ROWS: K and V of head_dim 128 are 8 MB; 2**13 and 2**15 are slower


@dataclass(frozen=True)
class PathWork:
    """
    Attributes:
        items: [n, PathFields.NUM_FIELDS + parts * PathFields.NUM_PART_FIELDS] int32, longest first; the same tiles
            serve every KV head.
        regions: [m, 2] int32, at least one row.
    """

    items: Table
    regions: Table


class _Tiles(NamedTuple):
    """Rows [row, row_end) of each tile, and the segment that holds the first one."""

    row: IntArray
    row_end: IntArray
    first: IntArray


class _Intervals(NamedTuple):
    """The keys that tiles see as intervals of packed rows, tile after tile, from the root on."""

    tile: IntArray
    begin: IntArray
    end: IntArray
    # Blocks begin anew: between this interval and the one before are keys of the path that no row sees, or tiles are by
    # segment.
    apart: npt.NDArray[np.bool_]


class _Masked(NamedTuple):
    """Masked blocks in the kernel's order, tile after tile (from the last tile on)."""

    tile: IntArray
    begin: IntArray  # keys [begin, end) that rows may see
    end: IntArray
    visible_end: IntArray  # no row from here on sees any of them


def path_work(
    segments: Segments, tokens: int, tile_n: int, window: Window | None = None, parts: int = 1,
    by_segment: bool = False,
) -> PathWork:  # fmt: skip
    """The work items of a layout: every packed row whose result is needed lies in exactly one tile, and no tile reaches
    into the next group.

    Args:
        segments: the layout, of any depth.
        tokens: packed rows a tile (`ForwardTile.tokens`).
        tile_n: keys a block.
        window: a sliding window or chunks.
        parts: of a tile, equal ones, each with the blocks that its rows see (`ForwardTile.parts`).
        by_segment: tiles and blocks begin where a segment does, and end where it does. So what a row's tile computes,
            and in which order, follows from the row's path alone, and from where it is cut into segments. Of rows
            without queries the last ones before a query may be in a tile then.
    """
    offsets, parent, depth = segments.offsets, segments.parent, segments.depth
    run, run_end = tiled_runs(segments, tokens, by_segment)
    count = -(-(run_end - run) // tokens)  # tiles of each run
    row = np.repeat(run, count) + positions(count) * tokens
    row_end = np.minimum(row + tokens, np.repeat(run_end, count))

    # The deepest segment that is on the path of every row: the first row's segment, or the parent of the highest one
    # that begins within the tile.
    first, last = segment_at(offsets, row), segment_at(offsets, row_end - 1)
    by_depth = np.append(depth * len(depth) + np.arange(len(depth)), 0)
    highest = np.minimum.reduceat(by_depth, np.stack([first + 1, last + 1], 1).reshape(-1))[::2] % max(len(depth), 1)
    inside = (first == last) | (depth[highest] > depth[first])
    shared = np.where(inside, first, parent[highest])
    whole_end = np.minimum(row, offsets[shared + 1])  # every row sees the keys of the path before this one ...

    # The keys of each tile as intervals, from the root on: the keys that its rows see on the path of its first row,
    # with the last interval extended to the end of the tile.
    tiles = _Tiles(row, row_end, first)
    if window is None:
        first_key = np.zeros(segments.total, np.int64)
        tile, begin, end, apart = _paths(segments, tiles, by_segment)
        whole_begin = np.zeros(len(row), np.int64)  # ... from this one on
    else:
        first_key = first_keys(segments, window)
        tile, begin, end, apart = _windows(segments, tiles, first_key, by_segment)
        whole_begin = _over(np.maximum, first_key, row, row_end)
    number = np.bincount(tile, minlength=len(row))
    start = np.cumsum(number) - number
    alone = apart | (np.append(-1, tile)[:-1] != tile)  # no block of the interval before reaches into this one

    # An interval's blocks begin at its first key that the blocks of the intervals before do not cover.
    from_key, covered = begin.copy(), np.zeros(len(row), np.int64)
    for step in range(int(number.max(initial=0))):
        at = np.flatnonzero(number > step)
        i = start[at] + step
        from_key[i] = np.where(alone[i], begin[i], np.maximum(begin[i], covered[at]))
        covered[at] = from_key[i] + _blocks(from_key[i], end[i], tile_n) * tile_n
    blocks = _blocks(from_key, end, tile_n)
    before = np.clip(_blocks(from_key, whole_begin[tile], tile_n), 0, blocks)  # masked ones before the whole ones
    whole = np.clip((np.minimum(whole_end[tile], end) - from_key) // tile_n - before, 0, blocks - before)

    # Masked blocks, the last one first. The first of them is in the work item, so that the tile begins without waiting
    # for the table of regions.
    masked = blocks - whole
    which = np.repeat(np.arange(len(tile)), masked)
    at = positions(masked)
    key = (from_key[which] + (at + np.where(at < before[which], 0, whole[which])) * tile_n)[::-1]
    which = which[::-1]
    owner, key_end = tile[which], np.minimum(key + tile_n, end[which])
    next_alone, next_begin = np.append(alone, True)[which + 1], np.append(begin, 0)[which + 1]
    one_interval = next_alone | (key + tile_n <= next_begin)
    to_all = one_interval & (visible_end_over(np.minimum, segments, key, key_end) >= row_end[owner])
    reach = np.append(end, 0)[np.append(np.flatnonzero(alone), len(end))[1:] - 1]  # of intervals up to one alone
    limit = np.where(to_all, key_end, -reach[(np.cumsum(alone) - 1)[which]])

    work = np.empty((len(row), items.NUM_FIELDS + items.NUM_PART_FIELDS * parts), np.int32)
    stop = np.minimum(key + tile_n, abs(limit))
    seen = _Masked(owner, key, stop, visible_end_over(np.maximum, segments, key, stop))
    total = np.bincount(tile, blocks, len(row)).astype(np.int64)
    work[:, items.NUM_FIELDS :] = _walks(tiles, seen, first_key, total, tokens // parts, parts)
    work[:, items.ROW], work[:, items.ROW_END] = row, row_end
    first_of = np.append(-1, owner)[:-1] != owner
    work[owner[first_of], items.KEY], work[owner[first_of], items.LIMIT] = key[first_of], limit[first_of]
    key, limit, owner = key[~first_of], limit[~first_of], owner[~first_of]

    runs = np.flatnonzero(whole)
    run_key = from_key[runs] + before[runs] * tile_n
    owner = np.concatenate([owner, tile[runs], [len(row)]])  # and an unused row, as kernels take no empty table
    regions = np.stack([np.concatenate([key, run_key, [0]]), np.concatenate([limit, whole[runs], [0]])], 1)
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


def first_keys(segments: Segments, window: Window) -> IntArray:
    """[T] the packed row of the first key that each row sees. It sees the keys of its path from there on: along a path,
    rows ascend as positions do. Computed once for a window."""
    return segments.cached(("first_keys", window), lambda: _first_keys(segments, window))


def _first_keys(segments: Segments, window: Window) -> IntArray:
    offsets, parent, start, row_end = segments.offsets, segments.parent, segments.first_position, segments.offsets[1:]
    segment = np.flatnonzero(segments.lengths)
    above, row_end = segment, row_end[segment]  # an ancestor; rows [.., row_end) have their first key there or above
    begins, shifts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    while len(segment):
        position = np.where(start[above] > 0, window.end(start[above] - 1), 0)  # of the first one to see no key above
        begin = np.clip(position - start[segment] + offsets[segment], offsets[segment], row_end)
        begins.append(begin[begin < row_end])
        shifts.append((offsets[above] - start[above])[begin < row_end])
        more = begin > offsets[segment]
        segment, above, row_end = segment[more], parent[above[more]], begin[more]
    runs, shift = np.concatenate(begins), np.concatenate(shifts)
    order = np.argsort(runs)
    lengths = np.diff(np.append(runs[order], segments.total))
    result: IntArray = window.lowest(segments.position) + np.repeat(shift[order], lengths)
    return result


def tile_cost(work: Table) -> npt.NDArray[np.float64]:
    """[n] time that each tile takes, in unmasked blocks: the time of the part that walks the most."""
    blocks, masked = work[:, items.BLOCKS], work[:, items.MASKED]
    parts = work[:, items.NUM_FIELDS :].reshape(len(work), -1, items.NUM_PART_FIELDS)
    between = parts[:, :, items.BEGIN] + parts[:, :, items.REST] - parts[:, :, items.END]
    walked = blocks - between.min(axis=1)
    return walked + MASKED_COST_OF_SOME * (walked - (blocks - masked))


def tiled_runs(segments: Segments, tokens: int, by_segment: bool) -> tuple[IntArray, IntArray]:
    """Rows [begin, end) that tiles of `tokens` rows cover one after another: of each group or each segment."""
    if not by_segment:
        return segments.first_query, segments.subtree_end[segments.roots]
    begin, end = segments.offsets[:-1], segments.offsets[1:]
    before = np.clip(segments.first_query[segments.group_of_segment] - begin, 0, end - begin)
    return np.where(before == end - begin, end, begin + before // tokens * tokens), end


def _paths(segments: Segments, tiles: _Tiles, by_segment: bool) -> _Intervals:
    """Find the intervals of keys of each tile without a window: whole paths."""
    begin_of, above, number_of = _intervals(segments, by_segment)
    number = number_of[tiles.first]
    start = np.cumsum(number) - number
    tile = np.repeat(np.arange(len(number)), number)
    begin, end = (np.empty(len(tile), np.int64) for _ in range(2))
    segment = tiles.first.copy()
    for step in range(int(number.max(initial=0))):
        at = np.flatnonzero(number > step)
        i, s = start[at] + number[at] - 1 - step, segment[at]
        begin[i], end[i], segment[at] = begin_of[s], segments.offsets[s + 1], above[s]
    end[start + number - 1] = tiles.row_end
    return _Intervals(tile, begin, end, np.full(len(tile), by_segment))


def _windows(segments: Segments, tiles: _Tiles, first_key: IntArray, by_segment: bool) -> _Intervals:
    """Find the keys that each tile's rows see with a window, segment by segment of the path. Rows of later segments may
    see fewer keys of a segment above them than the first row, or keys that the first row does not see.

    Args:
        first_key: of :func:`first_keys`.
    """
    offsets, up = segments.offsets, _nearest_with_rows(segments)
    row, row_end, first = tiles
    # First keys ascend within a segment, so only the tile's first row and the segments that begin in the tile count.
    of_segment = np.append(first_key, 0)[offsets[:-1]]
    lowest = _over(np.minimum, first_key, row, row_end)
    at, segment, end = np.arange(len(row)), first, row_end
    tile, begins, ends, segments_of = [at[:0]], [at[:0]], [at[:0]], [at[:0]]
    while len(at):
        stop = np.searchsorted(offsets[:-1], np.minimum(row_end[at], segments.subtree_end[segment]))
        low = np.minimum(first_key[row[at]], _over(np.minimum, of_segment, first[at] + 1, stop))
        low = np.maximum(low, offsets[segment])
        seen = low < end
        for found, x in ((tile, at), (begins, low), (ends, end), (segments_of, segment)):
            found.append(x[seen])
        more = lowest[at] < offsets[segment]
        at, segment = at[more], up[segment[more]]
        end = offsets[segment + 1]
    found = [np.concatenate(x[::-1]) for x in (tile, begins, ends, segments_of)]
    order = np.argsort(found[0], kind="stable")  # from the root on
    owner, begin, end, segment = (x[order] for x in found)
    follows = (owner[1:] == owner[:-1]) & (begin[1:] == offsets[segment[1:]]) & (segment[:-1] == up[segment[1:]])
    follows &= not by_segment
    joined = follows & (begin[1:] == end[:-1])
    heads, tails = np.append(True, ~joined)[: len(owner)], np.append(~joined, True)[: len(owner)]
    return _Intervals(owner[heads], begin[heads], end[tails], ~np.append(False, follows)[: len(owner)][heads])


def _walks(
    tiles: _Tiles, masked: _Masked, first_key: IntArray, blocks: IntArray, size: int, parts: int
) -> npt.NDArray[np.int32]:
    """[n, parts * NUM_PART_FIELDS]: the blocks that each part of a tile walks.

    A part walks the masked blocks from the first one that its rows see, less the longest run that they do not see. What
    comes after that run is a stretch of its own, which costs some time (SHORTEST_GAP).

    Args:
        blocks: of each tile.
        size: rows a part.
    """
    walks = np.empty((len(blocks), parts, items.NUM_PART_FIELDS), np.int32)
    walks[:] = blocks[:, None, None]  # of a part without rows
    heads = np.flatnonzero(np.append(-1, masked.tile)[:-1] != masked.tile)
    count = np.diff(np.append(heads, len(masked.tile)))
    number = positions(count)  # of a block in its tile
    last = np.zeros(len(blocks), np.int64)
    last[masked.tile] = count.repeat(count)
    for part in range(parts):
        begin = np.minimum(tiles.row + part * size, tiles.row_end)
        end = np.minimum(begin + size, tiles.row_end)
        low = _over(np.minimum, first_key, begin, end)
        of = masked.tile
        seen = (masked.begin < end[of]) & (masked.visible_end > begin[of]) & (masked.end > low[of])
        at = np.flatnonzero(seen & (begin < end)[of])
        tile, block = of[at], number[at]
        new = np.append(True, tile[1:] != tile[:-1])[: len(at)]
        gap = np.where(new, 0, block - np.append(0, block[:-1])[: len(at)] - 1)
        first = np.flatnonzero(new)
        longest = np.maximum.reduceat(gap * len(at) + np.arange(len(at)), first) % len(at) if len(at) else first
        final = np.append(first[1:], len(at))[: len(first)] - 1  # the last one that its rows see
        t, gap = tile[first], gap[longest]
        behind = last[t] - 1 - block[final]  # masked ones that they do not see; then whole blocks, or none
        at_end = (behind >= gap) & ((behind >= SHORTEST_GAP) | (last[t] == blocks[t]))
        inside = ~at_end & (gap >= SHORTEST_GAP)
        walks[t, part, items.BEGIN] = block[first]
        resume = np.where(at_end, last[t], np.where(inside, block[longest], blocks[t]))
        stop = np.where(at_end, block[final] + 1, np.where(inside, block[longest] - gap, blocks[t]))
        walks[t, part, items.END], walks[t, part, items.REST] = stop, resume
    return walks.reshape(len(blocks), parts * items.NUM_PART_FIELDS)


def _nearest_with_rows(segments: Segments) -> IntArray:
    """[S] the nearest ancestor of each segment that has rows, -1 for none."""
    parent, empty = segments.parent, segments.lengths == 0
    up = parent.copy()
    while len(at := np.flatnonzero((up >= 0) & empty[up])):
        up[at] = parent[up[at]]
    return up


def _over(op: np.ufunc, values: IntArray, begin: IntArray, end: IntArray) -> IntArray:
    """`op` (np.minimum or np.maximum) over values[begin[i] : end[i]]; its neutral number for an empty range."""
    neutral = np.iinfo(np.int64).max if op is np.minimum else 0
    found = op.reduceat(np.append(values, neutral), np.stack([begin, end], 1).reshape(-1))[::2]
    return np.where(begin < end, found, neutral)


def _intervals(segments: Segments, by_segment: bool) -> tuple[IntArray, IntArray, IntArray]:
    """Each segment's path as intervals of packed rows. Segments whose rows follow one another are one interval, unless
    `by_segment`.

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
        elif offsets[up + 1] == offsets[s] and not by_segment:
            begin[s], above[s], number[s] = begin[up], above[up], number[up]
        else:
            begin[s], above[s], number[s] = offsets[s], up, number[up] + 1
    return np.array(begin, np.int64), np.array(above, np.int64), np.array(number, np.int64)


def _blocks(begin: IntArray, end: IntArray, tile_n: int) -> IntArray:
    """Blocks that cover [begin, end); 0 if that is empty."""
    return np.maximum(-(-(end - begin) // tile_n), 0)

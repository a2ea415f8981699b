"""The backward's work plan with a sliding window or chunks. On the host, numpy only.

The rows that see a prompt's keys are then some of the prompt and the first ones of each response: not one interval. So
an item has a list of query blocks, rows of a table (`cute_kernels.abi.BlockFields`). The list says of each block which
of its rows see keys of which warp group, and whether the mask is needed.

A plan is made of *pairs*: the rows of one segment in one query block, and 64 neighbouring keys, the part of them in one
segment. The rows that see any of these keys are an interval, and `Window` says which. Few keys away from the ends of
segments are seen by most rows of a block or by none, so the number of pairs is about T / tile_m * window / 64.

Items that run at the same time should be at the same query blocks, so that Q, dO and the sums of dQ stay in L2. Without
a window this comes by itself: the items of a segment end at one block, from where all of them walk. Here `in_step` says
where in its list each one begins, which is worth 5 to 9 % at W = 4096. Deterministic sums come in the order of the
keys; there items that walk in step wait for one another, and lists are walked from a segment's last block on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from codegen.tiles import BackwardTile
from cute_kernels.abi import BackwardFields as items
from cute_kernels.abi import BlockFields as fields
from cute_kernels.abi import part_rows
from dualkv.arrays import IntArray, positions
from dualkv.ops.features import Window
from dualkv.ops.plan.backward import BackwardWork, KeyItems, choose_lengths, cut, divide_keys, in_order, work_tables
from dualkv.ops.plan.backward_order import WAVE, delayed_responses, in_key_order
from dualkv.ops.plan.shared import Table, segment_at
from dualkv.segments import Segments

CHUNK = 64  # keys of a warp group
SHARE, SHORTEST = 24, 360  # of pieces: see `choose_lengths`; clusters that take a piece often stay in step


class Pairs(NamedTuple):
    """Pairs of the rows of one segment in one query block, and the part of 64 keys of an item that is in one segment;
    some row sees some key.

    Attributes:
        chunk: [n] the 64 keys: `item * chunks_of_item + number`.
        block: [n] query block.
        begin, end: [n] the rows that see any of the keys.
        area: [n] rows times keys, where all rows of the block's segment see all of the keys; else 0.
    """

    chunk: IntArray
    block: IntArray
    begin: IntArray
    end: IntArray
    area: IntArray


def windowed_work(
    segments: Segments, window: Window, tile: BackwardTile, heads: int, kv_heads: int, num_sms: int
) -> BackwardWork:
    """Work items of all KV heads, and the table of query blocks that all KV heads share.

    If `tile.deterministic`, items add to a block's dQ in the order in which they start, which is the same for all KV
    heads. So none waits for a later one.

    Args:
        segments: the layout.
        window: which keys of its path a query sees.
        tile: tile configuration of the kernel.
        heads, kv_heads: H, a multiple of Hk.
        num_sms: multiprocessors of the device.
    """
    keys = key_items(segments, window, tile)
    table, item = block_table(segments, window, tile, keys)
    count = np.bincount(item, minlength=len(keys.key))
    end = np.cumsum(count)
    keys = replace(keys, block_begin=end - count, block_end=end)
    if tile.deterministic:
        chosen = choose_lengths(keys, segments.total, tile, heads, kv_heads, num_sms)
        pieces = cut(keys, chosen.best)
        none = np.zeros(len(keys.key), bool)
        priority, _ = delayed_responses(keys.group, keys.is_response, none, chosen.clusters // kv_heads)
        order = in_key_order(pieces, priority[pieces.item], kv_heads, WAVE)
    else:
        chosen = choose_lengths(keys, segments.total, tile, heads, kv_heads, num_sms, SHARE, SHORTEST)
        pieces, order = in_order(keys, chosen, kv_heads)
    made = work_tables(keys, pieces, order, kv_heads)
    if tile.deterministic:
        own_head = made.items[made.items[:, items.KV_HEAD] == 0].astype(np.int64)
        table[:, fields.BEFORE] = adders_before(table, own_head, tile)
    return replace(made, blocks=table)


def key_items(segments: Segments, window: Window, tile: BackwardTile) -> KeyItems:
    """The keys of one KV head in items of a cluster's keys each.

    The keys of an item lie on the grid of query blocks where that fits: then the rows that see them are the fewest
    blocks. Such an item may have keys of several groups. Where it does not fit, items begin with a group, and with a
    segment that fills an item, as without a window.

    A run is up to WAVE neighbouring items of a segment: see `in_step`. Items whose keys are seen beyond their segment
    have runs of their own, as their lists are longer. With deterministic sums a run is a segment.
    """
    step = tile.cluster * tile.tile_n
    starts = (segments.parent == -1) | (segments.lengths >= step)
    cut_begin = segments.offsets[:-1][starts] if tile.tile_m % CHUNK else np.zeros(1, np.int64)
    key, key_end, group = divide_keys(segments, cut_begin, step)
    segment = segment_at(segments.offsets, key)
    is_response = segments.parent[segment] != -1
    has_children = np.bincount(segments.parent[segments.parent >= 0], minlength=len(segments.parent)) > 0
    segment_end = segments.offsets[segment + 1]
    last = np.minimum(key_end, segment_end) - 1
    to_position = (segments.first_position - segments.offsets[:-1])[segment]
    beyond = has_children[segment] & (window.end(last + to_position) > segment_end + to_position)
    starts_run = np.append(True, np.diff(segment) != 0)[: len(key)]
    if not tile.deterministic:
        starts_run[1:] |= np.diff(beyond) != 0
        within = positions(np.diff(np.append(np.flatnonzero(starts_run), len(key))))
        starts_run |= within % WAVE == 0
    run = np.cumsum(starts_run) - 1
    none = np.zeros_like(key)
    return KeyItems(key, key_end, group, run, is_response, none, none, none, [none] * 2)


def block_table(
    segments: Segments, window: Window, tile: BackwardTile, keys: KeyItems
) -> tuple[Table, IntArray]:  # fmt: skip
    """The table of query blocks, and the item of each of its rows. The rows of an item are in the reverse of the order
    in which it walks them: the order of `in_step`, or if deterministic its own segment first, and within a segment the
    last block. So the items at the end of a prompt come to the first response first, whose own items start first behind
    them."""
    M, total, count = tile.tile_m, segments.total, len(keys.key)
    chunks = tile.cluster * tile.tile_n // CHUNK
    pairs = visible_pairs(segments, window, tile, keys)
    num_blocks = -(-total // M)
    segment = segments.segment_of_row
    first_row = np.arange(num_blocks) * M
    shift = segments.first_position - segments.offsets[:-1]
    position = shift[segment] + np.arange(total)

    pair_row = pairs.chunk // chunks * num_blocks + pairs.block
    unseen = np.setdiff1d(np.arange(count), pairs.chunk // chunks)  # an item walks a block at least
    seen_row, row_of = np.unique(
        np.concatenate([pair_row, unseen * num_blocks + keys.key[unseen] // M]), return_inverse=True
    )
    item, block, n = seen_row // num_blocks, seen_row % num_blocks, len(seen_row)
    if tile.deterministic:
        order = np.lexsort((block, -segment[first_row[block]], item))
    else:
        order = in_step(item, by_depth(segments, position, first_row, M)[block], keys.run)
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    block, row_of = block[order], place[row_of[: len(pair_row)]]
    cell = row_of * chunks + pairs.chunk % chunks
    begin, end = np.full(n * chunks, total), np.zeros(n * chunks, np.int64)
    np.minimum.at(begin, cell, pairs.begin)
    np.maximum.at(end, cell, pairs.end)
    of_cta = n, tile.cluster, chunks // tile.cluster
    area, seen = np.bincount(cell, pairs.area, n * chunks).reshape(of_cta).sum(-1), end.reshape(of_cta).max(-1) > 0

    m0 = block * M
    rows = np.minimum(M, total - m0)
    flags = np.zeros(n, np.int64)
    for rank in range(tile.cluster):
        flags |= (area[:, rank] < tile.tile_n * rows).astype(np.int64) << (fields.MASKED + rank)
        # In order, the CTAs of a cluster add to a block one after the other. Then both take part in every block (with
        # zeros): if one went on without the other, its next sum would wait for a sum that the other makes only with
        # its next block, whose loads wait for both.
        own = seen[:, rank] | (tile.deterministic and tile.tile_n == 2 * CHUNK)
        flags |= own.astype(np.int64) << (fields.OWN + rank)
    last = np.maximum.reduceat(position, first_row) if total else position
    end_position = np.minimum.reduceat(window.end(position), keys.key) if total else position
    several = segment[m0] != segment[m0 + rows - 1]
    crosses = last[block] >= end_position[item]  # else the window hides nothing here
    flags |= (several & crosses).astype(np.int64) << fields.SEVERAL
    if tile.tile_n == 2 * CHUNK:
        first, last = begin.reshape(n, chunks) - m0[:, None], end.reshape(n, chunks) - m0[:, None]
        part = part_rows(M)
        kind = np.where(last <= part, fields.FIRST_ROWS, np.where(first >= M - part, fields.LAST_ROWS, fields.WHOLE))
        kind = np.where(first < last, kind, fields.SKIP)
        flags |= (kind << (2 * np.arange(chunks))).sum(-1)

    table = np.zeros((n, fields.NUM_FIELDS), np.int32)
    table[:, fields.M_BLOCK], table[:, fields.FLAGS] = block, flags
    table[:, fields.SHIFT] = np.where(several, -M - m0, shift[segment[m0]])  # the former: no limit within the block
    return table, item


def by_depth(segments: Segments, position: IntArray, first_row: IntArray, tile_m: int) -> IntArray:
    """[num_blocks] numbers of query blocks, group by group in the order of their rows' positions: first the blocks of a
    prompt, then the first blocks of all responses, and so on. The blocks that see a key are then neighbours, about."""
    depth = np.minimum.reduceat(position, first_row) // tile_m if len(first_row) else first_row
    group = segments.group_of_segment[segments.segment_of_row[first_row]]
    number = np.empty(len(first_row), np.int64)
    number[np.lexsort((first_row, depth, group))] = np.arange(len(first_row))
    return number


def in_step(item: IntArray, number: IntArray, run: IntArray) -> IntArray:
    """The order of the table's rows, which the items of a run walk backwards so that they are at the same blocks at the
    same time if they start together.

    The blocks of an item are about an interval of numbers, which it goes through once in a circle. Where lists of a run
    end together (a response's), they go down, else up. All begin at a number that each of them has. Where there is
    none, the window is shorter than a run, and lists are equally long, L: then they begin at numbers that differ by
    multiples of L, so that one that leaves the others' blocks comes to the blocks of the next ones.

    Args:
        item: [n] of each row, ascending from 0 to the last.
        number: [n] of its query block (`by_depth`).
        run: [items] of each item.
    """
    if not len(item):
        return item
    items_at, runs_at = (np.flatnonzero(np.diff(x, prepend=-1)) for x in (item, run))
    first, last = np.minimum.reduceat(number, items_at), np.maximum.reduceat(number, items_at)
    spread = [np.maximum.reduceat(x, runs_at) - np.minimum.reduceat(x, runs_at) for x in (first, last)]
    down = (spread[1] < spread[0])[run]
    first, last = np.where(down, -last, first), np.where(down, -first, last)  # in the direction of the walk
    anchor = np.maximum.reduceat(first, runs_at)[run]
    longest = np.maximum.reduceat(last - first + 1, runs_at)[run]
    start = first + (anchor - first) % longest
    start = np.where(start <= last, start, first)[item]
    number = np.where(down[item], -number, number)
    return np.lexsort((-number, number >= start, item))


def visible_pairs(segments: Segments, window: Window, tile: BackwardTile, keys: KeyItems) -> Pairs:
    """All pairs of the items' keys and the rows that see any of them, see :class:`Pairs`."""
    M, step, offsets = tile.tile_m, tile.cluster * tile.tile_n, segments.offsets
    # Parts of 64 keys in one segment.
    number = np.arange(step // CHUNK) * CHUNK
    chunk_begin = (keys.key[:, None] + number)[keys.key[:, None] + number < keys.key_end[:, None]]
    part_begin = np.union1d(chunk_begin, offsets[:-1][segments.lengths > 0])
    part_end = np.append(part_begin, segments.total)[1:]
    item = np.searchsorted(keys.key, part_begin, side="right") - 1
    part_chunk = item * (step // CHUNK) + (part_begin - keys.key[item]) // CHUNK
    shift = segments.first_position - offsets[:-1]
    part_shift = shift[segment_at(offsets, part_begin)]

    # Rows of one segment in one block.
    group = segments.group_of_segment
    begin, end = np.maximum(offsets[:-1], segments.first_query[group]), offsets[1:]
    count = np.where(begin < end, -(-end // M) - begin // M, 0)
    segment = np.repeat(np.arange(len(count)), count)
    block = begin[segment] // M + positions(count)
    row, row_end = np.maximum(begin[segment], block * M), np.minimum(end[segment], block * M + M)

    found: list[Pairs] = []
    low = window.lowest(row + shift[segment])
    ancestor = segment
    rows = np.arange(len(block))
    while len(rows) or not found:  # from the rows' own segment up, as far as the window reaches
        above, lowest = ancestor[rows], low[rows]
        last = np.where(above == segment[rows], row_end[rows], offsets[above + 1])  # one past the last key
        first = np.maximum(lowest - shift[above], offsets[above])
        some = first < last
        of, first, last = rows[some], first[some], last[some]
        begin_part = np.searchsorted(part_begin, first, side="right") - 1
        parts = np.searchsorted(part_begin, last, side="left") - begin_part
        of, part = np.repeat(of, parts), np.repeat(begin_part, parts) + positions(parts)

        q, q_end = row[of] + shift[segment[of]], row_end[of] + shift[segment[of]]  # positions
        k, k_last = part_begin[part] + part_shift[part], part_end[part] - 1 + part_shift[part]
        seen = row[of] + np.maximum(k - q, 0), row[of] + np.minimum(q_end, window.end(k_last)) - q
        whole = (q >= k_last) & (q_end <= window.end(k))
        area = np.where(whole, (q_end - q) * (k_last + 1 - k), 0)
        found.append(Pairs(part_chunk[part], block[of], *seen, area))

        further = (segments.parent[above] >= 0) & (lowest < segments.first_position[above])
        ancestor = ancestor.copy()
        ancestor[rows] = segments.parent[above]
        rows = rows[further]
    return Pairs(*(np.concatenate(x) for x in zip(*found, strict=True)))


def position_tables(segments: Segments, window: Window, tile: BackwardTile) -> tuple[Table, Table]:
    """Make the kernel's tables: the position of every row of every query block, 0 past the last one; and for each key
    one past the last position that sees it, or past all of them."""
    own, rows = segments.segment_of_row, np.arange(segments.total)
    position = rows - (segments.offsets[:-1] - segments.first_position)[own]
    padded = np.zeros(-(-segments.total // tile.tile_m) * tile.tile_m, np.int32)
    padded[: segments.total] = position
    end = np.minimum(window.end(position), position.max(initial=0) + 1)
    return padded, end.astype(np.int32)


def adders_before(table: Table, work: IntArray, tile: BackwardTile) -> IntArray:
    """[n] BlockFields.BEFORE of each row of the table: how many add to the block before, if items start as in `work`
    (of one KV head). Up to head dim 128, CTAs that see the block; beyond, items."""
    begin, count = work[:, items.BLOCK_BEGIN], work[:, items.BLOCK_END] - work[:, items.BLOCK_BEGIN]
    row = np.repeat(begin, count) + positions(count)
    start = np.empty(len(table), np.int64)
    start[row] = np.repeat(np.arange(len(work)), count)
    adders = np.ones(len(table), np.int64)
    if tile.tile_n == 2 * CHUNK:
        own = table[:, fields.FLAGS, None] >> (fields.OWN + np.arange(tile.cluster))
        adders = (own & 1).sum(1)
    block = table[:, fields.M_BLOCK]
    order = np.lexsort((start, block))
    before = np.cumsum(adders[order]) - adders[order]
    first = np.append(True, np.diff(block[order]) != 0)
    before -= np.maximum.accumulate(np.where(first, before, 0))
    result = np.empty(len(table), np.int64)
    result[order] = before
    return result

"""The backward's work plan: which keys a cluster owns and which query blocks it walks. On the host, numpy only.

`cute_kernels/bwd_items.py` says what the fields of a work item mean. Layouts of any depth can be planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.tiles import BackwardTile
from cute_kernels import bwd_items as items
from dualkv.layout import IntArray, Segments, positions

Table = npt.NDArray[np.int32]

SHARES = 3  # no item longer than a cluster's share of all work divided by this ...
SHORTEST_PIECE = 16  # ... nor shorter pieces than this: steps (a query block of one head)
WAVE = 16  # neighbouring items of a KV head that start together, before those of the next: all add to the same dQ
SLAB_FRACTION = 4  # slabs take at most a quarter of the fp32 dQ


@dataclass(frozen=True)
class BackwardWork:
    """
    Attributes:
        items: [n, items.NUM_FIELDS] int32, in the order in which they should start: longest first, those that read the
            same queries together.
        sums: [m, items.NUM_SUM_FIELDS] int32: which slabs make the dK and dV of split items.
        num_slabs: partial sums that the items write.
    """

    items: Table
    sums: Table
    num_slabs: int


def backward_work(
    segments: Segments, tile: BackwardTile, heads: int, kv_heads: int, num_sms: int, deterministic: bool = False
) -> BackwardWork:
    """Work items of all KV heads.

    A group's keys are cut from its first row on, so short responses share an item; a response of an item's length or
    more begins with one of its own, as its keys are seen by few rows besides its own. An item whose loop is too long a
    part of the whole is split along its queries; the pieces write slabs.

    Args:
        segments: the layout.
        tile: tile configuration of the kernel.
        heads, kv_heads: H, a multiple of Hk.
        num_sms: multiprocessors of the device.
        deterministic: items start in the order of their keys, in which they add to dQ; trees of at most two levels.

    Raises:
        ValueError: deterministic, and a layout of more levels.
    """
    if deterministic and segments.max_depth > 2:
        raise ValueError(f"deterministic needs a layout of at most 2 levels, this one has {segments.max_depth}")
    present = segments.lengths > 0
    begin, end = segments.offsets[:-1][present], segments.subtree_end[present]  # of segments with rows
    roots = np.flatnonzero(segments.parent == -1)
    group_begin = segments.offsets[roots]
    prompt = segments.lengths[roots]
    step, per_kv = tile.cluster * tile.tile_n, heads // kv_heads

    # Keys are cut into items from the first row of each group on, and anew from that of each response that fills one.
    cut_begin = segments.offsets[:-1][(segments.parent == -1) | (segments.lengths >= step)]
    cut_end = np.append(cut_begin, segments.total)[1:]
    count = -(-(cut_end - cut_begin) // step)  # items of each cut
    within = positions(count)
    key = np.repeat(cut_begin, count) + within * step
    key_end = np.minimum(key + step, np.repeat(cut_end, count))
    group = np.searchsorted(group_begin, key, side="right") - 1
    block_begin = np.maximum(key, segments.first_query[group]) // tile.tile_m
    block_end = -(-_over_keys(np.maximum, begin, end, key, key_end) // tile.tile_m)
    blocks = block_end - block_begin
    clean_end = [np.zeros_like(key)] * 2
    for rank in range(tile.cluster):
        n0 = key + rank * tile.tile_n
        full = n0 + tile.tile_n <= key_end
        safe = np.where(full, n0, key)
        clean_end[rank] = np.where(
            full, _over_keys(np.minimum, begin, end, safe, safe + full * (tile.tile_n - 1) + 1), 0
        )

    # Items whose first keys lie in one segment read the same queries.
    run = np.searchsorted(begin, key, side="right") - 1
    slab_budget = segments.total * heads // (2 * SLAB_FRACTION * step * kv_heads)
    limit = int((blocks * per_kv).sum()) * kv_heads // (SHARES * max(num_sms // tile.cluster, 1))
    length = _piece_length(blocks, run, per_kv, limit, slab_budget)
    pieces = -(-blocks // length)
    item, piece = np.repeat(np.arange(len(key)), pieces), positions(pieces)
    piece_end = block_end[item] - piece * length[item]
    piece_begin = np.maximum(piece_end - length[item], block_begin[item])
    split = pieces > 1
    first_slab = np.cumsum(np.where(split, pieces, 0)) - pieces
    num_slabs = int(pieces[split].sum())

    base = np.empty((len(item), items.NUM_FIELDS), np.int32)
    base[:, items.KEY], base[:, items.KEY_END] = key[item], key_end[item]
    base[:, items.BLOCK_BEGIN], base[:, items.BLOCK_END] = piece_begin, piece_end
    base[:, items.CLEAN_END], base[:, items.CLEAN_END + 1] = clean_end[0][item], clean_end[1][item]
    base[:, items.SLAB] = np.where(split[item], first_slab[item] + piece, -1)
    # At any block the item before it has added last to dQ, unless its own queries end below: then the last item with
    # prompt rows of the group has, or nobody.
    index = np.arange(len(key))
    last_prompt = np.where(prompt > 0, np.searchsorted(key, group_begin + prompt) - 1, -1)
    last_prompt = last_prompt[group]
    base[:, items.ORDER] = item
    base[:, items.PREVIOUS_END] = np.append(0, block_end)[item]
    base[:, items.PREVIOUS] = np.where(last_prompt < index, last_prompt, -1)[item]
    if deterministic:
        order = np.lexsort((piece, item))
    else:
        longest = np.zeros(len(begin), np.int64)
        np.maximum.at(longest, run[item], piece_end - piece_begin)
        order = np.lexsort((item, piece, run[item], -longest[run[item]]))
    starts = np.append(True, np.diff(run[item[order]]) != 0)[: len(order)]  # of runs, and of the waves in them
    if tile.heads_inside:
        within = positions(np.diff(np.append(np.flatnonzero(starts), len(order))))
        starts |= (within % WAVE == 0) & ~split[item[order]]
    work = _by_kv_head(base[order], np.flatnonzero(starts), kv_heads, num_slabs)

    sums = np.empty((kv_heads, int(split.sum()), items.NUM_SUM_FIELDS), np.int32)
    sums[:, :, items.SUM_KV_HEAD] = np.arange(kv_heads)[:, None]
    sums[:, :, items.SUM_KEY], sums[:, :, items.SUM_KEY_END] = key[split], key_end[split]
    sums[:, :, items.SUM_FIRST] = first_slab[split] + np.arange(kv_heads)[:, None] * num_slabs
    sums[:, :, items.SUM_COUNT] = pieces[split]
    return BackwardWork(work, sums.reshape(-1, items.NUM_SUM_FIELDS), num_slabs * kv_heads)


def _piece_length(blocks: IntArray, run: IntArray, per_kv: int, limit: int, budget: int) -> IntArray:
    """Query blocks of each item's pieces, cut from its end: at most `limit` steps, as far as `budget` slabs allow.

    One length for the items of a run, whose ends coincide: pieces that start together read the same queries.
    """
    longest = np.zeros(run.max(initial=-1) + 1, np.int64)
    np.maximum.at(longest, run, blocks)
    limit = max(limit, SHORTEST_PIECE)
    while True:
        count = np.maximum(-(-longest * per_kv // limit), 1)
        length = np.maximum(-(-longest // count), 1)[run]
        pieces = -(-blocks // length)
        if pieces[pieces > 1].sum() <= budget:
            return length
        limit += limit // 4


def _by_kv_head(base: Table, starts: IntArray, kv_heads: int, num_slabs: int) -> Table:
    """`base` for every KV head, part by part (from each of `starts` on) and within a part KV head by KV head."""
    counts = np.diff(np.append(starts, len(base)))
    place = np.repeat(kv_heads * starts, counts) + positions(counts)
    work = np.empty((kv_heads * len(base), items.NUM_FIELDS), np.int32)
    for kv_head in range(kv_heads):
        base[:, items.KV_HEAD] = kv_head
        work[place] = base
        place += np.repeat(counts, counts)
        base[:, items.SLAB] += np.where(base[:, items.SLAB] < 0, 0, num_slabs)
    return work


def _over_keys(op: Any, begin: IntArray, end: IntArray, key: IntArray, key_end: IntArray) -> IntArray:
    """op (a ufunc) over visible_end of the keys [key[i], key_end[i]), given `begin` and visible_end of segments."""
    bounds = np.stack([np.searchsorted(begin, key, side="right") - 1, np.searchsorted(begin, key_end, side="left")], 1)
    result: IntArray = op.reduceat(np.append(end, 0), bounds.reshape(-1))[::2]
    return result

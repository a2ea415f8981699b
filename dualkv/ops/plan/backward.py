"""The backward's work plan: which keys a cluster owns and which query blocks it walks. On the host, numpy only.

`cute_kernels.abi.BackwardFields` says what the fields of a work item mean. Layouts of any depth can be planned.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from codegen.tiles import BackwardTile
from cute_kernels.abi import BackwardFields as items
from dualkv.arrays import IntArray, positions
from dualkv.layout import Segments
from dualkv.ops.plan.forward import visible_end_over

Table = npt.NDArray[np.int32]
Order = Literal["waves", "reads", "longest first"]

SHARES = 3  # no item longer than a cluster's share of all work divided by this ...
SHORTEST_PIECE = 16  # ... nor shorter pieces than this: steps (a query block of one head)
WAVE, WAVE_OF_TREES = 22, 16  # neighbouring items of a KV head that start together: all add to the same dQ
TAIL = 0.04  # of all steps of a tree: the last ones to start
FEW = 16  # items a cluster: fewer may start longest first, whichever queries they read ...
GAIN = 1.02  # ... if by their lengths they are done earlier by this factor: reading the same queries is worth as much
FINER = 3  # of so few, pieces of a third of that length are tried too
MANY = 64  # items a cluster: so many are done at about the same time, however they are sorted
PIECE = 1  # query blocks that beginning and ending an item take, about
SLAB_FRACTION = 4  # slabs take at most a quarter of the fp32 dQ


@dataclass(frozen=True)
class BackwardWork:
    """
    Attributes:
        items: [n, items.NUM_FIELDS] int32, in the order in which they should start: those that read the same queries
            together, long ones first.
        sums: [m, items.NUM_SUM_FIELDS] int32: which slabs make the dK and dV of split items.
        num_slabs: partial sums that the items write.
    """

    items: Table
    sums: Table
    num_slabs: int


@dataclass(frozen=True)
class Uncut:
    """Items before long ones are cut along their queries, in the order of their keys.

    Attributes:
        key, key_end: packed rows.
        group: of the keys.
        run: the segment of the first key, among those that are not empty.
        block_begin, block_end: query blocks.
        previous: see `_in_turns`.
        clean_end: see BackwardFields.CLEAN_END, of each CTA.
    """

    key: IntArray
    key_end: IntArray
    group: IntArray
    run: IntArray
    block_begin: IntArray
    block_end: IntArray
    previous: IntArray
    clean_end: list[IntArray]


def backward_work(
    segments: Segments, tile: BackwardTile, heads: int, kv_heads: int, num_sms: int, deterministic: bool = False
) -> BackwardWork:
    """Work items of all KV heads.

    A group's keys are cut from its first row on, so short responses share an item; a response of an item's length or
    more begins with one of its own, as its keys are seen by few rows besides its own. Deeper trees: `_tree_cuts`. An
    item whose loop is too long a part of the whole is split along its queries; the pieces write slabs.

    Args:
        segments: the layout.
        tile: tile configuration of the kernel.
        heads, kv_heads: H, a multiple of Hk.
        num_sms: multiprocessors of the device.
        deterministic: items add to dQ in the order of their keys, and start in an order in which none waits for a later
            one: that of their keys, but for responses (see `_late`).
    """
    step, per_kv = tile.cluster * tile.tile_n, heads // kv_heads

    # Keys are cut into items from the first row of each group on, and anew from that of each response that fills one.
    cut_begin = segments.offsets[:-1][(segments.parent == -1) | (segments.lengths >= step)]
    if segments.max_depth > 2:
        cut_begin = _tree_cuts(segments, step, 2 * tile.tile_m)
    cut_end = np.append(cut_begin, segments.total)[1:]
    count = -(-(cut_end - cut_begin) // step)  # items of each cut
    within = positions(count)
    key = np.repeat(cut_begin, count) + within * step
    key_end = np.minimum(key + step, np.repeat(cut_end, count))
    group = np.searchsorted(segments.offsets[:-1][segments.parent == -1], key, side="right") - 1
    block_begin = np.maximum(key, segments.first_query[group]) // tile.tile_m
    block_end = -(-visible_end_over(np.maximum, segments, key, key_end) // tile.tile_m)
    previous = np.full(len(key), -1)
    if deterministic:
        block_end, previous = _in_turns(block_begin, block_end)
    blocks = block_end - block_begin
    clean_end = [np.zeros_like(key)] * 2
    for rank in range(tile.cluster):
        n0 = key + rank * tile.tile_n
        full = n0 + tile.tile_n <= key_end
        safe = np.where(full, n0, key)
        clean_end[rank] = np.where(
            full, visible_end_over(np.minimum, segments, safe, safe + full * (tile.tile_n - 1) + 1), 0
        )

    # Items whose first keys lie in one segment read the same queries.
    run = np.searchsorted(segments.offsets[:-1][segments.lengths > 0], key, side="right") - 1
    uncut = Uncut(key, key_end, group, run, block_begin, block_end, previous, clean_end)
    slab_budget = segments.total * heads // (2 * SLAB_FRACTION * step * kv_heads)
    clusters = max(num_sms // tile.cluster, 1)

    def cut(length: IntArray, order: Order = "waves") -> BackwardWork:
        return _cut(uncut, length, segments, tile, kv_heads, clusters, slab_budget, deterministic, order)

    limit = int((blocks * per_kv).sum()) * kv_heads // (SHARES * clusters)
    lengths = _piece_length(blocks, run, per_kv, limit, slab_budget)
    if len(blocks) * kv_heads >= FEW * clusters:
        length = next(lengths)
        of_prompt = segments.parent[segments.lengths > 0][run] == -1
        at_once = np.bincount(group[of_prompt], minlength=1).max() <= clusters
        if at_once and tile.heads_inside and not deterministic and segments.max_depth <= 2:
            work = cut(length, "reads")
            taken = work.items[:, items.BLOCK_END] - work.items[:, items.BLOCK_BEGIN]
            if len(taken) >= MANY * clusters or _span(taken, clusters) < GAIN * (taken + PIECE).sum() / clusters:
                return work
        return cut(length)
    lengths = itertools.chain(lengths, _piece_length(blocks, run, per_kv, limit // FINER, slab_budget))
    first, *others = ((_span(_longest_first(blocks, x, kv_heads), clusters), x) for x in lengths)
    span, length = min(first, *others, key=lambda spanned: spanned[0])
    in_waves = cut(length if deterministic else first[1])
    taken = in_waves.items[:, items.BLOCK_END] - in_waves.items[:, items.BLOCK_BEGIN]
    if deterministic or _span(taken, clusters) < GAIN * span:
        return in_waves
    return cut(length, "longest first")


def _cut(
    uncut: Uncut, length: IntArray, segments: Segments, tile: BackwardTile, kv_heads: int, clusters: int,
    slab_budget: int, deterministic: bool, order_by: Order,
) -> BackwardWork:  # fmt: skip
    """Items cut into pieces of so many query blocks each, in their order: longest first, neighbours in waves, or with
    those that read the same (`_by_reads`)."""
    key, group, run, block_begin, block_end = uncut.key, uncut.group, uncut.run, uncut.block_begin, uncut.block_end
    blocks = block_end - block_begin
    turn, apart = np.zeros_like(group), np.zeros(len(group), bool)
    if deterministic and segments.max_depth == 2 and (length >= blocks).all():
        response = segments.parent[segments.lengths > 0][run] != -1
        late = _late(group, response, clusters // kv_heads)
        # A group's first block of queries may hold rows of the group before, whose late items add to it first: what the
        # group's first item does there starts behind them, as a piece of its own.
        shares = np.append(False, group[1:] != group[:-1]) & (block_begin * tile.tile_m < key)
        apart = shares & np.append(False, late[:-1])
        if 2 * (apart & (blocks > 1)).sum() <= slab_budget:
            length = np.where(apart & (blocks > 1), blocks - 1, length)
            turn = 4 * group + np.where(response, np.where(late, 5, 3), 0)
        else:
            apart[:] = False
    pieces = -(-blocks // length)
    item, piece = np.repeat(np.arange(len(key)), pieces), positions(pieces)
    piece_end = block_end[item] - piece * length[item]
    piece_begin = np.maximum(piece_end - length[item], block_begin[item])
    split = pieces > 1
    first_slab = np.cumsum(np.where(split, pieces, 0)) - pieces
    num_slabs = int(pieces[split].sum())

    base = np.empty((len(item), items.NUM_FIELDS), np.int32)
    base[:, items.KEY], base[:, items.KEY_END] = key[item], uncut.key_end[item]
    base[:, items.BLOCK_BEGIN], base[:, items.BLOCK_END] = piece_begin, piece_end
    base[:, items.CLEAN_END], base[:, items.CLEAN_END + 1] = (x[item] for x in uncut.clean_end)
    base[:, items.SLAB] = np.where(split[item], first_slab[item] + piece, -1)
    base[:, items.ORDER], base[:, items.PREVIOUS] = item, uncut.previous[item]
    base[:, items.PREVIOUS_END] = np.append(0, block_end)[item]
    part, wave = run[item], WAVE
    if deterministic:
        order = np.lexsort((piece, item, turn[item] + 2 * (apart[item] & (piece == pieces[item] - 1))))
    elif segments.max_depth > 2:
        ends, then = _tree_order(block_end[item], piece_begin, piece_end)
        order = np.lexsort((item, then, ends))
        part, wave = ends * (segments.total + 1) - then, WAVE_OF_TREES
    elif order_by == "reads":
        order, part = np.argsort(piece, kind="stable"), np.zeros_like(item)
    else:
        longest = np.zeros(run.max(initial=-1) + 1, np.int64)
        np.maximum.at(longest, run[item], piece_end - piece_begin)
        order = np.lexsort((item, piece, run[item], -longest[run[item]]))
    starts = np.append(True, np.diff(part[order]) != 0)[: len(order)]  # of parts, and of the waves in them
    if tile.heads_inside and order_by != "reads":
        within = positions(np.diff(np.append(np.flatnonzero(starts), len(order))))
        starts |= (within % wave == 0) & ~split[item[order]]
    work = _by_kv_head(base[order], np.flatnonzero(starts), kv_heads, num_slabs)
    if order_by == "reads":
        work = work[_by_reads(group[item[order]], piece_begin[order], piece_end[order], kv_heads, clusters)]
    if order_by == "longest first":
        work = work[np.argsort(work[:, items.BLOCK_BEGIN] - work[:, items.BLOCK_END], kind="stable")]

    sums = np.empty((kv_heads, int(split.sum()), items.NUM_SUM_FIELDS), np.int32)
    sums[:, :, items.SUM_KV_HEAD] = np.arange(kv_heads)[:, None]
    sums[:, :, items.SUM_KEY], sums[:, :, items.SUM_KEY_END] = key[split], uncut.key_end[split]
    sums[:, :, items.SUM_FIRST] = first_slab[split] + np.arange(kv_heads)[:, None] * num_slabs
    sums[:, :, items.SUM_COUNT] = pieces[split]
    return BackwardWork(work, sums.reshape(-1, items.NUM_SUM_FIELDS), num_slabs * kv_heads)


def _by_reads(group: IntArray, begin: IntArray, end: IntArray, kv_heads: int, clusters: int) -> IntArray:
    """Places of items, KV head by KV head, so that those that read the same queries and add to the same sums of dQ do
    so at the same time.

    Those are the items of a group and KV head, and they walk from the last block on: the prompt's start together, any
    other one when the prompt's have come to where it ends. Groups and KV heads follow as the ones before are done, the
    longest group first, but none so late that its prompt would end behind all others.

    Args:
        group, begin, end: of the items of a KV head; they take query blocks [begin, end).
    """
    last, longest = np.zeros((2, group.max() + 1), np.int64)
    np.maximum.at(last, group, end)
    np.maximum.at(longest, group, end - begin)  # of pieces, where the prompt's items are split: these start together
    load = np.bincount(group, end - begin + PIECE) / clusters  # of a KV head, in blocks
    order = np.argsort(-longest, kind="stable")
    first = np.empty_like(load)
    first[order] = (np.cumsum(load[order]) - load[order]) * kv_heads
    latest = np.maximum(load.sum() * kv_heads - longest, 0)
    start = np.minimum(first + load * np.arange(kv_heads)[:, None], latest)  # [Hk, groups]
    return np.argsort((start[:, group] + (last[group] - end) % np.maximum(longest, 1)[group]).ravel(), kind="stable")


def _tree_cuts(segments: Segments, step: int, more: int) -> IntArray:
    """Where keys are cut into items of `step` keys from there on: the first row of each group, and of some segments.

    The rows that an item's first key sees are those that its loop takes. What continues a segment fills its last item
    up at no cost. Where a branch ends, the next one may fill the last item up too, or begin one of its own: whatever
    takes fewer query rows, of that item and of those that are left of the next branch (a segment and its first
    children). `more`: what an item takes besides its rows, in rows.
    """
    present = segments.lengths > 0
    begin, visible_end = segments.offsets[:-1][present].tolist(), segments.subtree_end[present].tolist()
    end = [*begin[1:], segments.total]

    def rows(s: int, key: int) -> int:
        """Of the items from `key` on, in segment s or behind it, to the end of the branch."""
        total = 0
        while True:
            count = max(-(-(end[s] - key) // step), 0)
            total += count * (visible_end[s] + more - key) - step * (count * (count - 1) // 2)
            key += count * step
            if end[s] == visible_end[s]:
                return total
            s += 1

    groups = set(segments.offsets[:-1][segments.parent == -1].tolist())
    cuts: list[int] = []
    item, seen_to = -step, 0  # the last item's first key, and one past the last row that sees any of its keys
    for s, first in enumerate(begin):
        anew = first in groups
        if not anew and first != item + step and end[s - 1] == visible_end[s - 1]:  # within an item a branch has ended
            anew = rows(s, first) < max(visible_end[s] - seen_to, 0) + rows(s, item + step)
        if anew:
            cuts.append(first)
            item, seen_to = first, visible_end[s]
        elif first < item + step:
            seen_to = max(seen_to, visible_end[s])
        further = (end[s] - 1 - item) // step
        if further:
            item, seen_to = item + further * step, visible_end[s]
    return np.array(cuts, np.int64)


def _tree_order(end: IntArray, piece_begin: IntArray, piece_end: IntArray) -> tuple[IntArray, IntArray]:
    """What the pieces of items that end at these blocks are sorted by, first and then, for trees.

    Those that start at the same block read the same queries for as long as both last: they start together, so that
    queries and sums stay in L2 (the agent tree of the bench: 5 % faster), from the last block on. The last of all start
    longest first, to end together.
    """
    by_end = np.argsort(end, kind="stable")
    steps = np.cumsum((piece_end - piece_begin)[by_end])
    tail = np.append(end[by_end], 0)[np.searchsorted(steps, steps[-1:] * TAIL)]
    return -np.maximum(end, tail), np.where(end <= tail, piece_begin - piece_end, -piece_end)


def _late(group: IntArray, response: npt.NDArray[np.bool_], room: int) -> npt.NDArray[np.bool_]:
    """Items of groups whose responses start behind the next group's prompt, where that fits (`room`: items at once).

    Right behind its own group's prompt, a response's item would wait until the prompt's items, which began at the
    group's last rows, have come to its own: 1.19 times the time of sums in any order on 64 groups of 8, 1.06 like this.
    """
    prompts = np.bincount(group[~response], minlength=group.max(initial=-1) + 2)[1:]
    return ((prompts > 0) & (prompts <= room))[group]


def _in_turns(block_begin: IntArray, block_end: IntArray) -> tuple[IntArray, IntArray]:
    """Block ends and the item that has added before to blocks which the item in front does not reach (-1: nobody).

    To a block adds every item that ends behind it, in order. Those that an item follows are, from its first block on,
    the one in front; where that ends, an ancestor; and where the item begins new subtrees further up, ancestors of
    that. A work item names the first two. So the one in front gets blocks in which it sees nothing, up to the last
    ancestor: no more than there are in an item's own rows.
    """
    begin, end = block_begin.tolist(), block_end.tolist()
    longer: list[int] = []  # for each item the last one before it that ends later
    for i, its_end in enumerate(end):
        j = i - 1
        while j >= 0 and end[j] <= its_end:
            j = longer[j]
        longer.append(j)
    previous = [-1] * len(end)
    for i in range(len(end) - 1, 0, -1):
        j = i - 1
        if end[j] >= end[i]:
            continue
        while longer[j] >= 0 and end[longer[j]] < end[i]:
            j = longer[j]
        previous[i] = longer[j]
        if end[j] > begin[i]:
            end[i - 1] = end[j]
    return np.array(end, np.int64), np.array(previous, np.int64)


def _piece_length(blocks: IntArray, run: IntArray, per_kv: int, limit: int, budget: int) -> Iterator[IntArray]:
    """Query blocks of each item's pieces, cut from its end: at most `limit` steps, as far as `budget` slabs allow; then
    longer ones, up to whole items.

    One length for the items of a run, whose ends coincide: pieces that start together read the same queries. Those of
    its longest item are equal; where the budget does not pay for that, its first one is shorter.
    """
    longest = np.zeros(run.max(initial=-1) + 1, np.int64)
    np.maximum.at(longest, run, blocks)
    limit = max(limit, SHORTEST_PIECE)
    while True:
        count = np.maximum(-(-longest * per_kv // limit), 1)
        for lengths in (-(-longest // count), np.minimum(longest, -(-limit // per_kv))):
            length = np.maximum(lengths, 1)[run]
            pieces = -(-blocks // length)
            if pieces[pieces > 1].sum() <= budget:
                yield length
        if (count == 1).all():
            return
        limit += limit // 4


def _longest_first(blocks: IntArray, length: IntArray, kv_heads: int) -> IntArray:
    """Query blocks of all pieces in that order."""
    pieces = -(-blocks // length)
    first = blocks - (pieces - 1) * length
    return np.sort(np.concatenate([first, np.repeat(length, pieces - 1)]).repeat(kv_heads))[::-1]


def _span(taken: IntArray, clusters: int) -> int:
    """Query blocks of the cluster that takes most, when each in turn takes the next piece, of so many."""
    loads = [0] * clusters
    for piece in (taken + PIECE).tolist():
        heapq.heapreplace(loads, loads[0] + piece)
    return max(loads)


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

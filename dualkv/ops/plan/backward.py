"""The backward's work plan: which keys a cluster owns and which query blocks it walks. On the host, numpy only.

`cute_kernels.abi.BackwardFields` says what the fields of a work item mean. Layouts of any depth can be planned. A plan
is made in three steps: keys are divided into items (`_key_items`), long items are cut along their queries (`cut`), and
the pieces are put into the order in which they start (`dualkv.ops.plan.backward_order`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from codegen.tiles import BackwardTile
from cute_kernels.abi import BackwardFields as items
from dualkv.arrays import IntArray, positions
from dualkv.ops.plan.backward_order import (
    PIECE_OVERHEAD,
    WAVE,
    WAVE_OF_TREES,
    Bools,
    Pieces,
    by_queries,
    delayed_responses,
    in_key_order,
    in_tree_order,
    in_waves,
    lengths_in,
    longest_first,
)
from dualkv.ops.plan.shared import Table, largest, visible_end_over
from dualkv.segments import Segments

MAX_SHARE = 3  # no piece is longer than a cluster's share of all work divided by this ...
SHORTEST_PIECE = 16  # ... and no piece is cut shorter than this: steps (a query block of one head)
FEW = 16  # items a cluster: fewer may start longest first, whichever queries they read ...
GAIN = 1.02  # ... if by their lengths they are done earlier by this factor: reading the same queries is worth as much
GAIN_OF_TREES = 1.03  # ... and this much in trees
FINER = 3  # of so few items, pieces of a third of the usual length are tried too
MANY = 64  # items a cluster: with so many, all clusters finish at about the same time in any order
WORKSPACE_FRACTION = 4  # partial sums take at most a quarter of the memory of the fp32 dQ ...
IN_STEP = 2  # ... and twice that where long prompts are cut to stay in step, or responses halved
STAGGER = 500  # in a fixed order of sums they are cut from so many steps between the ends of the first and last item on
MANY_HEADS = 8  # ... and from so many query heads a KV head on; from there on head dim 512 has its responses halved


@dataclass(frozen=True)
class BackwardWork:
    """
    Attributes:
        items: [n, items.NUM_FIELDS] int32, in the order in which they start.
        sums: [m, items.NUM_SUM_FIELDS] int32: which partial sums make the dK and dV of split items.
        num_partials: partial sums that the items write.
        blocks: [b, abi.BlockFields.NUM_FIELDS] int32 with windows or chunks, which `items` has intervals of; else None.
    """

    items: Table
    sums: Table
    num_partials: int
    blocks: Table | None = None


@dataclass(frozen=True)
class KeyItems:
    """The items of one KV head before long ones are cut along their queries, in the order of their keys.

    Attributes:
        key, key_end: [n] packed rows.
        group: [n] of the keys.
        run: [n] the segment of the first key, counted among segments with rows. Items of a run read the same queries.
            With windows: see `windowed.key_items`.
        is_response: [n] that segment is not a prompt.
        block_begin, block_end: [n] query blocks.
        previous: [n] see `_fixed_order`.
        unmasked_end: [n] of each CTA; see BackwardFields.UNMASKED_END.
    """

    key: IntArray
    key_end: IntArray
    group: IntArray
    run: IntArray
    is_response: Bools
    block_begin: IntArray
    block_end: IntArray
    previous: IntArray
    unmasked_end: list[IntArray]

    @property
    def blocks(self) -> IntArray:
        """[n] query blocks of each item."""
        return self.block_end - self.block_begin


def backward_work(
    segments: Segments, tile: BackwardTile, heads: int, kv_heads: int, num_sms: int, deterministic: bool = False
) -> BackwardWork:
    """Work items of all KV heads.

    With many items a cluster, pieces of one length do, and pieces that read the same queries run at the same time where
    that leaves no cluster idle at the end. Prompts of more items than clusters are cut for that (`_in_step`), and where
    the blocks of all query heads are large, responses too (`_in_parts`: head dim 512 and MANY_HEADS). With few
    items, several lengths are compared by when the last cluster is done (`_span`), and pieces start longest first where
    that is clearly earlier.

    Args:
        segments: the layout.
        tile: tile configuration of the kernel.
        heads, kv_heads: H, a multiple of Hk.
        num_sms: multiprocessors of the device.
        deterministic: items add to dQ in the order of their keys, and start in an order in which none waits for a later
            one.
    """
    keys = _key_items(segments, tile, deterministic)
    chosen = choose_lengths(keys, segments.total, tile, heads, kv_heads, num_sms)
    trees = segments.max_depth > 2
    if deterministic:
        pieces, priority = _cut_in_key_order(keys, chosen, tile, heads, kv_heads, segments.max_depth)
        return work_tables(keys, pieces, in_key_order(pieces, priority, kv_heads, WAVE), kv_heads)

    made, per_kv = None, heads // kv_heads
    # Pairs of CTAs that share an item's keys are head dim 512's: docs/tuning.md#backward-above-head-dim-128
    if tile.ctas > tile.cluster and per_kv >= MANY_HEADS and not trees:
        made = _in_parts(keys, chosen, per_kv, kv_heads)
    made = made or _found_in_l2(keys, chosen, kv_heads, trees) or in_order(keys, chosen, kv_heads, trees)
    return work_tables(keys, *made, kv_heads)


class Lengths(NamedTuple):
    """The lengths of pieces into which items are cut.

    Attributes:
        first: [n] lengths of pieces, in query blocks: the first that partial sums pay for.
        best: [n] those whose pieces are done first, started longest first, if there are few items; else `first`.
        span: when they are done, in query blocks; 0 if there are many items.
        few: whether there are few items.
        clusters: clusters that run at the same time.
        budget: partial sums, of one KV head.
    """

    first: IntArray
    best: IntArray
    span: int
    few: bool
    clusters: int
    budget: int


def choose_lengths(
    keys: KeyItems, total: int, tile: BackwardTile, heads: int, kv_heads: int, num_sms: int,
    share: int = MAX_SHARE, shortest: int = SHORTEST_PIECE,
) -> Lengths:  # fmt: skip
    """The lengths of pieces, of `total` rows: at most a cluster's share of all work divided by `share`, but at least
    `shortest` steps."""
    clusters, per_kv = max(num_sms // tile.ctas, 1), heads // kv_heads
    limit = int((keys.blocks * per_kv).sum()) * kv_heads // (share * clusters)
    limit = max(limit, shortest)
    budget = total * heads // (2 * WORKSPACE_FRACTION * tile.cluster * tile.tile_n * kv_heads)
    few, span = len(keys.key) * kv_heads < FEW * clusters, 0
    lengths = _piece_lengths(keys, per_kv, limit, budget)
    if few:  # choose by the span of the pieces, longest first
        finer = _piece_lengths(keys, per_kv, limit // FINER, budget)
        by_span = [(_span(_sorted_pieces(keys.blocks, x, kv_heads), clusters), x) for x in (*lengths, *finer)]
        first = by_span[0][1]
        span, best = min(by_span, key=lambda found: found[0])
    else:
        first = best = next(lengths)
    return Lengths(first, best, span, few, clusters, budget)


def in_order(keys: KeyItems, chosen: Lengths, kv_heads: int, trees: bool = False) -> tuple[Pieces, IntArray]:
    """Pieces and their order, where sums of dQ have no fixed order: few items start longest first if that is clearly
    earlier."""
    ordered, wave = (in_tree_order, WAVE_OF_TREES) if trees else (in_waves, WAVE)
    pieces = cut(keys, chosen.first)
    order = ordered(pieces, kv_heads, wave)
    if chosen.few and _span(lengths_in(order, pieces), chosen.clusters) >= GAIN * chosen.span:
        pieces = cut(keys, chosen.best)
        order = longest_first(ordered(pieces, kv_heads, wave), pieces)
    return pieces, order


def _key_items(segments: Segments, tile: BackwardTile, deterministic: bool) -> KeyItems:
    """The keys of one KV head in items of a cluster's keys each.

    A group's keys are divided from its first row on, so short responses share an item. A response that fills an item
    begins a new one: few rows besides its own see its keys. Deeper trees: `_tree_cuts`.
    """
    step, present = tile.cluster * tile.tile_n, segments.lengths > 0
    cut_begin = segments.offsets[:-1][(segments.parent == -1) | (segments.lengths >= step)]
    if segments.max_depth > 2:
        cut_begin = _tree_cuts(segments, step, 2 * tile.tile_m)
    key, key_end, group = divide_keys(segments, cut_begin, step)
    run = np.searchsorted(segments.offsets[:-1][present], key, side="right") - 1
    is_response = (segments.parent[present] != -1)[run]

    block_end = -(-visible_end_over(np.maximum, segments, key, key_end) // tile.tile_m)
    # An item whose keys no query sees has a block all the same: its gradients, zeros, have to be stored.
    block_begin = np.minimum(np.maximum(key, segments.first_query[group]) // tile.tile_m, block_end - 1)
    previous = np.full(len(key), -1)
    if deterministic:
        block_end, previous = _fixed_order(block_begin, block_end)
    unmasked_end = [np.zeros_like(key)] * 2
    for rank in range(tile.cluster):
        n0 = key + rank * tile.tile_n
        full = n0 + tile.tile_n <= key_end
        safe = np.where(full, n0, key)
        unmasked_end[rank] = np.where(
            full, visible_end_over(np.minimum, segments, safe, safe + full * (tile.tile_n - 1) + 1), 0
        )
    return KeyItems(key, key_end, group, run, is_response, block_begin, block_end, previous, unmasked_end)


def divide_keys(segments: Segments, cut_begin: IntArray, step: int) -> tuple[IntArray, IntArray, IntArray]:
    """`key`, `key_end` and `group` (see `KeyItems`) of items of up to `step` keys, a new one at each of `cut_begin`."""
    cut_end = np.append(cut_begin, segments.total)[1:]
    count = -(-(cut_end - cut_begin) // step)  # items of each cut
    key = np.repeat(cut_begin, count) + positions(count) * step
    key_end = np.minimum(key + step, np.repeat(cut_end, count))
    return key, key_end, np.searchsorted(segments.offsets[segments.roots], key, side="right") - 1


def rows_walked(segments: Segments, tile: BackwardTile) -> int:
    """Query rows that the CTAs of a tile walk for one head, each for its own keys."""
    return int(_key_items(segments, tile, False).blocks.sum()) * tile.cluster * tile.tile_m


def _found_in_l2(
    keys: KeyItems, chosen: Lengths, kv_heads: int, trees: bool
) -> tuple[Pieces, IntArray] | None:  # fmt: skip
    """Pieces and their order, in which pieces that read the same queries run at the same time; None if there are too
    few of them, or clusters would be idle at the end."""
    prompt_items = _prompt_items(keys)
    if prompt_items.max() > chosen.clusters:
        pieces = cut(keys, _in_step(keys, chosen.first, prompt_items > chosen.clusters))
        if trees or (pieces.count > 1).sum() > IN_STEP * chosen.budget:
            return None
        order = in_waves(pieces, kv_heads, WAVE)
    elif chosen.few:
        return None
    else:
        pieces = cut(keys, chosen.first)
        order = by_queries(pieces, kv_heads, chosen.clusters, trees)
    return (pieces, order) if _keeps_clusters_busy(pieces, order, chosen, GAIN_OF_TREES if trees else GAIN) else None


def _in_parts(keys: KeyItems, chosen: Lengths, per_kv: int, kv_heads: int) -> tuple[Pieces, IntArray] | None:
    """Pieces and their order by what queries they read, for blocks so large that L2 holds few of them. None if partial
    sums would take more than half of dQ's memory, or clusters would be idle at the end.

    Items of a response start one after the other, and L2 must hold the blocks between the first and the last of them,
    for each response under way. In halves, half as many are under way. A prompt's items are cut where the responses
    begin, and above into equal parts: pieces that start together end together.
    """
    responses, longest = (of_group[keys.group] for of_group in _walked_by_prompts(keys))
    halves = np.maximum(-(-largest(keys.blocks, keys.run)[keys.run] // 2), -(-SHORTEST_PIECE // per_kv))
    parts = np.maximum(-(-responses // chosen.first), 1)
    equal = np.where(2 * responses >= longest, -(-responses // parts), -(-longest // 2))
    pieces = cut(keys, np.minimum(chosen.first, np.where(keys.is_response, halves, equal)))
    if (pieces.count > 1).sum() > IN_STEP * chosen.budget:
        return None
    order = by_queries(pieces, kv_heads, chosen.clusters)
    return (pieces, order) if _keeps_clusters_busy(pieces, order, chosen, GAIN) else None


def _keeps_clusters_busy(pieces: Pieces, order: IntArray, chosen: Lengths, gain: float) -> bool:
    """Whether there are many pieces, or the last cluster is done late by no more than this factor."""
    blocks = lengths_in(order, pieces)
    shortest_span = chosen.span if chosen.few else (blocks + PIECE_OVERHEAD).sum() / chosen.clusters
    return len(order) >= MANY * chosen.clusters or _span(blocks, chosen.clusters) < gain * shortest_span


def _prompt_items(keys: KeyItems) -> IntArray:
    """[groups] items of each prompt, which start together; at least one group."""
    return np.bincount(keys.group[~keys.is_response], minlength=keys.group.max(initial=0) + 1)


def _in_step(keys: KeyItems, length: IntArray, long: Bools) -> IntArray:
    """[n] lengths of pieces, at most `length`, such that pieces of long prompts which start together also end together.

    A prompt's items walk all responses' blocks and then end one after the other, each at its own keys. Where there are
    more of them than clusters, the next ones would start one after the other, too far apart to find in L2 what the
    others have read. So they are cut where the responses begin, or in halves if the prompt is longer than that.

    Args:
        long: [groups] which have such prompts.
    """
    responses, longest = _walked_by_prompts(keys)
    in_step = np.maximum(responses, -(-longest // 2))
    return np.where(long[keys.group] & ~keys.is_response, np.minimum(length, in_step[keys.group]), length)


def _walked_by_prompts(keys: KeyItems) -> tuple[IntArray, IntArray]:
    """[groups] query blocks of the responses, which all items of a prompt walk, and of the prompt's longest item."""
    last = largest(keys.block_end, keys.group)
    responses = np.where(keys.is_response, last[keys.group] - keys.block_begin, 0)
    return largest(responses, keys.group), largest(keys.blocks, keys.group)


def cut(keys: KeyItems, length: IntArray) -> Pieces:
    """Items cut into pieces of `length` [n] query blocks each, from their last block on; their first piece may be
    shorter."""
    count = -(-keys.blocks // length)
    item, number = np.repeat(np.arange(len(count)), count), positions(count)
    end = keys.block_end[item] - number * length[item]
    begin = np.maximum(end - length[item], keys.block_begin[item])
    return Pieces(item, number, count[item], begin, end, keys.group[item], keys.run[item])


def _cut_in_key_order(
    keys: KeyItems, chosen: Lengths, tile: BackwardTile, heads: int, kv_heads: int, max_depth: int
) -> tuple[Pieces, IntArray]:  # fmt: skip
    """Pieces and their priorities, for sums of dQ in the order of the keys.

    A long prompt's items end one after the other, at distances of the steps of all heads in an item's keys. With
    MANY_HEADS and STAGGER steps between the first and the last they are cut (see `_in_step`), and the first pieces of a
    prompt start before its second ones. Else responses are delayed (see `delayed_responses`) where no item is split
    otherwise. Both as far as partial sums may take memory for the pieces that this makes.
    """
    length, per_kv = chosen.best, heads // kv_heads
    apart = np.minimum(_prompt_items(keys), chosen.clusters) * (tile.cluster * tile.tile_n // tile.tile_m * per_kv)
    long = apart >= STAGGER
    if max_depth == 2 and per_kv >= MANY_HEADS and long.any():
        is_long = long[keys.group] & ~keys.is_response
        one = np.full(len(long), length.max(initial=1))  # length a group: pieces of one number walk the same blocks
        np.minimum.at(one, keys.group[is_long], _in_step(keys, length, long)[is_long])
        pieces = cut(keys, np.where(is_long, one[keys.group], length))
        if (pieces.count > 1).sum() <= IN_STEP * chosen.budget:
            priority = (2 * keys.group + keys.is_response)[pieces.item] * pieces.count.max()
            return pieces, priority + np.where(is_long[pieces.item], pieces.number, 0)
    if max_depth == 2 and (length >= keys.blocks).all():
        starts_group = np.append(False, keys.group[1:] != keys.group[:-1])
        shares_block = starts_group & (keys.block_begin * tile.tile_m < keys.key)
        at_once = chosen.clusters // kv_heads
        priority, separate = delayed_responses(keys.group, keys.is_response, shares_block, at_once)
        split = separate & (keys.blocks > 1)
        if 2 * split.sum() <= chosen.budget:
            pieces = cut(keys, np.where(split, keys.blocks - 1, length))
            has_first_block = pieces.number == pieces.count - 1
            return pieces, priority[pieces.item] + 2 * (separate[pieces.item] & has_first_block)
    pieces = cut(keys, length)
    return pieces, np.zeros_like(pieces.item)


def work_tables(keys: KeyItems, pieces: Pieces, order: IntArray, kv_heads: int) -> BackwardWork:
    """The tables of a plan: pieces of all KV heads in the order of `backward_order`, and the sums of split items."""
    first, split = pieces.number == 0, pieces.count > 1
    num_partials = int(split.sum())  # of one KV head
    partial = np.cumsum(split) - 1

    n = len(pieces.item)
    of_head = np.empty((n, items.NUM_FIELDS), np.int32)
    of_head[:, items.KEY], of_head[:, items.KEY_END] = keys.key[pieces.item], keys.key_end[pieces.item]
    of_head[:, items.BLOCK_BEGIN], of_head[:, items.BLOCK_END] = pieces.begin, pieces.end
    for rank, unmasked_end in enumerate(keys.unmasked_end):
        of_head[:, items.UNMASKED_END + rank] = unmasked_end[pieces.item]
    of_head[:, items.PARTIAL] = np.where(split, partial, -1)
    of_head[:, items.ORDER], of_head[:, items.PREVIOUS] = pieces.item, keys.previous[pieces.item]
    of_head[:, items.PREVIOUS_END] = np.append(0, keys.block_end)[pieces.item]
    kv_head = order // max(n, 1)
    work = of_head.take(order - kv_head * n, axis=0)
    work[:, items.KV_HEAD] = kv_head
    if num_partials:
        work[:, items.PARTIAL] += np.where(work[:, items.PARTIAL] < 0, 0, kv_head * num_partials)

    at = np.flatnonzero(first & split)  # the first piece of each split item
    sums = np.empty((kv_heads, len(at), items.NUM_SUM_FIELDS), np.int32)
    sums[:, :, items.SUM_KV_HEAD] = np.arange(kv_heads)[:, None]
    sums[:, :, items.SUM_KEY], sums[:, :, items.SUM_KEY_END] = keys.key[pieces.item[at]], keys.key_end[pieces.item[at]]
    sums[:, :, items.SUM_FIRST] = partial[at] + np.arange(kv_heads)[:, None] * num_partials
    sums[:, :, items.SUM_COUNT] = pieces.count[at]
    return BackwardWork(work, sums.reshape(-1, items.NUM_SUM_FIELDS), num_partials * kv_heads)


def _tree_cuts(segments: Segments, step: int, overhead: int) -> IntArray:
    """Find where items of `step` keys each begin in a tree: the first row of each group, and of some segments.

    An item's loop takes the rows that see its first key. What continues a segment may fill the segment's last item up
    at no cost. Where a branch ends, the next branch may fill the last item up too, or begin an item of its own. The
    choice is the one with fewer query rows, of that item and of what remains of the next branch (a segment and its
    first children).

    Args:
        overhead: what an item costs besides its rows, in rows.
    """
    present = segments.lengths > 0
    begin, visible_end = segments.offsets[:-1][present].tolist(), segments.subtree_end[present].tolist()
    end = [*begin[1:], segments.total]

    def rows(s: int, key: int) -> int:
        """Count the query rows of the items from `key` on, in segment s or after it, to the end of the branch."""
        total = 0
        while True:
            count = max(-(-(end[s] - key) // step), 0)
            total += count * (visible_end[s] + overhead - key) - step * (count * (count - 1) // 2)
            key += count * step
            if end[s] == visible_end[s]:
                return total
            s += 1

    groups = set(segments.offsets[segments.roots].tolist())
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


def _fixed_order(block_begin: IntArray, block_end: IntArray) -> tuple[IntArray, IntArray]:
    """Find what items need to add to each query block in the order of their keys: their block ends, and the item that
    has added before to those blocks that the item in front does not reach (-1: none).

    Every item that ends behind a block adds to the block, in order. The item before an item there is, from the item's
    first block on, the one in front; where that one ends, an ancestor; and where the item begins new subtrees further
    up, ancestors of these. A work item has fields for two. So the one in front gets blocks in which it sees nothing, up
    to the last ancestor: no more than an item's own rows have.
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


def _piece_lengths(keys: KeyItems, per_kv: int, limit: int, budget: int) -> Iterator[IntArray]:
    """Lengths [n], in query blocks, of the pieces into which items may be cut. The first has at most `limit` steps a
    piece, as far as `budget` partial sums allow; later ones are longer, and the last one is whole items.

    Items of a run have one length, as their ends coincide: pieces that start together read the same queries. The pieces
    of a run's longest item are equal; where the budget does not pay for that, its first piece is shorter.
    """
    blocks, run = keys.blocks, keys.run
    longest = largest(blocks, run)
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


def _sorted_pieces(blocks: IntArray, length: IntArray, kv_heads: int) -> IntArray:
    """Query blocks of the pieces of all KV heads, longest first, if items of `blocks` are cut to `length`."""
    pieces = -(-blocks // length)
    first = blocks - (pieces - 1) * length
    return np.sort(np.concatenate([first, np.repeat(length, pieces - 1)]).repeat(kv_heads))[::-1]


def _span(blocks: IntArray, clusters: int) -> int:
    """Compute when the last cluster is done, in query blocks, if each takes the next piece whenever it is free."""
    loads = [0] * clusters
    for piece in (blocks + PIECE_OVERHEAD).tolist():
        heapq.heapreplace(loads, loads[0] + piece)
    return max(loads)

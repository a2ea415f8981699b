"""The order in which the backward's work items start: one function for each policy. On the host, numpy only.

| policy | for |
|---|---|
| `in_key_order` | deterministic sums of dQ |
| `by_queries` | many items: pieces that read the same queries run at the same time |
| `in_tree_order` | trees of more than two levels otherwise |
| `in_waves` | prompts with responses otherwise |
| `longest_first` | few items, where the order above leaves clusters idle at the end |

`dualkv.ops.plan.backward` chooses. Every policy takes the n pieces of one KV head and returns an order of the pieces of
all KV heads: [kv_heads * n] indices, each `kv_head * n + piece` once.

The trade-off is the same in all of them. Pieces that read the same queries and add to the same rows of dQ should run at
the same time, so that both stay in L2; and no cluster should begin with a long piece when the others have finished.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualkv.arrays import IntArray, positions
from dualkv.ops.plan.shared import largest

WAVE, WAVE_OF_TREES = 22, 16  # neighbouring items of a KV head that start together: all of them add to the same dQ
TREE_TAIL = 0.04  # the fraction of a tree's query blocks that starts last, longest first
PIECE_OVERHEAD = 1  # what beginning and ending a piece costs, about, in query blocks

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Pieces:
    """The work items of one KV head: key ranges, the long ones cut along their queries. They are in the order of their
    keys, and the pieces of one key range go from its last query block to its first.

    Attributes:
        item: [n] the key range, numbered in the order of keys.
        number: [n] 0, 1, ... among the pieces of its key range; 0 has the last query blocks.
        count: [n] pieces of its key range.
        begin, end: [n] query blocks [begin, end).
        group: [n] the group of its keys.
        run: [n] the segment of its first key, counted among segments with rows. The pieces of a run end at one block.
            With windows: see `windowed.key_items`.
    """

    item: IntArray
    number: IntArray
    count: IntArray
    begin: IntArray
    end: IntArray
    group: IntArray
    run: IntArray

    @property
    def blocks(self) -> IntArray:
        """[n] query blocks of each piece."""
        return self.end - self.begin


def in_key_order(pieces: Pieces, priority: IntArray, kv_heads: int, wave: int) -> IntArray:
    """Sort pieces by `priority` [n], the smallest first, then in the order of keys.

    With equal priorities no piece waits for one that starts later: pieces add to dQ in the order of their keys.
    `delayed_responses` makes other priorities, and so do prompts that are cut.
    """
    order = np.argsort(priority, kind="stable")
    return _over_heads(order, pieces, [pieces.run, priority], kv_heads, wave)


def delayed_responses(group: IntArray, is_response: Bools, shares_block: Bools, at_once: int) -> tuple[IntArray, Bools]:
    """Priorities with which responses start behind the prompt of the next group, where their own pieces fit.

    An item of a response that starts right behind its own prompt waits for that prompt's items: they begin at the
    group's last rows and come to the response's rows later. On 64 groups of 8 deterministic sums take 1.19 times as
    long as others that way, and 1.06 times as long with delayed responses.

    The first query block of a group may hold rows of the group before. Then the delayed items of the group before add
    to this block first, and the block must be a piece of its own that starts after them.

    Args:
        group: [n] of each key range, ascending.
        is_response: [n] the first key is a response's.
        shares_block: [n] the first key range of a group whose first query block holds rows of the group before.
        at_once: key ranges of a KV head that run at the same time. Responses are delayed where the next group's prompt
            has no more items than that.

    Returns:
        [n] priority of each key range; its own first block, where that becomes a piece, needs this one plus 2. And [n]
        key ranges whose first query block must become a piece.
    """
    prompts = np.bincount(group[~is_response], minlength=group.max(initial=-1) + 2)[1:]  # of the next group
    delayed = ((prompts > 0) & (prompts <= at_once))[group]
    priority = 4 * group + np.where(is_response, np.where(delayed, 5, 3), 0)
    return priority, shares_block & np.append(False, delayed[:-1])


def in_tree_order(pieces: Pieces, kv_heads: int, wave: int) -> IntArray:
    """Sort pieces from the last query block on, which all pieces of a tree walk in this direction; the last ones
    longest first.

    Pieces that start at the same block read the same queries for as long as both run. They start together, so that
    queries and dQ stay in L2 (the benchmark's agent tree: 5 % faster). The last TREE_TAIL of all blocks start longest
    first, so that all clusters finish together.
    """
    end = pieces.end[np.arange(len(pieces.end)) - pieces.number]  # of the whole key range
    by_end = np.argsort(end, kind="stable")
    blocks = np.cumsum(pieces.blocks[by_end])
    tail = np.append(end[by_end], 0)[np.searchsorted(blocks, blocks[-1:] * TREE_TAIL)]
    first, second = -np.maximum(end, tail), np.where(end <= tail, -pieces.blocks, -pieces.end)
    return _over_heads(np.lexsort((second, first)), pieces, [first, second], kv_heads, wave)


def by_queries(pieces: Pieces, kv_heads: int, clusters: int, trees: bool = False) -> IntArray:
    """Pieces that read the same queries and add to the same rows of dQ run at the same time.

    Such pieces belong to one group and KV head, and walk from the last block to the first. The pieces of the prompt
    start together; every other one starts when the prompt's have come to the block where it ends. A group and KV head
    starts when the one before is done, the longest group first. A long prompt starts early enough not to end after
    everything else. In trees every piece does: their branches may be as long.
    """
    number = np.argsort(pieces.number, kind="stable")
    group, end, blocks = pieces.group[number], pieces.end[number], pieces.blocks[number]
    last = largest(end, group)
    longest = largest(blocks, group)  # of pieces: those of a prompt's item that is split start together too
    load = np.bincount(group, blocks + PIECE_OVERHEAD) / clusters  # of one KV head: query blocks a cluster
    order = np.argsort(-longest, kind="stable")
    start = np.empty_like(load)
    start[order] = (np.cumsum(load[order]) - load[order]) * kv_heads
    all_done = load.sum() * kv_heads
    starts = np.minimum(start + load * np.arange(kv_heads)[:, None], np.maximum(all_done - longest, 0))  # [Hk, groups]
    walked = (last[group] - end) % np.maximum(longest, 1)[group]  # by the prompt's pieces, before this one starts
    at = starts[:, group] + walked
    if trees:
        at = np.minimum(at, all_done - blocks - PIECE_OVERHEAD)
    found = np.argsort(at.ravel(), kind="stable")
    kv_head = found // max(len(number), 1)
    return number[found - kv_head * len(number)] + kv_head * len(number)


def in_waves(pieces: Pieces, kv_heads: int, wave: int) -> IntArray:
    """Runs by their longest piece, the longest first; within a run in the order of keys."""
    longest = largest(pieces.blocks, pieces.run)
    order = np.lexsort((pieces.number, pieces.run, -longest[pieces.run]))
    return _over_heads(order, pieces, [pieces.run], kv_heads, wave)


def longest_first(order: IntArray, pieces: Pieces) -> IntArray:
    """Sort an order by length: pieces of one length keep its order."""
    return order[np.argsort(-lengths_in(order, pieces), kind="stable")]


def lengths_in(order: IntArray, pieces: Pieces) -> IntArray:
    """Query blocks of the pieces of all KV heads in an order."""
    return pieces.blocks[order % max(len(pieces.item), 1)]


def _over_heads(order: IntArray, pieces: Pieces, parts: list[IntArray], kv_heads: int, wave: int) -> IntArray:
    """An order [n] of one KV head's pieces for all KV heads: part by part, and within a part KV head by KV head.

    Args:
        order, pieces: of one KV head.
        parts: arrays [n]. A part ends where one of them changes.
        wave: parts end after so many pieces too, but not between pieces of one key range.
    """
    n = len(order)
    new_part = np.ones(n, bool)
    new_part[1:] = np.logical_or.reduce([np.diff(part[order]) != 0 for part in parts])
    within = positions(np.diff(np.append(np.flatnonzero(new_part), n)))
    new_part |= (within % wave == 0) & (pieces.count[order] == 1)
    starts = np.flatnonzero(new_part)
    counts = np.diff(np.append(starts, n))
    step = np.repeat(counts, counts)
    place = np.repeat(kv_heads * starts, counts) + positions(counts)
    result = np.empty(kv_heads * n, np.int64)
    for kv_head in range(kv_heads):
        result[place] = order + kv_head * n
        place += step
    return result

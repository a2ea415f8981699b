"""The order in which the forward's clusters take tiles and head groups. On the host, numpy only.

Of n clusters, cluster c takes the items c, c + n, c + 2 n, ... of a schedule; a round is one item for each cluster.
Head groups come one after another, and tiles in the order of their plan, so that K and V of a head group stay in L2.
With few rounds, some clusters would begin a long tile of the last head group when others have finished. So with few
rounds head groups come side by side, the longest tiles of all of them first. Within a round, the cluster with the least
work so far gets the longest tile (`deal`).
"""

from __future__ import annotations

import numpy as np

from dualkv.arrays import IntArray
from dualkv.ops.plan.shared import Rows, Table

FEW_ROUNDS = 24  # fewer are few; with 39 rounds head groups side by side were 2 % slower, though more even
L2_BYTES = 48 * 2**20  # for K and V of head groups side by side, of an H200's 50 MB
DEALT_ROUNDS = 64  # the last rounds are dealt; as even as dealing all of 82 to 464 rounds, 32 were less even


def schedule(cost: Rows, head_groups: int, kv_heads: int, clusters: int, kv_bytes: int, longest_first: bool) -> Table:
    """Assign a tile and a head group to each item of the launch.

    Args:
        cost: [n] time that each tile takes, in any unit, in the order of the plan.
        head_groups, kv_heads: of the call; a tile has the query heads of a head group.
        clusters: how many the device runs at a time, at least 1; no more clusters are launched than there are items.
        kv_bytes: size of K and V of one KV head.
        longest_first: whether the plan has its tiles in that order.

    Returns:
        [n * head_groups, 2] int32: (tile, head group), each pair once.
    """
    few = len(cost) * head_groups < FEW_ROUNDS * clusters
    side = side_by_side(head_groups, kv_heads, kv_bytes) if few and longest_first else 1
    parts = head_groups // side  # one after another
    tile = np.tile(np.repeat(np.arange(len(cost), dtype=np.int32), side), parts)
    head_group = np.repeat(np.arange(head_groups, dtype=np.int32).reshape(parts, 1, side), len(cost), axis=1)
    places = deal(cost[tile], clusters)
    return np.stack([tile[places], head_group.reshape(-1)[places]], 1)


def side_by_side(head_groups: int, kv_heads: int, kv_bytes: int) -> int:
    """Choose how many head groups run side by side: all of them or half, if their K and V fit into L2 together; else
    1."""
    fit = L2_BYTES // kv_bytes * (head_groups // kv_heads)
    # With more than two parts, each would have too few rounds to even out.
    side = head_groups // 2 if head_groups > fit and head_groups % 2 == 0 else head_groups
    return side if side <= fit else 1


def deal(cost: Rows, clusters: int) -> IntArray:
    """Item numbers in the order of the schedule, [n].

    In each round the longest item goes to the cluster with the least work so far, the next item to the next cluster.
    Only the last DEALT_ROUNDS rounds are dealt this way, which evens out the earlier ones too. Of those, every other
    one is reversed.
    """
    clusters = max(min(clusters, len(cost)), 1)
    rounds = -(-len(cost) // clusters)
    places = np.full((rounds, clusters), -1)
    places.reshape(-1)[: len(cost)] = np.arange(len(cost))
    early = places[: max(rounds - DEALT_ROUNDS, 0)]
    early[1::2] = early[1::2, ::-1].copy()
    load = cost[early].sum(axis=0) if len(early) else np.zeros(clusters)
    for row in places[len(early) :]:
        items = row[row >= 0]
        items = items[np.argsort(-cost[items], kind="stable")]
        least = np.argsort(load, kind="stable")[: len(items)]
        row[:] = -1
        row[least] = items
        load[least] += cost[items]
    # Clusters are interchangeable: those with an item in the last round become the first ones.
    without = places[-1:].min(axis=0, initial=0) < 0
    return places[:, np.argsort(without, kind="stable")].reshape(-1)[: len(cost)]

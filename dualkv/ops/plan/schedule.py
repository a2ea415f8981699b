"""In which order the forward's clusters take tiles and head groups. On the host, numpy only.

Of n clusters, c takes the items c, c + n, c + 2 n, ... of a schedule: a round of items is one of each. Head groups come
one after another, tiles in the order of their plan, so that K and V of a head group stay in L2. Of few rounds, some
clusters would begin with a long tile of the last head group where others are through. So in few rounds head groups come
side by side, the longest tiles of all of them first. Within a round, who has had least to do so far gets the longest
(`deal`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dualkv.arrays import IntArray
from dualkv.ops.plan.forward import Rows

FEW_ROUNDS = 24  # fewer are few; of 39 rounds head groups side by side were 2 % slower, though more even
L2_BYTES = 48 * 2**20  # K and V of head groups side by side, of an H200's 50 MB
DEALT_ROUNDS = 64  # as even as all of them, in 82 to 464 rounds; 32 were less so

Schedule = npt.NDArray[np.int32]


def schedule(
    cost: Rows, head_groups: int, kv_heads: int, clusters: int, kv_bytes: int, longest_first: bool
) -> Schedule:
    """
    Args:
        cost: [n] time that each tile takes, in any unit, in the order of the plan.
        head_groups, kv_heads: of the call; a tile has the query heads of a head group.
        clusters: that the device has room for at a time, at least 1; no more than there are items are launched.
        kv_bytes: K and V of a KV head.
        longest_first: the plan's tiles come so.

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
    """How many head groups come side by side: all of them or half, if their K and V stay in L2 together; else 1."""
    near = L2_BYTES // kv_bytes * (head_groups // kv_heads)
    # In more parts than two there are too few rounds in each to even out.
    side = head_groups // 2 if head_groups > near and head_groups % 2 == 0 else head_groups
    return side if side <= near else 1


def deal(cost: Rows, clusters: int) -> IntArray:
    """[n] the item at each place.

    Of a round, the longest goes to the cluster that has had least so far, the next to the next. Only the last rounds
    are dealt so, which evens out those before: of these, every other one begins with the last cluster.
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
    # Clusters are alike: those that have an item of the last round become the first ones.
    without = places[-1:].min(axis=0, initial=0) < 0
    return places[:, np.argsort(without, kind="stable")].reshape(-1)[: len(cost)]

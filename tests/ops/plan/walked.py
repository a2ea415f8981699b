"""Common parts of the planners' tests: random groups, the rule of visibility, and the bookkeeping of the backward's
walk."""

import numpy as np
from hypothesis import strategies as st

from cute_kernels.abi import BackwardFields as items
from dualkv import Layout
from dualkv.segments import Segments, segments_of

SIZES_OF_TILES = st.sampled_from([63, 64, 65, 80, 96, 112, 127, 128, 129, 256])
lengths = st.one_of(st.integers(0, 5), st.integers(0, 300), SIZES_OF_TILES)
groups = st.lists(st.tuples(lengths, st.lists(lengths, max_size=6)), max_size=4)
ratios, kv_heads_, num_sms_ = st.sampled_from([1, 2, 3, 8, 40]), st.integers(1, 2), st.sampled_from([2, 20, 132])


def of(layout):
    return segments_of(layout.offsets, layout.parent)


def segments(prompts, responses):
    return of(Layout.from_lengths(prompts, responses))


def of_groups(groups):
    """Segments of the first of the groups, 1000 rows or fewer."""
    groups = list(groups)
    while sum(p + sum(rs) for p, rs in groups) > 1000:
        groups.pop()
    return segments([p for p, _ in groups], [rs for _, rs in groups])


def not_asking(asking):
    """Make segments whose prompts have no queries; and the rows from each row to its prompt's end, not above 0 for a
    response."""
    seg = Segments(asking.offsets, asking.parent, asking.lengths[asking.parent == -1])
    root = np.maximum.accumulate(np.where(seg.parent == -1, np.arange(len(seg.parent)), 0))[seg.segment_of_row]
    return seg, seg.offsets[root + 1] - np.arange(seg.total)


def below_a_path(tree):
    """Segments of a tree whose first rows, on the path to its first leaf, have no queries; None if there are no such
    rows, or no others. And the rows from each row to the first one with a query, not above 0 after it."""
    layout = Layout.from_segments(*tree)
    parent, chain = layout.parent.tolist(), 1
    while chain < len(parent) and parent[chain] == chain - 1:
        chain += 1
    rows = int(layout.offsets[chain - 1])
    if not 0 < rows < of(layout).subtree_end[0] or layout.num_tokens > 1500:
        return None
    return of(layout.without_queries([rows])), rows - np.arange(layout.num_tokens)


def rule(seg, window=None):
    """[T, T] whether query row q sees key row k."""
    q, k = np.arange(seg.total)[:, None], np.arange(seg.total)[None]
    seen = (k <= q) & (q < seg.visible_end[k])
    return seen if window is None else seen & (seg.position[k] >= window.lowest(seg.position)[:, None])


def walk(seg, tile, plan, kv_heads, steps):
    """Walk the backward's plan: pairs [Hk, T, keys] of query and key rows added, and stores [Hk, T] of dK and dV.

    steps: of an item, (query rows [n, 1], key rows [m], which pairs of them count [n, m]) one after another.
    """
    pairs = np.zeros((kv_heads, seg.total + tile.tile_m, seg.total + 2 * tile.tile_n), int)
    stores, partials = np.zeros((kv_heads, seg.total), int), {}
    for item in plan.items.astype(int):
        kv_head, key, key_end = item[items.KV_HEAD], item[items.KEY], item[items.KEY_END]
        assert item[items.BLOCK_BEGIN] < item[items.BLOCK_END]
        assert key < key_end <= key + tile.cluster * tile.tile_n
        if item[items.PARTIAL] < 0:
            stores[kv_head, key:key_end] += 1
        else:
            assert item[items.PARTIAL] not in partials
            partials[item[items.PARTIAL]] = kv_head, key, key_end
        for q, n, seen in steps(item):
            pairs[kv_head, q, n] += seen
    for entry in plan.sums.astype(int):
        parts = range(entry[items.SUM_FIRST], entry[items.SUM_FIRST] + entry[items.SUM_COUNT])
        kv_head, key, key_end = entry[items.SUM_KV_HEAD], entry[items.SUM_KEY], entry[items.SUM_KEY_END]
        assert len(parts) > 1
        assert all(partials.pop(partial) == (kv_head, key, key_end) for partial in parts)
        stores[kv_head, key:key_end] += 1
    assert not partials, "partial sums that nothing adds up"
    return pairs, stores


def check_walk(seg, tile, plan, heads, kv_heads, steps, rule, asks=None):
    """Every pair of the rule once, of rows without queries at most once; every key stored once. Returns the pairs."""
    assert plan.items.dtype == plan.sums.dtype == np.int32
    assert plan.num_partials == plan.sums[:, items.SUM_COUNT].sum()
    floats = 2 * tile.cluster * tile.tile_n
    assert plan.num_partials * floats <= seg.total * heads / 2, "partial sums take at most half of dQ"
    pairs, stores = walk(seg, tile, plan, kv_heads, steps)
    assert (stores == 1).all()
    asks = np.ones(seg.total, bool) if asks is None else asks
    for of_head in pairs:
        found = of_head[: seg.total, : seg.total]
        assert (found[asks] == rule[asks]).all()
        assert (found[~asks] <= rule[~asks]).all()
        assert not of_head[seg.total :].any()
        assert not of_head[:, seg.total :].any()
    return pairs

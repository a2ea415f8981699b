"""Common parts of the planners' tests: random layouts, the rule of visibility, and the bookkeeping of the backward's
walk."""

import numpy as np
from hypothesis import note
from hypothesis import strategies as st

from cute_kernels.abi import BackwardFields as items
from dualkv import Layout
from dualkv.segments import segments_of
from tests import strategies

SIZES_OF_TILES = st.sampled_from([63, 64, 65, 80, 96, 112, 127, 128, 129, 256])
MOST_ROWS = 1000
lengths = st.one_of(st.integers(0, 5), st.integers(0, 300), SIZES_OF_TILES)
TREES = strategies.trees(max_segments=24, length=lengths) | strategies.trees(200, st.integers(0, 20))
ratios, kv_heads_, num_sms_ = st.sampled_from([1, 2, 3, 8, 40]), st.integers(1, 2), st.sampled_from([2, 20, 132])


def of(layout):
    return segments_of(layout.offsets, layout.parent)


def segments(prompts, responses):
    return of(Layout.from_lengths(prompts, responses))


@st.composite
def drawn(draw, trees=TREES):
    """Draw segments of groups, or of trees unless `trees` is None, of MOST_ROWS rows or fewer. In half of them prompts,
    or the rows above the first leaf of a tree, have no queries."""
    all_ask = draw(st.booleans())
    if trees is None or draw(st.booleans()):
        prompts, responses = draw(strategies.groups(max_responses=6, length=lengths))
        while sum(prompts) + sum(map(sum, responses)) > MOST_ROWS:
            prompts, responses = prompts[:-1], responses[:-1]
        layout = Layout.from_lengths(prompts, responses)
        layout = layout if all_ask else layout.without_prompt_queries()
    else:
        offsets, parent = draw(trees)
        while offsets[-1] > MOST_ROWS:
            offsets, parent = offsets[:-1], parent[:-1]
        layout, chain = Layout.from_segments(offsets, parent), 1
        while chain < len(parent) and parent[chain] == chain - 1:
            chain += 1
        if not all_ask and 0 < offsets[chain - 1] < layout._segments.group_rows[0]:
            layout = layout.without_queries([offsets[chain - 1]])
    note(f"offsets {layout.offsets.tolist()}, parent {layout.parent.tolist()}, silent {layout._segments.silent}")
    return of(layout)


def before_queries(seg):
    """[T] rows from each row to the first one of its group with a query; 0 and below from that one on."""
    if seg.silent is None:
        return np.zeros(seg.total, int)
    return (seg.offsets[seg.roots] + seg.silent)[seg.group_of_row] - np.arange(seg.total)


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


def check_walk(seg, tile, plan, heads, kv_heads, steps, window=None):
    """Every visible pair once, of rows without queries at most once; every key stored once. Returns the pairs."""
    assert plan.items.dtype == plan.sums.dtype == np.int32
    assert plan.num_partials == plan.sums[:, items.SUM_COUNT].sum()
    floats = 2 * tile.cluster * tile.tile_n
    assert plan.num_partials * floats <= seg.total * heads / 2, "partial sums take at most half of dQ"
    pairs, stores = walk(seg, tile, plan, kv_heads, steps)
    assert (stores == 1).all()
    asks, wanted = before_queries(seg) <= 0, rule(seg, window)
    for of_head in pairs:
        found = of_head[: seg.total, : seg.total]
        assert (found[asks] == wanted[asks]).all()
        assert (found[~asks] <= wanted[~asks]).all()
        assert not of_head[seg.total :].any()
        assert not of_head[:, seg.total :].any()
    return pairs

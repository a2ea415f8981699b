"""The backward's plan with windows and chunks: walked in numpy as the kernel walks it, against `Window`'s rule."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codegen.tiles import BACKWARD_TILES, HEAD_DIMS, BackwardTile, backward_tile
from cute_kernels.abi import BackwardFields as items
from cute_kernels.abi import BlockFields as fields
from cute_kernels.abi import part_rows
from dualkv import Layout
from dualkv.bench.executed import backward_pairs
from dualkv.layout import Segments, segments_of
from dualkv.ops.plan.windowed import windowed_work
from dualkv.ops.window import Window
from tests.strategies import trees

TILES = sorted({*BACKWARD_TILES.values(), BackwardTile(tile_m=128, cluster=1, heads_inside=True)}, key=repr)
ORDERED = [BackwardTile(**(vars(tile) | {"deterministic": True})) for tile in TILES]


def of(layout):
    return segments_of(layout.offsets, layout.parent)


def segments(prompts, responses):
    return of(Layout.from_lengths(prompts, responses))


def positions_of(seg):
    own = seg.segment_of_row
    return seg.first_position[own] + np.arange(seg.total) - seg.offsets[own]


def visible(seg, window):
    """[T, T] whether query row q sees key row k."""
    q, k, position = np.arange(seg.total)[:, None], np.arange(seg.total)[None], positions_of(seg)
    return (k <= q) & (q < seg.visible_end[k]) & (position[k] >= window.lowest(position)[:, None])


def rows_of(tile, flags, rank):
    """What a CTA computes of a block: the first of its keys, how many, and the first and last row of the block."""
    M, N, part = tile.tile_m, tile.tile_n, part_rows(tile.tile_m)
    if N != 128:
        return [(0, N, 0, M)]
    if not flags >> (fields.OWN + rank) & 1:
        return []
    rows = {fields.FIRST_ROWS: (0, part), fields.WHOLE: (0, M), fields.LAST_ROWS: (M - part, M)}
    kinds = [(wg, flags >> (4 * rank + 2 * wg) & 3) for wg in range(2)]
    return [(64 * wg, 64, *rows[kind]) for wg, kind in kinds if kind != fields.SKIP]


def walk(seg, window, tile, plan, kv_heads):
    """What the kernels would do: pairs [Hk, T, keys] of query and key rows added, and stores [Hk, T] of dK and dV."""
    total, M, N = seg.total, tile.tile_m, tile.tile_n
    pairs = np.zeros((kv_heads, total + M, total + 2 * N), int)
    stores = np.zeros((kv_heads, total), int)
    partials = {}
    visible_end = np.append(seg.visible_end, np.zeros(2 * N, int))
    position = np.append(positions_of(seg), np.full(M, 10**6))
    end_position = np.append(window.end(positions_of(seg)), np.zeros(2 * N, int))
    table = plan.blocks.astype(int)
    for item in plan.items.astype(int):
        kv_head, key_end = item[items.KV_HEAD], item[items.KEY_END]
        begin, end = item[items.BLOCK_BEGIN], item[items.BLOCK_END]
        assert begin < end
        assert item[items.KEY] < key_end <= item[items.KEY] + tile.cluster * N
        if item[items.PARTIAL] < 0:
            stores[kv_head, item[items.KEY] : key_end] += 1
        else:
            assert item[items.PARTIAL] not in partials
            partials[item[items.PARTIAL]] = kv_head, item[items.KEY], key_end
        for m_block, flags, shift, _ in table[begin:end]:
            for rank in range(tile.cluster):
                n = item[items.KEY] + rank * N + np.arange(N)
                key_visible = np.where(n < key_end, visible_end[n], 0)
                for first, count, row, row_end in rows_of(tile, flags, rank):
                    q, own = m_block * M + np.arange(row, row_end)[:, None], slice(first, first + count)
                    limit = position[q] if flags >> fields.SEVERAL & 1 else q + shift
                    seen = (n[own] <= q) & (q < key_visible[own]) & (limit < end_position[n[own]])
                    if not flags >> (fields.MASKED + rank) & 1:
                        assert (n[own] < key_end).all()
                        assert seen[q[:, 0] < total].all(), "an unmasked block with a hidden pair"
                    pairs[kv_head, q, n[own]] += seen
    for entry in plan.sums.astype(int):
        parts = range(entry[items.SUM_FIRST], entry[items.SUM_FIRST] + entry[items.SUM_COUNT])
        where = entry[items.SUM_KV_HEAD], entry[items.SUM_KEY], entry[items.SUM_KEY_END]
        assert len(parts) > 1
        assert all(partials.pop(partial) == where for partial in parts)
        stores[where[0], where[1] : where[2]] += 1
    assert not partials, "partial sums that nothing adds up"
    return pairs, stores


def check(seg, window, tile, plan, heads, kv_heads, asks=None):
    assert plan.items.dtype == plan.sums.dtype == plan.blocks.dtype == np.int32
    assert plan.num_partials == plan.sums[:, items.SUM_COUNT].sum()
    floats = 2 * tile.cluster * tile.tile_n
    assert plan.num_partials * floats <= seg.total * heads / 4, "partial sums take at most a quarter of dQ"
    rule = visible(seg, window)
    pairs, stores = walk(seg, window, tile, plan, kv_heads)
    assert (stores == 1).all()
    asks = np.ones(seg.total, bool) if asks is None else asks
    for of_head in pairs:
        found = of_head[: seg.total, : seg.total]
        assert (found[asks] == rule[asks]).all()
        assert (found[~asks] <= rule[~asks]).all()
        assert not of_head[seg.total :].any()
        assert not of_head[:, seg.total :].any()
    if tile.deterministic:
        check_waits(tile, plan, kv_heads)


def check_waits(tile, plan, kv_heads):
    """Each adds to dQ of a block after a fixed one, which has begun before: an item in front, or the CTA before.

    For every lock, as `turn` and `add_dq_block` (up to head dim 128: both CTAs on one lock, one after the other, if
    they see the block), and `grant_dq` (beyond: a lock a CTA) wait for it and pass it on.
    """
    added = {}
    for i, item in enumerate(plan.items.astype(int)):
        for m_block, flags, _, before in plan.blocks[item[items.BLOCK_BEGIN] : item[items.BLOCK_END]].astype(int):
            for rank in range(tile.cluster):
                own = [flags >> (fields.OWN + r) & 1 for r in range(tile.cluster)]
                lock, value = (item[items.KV_HEAD], m_block, rank), before
                if tile.tile_n == 128:
                    if not own[rank]:
                        continue
                    lock, value = lock[:2], before + (rank == 1 and own[0])
                added.setdefault(lock, {})
                assert value not in added[lock], "one adder a value"
                added[lock][value] = i, rank
    assert {lock[0] for lock in added} <= set(range(kv_heads))
    for turns in added.values():
        assert sorted(turns) == list(range(len(turns))), "a value that nobody writes is waited for"
        order = [turns[value] for value in range(len(turns))]
        assert order == sorted(order), "waits for an item that may not have begun"


lengths = st.one_of(st.integers(0, 5), st.integers(0, 300), st.sampled_from([63, 64, 65, 80, 96, 127, 128, 129, 256]))
groups = st.lists(st.tuples(lengths, st.lists(lengths, max_size=6)), max_size=4)
sizes = st.one_of(st.integers(1, 10), st.integers(1, 700), st.sampled_from([63, 64, 65, 127, 128, 129, 256, 10**6]))
windows = st.builds(lambda chunked, n: Window(chunk=n) if chunked else Window(n), st.booleans(), sizes)
ratios, kv_heads_, num_sms_ = st.sampled_from([1, 2, 8, 40]), st.integers(1, 2), st.sampled_from([2, 20, 132])


@settings(max_examples=600, deadline=None)
@given(groups, windows, st.sampled_from(TILES + ORDERED), ratios, kv_heads_, num_sms_)
@example([(129, [])], Window(1), TILES[0], 1, 1, 132)
@example([(1, [1] * 300)], Window(2), TILES[0], 4, 1, 132)
@example([(500, [200, 100])], Window(chunk=128), TILES[-1], 40, 1, 132)
def test_items_cover_each_visible_pair_once(groups, window, tile, ratio, kv_heads, num_sms):
    groups = list(groups)
    while sum(p + sum(rs) for p, rs in groups) > 1000:
        groups.pop()
    seg = segments([p for p, _ in groups], [rs for _, rs in groups])
    plan = windowed_work(seg, window, tile, ratio * kv_heads, kv_heads, num_sms)
    check(seg, window, tile, plan, ratio * kv_heads, kv_heads)


@settings(max_examples=300, deadline=None)
@given(trees(length=lengths), windows, st.sampled_from(TILES + ORDERED))
def test_trees(tree, window, tile):
    seg = of(Layout.from_segments(*tree))
    if seg.total <= 1500:
        check(seg, window, tile, windowed_work(seg, window, tile, 2, 1, 132), 2, 1)


@settings(max_examples=200, deadline=None)
@given(groups, windows, st.sampled_from(TILES + ORDERED))
def test_rows_of_prompts_that_do_not_ask_are_left_out(groups, window, tile):
    while sum(p + sum(rs) for p, rs in groups) > 1000:
        groups.pop()
    asking = segments([p for p, _ in groups], [rs for _, rs in groups])
    seg = Segments(asking.offsets, asking.parent, prompts_ask=False)
    root = np.maximum.accumulate(np.where(seg.parent == -1, np.arange(len(seg.parent)), 0))[seg.segment_of_row]
    before = seg.offsets[root + 1] - np.arange(seg.total)  # rows to the end of the prompt; not above 0: a response's
    plan = windowed_work(seg, window, tile, 4, 2, 20)
    check(seg, window, tile, plan, 4, 2, before <= 0)


@pytest.mark.parametrize("bits", [1 << fields.MASKED, 1 << fields.SEVERAL, 1 << fields.OWN, 0x55, 0xAA])
def test_a_wrong_flag_is_noticed(bits):
    seg, tile, window = segments([300], [[130, 200, 90]]), backward_tile(128), Window(150)
    plan = windowed_work(seg, window, tile, 4, 1, 132)
    check(seg, window, tile, plan, 4, 1)
    plan.blocks[:, fields.FLAGS] &= ~bits
    with pytest.raises(AssertionError):
        check(seg, window, tile, plan, 4, 1)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_an_item_that_waits_for_a_later_one_is_noticed(head_dim):
    seg, tile = segments([2000, 100], [[300] * 8, [700] * 2]), backward_tile(head_dim, True)
    plan = windowed_work(seg, Window(200), tile, 8, 2, 132)
    check_waits(tile, plan, 2)
    plan.items[:] = plan.items[::-1].copy()
    with pytest.raises(AssertionError, match="may not have begun"):
        check_waits(tile, plan, 2)


def executed(tile, plan, kv_heads):
    """Multiplications of one head over those of visible pairs, of the five products together, per pair and column."""
    count = 0
    for item in plan.items[plan.items[:, items.KV_HEAD] == 0].astype(int):
        for _, flags, _, _ in plan.blocks[item[items.BLOCK_BEGIN] : item[items.BLOCK_END]].astype(int):
            for rank in range(tile.cluster):
                parts = rows_of(tile, flags, rank)
                count += sum(4 * n * (end - begin) for _, n, begin, end in parts)
                count += tile.tile_n * tile.tile_m * bool(parts)  # dQ
    return count / 5


def useful(seg, window):
    position = positions_of(seg)
    return (position - window.lowest(position) + 1).sum()


@pytest.mark.parametrize(("prompt", "responses"), [(8192, 32), (32768, 16)])
@pytest.mark.parametrize(("head_dim", "size", "heads", "most"), [(128, 4096, 32, 1.1), (64, 128, 64, 2.0)])
def test_little_is_computed_besides_what_is_visible(prompt, responses, head_dim, size, heads, most):
    seg, window, tile = segments([prompt], [[2048] * responses]), Window(size), backward_tile(head_dim)
    plan = windowed_work(seg, window, tile, heads, 8, 132)
    done = executed(tile, plan, 8)
    assert done <= most * useful(seg, window)
    assert backward_pairs(plan, tile) == pytest.approx(done)


def test_clusters_finish_together():
    """At the end of the prompt are items with rows of every response."""
    for prompt, responses, head_dim, size, heads in [(8192, 32, 128, 4096, 32), (8192, 32, 64, 128, 64)]:
        seg, tile = segments([prompt], [[2048] * responses]), backward_tile(head_dim)
        plan = windowed_work(seg, Window(size), tile, heads, 8, 132)
        load = np.zeros(132 // 2)
        for length in (plan.items[:, items.BLOCK_END] - plan.items[:, items.BLOCK_BEGIN]) * (heads // 8) + heads // 8:
            load[load.argmin()] += length
        assert load.mean() / load.max() > 0.93

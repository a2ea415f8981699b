"""The backward's plan with windows and chunks: walked in numpy as the kernel walks it, against `Window`'s rule."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codegen.tiles import BACKWARD_TILES, BackwardTile, backward_tile
from cute_kernels.abi import BackwardFields as items
from cute_kernels.abi import BlockFields as fields
from cute_kernels.abi import part_rows
from dualkv import Layout
from dualkv.ops.features import Window
from dualkv.ops.plan.windowed import windowed_work
from tests.ops.plan.walked import check_walk, drawn, kv_heads_, num_sms_, of, ratios, segments
from tests.strategies import examples

TILES = sorted({*BACKWARD_TILES.values(), BackwardTile(tile_m=128, cluster=1)}, key=repr)
ORDERED = [BackwardTile(**(vars(tile) | {"deterministic": True})) for tile in TILES]


def rows_of(tile, flags, rank):
    """List what a CTA computes of a block: the first of its keys, how many, and the first and last row of the block."""
    M, N, part = tile.tile_m, tile.tile_n, part_rows(tile.tile_m)
    if N != 128:
        return [(0, N, 0, M)]
    if not flags >> (fields.OWN + rank) & 1:
        return []
    rows = {fields.FIRST_ROWS: (0, part), fields.WHOLE: (0, M), fields.LAST_ROWS: (M - part, M)}
    kinds = [(wg, flags >> (4 * rank + 2 * wg) & 3) for wg in range(2)]
    return [(64 * wg, 64, *rows[kind]) for wg, kind in kinds if kind != fields.SKIP]


def check(seg, window, tile, plan, heads, kv_heads):
    """The plan, walked as the kernels walk it."""
    total, M, N = seg.total, tile.tile_m, tile.tile_n
    visible_end = np.append(seg.visible_end, np.zeros(2 * N, int))
    position = np.append(seg.position, np.full(M, 10**6))
    end_position = np.append(window.end(seg.position), np.zeros(2 * N, int))
    assert plan.blocks.dtype == np.int32
    table = plan.blocks.astype(int)

    def steps(item):
        key_end = item[items.KEY_END]
        for m_block, flags, shift, _ in table[item[items.BLOCK_BEGIN] : item[items.BLOCK_END]]:
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
                    yield q, n[own], seen

    check_walk(seg, tile, plan, heads, kv_heads, steps, window)
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


sizes = st.one_of(st.integers(1, 10), st.integers(1, 700), st.sampled_from([63, 64, 65, 127, 128, 129, 256, 10**6]))
windows = st.builds(lambda chunked, n: Window(chunk=n) if chunked else Window(n), st.booleans(), sizes)


@examples(300)
@given(drawn(), windows, st.sampled_from(TILES + ORDERED), ratios, kv_heads_, num_sms_)
@example(segments([129], [[]]), Window(1), TILES[0], 1, 1, 132)
@example(segments([1], [[1] * 300]), Window(2), TILES[0], 4, 1, 132)
@example(segments([500], [[200, 100]]), Window(chunk=128), TILES[-1], 40, 1, 132)
def test_items_cover_each_visible_pair_once(seg, window, tile, ratio, kv_heads, num_sms):
    plan = windowed_work(seg, window, tile, ratio * kv_heads, kv_heads, num_sms)
    check(seg, window, tile, plan, ratio * kv_heads, kv_heads)


@pytest.mark.parametrize("window", [Window(50), Window(1000), Window(chunk=64)], ids=str)
@pytest.mark.parametrize("tile", TILES + ORDERED, ids=repr)
def test_keys_that_no_query_sees_are_stored(tile, window):
    layout = Layout.from_segments([0, 0, 128, *range(128, 1209, 60)], [-1, 0, 1, *[0] * 18])
    seg = of(layout.without_queries([128]))
    check(seg, window, tile, windowed_work(seg, window, tile, 4, 2, 20), 4, 2)


def executed(tile, plan):
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
    return (seg.position - window.lowest(seg.position) + 1).sum()


@pytest.mark.parametrize(("prompt", "responses"), [(8192, 32), (32768, 16)])
@pytest.mark.parametrize(("head_dim", "size", "heads", "most"), [(128, 4096, 32, 1.1), (64, 128, 64, 2.0)])
def test_little_is_computed_besides_what_is_visible(prompt, responses, head_dim, size, heads, most):
    seg, window, tile = segments([prompt], [[2048] * responses]), Window(size), backward_tile(head_dim)
    plan = windowed_work(seg, window, tile, heads, 8, 132)
    assert executed(tile, plan) <= most * useful(seg, window)

"""The order in which the forward's clusters take tiles and head groups: the integers that the kernels compute with."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codegen.tiles import forward_tile, packed_heads
from cute_kernels import items
from cute_kernels.order import FEW_ROUNDS, L2_BYTES, Order
from dualkv.bench.workloads import NAMED, Workload, random_workload
from dualkv.layout import segments_of
from dualkv.plan import forward_work

NUM_SMS = 132


def by_head(order):
    """Head groups one after another."""
    return order._replace(side=1, run=order.items)


def places(order):
    """[n, 2] tile and head group of all items."""
    return np.array([order.place(item) for item in range(order.items)])


def planned(workload: Workload):
    """(blocks of each tile and what a tile costs besides, as docs/tuning.md has it; the order; clusters)"""
    packed = packed_heads(workload.heads // workload.kv_heads)
    tile = forward_tile(workload.head_dim, packed)
    layout = workload.layout()
    seg = segments_of(layout.offsets, layout.parent)
    work = forward_work(seg, tile.tokens(packed), tile.tile_n).astype(int)
    blocks = -(-(work[:, items.CONTEXT_END] - work[:, items.CONTEXT_BEGIN]) // tile.tile_n)
    blocks += -(-(work[:, items.ROW_END] - work[:, items.OWN_BEGIN]) // tile.tile_n)
    masked = work[:, items.CONTEXT_MASKED] + work[:, items.OWN_MASKED]
    head_groups, clusters = workload.heads // packed, NUM_SMS // tile.cluster
    launched = min(len(work) * head_groups, clusters)
    shape = workload.kv_heads, seg.total, workload.head_dim
    order = Order.of(len(work), head_groups, launched, *shape, items.SORTED_ROWS)
    return blocks + 1.8 + 0.8 * masked, order, clusters


def balance(costs, order, clusters):
    """Mean over longest time of the clusters, each of which takes every so many-th item."""
    load = np.bincount(np.arange(order.items) % clusters, costs[places(order)[:, 0]], clusters)
    return load.mean() / load.max()


def group(prompt, responses, heads, kv_heads, head_dim):
    return Workload("a group", (prompt,), (tuple(responses),), heads, kv_heads, head_dim)


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, 300), st.sampled_from([1, 2, 3, 8, 14, 32]), st.sampled_from([1, 2, 66, 132]),
    st.sampled_from([1, 2]), st.integers(1, 100000), st.sampled_from([64, 256]),
)  # fmt: skip
@example(51, 32, 132, 1, 9640, 64)  # each half of the head groups side by side
def test_every_tile_of_every_head_group_is_one_item(num_tiles, head_groups, clusters, per_kv, rows, head_dim):
    per_kv = per_kv if head_groups % per_kv == 0 else 1
    launched = min(num_tiles * head_groups, clusters)
    order = Order.of(num_tiles, head_groups, launched, head_groups // per_kv, rows, head_dim, 50000)
    all_places = places(order)
    assert order.items == num_tiles * head_groups
    assert (all_places >= 0).all()
    assert len(np.unique(all_places @ [head_groups, 1])) == order.items
    assert (all_places < [num_tiles, head_groups]).all()
    assert head_groups % order.side == 0
    assert order.side == 1 or order.side // per_kv * rows * 4 * head_dim <= L2_BYTES


def test_few_rounds_take_the_longest_tiles_of_all_heads_first_and_go_to_and_fro():
    order = Order.of(3, 4, 5, 4, 1000, 64, 1000)
    tile, head_group = places(order).T
    assert tile.tolist() == [0, 0, 0, 0, 1, 2, 2, 1, 1, 1, 2, 2], "numbers 5 to 9 backwards"
    assert head_group.tolist() == [0, 1, 2, 3, 0, 1, 0, 3, 2, 1, 2, 3]
    rows = L2_BYTES // (4 * 64) // 2
    halves = Order.of(3, 4, 5, 4, rows, 64, rows)
    assert halves.side == 2
    assert set(places(halves)[:5, 1]) == {0, 1}
    assert Order.of(3, 4, 5, 4, 1000, 64, 999) == by_head(order), "tiles are not sorted"


@pytest.mark.parametrize(
    ("workload", "least"),
    [
        (random_workload(1, 20), 0.95),  # 12 rounds of heads of which half stay in L2
        (group(6600, (1312, 670, 1058), 32, 8, 64), 0.97),
        (group(4096, (512,) * 8, 32, 8, 128), 0.98),
        (group(2048, (256,) * 4, 32, 32, 128), 0.96),
        (group(1000, (300,) * 4, 32, 8, 128), 0.91),  # 3 rounds
        (group(2300, (), 32, 32, 256), 0.89),
        (group(8192, (512,) * 8, 28, 4, 128), 0.98),  # 21 rounds
        (group(16384, (1024,) * 15, 4, 1, 128), 0.96),  # of one head group
    ],
)
def test_few_rounds_end_together(workload, least):
    costs, order, clusters = planned(workload)
    assert balance(costs, by_head(order), clusters) < least - 0.03
    assert balance(costs, order, clusters) > least


def test_no_drawn_workload_is_less_even_than_head_by_head():
    for index in range(40):
        costs, order, clusters = planned(random_workload(1, index))
        if order.items < FEW_ROUNDS * clusters:
            assert balance(costs, order, clusters) >= balance(costs, by_head(order), clusters), index


@pytest.mark.parametrize("name", ["n32-p8192-r2048", "n28-p4096-r2048", "n64-p4096-r256", "n32-p8192-r2048-tp8"])
def test_many_rounds_go_head_by_head(name):
    _, order, _ = planned(NAMED[name])
    assert order == by_head(order)
    for item in (0, 1, order.num_tiles - 1, order.num_tiles % order.items, order.items - 1):
        assert order.place(item) == (item % order.num_tiles, item // order.num_tiles)

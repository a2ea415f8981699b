"""The order in which the forward's clusters take tiles and head groups."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codegen.tiles import forward_tile, packed_heads
from dualkv.bench.workloads import NAMED, Workload, random_workload
from dualkv.ops.plan.forward import L2_ROWS, forward_work, tile_cost
from dualkv.ops.plan.schedule import FEW_ROUNDS, schedule
from dualkv.segments import segments_of
from tests.strategies import examples

NUM_SMS = 132


def planned(workload: Workload):
    """(cost of each tile, head groups, clusters, the schedule)"""
    packed = packed_heads(workload.heads // workload.kv_heads)
    tile = forward_tile(workload.head_dim)
    layout = workload.layout()
    seg = segments_of(layout.offsets, layout.parent)
    cost = tile_cost(forward_work(seg, tile.tokens(packed), tile.tile_n), tile.tile_n)
    head_groups, clusters = workload.heads // packed, NUM_SMS // tile.cluster
    kv_bytes = 4 * workload.head_dim * seg.total
    made = schedule(cost, head_groups, workload.kv_heads, clusters, kv_bytes, seg.total <= L2_ROWS)
    return cost, head_groups, clusters, made


def evenness(costs, clusters):
    """Mean over longest time of the clusters, each of which takes every so many-th item."""
    load = np.bincount(np.arange(len(costs)) % clusters, costs, clusters)
    return load.mean() / load.max()


def group(prompt, responses, heads, kv_heads, head_dim):
    return Workload("a group", (prompt,), (tuple(responses),), heads, kv_heads, head_dim)


@examples(150)
@given(
    st.integers(0, 300), st.sampled_from([1, 2, 3, 8, 14, 32]), st.sampled_from([1, 2, 66, 132]),
    st.sampled_from([1, 2]), st.sampled_from([2**10, 2**20, 2**22, 2**26]), st.booleans(),
)  # fmt: skip
@example(51, 32, 132, 1, 9640 * 4 * 64, True)  # each half of the head groups side by side
@example(0, 8, 66, 1, 2**20, True)
@example(1000, 8, 66, 1, 2**20, False)  # more rounds than are dealt
def test_every_tile_of_every_head_group_is_one_item(num_tiles, head_groups, clusters, per_kv, kv_bytes, longest_first):
    per_kv = per_kv if head_groups % per_kv == 0 else 1
    cost = np.sort(np.random.default_rng(0).random(num_tiles))[::-1]
    made = schedule(cost, head_groups, head_groups // per_kv, clusters, kv_bytes, longest_first)
    assert made.dtype == np.int32
    assert made.shape == (num_tiles * head_groups, 2)
    assert made.flags.c_contiguous, "as the kernel reads it"
    assert (made >= 0).all()
    assert (made < [num_tiles, head_groups]).all()
    assert len(np.unique(made @ [head_groups, 1])) == len(made)


@pytest.mark.parametrize(
    ("workload", "by_head", "dealt"),
    [
        (random_workload(1, 20), 0.85, 0.98),  # 12 rounds of heads of which half stay in L2
        (group(6600, (1312, 670, 1058), 32, 8, 64), 0.83, 0.995),
        (group(4096, (512,) * 8, 32, 8, 128), 0.91, 0.995),
        (group(2048, (256,) * 4, 32, 32, 128), 0.91, 0.965),
        (group(2048, (512,) * 4, 32, 32, 128), 0.65, 0.96),
        (group(1000, (300,) * 4, 32, 8, 128), 0.69, 0.955),  # 3 rounds
        (group(2300, (), 32, 32, 256), 0.70, 0.93),
        (group(8192, (512,) * 8, 28, 4, 128), 0.92, 0.995),  # 21 rounds
        (group(16384, (1024,) * 15, 4, 1, 128), 0.89, 0.98),  # of one head group
        (NAMED["n28-p4096-r2048"], 0.983, 0.995),
        (NAMED["n32-p8192-r2048"], 0.991, 0.997),
        (NAMED["n32-p8192-uniform"], 0.957, 0.997),
        (NAMED["n64-p4096-r256"], 0.967, 0.986),
        (NAMED["g64-n8"], 0.987, 0.9995),
    ],
)
def test_clusters_end_together(workload, by_head, dealt):
    cost, head_groups, clusters, made = planned(workload)
    assert evenness(np.tile(cost, head_groups), clusters) < by_head
    assert evenness(cost[made[:, 0]], clusters) > dealt


def test_no_drawn_workload_is_less_even_than_head_by_head():
    for index in range(40):
        cost, head_groups, clusters, made = planned(random_workload(1, index))
        even = evenness(cost[made[:, 0]], clusters)
        assert even >= evenness(np.tile(cost, head_groups), clusters) - 1e-9, index


@pytest.mark.parametrize("name", ["n32-p8192-r2048", "n28-p4096-r2048", "n64-p4096-r256", "n32-p8192-r2048-tp8"])
def test_many_rounds_go_head_by_head(name):
    cost, head_groups, clusters, made = planned(NAMED[name])
    assert len(made) >= FEW_ROUNDS * clusters or head_groups == 1
    for first in range(0, len(made), clusters):  # a round has the same items, whoever takes them
        wanted = np.divmod(np.arange(first, min(first + clusters, len(made))), len(cost))
        assert sorted(made[first : first + clusters].tolist()) == sorted(np.stack(wanted[::-1], 1).tolist())

"""The backward's plan: walked in numpy as the kernel walks it, for every tile configuration, against the one rule."""

import bisect
import heapq
import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codegen.tiles import BACKWARD_TILES, FEW_KEYS_TILES, FORWARD_TILES, BackwardTile, backward_tile
from cute_kernels.abi import LOCKS, MAX_ROWS, part_rows
from cute_kernels.abi import BackwardFields as items
from cute_kernels.bwd_walk import Walk, first_block
from dualkv import Layout
from dualkv.bench.workloads import NAMED, parse
from dualkv.ops import hopper
from dualkv.ops.plan import backward
from dualkv.ops.plan.backward import backward_work
from tests.ops.plan.walked import before_queries, check_walk, drawn, kv_heads_, num_sms_, of, ratios, segments
from tests.pace import against_writing
from tests.strategies import examples, random_tree

BLOCKS = [items.BLOCK_BEGIN, items.BLOCK_END]
TILES = sorted({*BACKWARD_TILES.values(), *FEW_KEYS_TILES.values()}, key=repr)


def computed(tile, item, rank, key_visible):
    """List the parts of its blocks that a CTA computes: (keys, the first of its N; query rows from one to below
    another).

    Up to head dim 128 a warp group leaves out blocks and half blocks whose rows see none of its keys.
    """
    M, N, begin, end = tile.tile_m, tile.tile_n, item[items.BLOCK_BEGIN], item[items.BLOCK_END]
    if N != 128:
        return [(0, N, mb * M, mb * M + M) for mb in range(begin, end)]
    n0, part, found, mine = item[items.KEY] + rank * N, part_rows(M), [], begin
    if not tile.deterministic:
        mine = first_block(begin, end, n0, item[items.KEY_END], M)
    for wg in range(2):
        walk = Walk.of(mine, end, n0 + 64 * wg, key_visible[64 * wg : 64 * wg + 64].max(), M)
        for mb in range(walk.begin, walk.end):
            rows = (0, part) if mb >= walk.whole_end else (M - part, M) if mb < walk.whole_begin else (0, M)
            found.append((64 * wg, 64, mb * M + rows[0], mb * M + rows[1]))
    return found


def check(seg, tile, plan, heads, kv_heads, deterministic=False):
    """The plan, walked as the kernels walk it; no block is one of rows without queries alone."""
    visible_end = np.append(seg.visible_end, np.zeros(2 * tile.tile_n, int))

    def steps(item):
        for rank in range(tile.cluster):
            n0 = item[items.KEY] + rank * tile.tile_n
            n = np.arange(n0, n0 + tile.tile_n)
            key_visible = np.where(n < item[items.KEY_END], visible_end[n], 0)
            for first, count, row, row_end in computed(tile, item, rank, key_visible):
                q, own = np.arange(row, row_end)[:, None], slice(first, first + count)
                masked = row < n0 + tile.tile_n - 1 or row_end > item[items.UNMASKED_END + rank]
                seen = (n[own] <= q) & (q < key_visible[own]) if masked else np.ones((len(q), count), int)
                yield q, n[own], seen

    pairs, before = check_walk(seg, tile, plan, heads, kv_heads, steps), before_queries(seg)
    assert not pairs[:, : seg.total][:, before > tile.tile_m].any()
    if deterministic:
        check_turns(seg, tile, plan, kv_heads)
        check_waits(tile, plan)


def check_turns(seg, tile, plan, kv_heads):
    """Items that start in order never wait for a later one, and add to each row of dQ in the order of their keys.

    Turns are counted as the kernels count them where the CTAs of a cluster add to the same rows.
    """
    locks = np.zeros((kv_heads, seg.total // tile.tile_m + 2), int)
    last_key = np.full((kv_heads, seg.total + tile.tile_m), -1)
    for item in plan.items.astype(int):
        kv_head, place, before = item[items.KV_HEAD], item[items.ORDER], item[items.PREVIOUS] + 1
        for mb in range(item[items.BLOCK_BEGIN], item[items.BLOCK_END]):
            turn = (place if mb < item[items.PREVIOUS_END] else before) * tile.cluster
            for rank in range(tile.cluster):
                assert locks[kv_head, mb] == (place * tile.cluster + rank if rank else turn)
                locks[kv_head, mb] = place * tile.cluster + rank + 1
            rows = slice(mb * tile.tile_m, (mb + 1) * tile.tile_m)
            assert (last_key[kv_head, rows] <= item[items.KEY]).all()
            last_key[kv_head, rows] = item[items.KEY]


def check_waits(tile, plan):
    """Check that each item waits only for items before it in the plan, whatever the order in which items begin.

    For every lock of every query block, as `add_dq_block` (up to head dim 128: a lock a warp group, both CTAs of a
    cluster one after the other) and `grant_dq` (beyond: a lock a CTA) wait for it and pass it on. Only these items
    write the values, and CTAs of a cluster run together: so the first item that is not done waits for nothing.
    """
    both, written, awaited = tile.tile_n == 128, {}, []
    for i, item in enumerate(plan.items.astype(int)):
        place, before = item[items.ORDER], item[items.PREVIOUS] + 1
        for mb in range(item[items.BLOCK_BEGIN], item[items.BLOCK_END]):
            turn = place if mb < item[items.PREVIOUS_END] else before
            for rank in range(tile.cluster):
                value, after = (turn, place + 1) if not both else (turn * tile.cluster, place * tile.cluster + rank + 1)
                value = place * tile.cluster + 1 if both and rank else value
                for lock in range(LOCKS) if both else [rank]:
                    where = item[items.KV_HEAD], mb, lock
                    awaited.append((where, value, (i, rank)))
                    assert written.setdefault((where, after), (i, rank)) == (i, rank), "one item a value"
    for where, value, asks in awaited:
        if value:
            assert written[where, value] < asks, "waits for an item that may not have begun"


@examples(400)
@given(
    drawn(), st.sampled_from(TILES), ratios, kv_heads_, num_sms_, st.booleans(),
    st.sampled_from([1, backward.STAGGER]),
)  # fmt: skip
@example(segments([129], [[]]), TILES[0], 1, 1, 132, False, 1)
@example(segments([128, 0], [[128, 128], [1]]), TILES[0], 4, 2, 132, False, 1)
@example(segments([1], [[1] * 300]), TILES[0], 4, 1, 132, False, 1)
@example(segments([500], [[200, 100]]), TILES[-1], 40, 1, 132, False, 1)
@example(segments([500], [[200, 100]]), TILES[-1], 40, 1, 132, True, backward.STAGGER)
@example(segments([257, 0], [[], [1]]), TILES[0], 1, 1, 2, False, 1)
@example(segments([900, 700, 1], [[200, 100], [33], []]), backward_tile(256), 8, 2, 8, True, 1)
@example(segments([900, 0], [[200, 100], [1]]), backward_tile(256), 8, 2, 8, True, 1)
def test_items_cover_each_visible_pair_once(seg, tile, ratio, kv_heads, num_sms, deterministic, stagger):
    """Long prompts are cut in a fixed order too, here with a stagger of 1."""
    with mock.patch.object(backward, "STAGGER", stagger):
        plan = backward_work(seg, tile, ratio * kv_heads, kv_heads, num_sms, deterministic)
    check(seg, tile, plan, ratio * kv_heads, kv_heads, deterministic)


@pytest.mark.parametrize("num_sms", [8, 132], ids=["many items", "few items"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=repr)
def test_keys_that_no_query_sees_are_stored(tile, deterministic, num_sms):
    """The only segment below some rows without queries is empty, so their keys get gradients of zero."""
    layout = Layout.from_segments([0, 0, 128, *range(128, 1209, 60)], [-1, 0, 1, *[0] * 18])
    seg = of(layout.without_queries([128]))
    check(seg, tile, backward_work(seg, tile, 8, 2, num_sms, deterministic), 8, 2, deterministic)


def test_responses_start_behind_the_next_prompt():
    """Sums in a fixed order make responses start later, so that they need not wait for their prompt's items to come to
    their rows."""
    tile = backward_tile(128, True)
    seg = segments([1000] * 32, [[500] * 8] * 32)
    plan = backward_work(seg, tile, 32, 8, 132, True)
    check_turns(seg, tile, plan, 8)
    check_waits(tile, plan)
    key, order = plan.items[:, items.KEY], np.arange(len(plan.items))
    for group in range(31):
        begin = group * 5000
        last_prompt = order[(key >= begin + 5000) & (key < begin + 6000)]
        first_response = order[(key >= begin + 1000) & (key < begin + 5000)].min()
        assert np.sort(last_prompt)[-9] < first_response, "the last of each KV head shares a block with the responses"
    assert plan.num_partials == 16 * 8 * 2, "of every second group: 10000 rows are whole blocks"


def test_deep_trees_of_many_segments():
    for tree in (random_tree(0, 700, 64, 4), (range(801), range(-1, 799))):
        seg = of(Layout.from_segments(*tree))
        for deterministic in (False, True):
            plan = backward_work(seg, backward_tile(128), 4, 1, 132, deterministic)
            check(seg, backward_tile(128), plan, 4, 1, deterministic)


def fewest_rows(seg, step, more):
    """Query rows, and `more` an item, of the best of all ways to cut one group's keys into items of up to `step`."""
    begin, visible_end = seg.offsets[:-1].tolist(), seg.subtree_end.tolist()
    best = [0] * (seg.total + 1)
    for key in reversed(range(seg.total)):
        own, found = bisect.bisect_right(begin, key) - 1, []
        sees = visible_end[own]
        for s in range(own + 1, bisect.bisect_left(begin, min(key + step, seg.total))):
            found.append(sees + best[begin[s]])
            sees = max(sees, visible_end[s])
        best[key] = min([*found, sees + best[min(key + step, seg.total)]]) - key + more
    return best[0]


def test_trees_of_any_lengths_take_about_as_few_steps_as_they_can():
    tile, more = backward_tile(128), 160
    for seed, many, depth, longest in ((0, 60, 10, 900), (1, 60, 10, 900), (2, 100, 6, 300), (3, 300, 30, 60)):
        lengths = np.random.default_rng(seed).integers(longest // 8, longest, many)
        _, parent = random_tree(seed, many, depth, 0)
        seg = of(Layout.from_segments([0, *np.cumsum(lengths).tolist()], parent))
        plan = backward_work(seg, tile, 1, 1, 2).items
        assert (plan[:, items.PARTIAL] < 0).all()
        begin, end = plan[:, items.KEY], plan[:, items.KEY_END]
        rows = sum(seg.visible_end[a:b].max() - a + more for a, b in zip(begin, end, strict=True))
        assert rows <= 1.01 * fewest_rows(seg, 256, more)


def schedule(plan, clusters):
    """Compute when each item begins, in query blocks, and when each cluster is done, if they take items in order."""
    begins, loads = [], [0] * clusters
    for item in plan.items:
        begins.append(loads[0])
        heapq.heapreplace(loads, loads[0] + int(item[items.BLOCK_END] - item[items.BLOCK_BEGIN]))
    return begins, loads


def balance(plan, clusters):
    """Mean over longest time of clusters that take items in order, each when it is done with the last."""
    _, loads = schedule(plan, clusters)
    return sum(loads) / clusters / max(loads)


@pytest.mark.parametrize(
    ("prompt", "responses", "head_dim", "kv_heads", "least"),
    [
        (11245, [270, 400, 500, 648], 128, 2, 0.96),
        (4110, [1309] * 2, 64, 2, 0.95),
        (10622, [38] * 8, 128, 4, 0.95),
        (3706, [148] * 7, 64, 8, 0.95),
        (8751, [700] * 12, 256, 4, 0.99),  # eight items and more a cluster
        (51040, [1057] * 14, 64, 2, 0.99),
        (2578, [151, 313, 156, 255], 96, 4, 0.75),  # 66 clusters for 56 items, 5 of which it may split
    ],
)
def test_few_items_end_together(prompt, responses, head_dim, kv_heads, least):
    seg, tile = segments([prompt], [responses]), backward_tile(head_dim)
    plan = backward_work(seg, tile, 32, kv_heads, 132)
    if seg.total < 4000:  # all pairs of longer ones take seconds and a gigabyte
        check(seg, tile, plan, 32, kv_heads)
    assert balance(plan, 66) > least


def misses(plan, clusters, kept):
    """Count the query blocks of a KV head that a cache misses which keeps so many and drops the least recently used
    one, and all blocks.

    A miss reads Q and dO and writes dQ's sums, and reads these too but for the first time.
    """
    begins, _ = schedule(plan, clusters)
    times = [begin + np.arange(n) for begin, n in zip(begins, np.ptp(plan.items[:, BLOCKS], axis=1), strict=True)]
    reads = [item[items.KV_HEAD] * 2**20 + np.arange(*(item[BLOCKS] - 1)[::-1], -1) for item in plan.items]
    reads = np.concatenate(reads)[np.argsort(np.concatenate(times), kind="stable")]
    cache, missed = dict.fromkeys(range(-kept, 0)), 0
    for read in reads.tolist():
        if read not in cache:
            missed += 1
            del cache[next(iter(cache))]
        cache.pop(read, None)
        cache[read] = None
    return missed, len(np.unique(reads))


# Heads, and times that a block is missed, and at least so much of the time clusters are busy. An H200's L2 keeps 95 to
# 110 blocks of four heads (docs/results/experiments/tuning.json), and about 20 of eight at head dim 512. In waves: 2.0,
# 3.0, 4.5, 8.3, 15 and 17 times; trees from the last block on: 7.3, 5.1, 13.5 and 3.7 times; whole responses at head
# dim 512: 11.8, 35, 29 and 4.8 times.
@pytest.mark.parametrize(
    ("name", "head_dim", "heads", "most", "least"),
    [
        ("g64-n8", 128, 32, 1.1, 0.998),
        ("n28-p4096-r2048", 128, 32, 2, 0.99),
        ("n32-p8192-r2048", 128, 32, 2.1, 0.995),
        ("n28-p16384-r2048", 128, 32, 5, 0.99),
        ("n16-p32768-r2048", 128, 32, 7.5, 0.99),
        ("n28-p32768-r2048", 128, 32, 5.5, 0.99),
        ("trace-branched-0", 128, 32, 3, 0.98),
        ("trace-tau2-0", 128, 32, 4.2, 0.97),
        ("trace-swe-dropped-0-n4-t16", 128, 32, 3.6, 0.98),
        ("agent-t10-r512", 128, 32, 2.7, 0.99),
        ("n28-p4096-r2048", 512, 16, 3.4, 0.995),
        ("n32-p8192-r2048", 512, 16, 4.2, 0.995),
        ("n32-p8192-r2048", 512, 8, 5, 0.995),
        ("g64-n8", 512, 16, 2, 0.998),
    ],
)
def test_items_that_read_the_same_queries_start_when_these_are_in_l2(name, head_dim, heads, most, least):
    seg, kv_heads = of(parse(name).layout()), 8 if head_dim == 128 else heads // 8
    few_keys = head_dim == 128 and hopper.few_keys_backward(seg, kv_heads, None)
    plan = backward_work(seg, backward_tile(head_dim, few_keys=few_keys), heads, kv_heads, 132)
    clusters = 132 if few_keys else 66
    missed, blocks = misses(plan, clusters, 95 if head_dim == 128 else 20)
    assert missed < most * blocks
    assert balance(plan, clusters) > least


@examples(100)
@given(drawn(trees=None), st.sampled_from(TILES), st.sampled_from([1, 2, 3]), kv_heads_, st.booleans())
def test_partial_sums_take_a_quarter_of_dq(seg, tile, ratio, kv_heads, deterministic):
    """Prompts of more items than clusters and MANY_HEADS query heads are the exception, for which `check` allows
    half."""
    heads = ratio * kv_heads
    plan = backward_work(seg, tile, heads, kv_heads, 132, deterministic)
    assert plan.num_partials * 2 * tile.cluster * tile.tile_n <= seg.total * heads / 4


def test_a_tree_that_would_leave_clusters_idle_starts_from_its_last_block():
    """Clusters would be done 1.04 times as late in the order of queries."""
    seg = of(NAMED["binary-p4096-r1024"].layout())
    plan = backward_work(seg, backward_tile(128), 32, 8, 132)
    ends = plan.items[:200, items.BLOCK_END]
    assert (np.diff(ends) <= 0).all()
    assert balance(plan, 66) > 0.995


def test_empty_layouts():
    deep = of(Layout.from_segments([0] * 4, [-1, 0, 1]))
    for seg in (segments([], []), segments([0], [[]]), segments([0, 0], [[0, 0], []]), deep):
        plan = backward_work(seg, TILES[0], 4, 2, 132)
        assert plan.items.shape == (0, items.NUM_FIELDS)
        assert plan.sums.shape == (0, items.NUM_SUM_FIELDS)


def test_rows_up_to_int32():
    plan = backward_work(segments([MAX_ROWS - 1], [[1]]), BackwardTile(tile_m=2**20, tile_n=2**20), 1, 1, 132)
    assert plan.items[:, items.KEY : items.PARTIAL].min() >= 0
    assert plan.items[:, items.KEY_END].max() == MAX_ROWS


def test_rows_that_tiles_reach_past_the_last_one_are_int32():
    """The rows of a block of queries, the keys of a cluster, a tile of the forward and its last block of keys fit into
    int32."""
    past = [max(tile.tile_m, tile.cluster * tile.tile_n) for tile in TILES]
    past += [tile.tokens(1) + tile.tile_n for tile in FORWARD_TILES.values()]
    assert MAX_ROWS + max(past) < 2**31


@pytest.mark.parametrize("few_keys", [False, True])
def test_a_plan_is_quick(few_keys):
    """5 ms is the target for 64 groups of 32 responses, in 78,000 items of clusters of two; the best of a few of this
    thread's, as other work runs too. On slow cores it may take eight times as long as sorting and writing so many items
    (2.2 to 3.3 times alone, 5.4 beside other work that fills the machine)."""
    rng = np.random.default_rng(0)
    seg, tile = segments([1024] * 64, rng.integers(64, 2048, (64, 32))), backward_tile(128, few_keys=few_keys)
    made = backward_work(seg, tile, 32, 8, 132)  # derived arrays of the layout are made once

    def milliseconds():
        start = time.thread_time()
        backward_work(seg, tile, 32, 8, 132)
        return (time.thread_time() - start) * 1e3

    best, pace = against_writing(milliseconds, len(made.items), items.NUM_FIELDS)
    assert best < max(5, 8 * pace)

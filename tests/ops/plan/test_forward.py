"""The forward's plan: walked in numpy as the kernel walks it, for every tile configuration, against the one rule."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codegen.tiles import FORWARD_TILES, HEAD_DIMS, MAX_PACKED_HEADS, forward_tile
from cute_kernels import fwd_walk
from cute_kernels.abi import MAX_ROWS
from cute_kernels.abi import ForwardFields as items
from dualkv.ops.plan import forward as plan_forward
from dualkv.ops.plan.forward import L2_ROWS, forward_work, segment_begin
from tests.ops.plan.walked import before_queries, drawn, rule, segments
from tests.pace import against_writing
from tests.strategies import examples

TILES = list(FORWARD_TILES.values())


def blocks_of(item, tile_n):
    """Blocks of the own region and of the context, whole and masked."""
    own = -(-(item[items.ROW_END] - item[items.OWN_BEGIN]) // tile_n)
    return own, -(-(item[items.CONTEXT_END] - item[items.CONTEXT_BEGIN]) // tile_n)


def key_blocks(item, tile_n):
    """(first key row, in the own region, masked) of each block in the kernel's order; see cute_kernels/work.py."""
    own, context = blocks_of(item, tile_n)
    own_masked, masked = item[items.OWN_MASKED], item[items.OWN_MASKED] + item[items.CONTEXT_MASKED]
    context_whole = context - item[items.CONTEXT_MASKED]
    for i in range(own + context):
        if i < own_masked:
            yield item[items.OWN_BEGIN] + (own - 1 - i) * tile_n, True, True
        elif i < masked:
            yield item[items.CONTEXT_BEGIN] + (context - 1 - (i - own_masked)) * tile_n, False, True
        elif i < masked + context_whole:
            yield item[items.CONTEXT_BEGIN] + (i - masked) * tile_n, False, False
        else:
            yield item[items.OWN_BEGIN] + (i - masked - context_whole) * tile_n, True, False


def visible(item, q, begin, keys, own):
    """Compute the kernel's mask of a masked block: q [rows, 1], begin [rows, 1], keys [1, tile_n]."""
    limit = item[items.ROW_END] if own else item[items.CONTEXT_END]
    seen = keys < np.minimum(q + 1, limit)
    return seen & (keys >= begin) if own and item[items.STRADDLES] else seen


def warp_group_tokens(item, tile, heads):
    """[first, end) of the tokens of each warp group of the cluster; past the tile's end, end is not above first."""
    per_wg = 64 // heads
    for wg, rank in itertools.product(range(tile.warp_groups), range(tile.cluster)):
        first = item[items.ROW] + (wg * tile.cluster + rank) * per_wg
        yield first, min(first + per_wg, item[items.ROW_END])


def walk_of(item, begin, first, last, tile_n):
    """Compute the walk of the kernel's producer for a warp group with rows [first, last]."""
    own, context = blocks_of(item, tile_n)
    masked, straddles = item[items.OWN_MASKED] + item[items.CONTEXT_MASKED], bool(item[items.STRADDLES])
    tile = SimpleNamespace(
        tile_n=tile_n, own_begin=item[items.OWN_BEGIN], own_blocks=own, context_begin=item[items.CONTEXT_BEGIN],
        context_blocks=context, own_masked=item[items.OWN_MASKED], masked=masked, straddles=straddles,
    )  # fmt: skip
    begins = (begin[first], begin[last]) if straddles else (item[items.OWN_BEGIN],) * 2
    return fwd_walk.walk(tile, first, last, *begins)


def walk(seg, tile, heads):
    """Counts of what the kernel would do: stores [T, heads], pairs [T, T + tile_n] of query and key rows added."""
    total, begin = seg.total, segment_begin(seg)
    stores, pairs = np.zeros((total, heads), int), np.zeros((total, total + tile.tile_n), int)
    work = forward_work(seg, tile.tokens(heads), tile.tile_n)
    assert work.dtype == np.int32
    for item in work.tolist():
        blocks = list(key_blocks(item, tile.tile_n))
        assert blocks[0][2], "a tile begins with a masked block"
        walks = []
        for first, end in warp_group_tokens(item, tile, heads):
            stores[first:end] += 1
            walk = walk_of(item, begin, min(first, end - 1), end - 1, tile.tile_n)
            assert 0 <= walk.begin < walk.end <= walk.rest <= len(blocks)
            assert walk.rest < len(blocks) or walk.end == len(blocks), "a walk ends with the tile's last block"
            if first < end:
                walks.append((slice(first - item[items.ROW], end - item[items.ROW]), walk))
        walk_blocks(item, blocks, walks, begin, tile.tile_n, pairs)
    return stores, pairs


def walk_blocks(item, blocks, walks, begin, tile_n, pairs):
    """Add a tile's pairs of rows and keys, its rows as slices with their walks."""
    q = np.arange(item[items.ROW], item[items.ROW_END])[:, None]
    referenced = np.zeros(len(q), bool)
    for i, (row, own, needs_mask) in enumerate(blocks):
        keys = np.arange(row, row + tile_n)[None]
        seen = visible(item, q, begin[q], keys, own)
        assert needs_mask or seen.all(), "a block without a mask needs none"
        for rows, walk in walks:
            if walk.begin <= i < walk.end or i >= walk.rest:
                masked = i < walk.masked or i in (walk.begin, walk.rest)
                assert masked or seen[rows].all(), "nor does one that a warp group walks without"
                pairs[q[rows], keys] += seen[rows]
                referenced[rows] |= masked & seen[rows].any(1)
            else:
                assert not seen[rows].any(), "no row sees a block that is passed over"
    assert referenced.all(), "every row sees a key of a masked block"


def check(seg, tile, heads):
    """Rows of prompts without queries are left out but for the last one."""
    stores, pairs = walk(seg, tile, heads)
    before = before_queries(seg)
    assert (stores[before <= 0] == 1).all()
    assert (stores[before > 1] == 0).all()
    assert (pairs[:, : seg.total] == rule(seg))[before <= 0].all()
    assert not pairs[:, seg.total :].any()


@examples(300)
@given(drawn(trees=None), st.sampled_from(TILES), st.integers(1, MAX_PACKED_HEADS))
@example(segments([129], [[]]), TILES[0], 1)
@example(segments([128, 0], [[128, 128], [1]]), TILES[0], 4)
@example(segments([1], [[1] * 300]), TILES[0], 4)
@example(segments([128], [[1, 300]]), TILES[0], 4)
def test_items_cover_each_visible_pair_once(seg, tile, heads):
    check(seg, tile, heads)


@pytest.mark.parametrize(
    ("prompt", "responses", "all_blocks", "walked", "with_mask"),
    [
        (4096, [2048] * 28, 1.018, 1.0065, 0.019),
        (4096, [256] * 64, 1.026, 1.012, 0.025),
        (8191, [1100] * 8, 1.015, 1.007, 0.021),  # a block of the prompt needs the mask too
    ],
)
def test_warp_groups_walk_little_that_they_do_not_see(prompt, responses, all_blocks, walked, with_mask):
    """Pairs of queries and keys that are multiplied, over those that are visible; and how many are masked."""
    seg, tile = segments([prompt], [responses]), forward_tile(128)
    begin, sums = segment_begin(seg), np.zeros(3)
    for item in forward_work(seg, tile.tokens(4), tile.tile_n).tolist():
        blocks = len(list(key_blocks(item, tile.tile_n)))
        for first, end in warp_group_tokens(item, tile, 4):
            walk = walk_of(item, begin, min(first, end - 1), end - 1, tile.tile_n)
            masked = sum(i < walk.masked or i in (walk.begin, walk.rest)
                         for i in (*range(walk.begin, walk.end), *range(walk.rest, blocks)))  # fmt: skip
            sums += 64 // 4 * tile.tile_n * np.array([blocks, walk.end - walk.begin + blocks - walk.rest, masked])
    position = np.arange(seg.total) - begin
    visible = (position + 1 + np.where(begin > 0, prompt, 0)).sum()
    assert (sums / visible < [all_blocks + 0.002, walked, with_mask]).all()
    assert sums[0] / visible > all_blocks - 0.002


def test_tiles_of_groups_that_do_not_fit_into_l2_together_come_one_after_another():
    work = forward_work(segments([1000] * 40, [[500] * 2] * 40), 64, 128)
    rows = work[:, items.CONTEXT_BEGIN] // L2_ROWS
    assert rows.max() == 39 * 2000 // L2_ROWS == 2
    assert (np.diff(rows) >= 0).all()
    blocks = -(-(work[:, items.ROW_END] - work[:, items.OWN_BEGIN]) // 128)
    blocks += -(-(work[:, items.CONTEXT_END] - work[:, items.CONTEXT_BEGIN]) // 128)
    for some in range(3):
        assert (np.diff(blocks[rows == some]) <= 0).all(), "longest first"


def test_empty_layouts():
    for seg in (segments([], []), segments([0], [[]]), segments([0, 0], [[0, 0], []])):
        assert forward_work(seg, 64, 128).shape == (0, items.NUM_FIELDS)
        assert segment_begin(seg).shape == (0,)


def test_rows_up_to_int32():
    seg = segments([MAX_ROWS - 1], [[1]])
    work = forward_work(seg, 2**20, 128)
    assert work.dtype == np.int32
    assert work.min() >= 0
    assert work[:, items.ROW_END].max() == MAX_ROWS


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 9000), st.lists(st.integers(0, 9000), max_size=5)), max_size=20))
def test_a_plan_made_in_parts_is_the_same(groups):
    seg = segments([p for p, _ in groups], [rs for _, rs in groups])
    whole = forward_work(seg, 64, 128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_forward, "PART_TILES", 1)
        assert (forward_work(seg, 64, 128) == whole).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", [1, 4, 7, 8, MAX_PACKED_HEADS])
def test_a_plan_is_quick(head_dim, heads):
    """5 ms is the target for 64 groups of 32 responses; the best of a few of this thread's, as other work runs too. On
    slow cores it may take eight times as long as sorting so many keys and writing so many items in that order (2.5 to
    3.4 times alone where there are many items, 4.3 beside other work that fills the machine)."""
    rng = np.random.default_rng(0)
    responses, tile = rng.integers(64, 2048, (64, 32)), forward_tile(head_dim)

    def milliseconds():
        seg = segments([1024] * 64, responses)  # nothing of it is derived yet
        start = time.thread_time()
        made.append(len(forward_work(seg, tile.tokens(heads), tile.tile_n)))
        segment_begin(seg)
        return (time.thread_time() - start) * 1e3

    made: list[int] = []
    milliseconds()
    best, pace = against_writing(milliseconds, made[0], items.NUM_FIELDS)
    assert best < max(5, 8 * pace)

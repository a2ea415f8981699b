"""The forward's plan of trees and windows: walked in numpy as the kernel walks it, for every tile, against the rule."""

import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codegen.tiles import (
    FORWARD_TILES,
    MAX_PACKED_HEADS,
    SHORT_WINDOW_SINKS_TILES,
    SHORT_WINDOW_TILES,
    WINDOW_TILES,
    forward_tile,
)
from cute_kernels.abi import PathFields as items
from dualkv import Layout
from dualkv.ops.features import Window
from dualkv.ops.plan.paths import NEAR_ROWS, first_keys, path_work
from tests.ops.plan.walked import before_queries, drawn, lengths, of, rule
from tests.strategies import binary_tree, examples, random_tree, trees

TILES = list(FORWARD_TILES.values())
TILES_OF_WINDOWS = [*WINDOW_TILES.values(), SHORT_WINDOW_TILES[256], SHORT_WINDOW_SINKS_TILES[256]]


def tree(offsets, parent):
    return of(Layout.from_segments(offsets, parent))


def key_blocks(item, regions, tile_n):
    """(first key, limit; None of a whole block) of each block in the kernel's order; see cute_kernels/work.py."""
    at, more = item[items.REGION], item[items.MASKED] - 1
    blocks = [(item[items.KEY], item[items.LIMIT])]
    blocks += [(first, limit) for first, limit in regions[at : at + more]]
    at += more
    while len(blocks) < item[items.BLOCKS]:
        first, count = regions[at]
        blocks += [(first + j * tile_n, None) for j in range(count)]
        at += 1
    assert len(blocks) == item[items.BLOCKS]
    return blocks


def walks(item, row, row_end, tokens):
    """(rows, blocks that they walk) of each part of a tile that has rows."""
    found, parts = [], item[items.NUM_FIELDS :].reshape(-1, items.NUM_PART_FIELDS)
    for part, (begin, end, rest) in enumerate(parts.tolist()):
        rows = np.arange(row + tokens // len(parts) * part, min(row + tokens // len(parts) * (part + 1), row_end))
        assert 0 <= begin <= end <= rest <= item[items.BLOCKS]
        walked = [*range(begin, end), *range(rest, item[items.BLOCKS])]
        assert len(walked) > 0 if len(rows) else walked == []
        found += [(rows, walked)] if len(rows) else []
    return found


def walk(seg, tokens, tile_n, window=None, parts=1, by_segment=False):
    """Counts of what the kernel would do: rows taken [T], pairs [T, T + tile_n] of query and key rows added."""
    total = seg.total
    visible_end = np.append(seg.visible_end, np.zeros(tile_n, int))  # as the device has it
    taken, pairs = np.zeros(total, int), np.zeros((total, total + tile_n), int)
    first_key = np.zeros(total, int) if window is None else first_keys(seg, window)
    work = path_work(seg, tokens, tile_n, window, parts, by_segment)
    assert work.items.dtype == work.regions.dtype == np.int32
    regions = work.regions.astype(int)
    for item in work.items.astype(int):
        row, row_end = item[items.ROW], item[items.ROW_END]
        assert row < row_end <= row + tokens
        taken[row:row_end] += 1
        q = np.arange(row, row_end)[:, None]
        blocks = key_blocks(item, regions, tile_n)
        assert blocks[0][1] is not None, "a tile begins with a masked block"
        own = np.zeros(row_end - row, int)  # masked blocks with the row itself
        of_parts = walks(item, row, row_end, tokens)
        for i, (first, limit) in enumerate(blocks):
            keys = np.arange(first, first + tile_n)[None]
            if limit is None:
                seen = (keys <= q) & (q < visible_end[keys]) & (keys >= first_key[q])
                assert seen.all(), "a block without a mask needs none"
            else:
                seen = keys < np.minimum(q + 1, abs(limit))
                seen = seen & (q < visible_end[keys]) if limit < 0 else seen
                seen = seen & (keys >= first_key[q])
                own += (seen & (keys == q)).any(1)
                # What the kernel takes out of V: the keys that no row sees, of which none is left in.
                dead = (keys >= abs(limit)) | ((visible_end[keys] <= row) if limit < 0 else False)
                assert (dead == ~seen.any(0)).all()
            for rows, walked in of_parts:
                pairs[rows[:, None], keys] += seen[rows - row] & (i in walked)
        assert (own == 1).all(), "whole blocks find a reference"
    return taken, pairs


def check(seg, tokens, tile_n, window=None, parts=1, by_segment=False):
    taken, pairs = walk(seg, tokens, tile_n, window, parts, by_segment)
    asked = before_queries(seg) <= 0
    if seg.silent is not None:
        only = seg.group_rows == np.minimum(seg.silent, seg.group_rows)  # of these the last row is taken
        near = np.append(asked, np.zeros(tokens, bool))  # by segment, tiles begin up to so many rows before
        near = np.lib.stride_tricks.sliding_window_view(near, tokens)[: seg.total].any(1) if by_segment else asked
        assert not taken[~near & ~only[seg.group_of_row]].any()
    assert (taken[asked] == 1).all()
    assert (taken <= 1).all()
    assert (pairs[:, : seg.total] == rule(seg, window) * taken[:, None]).all()
    assert not pairs[:, seg.total :].any()


windows = st.one_of(
    st.builds(Window, size=st.one_of(st.integers(1, 5), st.integers(1, 400), st.sampled_from([63, 64, 65, 5000]))),
    st.builds(lambda chunk: Window(chunk=chunk), st.one_of(st.integers(1, 5), st.integers(1, 400), st.just(5000))),
)


@examples(400)
@given(
    drawn(),
    st.one_of(
        st.tuples(st.sampled_from(TILES), st.none()), st.tuples(st.sampled_from(TILES_OF_WINDOWS), windows)
    ),
    st.integers(1, MAX_PACKED_HEADS), st.booleans(),
)  # fmt: skip
@example(tree([0, 128, 256, 384, 512], [-1, 0, 1, 0]), (TILES[0], None), 4, False)
@example(tree([0, 0, 0, 1], [-1, 0, 1]), (TILES[0], None), 1, False)
@example(tree([0, 300, 700, 900], [-1, 0, 0]), (TILES[0], Window(size=64)), 4, False)  # within a tile
@example(tree([0, 300, 320, 330, 1000], [-1, 0, 1, 0]), (TILES[0], Window(size=24)), 4, False)
def test_items_cover_each_visible_pair_once(seg, tile_and_window, heads, by_segment):
    tile, window = tile_and_window
    check(seg, tile.tokens(heads), tile.tile_n, window, tile.parts, by_segment)


def steps_of_rows(seg, rows, tokens, tile_n, window, parts):
    """Describe what the kernel does for each of `rows` by segment: its place in its tile; the tile's blocks, as
    positions on the path, with limits; and what each part walks."""
    work, found = path_work(seg, tokens, tile_n, window, parts, by_segment=True), {}
    for item in work.items.astype(int):
        row, row_end = item[items.ROW], item[items.ROW_END]
        blocks = key_blocks(item, work.regions.astype(int), tile_n)
        keys = [(seg.position[first], None if limit is None else abs(limit) - first) for first, limit in blocks]
        for own in range(row, row_end):
            found[own] = own - row, row_end - row, keys, item[items.MASKED], item[items.NUM_FIELDS :].tolist()
    return [found[row] for row in rows]


@examples(150)
@given(
    trees(max_segments=12, length=lengths), st.sampled_from(TILES_OF_WINDOWS), st.integers(1, MAX_PACKED_HEADS),
    st.one_of(st.none(), windows), st.randoms(use_true_random=False),
)  # fmt: skip
def test_by_segment_a_row_is_computed_alike_whatever_else_is_packed(tree, tile, heads, window, draw):
    offsets, parent = tree
    seg = of(Layout.from_segments(*tree))
    if not 0 < seg.total <= 2000:
        return
    path = [draw.randrange(len(parent))]
    while parent[path[0]] >= 0:
        path.insert(0, parent[path[0]])
    alone = of(Layout.from_segments(np.cumsum([0, *seg.lengths[path]]).tolist(), range(-1, len(path) - 1)))
    rows = np.concatenate([np.arange(offsets[s], offsets[s + 1]) for s in path])
    shape = tile.tokens(heads), tile.tile_n, window, tile.parts
    assert steps_of_rows(seg, rows, *shape) == steps_of_rows(alone, np.arange(alone.total), *shape)


@examples(150)
@given(
    drawn(trees(max_segments=120, length=st.integers(0, 9))), st.sampled_from([16, 24, 64, 96, 128, 192]),
    st.sampled_from([16, 64]), st.sampled_from([1, 4]), st.one_of(st.none(), windows),
)  # fmt: skip
def test_other_tiles(seg, tokens, tile_n, parts, window):
    check(seg, tokens, tile_n, window, parts)


def test_a_window_beyond_all_paths_changes_no_block():
    seg = of(Layout.from_segments(*random_tree(0, 60, 9, 80)))
    full, far = path_work(seg, 64, 64), path_work(seg, 64, 64, Window(size=seg.total))
    assert (full.items == far.items).all()
    assert (full.regions == far.regions).all()


def test_deep_trees_of_many_segments():
    layout = Layout.from_segments(*random_tree(0, 700, 64, 4))
    assert layout.depth == 64
    chain = tree(range(801), range(-1, 799))
    combs = tree(np.arange(601) * 2, [-1, *np.repeat(np.arange(0, 598, 2), 2), 598])
    for seg in (of(layout), chain, combs):
        check(seg, 64, 128)


def test_trees_pay_for_what_they_see():
    """The segments are aligned, so the blocks have the visible pairs alone, and one block a tile is masked."""
    layout = Layout.from_segments(*binary_tree(4, 4096, 1024))
    work = path_work(of(layout), 64, 128)
    seen = layout.position_ids.numpy() + 1
    assert work.items[:, items.BLOCKS].sum() == (-(-seen[63::64] // 128)).sum()
    assert (work.items[:, items.MASKED] == 1).all()
    parts, blocks = work.items[:, items.ROW] // NEAR_ROWS, work.items[:, items.BLOCKS]
    assert (np.diff(parts) >= 0).all()
    assert (np.diff(blocks)[np.diff(parts) == 0] <= 0).all(), "longest first"
    assert (work.items[:, items.LIMIT] >= 0).all(), "no row asks for the end of a key"


@pytest.mark.parametrize("layout", [([8192], [[2048] * 32]), ([32768], [[2048] * 16])], ids=["N=32", "N=16"])
@pytest.mark.parametrize(
    ("head_dim", "heads", "window", "at_most"),
    [
        (64, 8, Window(size=128), 1.4),
        (192, 8, Window(size=129), 1.4),
        (256, 2, Window(size=512), 1.3),
        (256, 2, Window(size=1024), 1.15),
        (128, 4, Window(size=4096), 1.06),
        (128, 5, Window(chunk=8192), 1.08),
    ],
    ids=str,
)
def test_tiles_skip_what_windows_hide(layout, head_dim, heads, window, at_most):
    """The bounds are executed over useful products, by whole tiles."""
    seg, tile = of(Layout.from_lengths(*layout)), forward_tile(head_dim, ["window"], window.short)
    work = path_work(seg, tile.tokens(heads), tile.tile_n, window, tile.parts)
    executed = tile.tokens(heads) * tile.tile_n * int(work.items[:, items.BLOCKS].sum())
    useful = int((seg.position - window.lowest(seg.position) + 1).sum())
    assert useful <= executed <= at_most * useful


def test_empty_layouts():
    for tree in (([0], []), ([0, 0, 0, 0], [-1, 0, -1])):
        work = path_work(of(Layout.from_segments(*tree)), 64, 128)
        assert work.items.shape == (0, items.NUM_FIELDS + items.NUM_PART_FIELDS)
        assert work.regions.shape == (1, 2), "not empty"


@pytest.mark.parametrize("window", [None, Window(size=128), Window(size=1000), Window(chunk=500)], ids=str)
def test_a_plan_is_quick(window):
    """Ten thousand segments of up to 64 levels in 100 ms of an idle core, or 200 with a window. Here thrice that, and
    the best of a few tries: other work shares the machine."""
    seg = of(Layout.from_segments(*random_tree(0, 10_000, 64, 60)))
    tile = forward_tile(128, [] if window is None else ["window"])
    path_work(seg, tile.tokens(4), tile.tile_n, window, tile.parts)  # derived arrays of the layout are made once

    def milliseconds():
        start = time.thread_time()
        path_work(seg, tile.tokens(4), tile.tile_n, window, tile.parts)
        return (time.thread_time() - start) * 1e3

    assert min(milliseconds() for _ in range(5)) < (300 if window is None else 600)

"""Counted recompute passes against the forward's blocks, walked one after the other as the kernel walks them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import dualkv
from codegen.tiles import forward_tile
from cute_kernels import softmax
from cute_kernels.abi import ForwardFields, PathFields
from dualkv import Layout
from dualkv import recompute_passes as counted
from dualkv.ops import hopper
from dualkv.ops.features import Features
from dualkv.ops.plan.forward import forward_work, segment_begin
from dualkv.ops.plan.paths import first_keys, path_work
from dualkv.segments import segments_of
from tests.ops.plan import test_forward as groups
from tests.ops.plan import test_paths as paths

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, KV_HEADS = 8, 2


def walked(seg, spec, window):
    """(first row of the tile, rows, blocks) of each warp group. A block is its keys, whether each row sees them, and
    whether it raises references."""
    return of_paths(seg, spec.tile, window) if spec.trees else of_groups(seg, spec.tile)


def of_groups(seg, tile):
    begin, n = segment_begin(seg), tile.tile_n
    for item in forward_work(seg, tile.tokens(HEADS // KV_HEADS), n).tolist():
        blocks = list(groups.key_blocks(item, n))
        for first, end in groups.warp_group_tokens(item, tile, HEADS // KV_HEADS):
            if first >= end:
                continue
            walk, q, found = groups.walk_of(item, begin, first, end - 1, n), np.arange(first, end)[:, None], []
            for i in [*range(walk.begin, walk.end), *range(walk.rest, len(blocks))]:
                key, own, _ = blocks[i]
                keys = np.arange(key, key + n)
                limit = item[ForwardFields.ROW_END if own else ForwardFields.CONTEXT_END]
                raises = i in (walk.begin, walk.rest) or (i < walk.masked and min(key + n, limit) > first)
                found.append((keys, groups.visible(item, q, begin[q], keys[None], own), raises))
            yield item[ForwardFields.ROW], q[:, 0], found


def of_paths(seg, tile, window):
    tokens, n = tile.tokens(HEADS // KV_HEADS), tile.tile_n
    visible_end = np.append(seg.visible_end, np.zeros(n, int))
    first_key = np.zeros(seg.total, int) if window is None else first_keys(seg, window)
    work = path_work(seg, tokens, n, window, tile.parts)
    for item in work.items.astype(int):
        blocks = paths.key_blocks(item, work.regions.astype(int), n)
        for rows, walk in paths.walks(item, item[PathFields.ROW], item[PathFields.ROW_END], tokens):
            for part in np.split(rows, range(tokens // tile.parts, len(rows), tokens // tile.parts)):  # one by a window
                q, found = part[:, None], []
                for before, i in zip([-2, *walk], walk, strict=False):
                    key, limit = blocks[i]
                    keys = np.arange(key, key + n)
                    seen = (keys <= q) & (keys >= first_key[q]) & (q < visible_end[keys])
                    seen &= keys < (key + n if limit is None else abs(limit))
                    raises = i != before + 1 or (limit is not None and min(key + n, abs(limit)) > part[0])
                    found.append((keys, seen, raises))
                yield item[PathFields.ROW], part, found


LAYOUTS = {
    "groups": Layout.from_lengths([300, 40], [[100, 60, 40], [20, 30]]),
    "silent prompts": Layout.from_lengths([300], [[150, 60, 40]]).without_prompt_queries(),
    "tree": Layout.from_segments([0, 150, 200, 260, 420, 430, 520], [-1, 0, 1, 1, 0, 4]),
}


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("groups", Features()),
        ("groups", Features(softcap=300.0)),
        ("groups", Features(window=190)),
        ("silent prompts", Features()),
        ("tree", Features()),
        ("tree", Features(chunk=170)),
    ],
)
def test_rows_that_outgrow_their_reference_are_counted(name, features):
    """No row is missing that a walk finds; of prompts with responses few others are counted."""
    layout, generator = LAYOUTS[name], torch.Generator().manual_seed(1)
    seg, total = segments_of(layout.offsets, layout.parent), layout.num_tokens
    q, k, v = (torch.randn(total, heads, 64, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    heights = 3 * torch.randn(total, KV_HEADS, generator=generator)  # in powers of two, beside some noise
    heights[torch.randperm(total, generator=generator)[: total // 150]] += 120
    q[..., 0], k[..., 0] = 4, heights * (8 / 4 * math.log(2))
    with dualkv.RecomputePasses() as passes:
        _, lse = dualkv.attention(q, k, v, layout, return_lse=True, **features._asdict())
    ((_, spec),) = counted._launches(q, k, v, seg, features)
    grid = counted._grid(seg, spec, features)
    found = counted._outgrown(q, k, v, lse, grid, 0.125, features.softcap).numpy()

    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(HEADS // KV_HEADS, 1)) / 8
    if features.softcap:
        scores = features.softcap * (scores / features.softcap).tanh()
    scores = np.pad(scores.numpy() / math.log(2), [(0, 0), (0, 0), (0, spec.tile.tile_n)])
    exact, tiles = np.zeros((HEADS, total), bool), set()
    for tile, rows, blocks in walked(seg, spec, features.reach):
        reference = np.full((HEADS, len(rows)), -np.inf)
        for keys, visible, raises in blocks:
            if raises:
                largest = np.where(visible, scores[:, rows[:, None], keys], -np.inf).max(-1)
                reference = np.where(largest > reference + softmax.RESCALE_AT, largest, reference)
        sums = lse.numpy()[:, rows] / math.log(2) - reference
        exact[:, rows] = (sums > math.log2(softmax.SUM_LIMIT)) | (abs(reference) > softmax.REFERENCE_LIMIT)
        tiles |= {(tile, h // spec.packed_heads) for h in np.flatnonzero(exact[:, rows].any(1))}
    assert 20 < exact.sum() < found.size - 20
    assert not (exact & ~found).any()
    assert found.sum() < (4 if spec.trees or name == "silent prompts" else 1.2) * exact.sum()
    assert (passes.calls, passes.rows, passes.all_rows) == (1, found.sum(), exact.size)
    assert len(tiles) <= passes.tiles <= passes.all_tiles == grid.tiles * HEADS // spec.packed_heads
    assert f"{passes.tiles} of {passes.all_tiles} tiles" in str(passes)


def test_tiles_of_two_launches_are_counted(monkeypatch):
    """The first four of five query heads a KV head have tiles, and the last one has others."""
    layout = LAYOUTS["groups"]
    q, k, v = (torch.randn(layout.num_tokens, heads, 64) for heads in (10, 2, 2))
    q[30, [3, 9]] *= 1e6
    counts = []
    for rows in (0, 2**62):
        monkeypatch.setattr(hopper, "FEW_KEYS_ROWS", rows)
        monkeypatch.setattr(hopper, "PARTS_COST", math.inf)
        with dualkv.RecomputePasses() as passes:
            dualkv.attention(q, k, v, layout)
        counts.append((passes.calls, passes.rows, passes.all_rows, passes.tiles, passes.all_tiles))
        layout = Layout.from_lengths([300, 40], [[100, 60, 40], [20, 30]])
    (parts, whole), tile = counts, forward_tile(64)
    tiles = {heads: sum(-(-rows // tile.tokens(heads)) for rows in (500, 90)) for heads in (1, 4, 5)}
    assert parts == (1, 2, 10 * layout.num_tokens, 2, 2 * (tiles[1] + tiles[4]))
    assert whole == (1, 2, 10 * layout.num_tokens, 2, 2 * tiles[5])


def test_other_reasons_for_a_recompute_pass():
    """Huge references, and values with which O may be infinite, count; calls outside and backwards do not."""
    limits = 2**counted.RESCALE_AT, 2**counted.SUM_LIMIT, counted.REFERENCE_LIMIT
    assert limits == (2**softmax.RESCALE_AT, softmax.SUM_LIMIT, softmax.REFERENCE_LIMIT)
    layout, (q, k, v) = LAYOUTS["groups"], torch.randn(3, LAYOUTS["groups"].num_tokens, 2, 16)
    with dualkv.RecomputePasses() as passes:
        dualkv.attention(q, k, v.requires_grad_(), layout).sum().backward()
    assert (passes.calls, passes.rows) == (1, 0)
    for given in ((q * 1e4, k, v), (q, k, v * 1e36), (q, k, v * math.nan)):
        with dualkv.RecomputePasses() as passes:
            dualkv.attention(*given, layout)
        assert passes.rows > 0
    dualkv.attention(q * 1e4, k, v, layout)
    assert passes.calls == 1

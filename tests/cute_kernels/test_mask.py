"""The masks and the walk over a tile's blocks: the kernel's own source, run on numbers of 32 lanes.

tests/ops/plan/test_forward.py and test_paths.py prove plans by the same rules in numpy; here those rules meet the code.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from dualkv.layout import Layout
from dualkv.ops.features import Window
from dualkv.ops.plan.forward import forward_work, segment_begin
from dualkv.ops.plan.paths import first_keys, path_work
from dualkv.segments import segments_of
from tests.protocol import sources
from tests.protocol.lanes import Now
from tests.protocol.memory import Host

TILE_N, TOKENS, LANES = 48, 40, np.arange(32)


class Scores:
    """A warp's part of a block of scores: which ones are kept, [elements, lanes]."""

    def __init__(self, size):
        self.shape, self.kept = (size,), np.ones((size, 32), bool)

    def __getitem__(self, element):
        return np.where(self.kept[element], 0.0, -np.inf)

    def __setitem__(self, element, scores):
        taking = Now.machine.agent.mask
        taking = np.ones(32, bool) if taking is None else taking
        self.kept[element] = np.where(taking, np.broadcast_to(scores, 32) == 0, self.kept[element])


@pytest.fixture
def work(monkeypatch):
    """`cute_kernels.work` on stand-ins, with all rounds of the mask's loops."""
    monkeypatch.delitem(sources.ALIKE, "mask.py")
    monkeypatch.setattr(Now, "machine", SimpleNamespace(agent=SimpleNamespace(mask=None, name="a warp")))
    loaded = sources.kernels(("mask.py", "The visibility rule on the device", "The rule on the device"))
    return SimpleNamespace(**loaded.fwd_paths.PathTile.load.__func__.__globals__)


LAYOUTS = {
    "prompts with responses": ([0, 80, 120, 160, 390, 400, 440, 471], [-1, 0, 0, 0, 0, -1, 5]),
    "a tree": ([0, 60, 60, 130, 150, 155, 260, 300], [-1, 0, 1, 2, 2, 0, 5]),
}


def masked_pairs(tile, keys, bounds, pairs):
    """Adds the pairs that the masks of a tile's blocks keep, a warp's 16 rows at a time."""
    for row in range(tile.row, tile.row_end, 16):
        q = np.minimum(row + np.stack([LANES // 4, LANES // 4 + 8]), tile.row_end - 1)
        own = tile.bounds_of(q, bounds)
        for i, key in enumerate(keys):
            mask, scores = tile.mask(i), Scores(TILE_N // 2)
            mask.apply(scores, q, own)
            if i >= tile.masked:
                assert scores.kept.all(), "a whole block's mask keeps all of it, as the recompute pass needs"
            for e in range(TILE_N // 2):
                at = q[e // 2 % 2], key + e // 4 * 8 + e % 2 + LANES % 4 * 2
                if i < tile.masked:
                    assert (np.broadcast_to(mask.sees(e // 2 % 2, *at, own), 32) == scores.kept[e]).all()
                in_use = row + e // 2 % 2 * 8 + LANES // 4 < tile.row_end
                np.add.at(pairs, (at[0][in_use], at[1][in_use]), scores.kept[e][in_use])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "window", [Window(size=1), Window(size=5), Window(size=37), Window(size=170), Window(chunk=150)], ids=str
)
def test_rows_keep_the_keys_of_their_window(work, layout, window):
    made = Layout.from_segments(*LAYOUTS[layout])
    seg = segments_of(made.offsets, made.parent)
    total, first = seg.total, first_keys(seg, window)
    plan = path_work(seg, TOKENS, TILE_N, window)
    visible_end = np.append(seg.visible_end, np.zeros(TILE_N, int))
    regions = Host("regions", plan.regions)
    bounds = work.PathBounds(Host("visible_end", visible_end), Host("first_key", first))
    pairs = np.zeros((total, total + TILE_N), int)
    for item in plan.items.tolist():
        tile = work.PathTile.load(item, regions, TILE_N)
        keys = np.array([tile.key_row(i) for i in range(tile.blocks)])
        for i, key in enumerate(keys[: tile.masked].tolist()):
            mask = tile.mask(i)
            for k in range(key, key + TILE_N):
                hidden = k >= key + mask.first_hidden() and mask.hides(k, bounds)
                rows = range(tile.row, tile.row_end)
                seen = any(mask.sees(0, row, k, bounds._replace(own=[int(first[row])])) for row in rows)
                assert hidden == (not seen)
        masked_pairs(tile, keys, bounds, pairs)
    q, k = np.arange(total)[:, None], np.arange(total)[None]
    assert (pairs[:, :total] == ((k <= q) & (q < seg.visible_end[k]) & (k >= first[q]))).all()
    assert not pairs[:, total:].any()


def test_rows_keep_the_keys_of_their_segment_and_its_prompt(work):
    made = Layout.from_segments(*LAYOUTS["prompts with responses"])
    seg = segments_of(made.offsets, made.parent)
    total, begins = seg.total, Host("segment_begin", segment_begin(seg))
    pairs = np.zeros((total, total + TILE_N), int)
    tiles = [work.Tile.load(item, TILE_N) for item in forward_work(seg, TOKENS, TILE_N).tolist()]
    assert any(tile.straddles for tile in tiles)
    for tile in tiles:
        masked_pairs(tile, [int(tile.key_row(i)) for i in range(tile.blocks)], begins, pairs)
    q, k = np.arange(total)[:, None], np.arange(total)[None]
    assert (pairs[:, :total] == ((k <= q) & (q < seg.visible_end[k]))).all()
    assert not pairs[:, total:].any()

"""Tile configurations in turns: what needs no GPU of it."""

from __future__ import annotations

import json

import pytest

from codegen import KernelError
from codegen.spec import backward_specs
from codegen.tiles import BACKWARD_TILES, FORWARD_TILES, HEAD_DIMS
from tools.bench import tune


@pytest.fixture
def tables():
    every = FORWARD_TILES, BACKWARD_TILES
    before = [dict(table) for table in every]
    yield
    for table, entries in zip(every, before, strict=True):
        table.update(entries)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_candidates_differ_from_the_table(direction, head_dim, tables):
    tried = tune.candidates(direction, head_dim, [])
    assert tried[0].name == tune.STANDS
    assert len({one.tile for one in tried}) == len(tried) > 1


def test_a_candidate_is_what_kernels_are_chosen_by_until_the_next(tables):
    standing, other = tune.candidates("bwd", 96, ["tile_m=64"])
    assert {spec.tile.tile_m for spec in other.specs([4]) if hasattr(spec.tile, "tile_m")} == {64}
    assert backward_specs("bf16", 80).main.tile == other.tile
    standing.use()
    assert backward_specs("bf16", 80).main.tile == standing.tile != other.tile


def test_what_does_not_compile_or_spills_is_left_out(tables, tmp_path, monkeypatch):
    def entry(spec):
        if spec.tile.tile_n == 160:
            raise KernelError("compiling failed:\nneeds 999999 bytes of shared memory")
        made = {"wgmma_warnings": ["C7512"] * (spec.tile.stages == 3), "spill_stores": 8 * (spec.tile.tile_n == 144)}
        (tmp_path / "kernel.json").write_text(json.dumps(made))
        return tmp_path

    monkeypatch.setattr(tune.store, "entry", entry)
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 1)
    said: list[str] = []
    tried = tune.candidates("fwd", 128, ["tile_n=160", "stages=3", "tile_n=144", "tile_n=112"])
    assert [one.name for one in tune.compiled(tried, [4], said.append)] == [tune.STANDS, "tile_n=112"]
    assert [text.split(": ", 1)[1] for text in said] == [
        "needs 999999 bytes of shared memory",
        "products run one by one (C7512)",
        "8 bytes spilled",
    ]

"""Tile configurations in turns: what needs no GPU of it."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from codegen import KernelError
from codegen.spec import backward_specs, forward_spec
from codegen.tiles import BACKWARD_TILES, FORWARD_TILES, HEAD_DIMS
from tools import tables as tables_of_documents
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


def test_a_candidate_runs_at_every_ratio(tables):
    standing, other = tune.candidates("fwd", 128, ["cluster=1"])
    assert {forward_spec("bf16", 128, ratio).tile for ratio in (1, 4)} == {standing.tile}
    assert {spec.tile for spec in other.specs([1, 4])} == {other.tile}
    assert {spec.tile for spec in standing.specs([1, 4])} == {standing.tile}


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


def test_the_fastest_is_that_over_all_ratios():
    def result(**ms):
        return {"sides": {name: {"sustained_ms": x} if x else {"error": "it"} for name, x in ms.items()}}

    stands = {tune.STANDS: 10.0}
    assert tune.fastest([result(**stands, a=8.0, b=9.0), result(**stands, a=12.0, b=9.5)])[0] == "b"
    assert tune.fastest([result(**stands, a=5.0), result(**stands, a=None)]) == (tune.STANDS, 1.0)


def test_what_is_filed_is_what_the_table_shows(tmp_path, monkeypatch):
    def result(gqa, **ms):
        workload = {"name": "x", "response_lens": [[9] * 99], "head_dim": 96, "heads": 32, "kv_heads": 32 // gqa}
        some = {name: {"sustained_ms": x, "rounds": [1, 2]} if x else {"error": "too large"} for name, x in ms.items()}
        return {"workload": workload, "sides": some}

    filed = [tune.figures(result(1, a=10.0, b=8.0)), tune.figures(result(4, a=9.0, b=None))]
    assert filed[1] == {"head_dim": 96, "gqa": 4, "sides": {"a": {"sustained_ms": 9.0}, "b": {"error": "too large"}}}
    about = {"date": "2026-01-02", "commit": "a" * 40, "settings": {"seconds": 1, "rounds": 2}}
    (tmp_path / "tune-bwd-h200.json").write_text(json.dumps(about | {"results": filed}))
    monkeypatch.setattr(tables_of_documents, "RESULTS", tmp_path)
    head, _, *rows = tables_of_documents.tuned("bwd").splitlines()[:4]
    assert head == "| head dim | tile | GQA 1 | GQA 4 |"
    assert rows == ["| 96 | a | 10.00 | 9.00 |", "| 96 | b | 8.00 (1.250) |  |"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-d", "both"], "-d is 'both'"),
        (["--head-dim", "80"], "--head-dim is 80"),
        (["--head-dim", "96", "--tile", "rows=3"], "tile has no field 'rows'"),
        (["--head-dim", "96", "--tile", "slab_floats=3"], "tile has no field 'slab_floats'"),
        (["--gqa", "3"], "--gqa is 3"),
        (["-w", "nothing"], "nothing"),
        (["--head-dim", "96", "--tile", "tile_m=x"], "expected NAME=NUMBER"),
    ],
)
def test_bad_options_are_one_sentence(arguments, words):
    app = typer.Typer()
    app.command()(tune.main)
    done = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, [*arguments, "--compile"])
    assert done.exit_code == 2
    assert words in done.output.replace("\n", " ").replace("  ", " ")

"""A part of the matrix of types and ways, and how it tells what is wrong, refused or not run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from tools import filed, matrix, zoo, zoo_rows  # noqa: E402


def test_a_type_in_every_way(one_thread: None) -> None:
    cells = matrix.examine("qwen3")
    assert list(cells) == list(matrix.WAYS)
    assert {cell["outcome"] for cell in cells.values()} == {zoo.EXACT}


def test_what_differs_raises_or_is_refused(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    def off(case: matrix.Case) -> zoo.Computed:
        logits, gradients = matrix.plain(case)
        name = next(iter(gradients))
        return logits, gradients | {name: gradients[name] * 1.01}

    def raises(error: type[Exception]) -> matrix.Way:
        def way(_: matrix.Case) -> zoo.Computed:
            raise error("no such layer")

        return way

    ways = {"off": off, "refused": raises(ValueError), "raises": raises(RuntimeError)}
    monkeypatch.setattr(matrix, "WAYS", ways)
    cells = matrix.examine("llama")
    assert {way: cell["outcome"] for way, cell in cells.items()} == {
        "off": zoo.WRONG,
        "refused": zoo.REFUSED,
        "raises": zoo.WRONG,
    }
    assert "no such layer" in cells["refused"]["reason"]


def test_ranks_share_rows_and_each_gets_its_own_error(one_thread: None) -> None:
    """A model whose one recurrent head cannot be shared is refused on both ranks, and neither waits for the other."""
    cells = matrix.examine("zamba2")
    assert cells["ulysses"]["outcome"] == cells["context"]["outcome"] == zoo.REFUSED
    assert cells["plain"]["outcome"] == zoo.EXACT


def test_a_run_goes_on_where_it_was_cut_and_runs_named_types_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def fake(kinds: list[str], *_: Any, **__: Any) -> Any:
        for kind in kinds:
            ran.append(kind)
            yield kind, {"plain": {"outcome": zoo.EXACT, "error": 1e-6}}

    monkeypatch.setattr(zoo, "run", fake)
    path = tmp_path / "matrix.json"
    monkeypatch.setattr(zoo, "exact_before", lambda: ["llama"])
    matrix.main(json_to=path)
    monkeypatch.setattr(zoo, "exact_before", lambda: ["llama", "qwen3"])
    matrix.main(json_to=path)
    assert ran == ["llama", "qwen3"]
    before = filed.read(path)
    path.write_text(filed.text(before | {"commit": "0" * 40}))
    matrix.main(["qwen3"], json_to=path)
    assert ran == ["llama", "qwen3", "qwen3"]
    now = filed.read(path)
    assert (now["commit"], now["types"]) == ("0" * 40, before["types"])
    assert {kind: at["commit"] for kind, at in now["later"].items()} == {"qwen3": before["commit"]}
    assert f", 1 of them at commit {before['commit'][:7]}" in zoo_rows.matrix(now)


def test_a_type_that_does_not_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "run", lambda *_, **__: [("opt", {"outcome": zoo.NOT_BUILT, "reason": "no such"})])
    with pytest.raises(typer.Exit):
        matrix.main(["opt"])


def test_table() -> None:
    exact, refused = {"outcome": zoo.EXACT, "error": 3e-6}, {"outcome": zoo.REFUSED, "reason": "no"}
    run = {"transformers": "5", "workers": 2, "date": "2026-11-29", "commit": "a" * 40, "seconds": 60.0}
    cells = {"llama": dict.fromkeys(zoo_rows.WAYS, exact), "bloom": {"walk": refused}, "opt": {"all": exact}}
    assert set(matrix.WAYS) == set(zoo_rows.WAYS)
    about, _, _, _, *rows = zoo_rows.matrix(run | {"types": cells}).splitlines()
    assert about.endswith(" 2 types. Not run: `opt`:")
    [row] = [row for row in rows if "walk" in row]
    assert row.split("|")[2:6] == [" 1 ", " 3e-06 ", " 0 ", " 1: `bloom` "]
    [others] = [row for row in rows if "walk" not in row]
    assert others.split("|")[2:6] == [" 1 ", " 3e-06 ", " 0 ", " 0 "]
    assert all(words in others for way, words in zoo_rows.WAYS.items() if way != "walk")

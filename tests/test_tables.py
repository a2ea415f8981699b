"""The tables in README and docs are those of the recorded figures."""

from __future__ import annotations

import json

import pytest

from dualkv.bench import command
from dualkv.bench.run import SCHEMA
from tools import record, tables


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_the_recorded_figures(path):
    text = path.read_text()
    assert "<!-- table" in text
    assert tables.filled(text) == text, "run `python -m tools.tables`"


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_figures_say_where_they_come_from(path):
    record = json.loads(path.read_text())
    assert {"date", "commit", "changed_files", "gpu", "versions"} <= set(record)
    assert len(record["commit"]) == 40


def options_of(text):
    """Values by option of a command line that has no switches."""
    words, found = iter(text.split()), {}
    for option in words:
        found.setdefault(option, []).append(next(words))
    return found


@pytest.mark.parametrize("name", record.RECORDS)
def test_benchmarks_are_those_of_the_commands(name):
    """All of what the command asks for, or the part that was recorded."""
    path = record.RESULTS / f"{name}.json"
    if not path.exists():
        pytest.skip("not recorded yet")
    made, options = json.loads(path.read_text()), options_of(record.RECORDS[name])
    assert made["schema"] == SCHEMA
    assert set(made["settings"]["sides"]) <= set(command.sides(options["-s"]))
    asked = [(workload, direction) for workload in options["-w"] for direction in command.directions(*options["-d"])]
    assert [(r["workload"]["name"], r["direction"]) for r in made["results"]] == asked[: len(made["results"])]


def test_what_is_not_recorded_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.filled("a\n<!-- table peers -->\nold\n<!-- end -->\nb") == (
        "a\n<!-- table peers -->\nNot recorded yet.\n<!-- end -->\nb"
    )

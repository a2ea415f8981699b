"""Tests of what a run's record says beside its figures, and of lists of runs."""

from __future__ import annotations

import pytest

from tools import filed
from tools.bench.record import Record


def test_figures_stand_behind_where_they_come_from(tmp_path):
    path = tmp_path / "new" / "x.json"
    record = Record(path, gpu=False)
    record.write({"rows": [1]})
    assert record.write({"rows": [1, 2]}) == filed.read(path)
    made = filed.read(path)
    assert made["rows"] == [1, 2]
    assert {"date", "commit", "changed_files", "gpu", "python", "cuda", "versions"} <= set(made)
    assert list(path.parent.iterdir()) == [path]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = Record(None)
    assert record.write({"a": 1}) == {"a": 1}
    record.append({"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_runs_are_added_to_a_list_of_runs(tmp_path):
    path = tmp_path / "fuzz.json"
    for seed, device, worst in (("5", "cpu", 0.5), ("6", "cuda", 0.7), ("7", "cpu", 0.4)):
        found = {"seconds": 1.5, "failed": 1, "worst_part_of_bound": worst, "tried": {"cases": 2, seed: 1}}
        Record(path, gpu=False).append({"seed": seed, "device": device, **found})
    one, other = filed.read(path)["runs"]
    assert (one["seed"], one["device"], one["seconds"], one["failed"], one["worst_part_of_bound"]) == (
        "5, 7", "cpu", 3.0, 2, 0.5,
    )  # fmt: skip
    assert one["tried"] == {"5": 1, "7": 1, "cases": 4}
    assert (other["seed"], other["tried"]["cases"]) == ("6", 2)
    Record(path, gpu=False).write({"seed": 4})
    with pytest.raises(ValueError, match="expected a list of runs under 'runs'"):
        Record(path, gpu=False).append({"seed": "5"})

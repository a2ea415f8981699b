"""What a run's record says beside its figures, and lists of runs."""

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
    for seed in range(3):
        Record(path, gpu=False).append({"seed": seed})
    assert [run["seed"] for run in filed.read(path)["runs"]] == [0, 1, 2]
    assert all("commit" in run for run in filed.read(path)["runs"])
    Record(path, gpu=False).write({"seed": 4})
    with pytest.raises(ValueError, match="expected a list of runs under 'runs'"):
        Record(path, gpu=False).append({"seed": 5})

"""A copy of a checkout says what git said of the checkout, or nothing."""

from __future__ import annotations

import pytest

from dualkv.bench import run
from tools import stamp


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with a source of each kind, in place of the repository."""
    for name in ("dualkv/a.py", "codegen/b.c", "cute_kernels/c.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "STAMP", tmp_path / ".stamp.json")
    said = {"ls-files": "", "rev-parse": "a" * 40, "status": "M dualkv/a.py"}
    monkeypatch.setattr(run, "_git", lambda *arguments: said.get(arguments[0]))
    return said


def test_a_copy_without_git_says_what_the_stamp_says(checkout, capsys):
    stamp.main()
    assert capsys.readouterr().out == ".stamp.json: commit aaaaaaa, 1 changed files\n"
    checkout.clear()
    found = run.environment(None)
    assert (found["commit"], found["changed_files"]) == ("a" * 40, ["M dualkv/a.py"])
    assert "source_digest" not in found


@pytest.mark.parametrize("name", ["dualkv/a.py", "codegen/b.c", "cute_kernels/new.py"])
def test_a_copy_that_was_changed_records_nothing(checkout, name):
    stamp.main()
    checkout.clear()
    (run.ROOT / name).write_text("changed")
    with pytest.raises(ValueError, match=r"is of other sources, expected .* run `python -m tools\.stamp`"):
        run.environment(None)


def test_git_counts_once_the_sources_are_not_those_of_the_stamp(checkout):
    stamp.main()
    checkout["rev-parse"] = "b" * 40
    assert run.environment(None)["commit"] == "a" * 40  # git of a copy may know an earlier commit only
    (run.ROOT / "dualkv/a.py").write_text("changed")
    assert run.environment(None)["commit"] == "b" * 40

"""Tests of the record that is made from the output of test runs."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from tools import filed
from tools.bench import suite

ONE = """
tests/gpu/test_a.py ..Fs
=========================== short test summary info ============================
PASSED tests/gpu/test_a.py::test_it[fp16-PASSED tests]
PASSED tests/gpu/test_a.py::test_it[bf16]
SKIPPED [2] tests/gpu/test_a.py:317: needs two GPUs
FAILED tests/gpu/test_a.py::test_other[1] - AssertionError: dq
"""
OTHER = """
XFAIL tests/gpu/test_b.py::test_c - a reason
PASSED tests/gpu/test_b.py::test_d
PASSED tests/gpu/test_a.py::test_it[fp32]
ERROR tests/gpu/test_b.py::test_e - OSError
"""


def test_split_runs_are_counted_together(tmp_path):
    about = dict.fromkeys(suite.ABOUT, "x") | {"seed": 7}
    for name, text in (("1", ONE), ("2", OTHER), ("of", filed.text({"runs": [{"seed": 6}, about]}))):
        (tmp_path / name).write_text(text)
    app = typer.Typer()
    app.command()(suite.main)
    arguments = [str(tmp_path / name) for name in "12"] + ["--of", str(tmp_path / "of"), "--json", str(tmp_path / "r")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    made = filed.read(tmp_path / "r")
    assert set(made) == {*suite.ABOUT, "modules", "notes"}
    assert made["modules"] == {
        "tests/gpu/test_a.py": {"failed": 1, "passed": 3, "skipped": 2},
        "tests/gpu/test_b.py": {"error": 1, "passed": 1, "xfail": 1},
    }
    assert made["notes"] == [
        "tests/gpu/test_a.py::test_other[1] - AssertionError: dq",
        "2 skipped in tests/gpu/test_a.py: needs two GPUs",
        "tests/gpu/test_b.py::test_e - OSError",
    ]

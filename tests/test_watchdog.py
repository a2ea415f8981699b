"""The GPU tests' watchdog, without a GPU: a test that hangs ends the run, says its name and fails it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFTEST = """
import tests.watchdog
from tests.gpu import conftest
from tests.gpu.conftest import no_hang, uncaptured_stderr
conftest.HANG_SECONDS, tests.watchdog.GRACE = 3.0, 1.0
"""
HANGS = """
import ctypes, os, pytest, time

@pytest.mark.parametrize("i", range(4))
def test_before(i):
    time.sleep({before})

@pytest.mark.parametrize("size", [7])
def test_that_hangs(size):
    print("captured")
    {hang}

def test_after():
    open("after", "w")
"""


def run(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "test_it.py"]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    ("hang", "says", "before"),
    [
        ("time.sleep(600)", "test_it.py::test_that_hangs[7] has hung for 3 s: ending the run", 0.9),
        # As a call that waits with the interpreter's lock held: no other Python thread runs.
        ("ctypes.PyDLL(None).sleep(600)", "Timeout", 0),
    ],
    ids=["lock released", "lock held"],
)
def test_a_hang_ends_the_run_with_the_name_of_the_test(tmp_path, hang, says, before):
    """Short tests before, together longer than the limit of one, are left alone."""
    done = run(tmp_path, HANGS.format(hang=hang, before=before))
    assert done.returncode in (1, 3)
    assert says in done.stderr
    assert "in test_that_hangs" in done.stderr, "where it hung"
    assert not (tmp_path / "after").exists()

"""The long run: its steps, and what it says of memory that grows. (On a GPU: tests/gpu/test_load.py.)"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tools import filed
from tools.bench import soak

FLAT = {"seconds": 1.0, "steps": 1, **dict.fromkeys(soak.MAY_GROW, 100.0)}


def curve(**last):
    """16 samples, of which the last quarter is different."""
    return [dict(FLAT) for _ in range(12)] + [FLAT | last for _ in range(4)]


@pytest.mark.parametrize("name", soak.MAY_GROW)
def test_memory_that_grows_is_named(name):
    more = 100.0 + 2 * soak.MAY_GROW[name]
    assert soak.grown(curve(**{name: more})) == [
        f"{name} grew from 100 to {more:g}, by more than {soak.MAY_GROW[name]:g}"
    ]


def test_results_that_change_are_noticed(monkeypatch):
    monkeypatch.setattr(soak, "CHECK_EVERY", 2)
    steps = soak.steps(0, "cpu")
    assert next(steps) == "the same"
    real = soak._results
    monkeypatch.setattr(soak, "_results", lambda *arguments: [x + 1e-6 for x in real(*arguments)])
    next(steps)
    with pytest.raises(soak.Wrong, match="step 2: the results of the same call have changed"):
        next(steps)
    with pytest.raises(soak.Wrong, match="step 7: results that are not finite"):
        soak._finite([torch.ones(2), torch.tensor([1.0, float("nan")])], 7)


def test_the_command_files_its_curve(tmp_path, monkeypatch):
    """The command names what has grown, and fails."""
    leak = []

    def leaking(seed, device):
        for i in itertools.count():
            if i > 20:
                leak.append(open(__file__))  # noqa: SIM115
            yield "groups" if i % 2 else "graph"

    monkeypatch.setattr(soak, "steps", leaking)
    app = soak.typer.Typer()
    app.command()(soak.main)
    # A hundredth of a second a step, however slow the machine is.
    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=itertools.count(step=0.01).__next__))
    path = tmp_path / "soak.json"
    arguments = ["--device", "cpu", "--seconds", "1", "--every", "0", "--json", str(path)]
    monkeypatch.setattr(soak, "sample", lambda *a, real=soak.sample: real(*a) | {"descriptors": len(leak)})
    monkeypatch.setattr(soak.gc, "collect", lambda: None)
    said = CliRunner().invoke(app, arguments)
    for file in leak:
        file.close()
    made = filed.read(path)
    assert said.exit_code == 1
    assert "descriptors grew" in said.stderr
    assert made["problems"] == [line for line in said.stderr.splitlines() if line]
    assert sum(made["steps"].values()) == made["curve"][-1]["steps"] >= soak.FEWEST
    assert made["curve"][-1]["resident"] > 10
    assert {"date", "commit", "versions", "seed", "device"} <= set(made)

"""The long run: its steps, and what it says of memory that grows. (On a GPU: tests/gpu/test_load.py.)"""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from typer.testing import CliRunner

from tools import filed
from tools.bench import soak

FLAT = {"seconds": 1.0, "steps": 1, **dict.fromkeys(soak.MAY_GROW, 100.0)}


def curve(**last):
    """16 samples, of which the last quarter is different."""
    return [dict(FLAT) for _ in range(12)] + [FLAT | last for _ in range(4)]


def test_flat_memory_is_no_problem():
    assert soak.grown(curve()) == []
    assert soak.grown(curve(**{name: 100.0 + limit for name, limit in soak.MAY_GROW.items()})) == []
    warm_up = [FLAT | {"resident": 5.0, "reserved": 0.0}] * 4 + curve()[4:]
    assert soak.grown(warm_up) == []


@pytest.mark.parametrize("name", soak.MAY_GROW)
def test_memory_that_grows_is_named(name):
    more = 100.0 + 2 * soak.MAY_GROW[name]
    assert soak.grown(curve(**{name: more})) == [
        f"{name} grew from 100 to {more:g}, by more than {soak.MAY_GROW[name]:g}"
    ]


def test_what_the_driver_does_not_tell_is_not_judged():
    last = curve(device=1000.0)
    assert soak.grown(last) == ["device grew from 100 to 1000, by more than 320"]
    del last[5]["device"]
    assert soak.grown(last) == []


def test_too_short_a_run_is_not_judged():
    assert soak.grown([FLAT] * 3) == ["memory was looked at 3 times, too few to tell: expected at least 4"]


def test_steps_of_every_kind():
    assert list(itertools.islice(soak.steps(0, "cpu"), 4)) == ["the same", "groups", "paper's function", "groups"]


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


def test_a_run_that_is_cut_says_so():
    """Whatever ends it: the file that is there then."""
    filed = []

    def record(made):
        filed.append(list(made["problems"]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        soak.run(60.0, 0, "cpu", 0.0, record)
    assert filed == [[soak.UNFINISHED]]


def test_a_run_may_be_ended_early_and_is_judged():
    stop, filed = threading.Event(), []

    def record(made):
        filed.append(made)
        if len(filed) == soak.FEWEST - 1:
            stop.set()

    made = soak.run(60.0, 0, "cpu", 0.0, record, stop)
    assert len(made["curve"]) == soak.FEWEST
    assert made["curve"][-1]["seconds"] < 60.0
    assert soak.UNFINISHED not in made["problems"]


def test_the_command_files_its_curve(tmp_path, monkeypatch):
    """And what has grown is said and makes it fail."""
    leak = []

    def leaking(seed, device):
        for i in itertools.count():
            if i > 20:
                leak.append(open(__file__))  # noqa: SIM115
            yield "groups" if i % 2 else "graph"

    monkeypatch.setattr(soak, "steps", leaking)
    app = soak.typer.Typer()
    app.command()(soak.main)
    path = tmp_path / "soak.json"
    arguments = ["--device", "cpu", "--seconds", "1.5", "--every", "0", "--json", str(path)]
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
    assert {"schema", "date", "commit", "versions", "seed", "device"} <= set(made)

"""Benchmarks of windows, sinks and softcapping: what of them needs no GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from dualkv.bench import sides
from dualkv.bench.inputs import Inputs, Side
from dualkv.bench.workloads import Workload, parse
from tools import tables
from tools.bench import features


def test_tables_of_windows(tmp_path, monkeypatch):
    def result(direction, theirs, name="w"):
        peers = {name: {"sustained_ms": ms, "sustained_tflops": 1.0} for name, ms in theirs.items()}
        mine = {tables.OURS: {"sustained_ms": 2.0, "sustained_tflops": 500.0}}
        about = {"workload": {"name": name}, "direction": direction}
        return about | {"sides": mine | {tables.WINDOW_PEERS[0]: {"error": "it failed"}} | peers}

    results = [
        result("fwd", {tables.WINDOW_PEERS[1]: 3.0}),
        result("bwd", {tables.WINDOW_PEERS[0]: 2.5, tables.WINDOW_PEERS[1]: 3.0}),
        result("fwd", {}, "other"),
        result("fwd", {}, "n16-p32768-r2048-w128"),
    ]
    run = {"date": "2026-01-02", "commit": "a" * 40, "settings": {"seconds": 1, "rounds": 2}, "results": results}
    (tmp_path / "windows.json").write_text(json.dumps(run))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.windows().splitlines()[2:] == ["| w | 500 | 1.50 | 500 | 1.25 |", "| other | 500 |  |  |  |"]


class Small(Inputs):
    """A workload's first tokens on the CPU."""

    def __init__(self, workload, device="cpu"):
        lens = {"prompt_lens": (7,), "response_lens": ((5, 4),), "heads": 2, "kv_heads": 1, "head_dim": 16}
        super().__init__(Workload(**(vars(workload) | lens)), "cpu")


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Run DualKV on the CPU, and a peer that adds a per cent to its results and has no softcapping."""

    def peer(inputs, direction):
        if inputs.workload.softcap:
            raise NotImplementedError("no softcapping")
        side = sides.ours(inputs, direction)
        return Side(side.call, lambda: tuple(1.01 * x for x in side.results()))

    monkeypatch.setattr(sides, "SIDES", {"dualkv": sides.ours, "fa4-prompt-copied": peer})
    monkeypatch.setattr(sides, "hopper", SimpleNamespace(unsupported=lambda q: None))
    monkeypatch.setattr(features, "Inputs", Small)
    monkeypatch.setattr(features, "in_turns", lambda calls, pairs: (2.0, [1.02] * pairs))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_costs_and_errors_of_features(on_the_cpu):
    *_, figures = features.measure(4, "cpu")
    for found in figures["errors"]:
        if found["side"] == "dualkv":
            assert all(0 < found[name] < 0.01 for name in features.NAMES)
        elif found["softcap"] is None:
            assert found["out"] == pytest.approx(0.01, rel=0.3)
        else:
            assert found["error"] == "NotImplementedError: no softcapping"
    costs = features.costs(figures).splitlines()
    assert costs[2] == "| sinks, window: forward | +2.0 % | +2.0 % |"
    assert costs[-1] == "| softcap 50, window: backward | +2.0 % | not measured |"


def test_batches_of_two_calls_in_turns(monkeypatch):
    """Calls alone move the clock: 3 and 2 ms each, but 20 each in the first pair of batches."""
    made, now = [], [0.0]

    def call(which, ms):
        made.append(which)
        now[0] += ms if len(made) > 20 else 20

    class Event(float):
        def elapsed_time(self, end):
            return end - self

        def synchronize(self):
            pass

    def timed(call):
        begin = Event(now[0])
        call()
        return begin, Event(now[0])

    monkeypatch.setattr(features, "timed", timed)
    monkeypatch.setattr(features, "cold_ms", lambda call: 2.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ms, ratios = features.in_turns((lambda: call("with", 3.0), lambda: call("without", 2.0)), 3)
    assert (ms, ratios) == (2.0, [1.5] * 3)
    assert made == [which for name in ("with", "without", "without", "with") * 2 for which in [name] * 10]


def test_features_are_the_only_difference():
    for with_it, without in ([vars(parse(name)) for name in names] for names in features.PAIRS.values()):
        assert {name for name in with_it if with_it[name] != without[name]} - {"name"} <= {"sinks", "softcap"}

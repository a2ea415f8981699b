"""Kernels of an earlier commit beside today's: what needs no GPU of it."""

from __future__ import annotations

import json

import pytest

from codegen import store
from codegen.spec import forward_spec
from dualkv.ops import hopper
from tools.bench import before

SPEC = forward_spec("bf16", 128, 4)


@pytest.fixture
def entries(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "kernel.json").write_text(json.dumps({"spec": SPEC.to_dict(), "sources": "of another commit"}))
    monkeypatch.setattr(store, "open_entry", lambda path, spec: f"{path.name} {spec.symbol}")
    monkeypatch.setattr(store, "load", store.load)
    monkeypatch.setattr(store, "load_all", store.load_all)
    monkeypatch.setattr(before.Kernels, "current", None)
    return tmp_path


def test_an_earlier_kernel_is_found_by_its_specification(entries):
    assert before.earlier(entries)(SPEC) == f"old {SPEC.symbol}"


def test_a_kernel_that_is_not_there_is_named(entries):
    with pytest.raises(ValueError, match="has no kernel fwd bf16 head_dim=64"):
        before.earlier(entries)(forward_spec("bf16", 64, 4))


def test_a_folder_without_kernels_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a folder that `dualkv precompile --out` made"):
        before.kernels_in(tmp_path)


def test_calls_take_the_kernels_of_their_side(entries, monkeypatch):
    for lookup in (hopper._kernel, hopper._backward_kernels):
        monkeypatch.setattr(lookup, "cache_clear", lambda: None, raising=False)
    old, new = before.Kernels("before", before.earlier(entries)), before.Kernels("now", lambda spec: "new")
    for one, expected in ((old, f"old {SPEC.symbol}"), (new, "new"), (old, f"old {SPEC.symbol}")):
        one.use()
        assert store.load(SPEC) == expected
        assert store.load_all([SPEC]) == [expected]


def test_pairs_are_timed_in_both_orders(monkeypatch):
    called = []

    class Event:
        def __init__(self, ms):
            self.ms = ms

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.ms

    def timed(call):
        call()
        return Event(0.0), Event({"before": 12.0, "now": 10.0}[called[-1]])

    monkeypatch.setattr(before, "timed", timed)
    calls = (lambda: called.append("before"), lambda: called.append("now"))
    assert before.ratios(calls, 2, 0.0) == [1.2, 1.2]
    assert called == ["before"] * 2 + ["now"] * 4 + ["before"] * 2


def test_speed_is_the_median_pair():
    assert before.speed([1.0, 1.1, 1.5]) == {"speed": 1.1, "lower_quartile": 1.05, "upper_quartile": 1.3}

"""Kernels of an earlier commit beside today's: what needs no GPU of it."""

from __future__ import annotations

import json

import pytest

from codegen import store
from codegen.spec import backward_specs, forward_spec
from dualkv.ops import hopper
from tools.bench import before

SPEC = forward_spec("bf16", 128, 4)


@pytest.fixture
def entries(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    record = {"spec": SPEC.to_dict(), "symbol": "its_symbol", "sources": "of another commit"}
    record["spec"]["tile"]["q_in_registers"] = False  # an option that the tiles have no more
    (tmp_path / "old" / "kernel.json").write_text(json.dumps(record))
    monkeypatch.setattr(store, "open_entry", lambda path, spec, symbol: f"{path.name} {symbol}")
    monkeypatch.setattr(store, "load", store.load)
    monkeypatch.setattr(store, "load_all", store.load_all)
    monkeypatch.setattr(hopper, "forward_spec", hopper.forward_spec)
    monkeypatch.setattr(hopper, "backward_specs", hopper.backward_specs)
    monkeypatch.setattr(before.Kernels, "current", None)
    return tmp_path


def test_an_earlier_kernel_is_found_by_its_specification(entries):
    assert before.earlier(entries)(SPEC) == "old its_symbol"


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_earlier_kernels_decide_whether_layouts_choose_a_tile(entries, monkeypatch, deterministic):
    """The host plans for the tile of the kernels that it calls."""
    given = "bf16", 128, deterministic, "qkv", (), None
    many, few = (backward_specs(*given, few_keys=few_keys) for few_keys in (False, True))
    assert many.main.tile.cluster != few.main.tile.cluster
    forwards = [forward_spec("bf16", 128, 2, few_keys=few_keys) for few_keys in (False, True)]
    assert forwards[0].tile.cluster != forwards[1].tile.cluster
    for lookup in (hopper._kernel, hopper._backward_kernels):
        monkeypatch.setattr(lookup, "cache_clear", lambda: None, raising=False)
    for there, chosen, first in ((many, many, forwards[0]), (few, few, forwards[1])):
        for spec in (*there.present, first):
            (entries / spec.symbol).mkdir(exist_ok=True)
            record = {"spec": spec.to_dict(), "symbol": spec.symbol}
            (entries / spec.symbol / "kernel.json").write_text(json.dumps(record))
        old = before.Kernels("before", before.earlier(entries), *before.earlier_specs(entries))
        for side, expected, forward in (
            (before.Kernels("now", lambda spec: "new"), few, forwards[1]),
            (old, chosen, first),
        ):
            side.use()
            assert hopper.forward_spec("bf16", 128, 2, few_keys=True) == forward
            assert hopper.forward_spec("bf16", 128, 2, few_keys=False) == forwards[0]
            assert hopper.backward_specs(*given, few_keys=True) == expected
            assert hopper.backward_specs(*given, few_keys=False) == many
        assert store.load_all(chosen.present) == [f"{spec.symbol} {spec.symbol}" for spec in chosen.present]


def test_calls_take_the_kernels_of_their_side(entries, monkeypatch):
    for lookup in (hopper._kernel, hopper._backward_kernels):
        monkeypatch.setattr(lookup, "cache_clear", lambda: None, raising=False)
    old, new = before.Kernels("before", before.earlier(entries)), before.Kernels("now", lambda spec: "new")
    for one, expected in ((old, "old its_symbol"), (new, "new"), (old, "old its_symbol")):
        one.use()
        assert store.load(SPEC) == expected
        assert store.load_all([SPEC]) == [expected]


def test_pairs_are_timed_in_both_orders():
    called = []

    def turn(call):
        call()
        return {"before": 12.0, "now": 10.0}[called[-1]]

    calls = (lambda: called.append("before"), lambda: called.append("now"))
    assert before.ratios(calls, 2, turn) == [1.2, 1.2]
    assert called == ["before", "now", "now", "before"]

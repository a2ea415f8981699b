"""Packed updates of veRL's Megatron engine against its own, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("mbridge", reason="mbridge is not installed")

from tests.integrations.verl.scenarios import MEGATRON_FOUR, MEGATRON_ONE, MEGATRON_TWO
from tests.integrations.verl.test_equivalence import SCORES, distance, of_all_ranks, steps

Results = Callable[[str], list[dict[str, Any]]]
ALL = MEGATRON_ONE | MEGATRON_TWO | MEGATRON_FOUR
EXACT = [name for name, s in ALL.items() if "run" not in s and name != "megatron-stock"]
MATTERS = ("model", "temperature", "settings", "turns", "groups")


def reference(name: str) -> str:
    """The scenario of veRL's own engine on one rank that computes the same."""
    same = {key: ALL[name][key] for key in MATTERS if key in ALL[name]}
    return next(
        known
        for known, s in MEGATRON_ONE.items()
        if not s["packed"] and {key: s[key] for key in MATTERS if key in s} == same
    )


@pytest.mark.parametrize("name", EXACT)
def test_update(name: str, results: Results) -> None:
    found, stock = results(name), results(reference(name))
    assert [f.get("error") for f in found] == [None] * len(found)
    for what in SCORES:
        if what in stock[0]:
            got, expected = of_all_ranks(found, what), of_all_ranks(stock, what)
            assert got.shape == expected.shape
            assert (got - expected).abs().max() < 1e-5
    metrics = next(f["metrics"] for f in found if f["metrics"])
    for metric in ("loss", "grad_norm", "actor/pg_loss", "actor/entropy_loss", "kl_loss"):
        assert metrics[metric] == pytest.approx(stock[0]["metrics"][metric], rel=1e-5)
    for f in found:
        assert distance(f["weights"], stock[0]["weights"]) < 1e-4
        assert distance(steps(f), steps(stock[0])) < 1e-2
    assert [f["said"] for f in found] == [[]] * len(found)
    assert ("dualkv/tokens_packed" in metrics) == ALL[name]["packed"]

"""Reports of runs: the canary, `dualkv_observe`, the benchmark.

test_equivalence.py compares the updates of the canary's scenarios with those of veRL's own engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Results = Callable[[str], list[dict[str, Any]]]
NAME = "dualkv/packed_vs_separate"


@pytest.mark.parametrize("name", ["canary", "canary-fsdp1", "canary-trees", "dp2-canary", "sp2-canary"])
def test_the_canary_is_silent(name: str, results: Results) -> None:
    found = [f for f in results(name) if f["metrics"]]
    assert found
    assert all(0 < f["metrics"][NAME] < 1e-5 for f in found)
    assert not any("packed log-probs differ" in said for f in results(name) for said in f["said"])


def test_without_the_setting_there_is_none(results: Results) -> None:
    assert NAME not in results("dynamic-roomy")[0]["metrics"]


def test_a_planted_fault_is_seen(results: Results) -> None:
    found = results("canary-planted")[0]
    assert found["metrics"][NAME] > 1e-2
    assert any("packed log-probs differ from those of the rollouts alone by" in said for said in found["said"])


def test_observing_changes_nothing_and_says_what_packing_does(results: Results) -> None:
    plain, found, packed = (results(name)[0] for name in ("stock-of-four", "observed", "of-four"))
    assert plain["log_probs"].equal(found["log_probs"])
    assert all(torch.equal(weight, found["weights"][name]) for name, weight in plain["weights"].items())
    assert any(not torch.equal(weight, found["before"][name]) for name, weight in plain["weights"].items())
    assert not any(name.startswith("dualkv/") for name in found["metrics"])
    as_they_come, together = found["rows"]
    assert together == 2 * packed["metrics"]["dualkv/tokens_packed"]  # a mean over two updates
    assert as_they_come > together
    (text,) = found["report"]
    assert "4 training calls of FSDPQwen3ForCausalLM computed" in text
    assert f"{together:,} rows" in text


def test_bench_of_traces(results: Results) -> None:
    """Sequences of several turns, whose gradients are those of veRL's own engine."""
    stock, ours, kept, other = results("bench-traces")[0]["rows"]
    assert stock["replicated_tokens"] == ours["replicated_tokens"]
    assert 2 < ours["replicated_tokens"] / ours["metrics"]["dualkv/tokens_packed"] < 9
    assert 1 <= kept["replicated_tokens"] / kept["metrics"]["dualkv/tokens_packed"] < 2
    assert stock["gradients_from_fp32"] == 0, "the same computation once more"
    assert 0 < ours["gradients_from_fp32"] < 1e-5
    assert kept["gradients_from_fp32"] < 1e-5, "before any step"
    assert "gradients_from_fp32" not in other

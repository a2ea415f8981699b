"""The benchmark and the training of whole updates, in small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Results = Callable[[str], list[dict[str, Any]]]


def test_bench_measures_both_engines(results: Results) -> None:
    ours, fewer, stock, unfused, too_long, walked = results("bench")[0]["rows"]
    assert ours["replicated_tokens"] == stock["replicated_tokens"] == 4 * 70
    assert ours["metrics"]["dualkv/tokens_packed"] == 59 + 4 * 11
    assert fewer["metrics"]["dualkv/tokens_packed"] == 59 + 2 * 11
    for found in (stock, unfused):
        assert set(found["metrics"]) == {"mfu", "grad_norm"}
    for found in (ours, fewer, stock, unfused):
        assert len(found["seconds"]["each"]) == 1
        tokens = found["settings"]["responses"] * 70
        assert found["replicated_tokens_per_second"] == pytest.approx(tokens / found["seconds"]["median"])
    assert "30" in too_long["error"]
    assert "dualkv/walked_parts" in walked["metrics"]


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


def test_old_log_probs_of_the_bench_are_those_of_the_responses(results: Results) -> None:
    found = results("old-log-probs")[0]
    for x, y in zip(found["found"], found["wanted"], strict=True):
        assert torch.allclose(x, y, atol=1e-4)


def test_training_is_the_same_with_both_engines(results: Results) -> None:
    found = results("training")[0]
    assert found["rewarded"]["dualkv"] == found["rewarded"]["verl"]
    assert len(found["rewarded"]["verl"]) == 2


def test_training_on_recorded_rollouts_is_the_same_with_both_engines(results: Results) -> None:
    found = results("recorded")[0]["found"]
    assert len(found) == 3
    for run in found.values():
        assert run["log_probs_from_fp32"]["largest"] < 1e-4
        assert run["log_probs_apart"][1]["largest"] < 1e-3
        assert run["weights_apart"] < 1e-2
        assert run["grad_norm"] == pytest.approx(found["verl"]["grad_norm"], rel=1e-3)
        assert run["rewarded"][1] - run["rewarded"][0] > run["others"][1] - run["others"][0] + 0.1

"""Updates of policy and critic, by SkyRL's own trainer and workers on two ranks with FSDP2: packed equals stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.skyrl.ranks import RUNS
from tests.ranks import on_ranks

# Means over micro-batches, so they depend on which sequences are together.
OF_MICRO_BATCHES = {
    "policy_entropy",
    "policy_kl",
    "loss_metrics/clip_ratio",
    "minibatch_rollout_logprobs_abs_diff_mean",
    "minibatch_rollout_logprobs_abs_diff_std",
    "num_microbatches",
    "num_padding_microbatches",
    "critic_loss",
    "values_mean",
    "values_clipfrac",
}


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    on_ranks(2, "tests.integrations.skyrl.ranks:main", str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def assert_equal_metrics(ours: Any, theirs: Any, but: set[str]) -> None:
    for update, (found, expected) in enumerate(zip(ours["metrics"], theirs["metrics"], strict=True)):
        assert {"policy/policy_loss", "policy/final_loss", "policy/grad_norm"} <= expected.keys()
        assert expected["policy/grad_norm"] != 0, "weights that stay would be equal however they were trained"
        for name in expected:
            if name.partition("/")[2] not in but:
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), (update, name)


@pytest.mark.parametrize("name", RUNS)
def test_three_updates_are_the_stock_trainers(name: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        ours, theirs = found[f"{name}, packed"], found[f"{name}, stock"]
        assert len(ours["values"]) == len(theirs["values"]) == 3
        for made, expected in zip(ours["values"], theirs["values"], strict=True):
            assert len(expected) == 2  # of the policy, and of the reference or the critic
            torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
        assert ours["weights"].keys() == theirs["weights"].keys()
        for key, expected in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][key], expected, rtol=1e-4, atol=1e-5, msg=key)
        # values_clipfrac counts values that rounding alone moved from those of before.
        assert_equal_metrics(ours, theirs, OF_MICRO_BATCHES if "budget" in name else {"values_clipfrac"})


def test_all_metrics_are_those_of_the_same_micro_batches(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_equal_metrics(found["packed"], found["batches"], set())


def test_a_rank_had_padding_micro_batches(ranks: list[dict[str, Any]]) -> None:
    for update in ranks[0]["full, steps, budget, packed"]["metrics"]:
        assert update["policy/num_padding_microbatches"] > 0


def test_rows_are_counted(ranks: list[dict[str, Any]]) -> None:
    for update in ranks[0]["full, steps, budget, packed"]["metrics"]:
        assert update["policy/dualkv/tokens_packed"] < 330
        assert update["policy/dualkv/dedup_ratio"] > 2.1
    for update in ranks[0]["full, turns, critic, checkpointing, packed"]["metrics"]:
        assert update["critic/dualkv/dedup_ratio"] > 2.5

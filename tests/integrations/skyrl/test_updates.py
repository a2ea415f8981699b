"""Updates of policy and critic, by SkyRL's own trainer and workers on two ranks with FSDP2: packed equals stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.skyrl.ranks import RUNS
from tests.integrations.trainings import assert_equal_metrics, assert_equal_results, of_ranks

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
    return of_ranks("tests.integrations.skyrl.ranks:main", folder)


@pytest.mark.parametrize("name", RUNS)
def test_three_updates_are_the_stock_trainers(name: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        ours, theirs = found[f"{name}, packed"], found[f"{name}, stock"]
        assert [len(values) for values in theirs["values"]] == [2] * 3  # of the policy, and of the reference or critic
        assert_equal_results(ours, theirs, 1e-5)
        # values_clipfrac counts values that rounding alone moved from those of before.
        assert_equal_metrics(ours, theirs, OF_MICRO_BATCHES if "budget" in name else {"values_clipfrac"})
        for update in theirs["metrics"]:
            assert update.keys() >= {"policy/policy_loss", "policy/final_loss", "policy/grad_norm"}
            assert update["policy/grad_norm"] != 0, "weights that stay would be equal however they were trained"


def test_all_metrics_are_those_of_the_same_micro_batches(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_equal_metrics(found["packed"], found["batches"])


def test_a_rank_had_padding_micro_batches(ranks: list[dict[str, Any]]) -> None:
    for update in ranks[0]["full, steps, budget, packed"]["metrics"]:
        assert update["policy/num_padding_microbatches"] > 0


def test_rows_are_counted(ranks: list[dict[str, Any]]) -> None:
    for update in ranks[0]["full, steps, budget, packed"]["metrics"]:
        assert update["policy/dualkv/tokens_packed"] < 330
        assert update["policy/dualkv/dedup_ratio"] > 2.1
    for update in ranks[0]["full, turns, critic, checkpointing, packed"]["metrics"]:
        assert update["critic/dualkv/dedup_ratio"] > 2.5

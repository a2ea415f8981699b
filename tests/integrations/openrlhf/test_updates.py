"""Updates of actor and critic from rollouts, by OpenRLHF's own trainer on two ranks: packed equals stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.openrlhf.ranks import RUNS
from tests.integrations.trainings import assert_equal_metrics, assert_equal_results, of_ranks

# Sums and means over a micro-batch: OpenRLHF's means of them depend on which rollouts are together.
OF_MICRO_BATCHES = {"policy_loss", "kl", "ppo_kl", "ppo_clip_ratio", "logprobs_diff"}


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return of_ranks("tests.integrations.openrlhf.ranks:main", folder)


@pytest.mark.parametrize("name", RUNS)
def test_three_updates_are_the_stock_trainers(name: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        ours, theirs = found[f"{name}, packed"], found[f"{name}, stock"]
        assert len(theirs["values"]) == 3 * 16  # rollouts
        assert_equal_results(ours, theirs, 1e-4)
        assert_equal_metrics(ours, theirs, OF_MICRO_BATCHES if "dualkv/dedup_ratio" in ours["metrics"][0] else set())
        for update in theirs["metrics"]:
            assert update.keys() >= {"actor_grad_norm", "policy_loss", "return"}
            assert update["actor_grad_norm"] != 0, "weights that stay would be equal however they were trained"


def test_all_metrics_are_those_of_the_same_micro_batches(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_equal_metrics(found["full, ZeRO-3, packed"], found["full, ZeRO-3, batches"])


def test_rows_are_counted(ranks: list[dict[str, Any]]) -> None:
    for update in ranks[0]["full, ZeRO-3, packed"]["metrics"]:
        assert update["dualkv/tokens_packed"] < 200
        assert update["dualkv/dedup_ratio"] > 2.5

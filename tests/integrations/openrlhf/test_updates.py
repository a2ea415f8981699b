"""Updates of actor and critic from rollouts, by OpenRLHF's own trainer on two ranks: packed equals stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.openrlhf.ranks import RUNS
from tests.ranks import on_ranks

# Sums and means over a micro-batch: OpenRLHF's means of them depend on which rollouts are together.
OF_MICRO_BATCHES = frozenset({"policy_loss", "kl", "ppo_kl", "ppo_clip_ratio", "logprobs_diff"})


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    on_ranks(2, "tests.integrations.openrlhf.ranks:main", str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def assert_equal_metrics(ours: Any, theirs: Any, but: frozenset[str] = frozenset()) -> None:
    for update, (found, expected) in enumerate(zip(ours["metrics"], theirs["metrics"], strict=True)):
        names = {name for name in expected if not name.startswith("dualkv/")}
        assert names >= {"actor_grad_norm", "policy_loss", "return"}
        assert expected["actor_grad_norm"] != 0, "weights that stay would be equal however they were trained"
        for name in names - but:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4, nan_ok=True), (update, name)


@pytest.mark.parametrize("name", RUNS)
def test_three_updates_are_the_stock_trainers(name: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        ours, theirs = found[f"{name}, packed"], found[f"{name}, stock"]
        assert len(ours["values"]) == len(theirs["values"]) == 3 * 16  # rollouts
        for made, expected in zip(ours["values"], theirs["values"], strict=True):
            torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
        assert ours["weights"].keys() == theirs["weights"].keys()
        for key, expected in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][key], expected, rtol=1e-4, atol=1e-4, msg=key)
        assert_equal_metrics(
            ours, theirs, OF_MICRO_BATCHES if "dualkv/dedup_ratio" in ours["metrics"][0] else frozenset()
        )


def test_all_metrics_are_those_of_the_same_micro_batches(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_equal_metrics(found["full, ZeRO-3, packed"], found["full, ZeRO-3, batches"])


def test_rows_are_counted(ranks: list[dict[str, Any]]) -> None:
    for update in ranks[0]["full, ZeRO-3, packed"]["metrics"]:
        assert update["dualkv/tokens_packed"] < 200
        assert update["dualkv/dedup_ratio"] > 2.5

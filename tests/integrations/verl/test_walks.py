"""Walked groups: what ran. That results are those of veRL is in test_equivalence.py, by the names of scenarios."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualkv.data.memory import Memory, RowCosts
from dualkv.integrations.verl import walked
from dualkv.integrations.verl.data import read
from dualkv.integrations.verl.work import rollouts_by_tag
from tests.integrations.verl.rollouts import make_rollouts
from tests.integrations.verl.scenarios import LONG_PROMPTS, ONE, TWO, WALKS, reference
from tests.integrations.verl.test_equivalence import SCORES, distance, of_all_ranks, steps

Results = Callable[[str], list[dict[str, Any]]]
NAMES = [name for name, settings in (ONE | TWO).items() if settings.get("walk")]
ROW = RowCosts(kept=1024.0, path=512.0, graph=8000.0, recomputed=2000.0)


def apart(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[float]:
    """The largest differences: of values, and the relative ones of weights and of steps, on each rank of `a`."""
    values = [of_all_ranks(a, what) - of_all_ranks(b, what) for what in SCORES if what in b[0]]
    of_weights = [distance(f["weights"], b[0]["weights"]) for f in a]
    return [*(float(x.abs().max()) for x in values), *of_weights, *(distance(steps(f), steps(b[0])) for f in a)]


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_in_fp64_nothing_is_left_of_a_difference(name: str, results: Results) -> None:
    """The weights of a walk are up to 5e-5 from veRL's own in fp32: AdamW divides a gradient that is next to 0 by its
    own size, rounding included."""
    found = results(f"{name}-fp64")
    others = [f"{reference(name)}-fp64", f"{name}-one-row-fp64"]
    assert all("error" not in f and f["metrics"]["dualkv/walked_parts"] >= 0.5 for f in found)
    assert {x.dtype for x in found[0]["weights"].values()} == {torch.float64}
    for other in others if len(found) == 1 else others[:1]:
        assert max(apart(found, results(other))) < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_large_groups_are_walked(name: str, results: Results) -> None:
    """The metrics are means over updates, and over ranks."""
    for found in results(name):
        assert found["metrics"]["dualkv/walked_parts"] >= 0.5


def test_no_prompt_of_a_walked_group_is_repeated(results: Results) -> None:
    rollouts = read(make_rollouts(LONG_PROMPTS, 1, 0))
    rows = [rollouts.select(np.arange(at, at + 8)).packed_once.tokens for at in (0, 8)]
    for name in ("walk-fsdp1", "walk-moe-fused", "walk-sequence-loss", "walk-critic"):
        assert results(name)[0]["metrics"]["dualkv/tokens_packed"] == sum(rows) / 2


@pytest.mark.parametrize("name", ["walk-moe-fused", "dp2-walk"])
def test_the_canary_sees_no_difference(name: str, results: Results) -> None:
    assert results(name)[0]["metrics"]["dualkv/packed_vs_separate"] < 1e-5


def test_responses_stay_whole_where_that_takes_less_than_a_pass_ahead() -> None:
    """There is room for parts of some 70 rows behind a prompt of 300: enough for one response, too few for another."""
    for responses, whole in (([7, 3, 12, 9, 30], True), ([7, 3, 12, 9, 85], False)):
        data = make_rollouts({"groups": [(300, responses)]}, 1, 0)
        rollouts, memory = read(data), Memory(300.5 * ROW.recomputed, ROW)
        assert walked.is_large(rollouts, 300)
        batches = [walked.PlannedBatch([0, 1, 2, 3, 4], "walked", 1, 0)]
        (unit,) = walked.units(data, rollouts, batches, memory, "cpu")
        assert unit.whole == whole
        assert len(unit.parts) > 1
        assert sorted(np.concatenate([unit.members(part) for part in unit.parts]).tolist()) == [0, 1, 2, 3, 4]
        tokens = np.concatenate([unit.tokens_of(part) for part in unit.parts])
        assert sorted(tokens.tolist()) == list(range(sum(responses)))


def test_a_group_is_large_by_its_own_rows() -> None:
    rollouts = rollouts_by_tag(["a", "a", "b"], [10, 10, 10], [5, 5, 5])
    assert walked.is_large(rollouts, 20)
    assert not walked.is_large(rollouts, 21), "of which the other group is no part"


def test_a_walk_may_take_a_tenth_more_than_micro_batches_with_all_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(10, 25, bias=False)  # 1,000 bytes
    engine = SimpleNamespace(module=module)

    def found(forward_only: bool = False) -> float:
        return walked.WalksBatches._walk_bytes(engine, forward_only, 3000.0)

    assert found() == pytest.approx(3500)
    assert found(forward_only=True) == pytest.approx(3400)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 6000)
    for free, taken in ((9000, 4000), (3700, 3700), (2000, 3000)):
        monkeypatch.setattr(walked, "room", lambda _device, to_come, free=free: free if to_come == 1000 else 0)
        assert found() == pytest.approx(taken), "of what is free, and no less than micro-batches take"
    module.weight.grad = torch.zeros(25, 10)
    monkeypatch.setattr(walked, "room", lambda _device, to_come: 9000 if to_come == 0 else 0)
    assert found() == pytest.approx(3900)

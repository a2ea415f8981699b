"""The canary of veRL's engine: silent where all is right, and it sees a planted fault.

test_equivalence.py compares the updates of these scenarios with those of veRL's own engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Results = Callable[[str], list[dict[str, Any]]]
NAME = "dualkv/packed_vs_separate"


@pytest.mark.parametrize("name", ["canary", "canary-fsdp1", "canary-trees", "dp2-canary", "sp2-canary"])
def test_it_is_silent(name: str, results: Results) -> None:
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


def test_another_number_of_steps_is_refused(results: Results) -> None:
    assert results("canary-never")[0]["error"] == (
        "ValueError: fused_kernel_options.dualkv_canary is 0, expected a number of updates, 1 or more"
    )

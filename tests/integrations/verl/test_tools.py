"""The benchmark and the training that docs/verl.md names, in small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("verl", reason="veRL is not installed here: make test-verl")

Results = Callable[[str], list[dict[str, Any]]]


def test_bench_measures_both_engines(results: Results) -> None:
    ours, verls = results("bench")[0], results("bench-verl")[0]
    assert ours["replicated_tokens"] == verls["replicated_tokens"] == 4 * 70
    assert ours["metrics"]["dualkv/tokens_packed"] == 59 + 4 * 11
    assert set(verls["metrics"]) == {"mfu"}
    for found in (ours, verls):
        assert len(found["seconds"]["each"]) == 1
        assert found["replicated_tokens_per_second"] == pytest.approx(280 / found["seconds"]["median"])


def test_training_is_the_same_with_both_engines(results: Results) -> None:
    found = results("training")[0]
    assert found["rewards"]["dualkv"] == found["rewards"]["verl"]
    assert len(found["rewards"]["verl"]) == 2
    assert "</svg>" in found["picture"]

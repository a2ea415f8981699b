"""The benchmark of veRL, in small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Results = Callable[[str], list[dict[str, Any]]]


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

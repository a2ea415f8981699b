"""The benchmark of veRL's Megatron engine (tools/bench/verl_megatron), in small, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.documents import parse

Results = Callable[[str], list[dict[str, Any]]]


def check(rows: list[dict[str, Any]], ranks: int) -> None:
    """The rows of both engines are of the same updates of `ranks` data-parallel ranks, and have the same results."""
    first = rows[0]["metrics"]
    for row in rows:
        assert "error" not in row
        assert row["replicated_tokens"] == ranks * 4 * 70
        assert len(row["seconds"]["each"]) == 1
        assert row["metrics"]["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
        assert row["logp_from_first"]["max"] < 1e-5 < row["logp_from_first"]["deviation"]
        packed = row["settings"]["engine"] == "dualkv"
        assert row["metrics"].get("dualkv/tokens_packed") == (59 + 4 * 11 if packed else None)


def test_data_parallel(results: Results) -> None:
    *stock, packed, shared, too_long = results("bench")[0]["rows"]
    check([*stock, packed], 2)
    assert shared["settings"]["context_parallel"] == 2
    check([shared], 1)
    assert "30" in too_long["error"]


@pytest.mark.parametrize("name", ["bench-tensor", "bench-pipeline"])
def test_ranks_of_one_model(name: str, results: Results) -> None:
    for found in results(name):
        check(found["rows"], 1)


def test_options_are_taken() -> None:
    """The benchmark takes the options that its help shows."""
    options = ["--model", "qwen3-8b", "--layers", "8", "--rows", "rows.json", "--json", "o.json"]
    parse(["python", "-m", "tools.bench.verl_megatron", *options])

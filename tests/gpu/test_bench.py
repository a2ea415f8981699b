"""The benchmark on a GPU: its sides compute the same, and every figure is there."""

from __future__ import annotations

import json

from dualkv.bench.workloads import DIRECTIONS
from dualkv.cli import commands


def test_a_run(tmp_path):
    """The run leaves out flash-attn-4, which may be missing, and FlexAttention, which takes long to compile."""
    path = tmp_path / "bench.json"
    words = ["bench", "-w", "700:130,911;1:5;40:", "-d", ",".join(DIRECTIONS), "--seconds", "0.1", "--rounds", "1"]
    words += ["-s", "dualkv", "-s", "dualkv-deterministic", "-s", "torch-flash-replicated", "--json", str(path)]
    commands.app(words, standalone_mode=False)
    results = json.loads(path.read_text())["results"]
    assert [result["direction"] for result in results] == list(DIRECTIONS)
    for result in results:
        for name, side in result["sides"].items():
            assert "error" not in side, f"{result['direction']} {name}: {side['error']}"
            assert side["sustained_ms"] > 0
            assert side["cold_ms"] > 0
        assert result["sides"]["torch-flash-replicated"]["difference"] < 0.02

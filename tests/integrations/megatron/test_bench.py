"""The benchmark of megatron-core (tools/bench/megatron), in small, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core import tensor_parallel

from dualkv.models import CONFIGS
from tests.integrations.megatron import cpu
from tests.ranks import on_ranks
from tools.bench import megatron as bench
from tools.bench import walk
from tools.bench.megatron_costs import Group, Model, Nets
from tools.bench.walk_megatron import MegatronRunner

TINY = Model(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocabulary=64)


def main(number: int, file: str) -> None:
    """Run the benchmark on a rank."""
    run = bench.Run(TINY, 2, 1, 1, 4, torch.float32, False, torch.device("cpu"))
    with (
        cpu.rank(),
        mock.patch.object(tensor_parallel, "model_parallel_cuda_manual_seed"),
        mock.patch.object(bench, "SMALL", TINY),
        mock.patch.object(bench, "SMALL_GROUP", Group(3, 6, 4, groups=4)),
    ):
        *_, (figures, _) = bench.measure_ranks(run, Group(3, 5, 4))
    if number == 0:
        Path(file).write_text(json.dumps(figures))


@pytest.mark.parametrize("nets", [None, Nets(key_heads=8, value_heads=8, key_dim=8, value_dim=8, interval=2)])
def test_all_ways_compute_the_same(nets: Nets | None) -> None:
    layers = 1 if nets is None else 2
    model = Model(layers, hidden=32, intermediate=48, heads=8, kv_heads=2, head_dim=8, vocabulary=64, nets=nets)
    run = bench.Run(model, 2, 1, 1, 4, torch.float32, False, torch.device("cpu"))
    cases = {"one": Group(4, 6, 3), "two": Group(2, 5, 4, groups=2)}
    with mock.patch.object(tensor_parallel, "model_parallel_cuda_manual_seed"):
        *_, (figures, _) = bench.measure(run, cases, list(bench.WAYS))
    assert figures["cases"].keys() == cases.keys()
    for case in figures["cases"].values():
        assert list(case["rows"]) == ["packed", "replicated"]
        assert all(row["logp_rms_from_first_way"] < 1e-6 for row in case["rows"].values()), case["rows"]


def test_walks_compute_what_cutting_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(CONFIGS, "small", sizes | {"head_dim": 16, "vocab_size": 64, "num_hidden_layers": 4})
    asked = walk.Sizes("small", 2, 1, 16, "float32")
    with mock.patch.object(tensor_parallel, "model_parallel_cuda_manual_seed"):
        runner = MegatronRunner(asked, torch.device("cpu"))
        *_, figures = walk.measure(asked, ["60x6x8@76:1.1"], list(walk.PARTS), runner.device, runner)
    for ways in figures["jobs"]["60x6x8@76:1.1"]["parts"].values():
        assert list(ways) == ["cut", "walked"]
        assert ways["walked"]["parts"] > 1
        assert all(way["sum"] == pytest.approx(ways["cut"]["sum"], rel=1e-4) for way in ways.values())


def test_ranks_compute_what_one_does(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    on_ranks(2, "tests.integrations.megatron.test_bench:main", str(file))
    figures = json.loads(file.read_text())
    assert {kind: made["groups"] for kind, made in figures["rows"].items()} == {
        "one": 1, "tensor": 1, "context": 1, "gathered": 1, "pipeline": 4, "data": 2,
    }  # fmt: skip
    exact = {name: found for name, found in figures["check"].items() if name.endswith("float32")}
    assert len(exact) == len(bench.LAYOUTS)
    assert all(found["logp"] < 1e-5 and found["gradients"] < 1e-5 for found in exact.values()), exact
    assert any(found["gradients"] > 0 for found in exact.values()), exact

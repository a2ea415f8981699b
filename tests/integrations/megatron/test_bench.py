"""The benchmarks of steps and walks with megatron-core's model, in small, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from megatron.core import tensor_parallel

from dualkv.models import CONFIGS
from tools.bench import step, walk
from tools.bench.megatron import MegatronRunner

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_a_gpu() -> Iterator[None]:
    with mock.patch.object(tensor_parallel, "model_parallel_cuda_manual_seed"):
        yield


@pytest.mark.parametrize(("model", "layers"), [("tiny", 1), ("tiny-hybrid", 4)])
def test_both_ways_compute_the_same(model: str, layers: int) -> None:
    sizes = step.Update(model, layers, responses=4, prompt_len=6, response_len=3, micro_batch=2, repeats=1,
                        chunk_size=4, dtype="float32")  # fmt: skip
    *_, figures = step.measure(sizes, ["packed", "replicated"], CPU, megatron=True)
    assert all(row["logp_rms_from_first_row"] < 1e-6 for row in figures["rows"].values()), figures["rows"]


def test_walks_compute_what_cutting_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    small = sizes | {"model_type": "qwen3", "head_dim": 16, "vocab_size": 64, "num_hidden_layers": 4}
    monkeypatch.setitem(CONFIGS, "small", small)
    asked = walk.Sizes("small", 2, 1, 16, "float32")
    runner = MegatronRunner(asked, CPU)
    *_, figures = walk.measure(asked, ["60x6x8@76:1.1"], list(walk.PARTS), CPU, runner)
    for ways in figures["jobs"]["60x6x8@76:1.1"]["parts"].values():
        assert list(ways) == ["cut", "walked"]
        assert ways["walked"]["parts"] > 1
        assert all(way["sum"] == pytest.approx(ways["cut"]["sum"], rel=1e-4) for way in ways.values())

"""The benchmark of FP8 products (tools/bench/fp8), in small: what holds of packed rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchao", reason="torchao, which emulates FP8 on CPUs, is not installed")

from tools.bench import fp8

SIZES = fp8.Sizes(layers=2, prompts=(24, 9), responses=(8, 5))
pytestmark = pytest.mark.filterwarnings("ignore:dualkv. Qwen3Model has .* layers of the class Float8Linear")


@pytest.mark.parametrize("recipe", [None, *fp8.RECIPES])
def test_packed_rows_are_within_the_noise_of_fp8(recipe):
    found = fp8.measure(SIZES, torch.float32, recipe)
    if recipe is None:
        assert max(value for distances in found.values() for value in distances.values()) < 1e-5
        return
    log_probs, gradients = found["log_probs"], found["gradients"]
    assert log_probs["noise"] > 1e-3
    assert gradients["noise"] > 1e-2
    if recipe == "tensorwise":  # what a micro-batch holds matters, packed or not
        assert 1e-4 < log_probs["packed"] < 2 * log_probs["noise"]
        assert log_probs["micro_batches"] > 1e-4
        assert gradients["packed"] < 2 * gradients["noise"]
    else:
        assert log_probs["packed"] < 1e-5
        assert 1e-4 < gradients["packed"] < gradients["noise"] / 2
    assert gradients["noise_packed"] < 1.5 * gradients["noise"]

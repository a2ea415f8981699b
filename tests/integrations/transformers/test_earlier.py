"""Tests of the parts of packed recurrent layers of transformers before 5.17. The layers: verl/test_earlier.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from dualkv.integrations.recurrent import rules
from dualkv.integrations.transformers.recurrent import earlier


def test_fast_decays_give_no_nan() -> None:
    """exp(-A dt) of a pair of rows in the wrong order would overflow."""
    x, dt = torch.randn(1, 32, 1, 2, requires_grad=True), torch.full((1, 32, 1), 50.0, requires_grad=True)
    b = torch.randn(1, 32, 1, 2)
    out = rules.chunk_scan(x, dt, torch.tensor([-16.0]), b, b, chunk_size=32)
    out.sum().backward()
    for found in (out, x.grad, dt.grad):
        assert found is not None
        assert found.isfinite().all()


class Qwen3NextGatedDeltaNet:
    """A layer as it was before 5.17."""

    causal_conv1d_fn: Any
    chunk_gated_delta_rule: Any

    def forward(self, x: Any) -> Any:
        return self.chunk_gated_delta_rule(self.causal_conv1d_fn(x))


def test_small_copies_are_built_without_libraries() -> None:
    """A norm of flash-linear-attention cannot be built without a GPU, and does not run on the CPU."""
    file = SimpleNamespace(Qwen3NextGatedDeltaNet=Qwen3NextGatedDeltaNet, FusedRMSNormGated=object, other=1)
    with earlier.without_libraries(file):
        assert file.FusedRMSNormGated is None
        assert not hasattr(file, "chunk_gated_delta_rule")
    assert file.FusedRMSNormGated is object
    newer = SimpleNamespace(FusedRMSNormGated=object)
    with earlier.without_libraries(newer):
        assert newer.FusedRMSNormGated is object

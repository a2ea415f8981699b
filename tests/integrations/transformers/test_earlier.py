"""Tests of the parts of packed recurrent layers of transformers before 5.17. The layers: verl/test_earlier.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from dualkv.integrations.recurrent import rules
from dualkv.integrations.transformers import earlier


@pytest.mark.parametrize("starts", [False, True])
def test_chunk_scan(starts: bool) -> None:
    """Results, states and gradients, against the recurrence row by row."""
    n, length, heads, dim, groups, size = 2, 37, 4, 3, 2, 5
    draw = {"dtype": torch.float64, "requires_grad": True}
    x, d = torch.randn(n, length, heads, dim, **draw), torch.randn(heads, **draw)
    dt, decay = torch.rand(n, length, heads, **draw), (-torch.rand(heads, dtype=torch.float64)).requires_grad_()
    b, c = (torch.randn(n, length, groups, size, **draw) for _ in range(2))
    initial = torch.randn(n, heads, dim, size, **draw) if starts else None
    state = torch.zeros(n, heads, dim, size, dtype=torch.float64) if initial is None else initial
    keys, queries = (y.repeat_interleave(heads // groups, 2) for y in (b, c))
    rows = []
    for t in range(length):
        grown = (dt[:, t, :, None] * x[:, t])[..., None] * keys[:, t, :, None]
        state = state * torch.exp(dt[:, t] * decay)[..., None, None] + grown
        rows.append((state * queries[:, t, :, None]).sum(-1) + d[:, None] * x[:, t])
    expected = [torch.stack(rows, 1), state]
    found = rules.chunk_scan(x, dt, decay, b, c, chunk_size=16, D=d, initial_states=initial, return_final_states=True)
    leaves = [y for y in (x, dt, decay, b, c, d, initial) if y is not None]
    weights = [torch.randn_like(y) for y in expected]
    grads = [torch.autograd.grad(outs, leaves, weights) for outs in (found, expected)]
    for got, wanted in zip([*found, *grads[0]], [*expected, *grads[1]], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_fast_decays_give_no_nan() -> None:
    """exp(-A dt) of a pair of rows in the wrong order would overflow."""
    x, dt = torch.randn(1, 32, 1, 2, requires_grad=True), torch.full((1, 32, 1), 50.0, requires_grad=True)
    b = torch.randn(1, 32, 1, 2)
    out = rules.chunk_scan(x, dt, torch.tensor([-16.0]), b, b, chunk_size=32)
    out.sum().backward()
    for found in (out, x.grad, dt.grad):
        assert found is not None
        assert found.isfinite().all()


@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution(activation: str | None) -> None:
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3, 7), (3, 4), (3,)))
    expected = torch.zeros_like(x)
    for t in range(7):
        for tap in range(4):
            if (at := t - 3 + tap) >= 0:
                expected[:, :, t] += weight[:, tap] * x[:, :, at]
    expected += bias[:, None]
    expected = expected if activation is None else expected * expected.sigmoid()
    torch.testing.assert_close(rules.convolution(x, weight, bias, activation), expected)
    with pytest.raises(ValueError, match="has the activation 'gelu' behind its convolution, expected silu"):
        rules.convolution(x, weight, bias, "gelu")


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

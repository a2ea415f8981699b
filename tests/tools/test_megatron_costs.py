"""Costs of packed groups against counts by hand."""

from __future__ import annotations

from tools.bench.megatron_costs import Group, Model, flops, saving

MODEL = Model(layers=2, hidden=16, intermediate=24, heads=4, kv_heads=2, head_dim=8, vocabulary=32)
GROUP = Group(3, 8, 4)


def test_flops_of_a_group() -> None:
    """The FLOP equal those counted by hand: 20 packed rows, 12 of them of responses; pairs of a triangle count half of
    a square."""
    weights = 2 * (2 * (4 + 2) * 8 * 16 + 3 * 16 * 24)
    pairs = 32 + 3 * (32 + 8)
    expected = 6 * (weights * 20 + 16 * 32 * 12) + 12 * pairs * 2 * 4 * 8
    assert flops(MODEL, GROUP, True) == expected
    assert saving(MODEL, Group(32, 8192, 2048)) > 2

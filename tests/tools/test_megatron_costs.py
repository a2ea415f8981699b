"""Costs of packed groups and of context-parallel ranks against counts over a layout."""

from __future__ import annotations

import pytest
import torch

import dualkv
from tools.bench.megatron_costs import (
    Group,
    Model,
    flops,
    flops_of_rank,
    predicted_by,
    saving,
)

MODEL = Model(layers=2, hidden=16, intermediate=24, heads=4, kv_heads=2, head_dim=8, vocabulary=32)
GROUPS = Group(3, 8, 4), Group(2, 5, 7, groups=3), Group(4, 1, 1)


def batch_of(group: Group) -> dualkv.PackedBatch:
    prompts = [torch.full((group.prompt_len,), g) for g in range(group.groups)]
    responses = [[torch.zeros(group.response_len, dtype=torch.int64)] * group.responses] * group.groups
    return dualkv.pack(prompts, responses)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tokens_that_each_rank_predicts(group: Group, ranks: int) -> None:
    rows = batch_of(group).predict_rows // -(-group.rows(True) // ranks)
    assert [predicted_by(group, ranks, rank) for rank in range(ranks)] == rows.bincount(minlength=ranks).tolist()


def test_flops_of_ranks_are_those_of_one() -> None:
    for group in GROUPS:
        assert sum(flops_of_rank(MODEL, group, 4, rank) for rank in range(4)) == pytest.approx(
            flops(MODEL, group, True)
        )


def test_flops_of_a_group() -> None:
    """The FLOP equal those counted by hand: 20 packed rows, 12 of them of responses; pairs of a triangle count half of
    a square."""
    weights = 2 * (2 * (4 + 2) * 8 * 16 + 3 * 16 * 24)
    pairs = 32 + 3 * (32 + 8)
    expected = 6 * (weights * 20 + 16 * 32 * 12) + 12 * pairs * 2 * 4 * 8
    assert flops(MODEL, GROUPS[0], True) == expected
    assert saving(MODEL, Group(32, 8192, 2048)) > 2

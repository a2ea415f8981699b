"""Tests of the interface under `dualkv=`: every kind of packed rows is some rows of the whole batch."""

from __future__ import annotations

import pytest
import torch

import dualkv
from dualkv.branches import Branch
from dualkv.data.parts import plan_parts
from dualkv.packed_rows import packed_rows
from dualkv.sequence_parallel import Shard

SEQUENCES = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7, 8, 9, 3], [4, 4]]
BATCH = dualkv.pack_sequences([torch.tensor(ids) for ids in SEQUENCES])
LAYOUT = BATCH.layout


def of_a_walk() -> list[object]:
    branches: list[Branch] = []
    for part in plan_parts(BATCH, 3):
        branches.append(Branch(part, [branches[index] for index, _ in part.path]))
    assert len(branches) > 2
    return [*branches]


@pytest.mark.parametrize(
    "calls", [[LAYOUT], [Shard(LAYOUT, None)], of_a_walk()], ids=["layout", "one rank", "parts of a walk"]
)
def test_calls_compute_their_rows_of_the_batch(calls: list[object]) -> None:
    q, k, v = torch.randn(3, LAYOUT.num_tokens, 2, 8, generator=torch.Generator().manual_seed(0))
    expected = dualkv.attention(q, k, v, LAYOUT, 0.5, window=3)
    seen: list[int] = []
    for given in calls:
        packed = packed_rows(given)
        rows = torch.arange(LAYOUT.num_tokens) if packed.rows is None else packed.rows
        assert packed.whole == LAYOUT
        assert packed.of_layers is given
        assert torch.equal(packed.position_ids, LAYOUT.position_ids[rows])
        found = packed.attention_of("layer")(q[rows], k[rows], v[rows], softmax_scale=0.5, window=3)
        torch.testing.assert_close(found, expected[rows])
        seen += rows.tolist()
    assert sorted(seen) == list(range(LAYOUT.num_tokens))


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^dualkv is a list, expected a dualkv\.Layout$"):
        packed_rows([8])

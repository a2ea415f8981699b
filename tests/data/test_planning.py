"""Plans of micro-batches in a limit of memory (dualkv/data/planning)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkv
from dualkv import Memory, RowCosts
from dualkv.data.memory import PASS

pytestmark = pytest.mark.usefixtures("one_thread")
ROW = RowCosts(kept=10, path=5, graph=400, recomputed=100)


def group(prompt: int, lengths: list[int], first: int = 1000) -> list[list[int]]:
    shared = list(range(first, first + prompt))
    return [[*shared, *range(first + 500 * (i + 1), first + 500 * (i + 1) + n)] for i, n in enumerate(lengths)]


def plan(sequences: list[list[int]], rows: int, row: RowCosts = ROW, **settings: int) -> dualkv.MemoryPlan:
    """The plan in the memory of so many recomputed rows."""
    return dualkv.plan_in_memory(sequences, Memory(100 * rows, row), **settings)


def ways(made: dualkv.MemoryPlan) -> list[str]:
    return [batch.way for batch in made.batches]


def test_each_way_where_it_takes_the_least_time(monkeypatch):
    monkeypatch.setattr("dualkv.data.memory.PASS", PASS / 32)  # as if all lengths were larger
    long = group(1600, [100] * 8)
    made = plan(long, 1800)
    assert ways(made) == ["walked"]
    assert "is walked in" in made.reasons[0]
    assert "times as fast as cutting it (4 micro-batches with 7,200 rows)" in made.reasons[0]
    short = group(40, [400] * 8)
    wide = ROW._replace(graph=3000)  # keeping all is worth nothing
    made = plan(short, 1800, wide)
    assert ways(made) == ["cut", "cut"]
    assert made.reasons == [str(made).partition("; ")[2]]
    assert made.reasons[0].endswith("is cut: a walk would be 1.01 times as fast")
    assert ways(plan(short, 4000, wide)) == ["packed"]
    made = plan(long, 2600)
    assert ways(made) == ["walked"]
    assert made.reasons[0].endswith("times as fast as one pass")
    apart = [*group(2, [400, 400]), *group(9, [50, 50], first=7000)]
    made = plan(apart, 4000)
    assert sorted(ways(made)) == ["alone", "packed"]
    assert made.reasons == ["2 sequences are left alone: sharing would save less than 2%"]
    assert [b.sequences for b in made.batches if b.way == "alone"] == [[0, 1]]


def test_a_sequence_larger_than_a_pass_is_walked_alone():
    made = plan(group(600, [600]), 700)
    assert ways(made) == ["walked"]
    assert made.reasons[0].endswith("a sequence alone does not fit")
    with pytest.raises(ValueError, match=r"memory is 1,000 bytes.*sequence of 1,200 tokens, not even in parts"):
        plan(group(600, [600]), 10)
    with pytest.raises(TypeError, match=r"memory is a int, expected a dualkv\.Memory"):
        dualkv.plan_in_memory([[1, 2]], 100)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=9),
    st.integers(20, 120),
    st.sampled_from([1, 3]),
)
def test_plans_hold_every_sequence_once_and_fit(sequences, rows, min_shared):
    memory = Memory(100 * rows, ROW)
    if max(map(len, sequences)) > rows // 2:  # a walk may not fit, either
        return
    made = dualkv.plan_in_memory(sequences, memory, min_shared=min_shared)
    assert sorted(i for batch in made.batches for i in batch.sequences) == list(range(len(sequences)))
    for batch in made.batches:
        packed = dualkv.pack_sequences([sequences[i] for i in batch.sequences], min_shared=batch.min_shared)
        assert (batch.way == "alone") <= (packed.layout.num_tokens == sum(len(sequences[i]) for i in batch.sequences))
        if batch.way != "walked":
            assert packed.layout.num_tokens <= batch.rows <= rows
        dualkv.data.parts.plan_parts(packed, memory)  # it fits


def test_the_loop_of_the_docstring_is_exact():
    """Cut, walked and packed batches together have the gradients of separate sequences."""
    sequences = [*group(120, [9, 8, 9]), *group(5, [30, 40, 20], first=5000), [1, 2, 3]]
    sequences = [(np.array(s) % 61).tolist() for s in sequences]
    torch.manual_seed(0)
    table = torch.randn(61, 2, 8, dtype=torch.float64, requires_grad=True)

    def forward(ids, branch):
        x = table[ids[0]]
        return branch.attention(x, x, x, layer=0).flatten(1)[None]

    def loss(hidden, part):
        return part.expand(hidden[0, part.predict_rows].pow(3).sum(-1)).sum()

    def gradient(batches, budget):
        table.grad = None
        total = sum(dualkv.walk(dualkv.pack_sequences(*one), budget, forward, loss) for one in batches)
        return total, table.grad

    wanted = gradient([([s], None) for s in sequences], 1000)
    memory = Memory(100 * 90, ROW)
    made = dualkv.plan_in_memory(sequences, memory)
    assert {"walked"} < set(ways(made))
    assert made.time > 0
    found = gradient([([sequences[i] for i in b.sequences], None) for b in made.batches], memory)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)

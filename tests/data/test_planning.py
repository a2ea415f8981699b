"""Plans of micro-batches in a limit of memory (dualkv/data/planning)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkv
from dualkv import Memory, RowCosts
from dualkv.data import memory
from dualkv.data.parts import costed, fitting, plan_parts

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
    for name in ("PASS_BACKWARD", "LEAST_PASS"):  # as if all lengths were larger
        monkeypatch.setattr(memory, name, getattr(memory, name) / 128)
    long = group(1600, [100] * 8)
    made = plan(long, 1800)
    assert ways(made) == ["walked"]
    assert "is walked in" in made.reasons[0]
    assert "times as fast as cutting it (4 micro-batches with 7,200 rows)" in made.reasons[0]
    short = group(40, [400] * 8)
    wide = ROW._replace(graph=30000)  # keeping all is worth nothing
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
    limit = Memory(100 * rows, ROW)
    if max(map(len, sequences)) > rows // 2:  # a walk may not fit, either
        return
    made = dualkv.plan_in_memory(sequences, limit, min_shared=min_shared)
    assert sorted(i for batch in made.batches for i in batch.sequences) == list(range(len(sequences)))
    for batch in made.batches:
        packed = dualkv.pack_sequences([sequences[i] for i in batch.sequences], min_shared=batch.min_shared)
        assert (batch.way == "alone") <= (packed.layout.num_tokens == sum(len(sequences[i]) for i in batch.sequences))
        if batch.way != "walked":
            assert packed.layout.num_tokens == batch.rows <= rows
        plan_parts(packed, limit)  # it fits


def test_rows_of_a_cut_tree_are_those_of_its_parts_alone():
    """Four share [:3] and not [:2] where the second sequence is missing, and the next token of three is too short."""
    sequences = [[2, 2, 1, 0, 0], [2, 2, 0, 1], [2, 0, 1, 2], [2, 2, 1, 0, 1], [2, 2, 1, 0, 2], [2, 2, 1, 2, 1, 1]]
    made = dualkv.plan_in_memory(sequences, Memory(11, RowCosts(0, 0, 1, 1)), min_shared=2)
    for batch in made.batches:
        packed = dualkv.pack_sequences([sequences[i] for i in batch.sequences], min_shared=batch.min_shared)
        assert packed.layout.num_tokens == batch.rows <= 11


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
    limit = Memory(100 * 90, ROW)
    made = dualkv.plan_in_memory(sequences, limit)
    assert {"walked"} < set(ways(made))
    assert made.time > 0
    found = gradient([([sequences[i] for i in b.sequences], None) for b in made.batches], limit)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_path_takes_what_the_layer_with_the_most_takes():
    """Layers run some KV heads at a time behind long paths: 5 of 8, and 1 of 2."""
    weight = torch.ones(1, 8, 8, requires_grad=True)

    def forward(ids, branch):
        x = ids[0, :, None, None] * weight
        for layer, heads in enumerate((8, 2)):
            x = branch.attention(x, x[:, :heads], x[:, :heads], layer=layer)
        return x.flatten(1)[None]

    found = dualkv.measure_rows(forward, torch.arange(9), rows=16)
    assert (found.kv_heads, found.other_heads) == (8, ((2, (2 * 10 * 16 * 4 + 256) / (2 * 16 * 16 * 4 + 256)),))
    assert found.of_path(49152) == found.path * 49152 * 5 / 8
    assert found._replace(other_heads=((1, 0.9),)).of_path(49152) == pytest.approx(found.path * 49152 * 0.9)
    with pytest.raises(ValueError, match="other_heads is 0, expected a positive number"):
        Memory(1, found._replace(other_heads=((0, 0.9),)))
    for name, value in (("recomputed", None), ("head", "1"), ("beside_path", 1.0), ("saved", (1.0,))):
        with pytest.raises(TypeError, match=f"{name} is .*, expected a"):
            Memory(1, found._replace(**{name: value}))


# ---------------------------------------------------------------- 8 layers of Qwen3-8B, as recorded on an H200
LAYERS = RowCosts(98_304, 58_877, 1_829_720, 346_949, 23_553, 1, 0, (1_660_000, 221_000), (1_772_000, 106_500))
HEAD = 3.745e9
RECORDED = [  # rows of trunks, own rows of the largest part, whether layers keep all, with the head, bytes at the peak
    (24576, 8192, False, False, 5_686_390_272),
    (24576, 4096, False, False, 4_766_870_016),
    (24576, 4096, True, False, 10_674_096_640),
    (24576, 2048, True, False, 7_258_476_544),
    (28672, 8192, False, False, 6_326_288_384),
    (28672, 4096, True, False, 11_318_214_144),
    (65536, 8192, False, False, 12_093_320_704),
    (24576, 8192, False, True, 7_036_473_856),
    (24576, 4096, False, True, 6_597_927_424),
    (24576, 2048, True, True, 9_789_874_688),
    (28672, 2048, True, True, 10_182_607_360),
    (65536, 8192, False, True, 12_092_272_128),
]


@pytest.mark.parametrize(("prompt", "own", "keeps_all", "has_head", "peak"), RECORDED)
def test_bytes_of_a_pass_are_those_recorded(prompt, own, keeps_all, has_head, peak):
    limit = Memory(1, LAYERS._replace(head=HEAD))
    assert limit.of_pass(prompt, prompt, own, keeps_all, has_head) == pytest.approx(peak, rel=0.015)


WALKED = [  # rows of trunks, of a part, whether layers keep all, seconds of layers
    (24576, 8192, False, 2.734),
    (24576, 4096, False, 2.891),
    (24576, 2048, True, 2.567),
    (28672, 8192, False, 3.103),
    (28672, 2048, True, 2.958),
]


@pytest.mark.parametrize(("prompt", "own", "keeps_all", "seconds"), WALKED)
def test_times_of_walks_are_those_recorded(prompt, own, keeps_all, seconds):
    parts = plan_parts(dualkv.pack_sequences(*_of_shape(prompt, 16, 2048)), own)
    found = costed(parts, Memory(2**62, LAYERS), keeps_all)
    assert 6.2e-6 * found.time == pytest.approx(seconds, rel=0.03)


def test_parts_that_keep_most_layers_beside_a_few_that_recompute():
    """The record with the head has 2.85 s of 26 parts that keep all, and 3.03 s of three recomputed ones."""
    batch = dualkv.pack_sequences(*_of_shape(24576, 16, 2048))
    found = fitting(batch, Memory(13.3e9, LAYERS._replace(kv_heads=8, head=HEAD)))
    assert all(part.keeps > 0.7 for part in found.parts)
    assert 12 <= len(found.parts) <= 30


@pytest.mark.parametrize(
    ("shape", "bytes_", "trunks", "speed_up"),
    [((24576, 16, 2048), 13.3e9, 4, 2.05), ((28672, 16, 2048), 13.3e9, 5, 3.7), ((65536, 8, 4096), 15.5e9, 11, 0.95)],
)
def test_plans_of_large_groups(shape, bytes_, trunks, speed_up):
    """Parts are as large as memory holds behind their path, and all of them keep all; against micro-batches of 32,768
    rows, or one pass of all. With the head, fewer and larger parts may be faster."""
    prompt, responses, length = shape
    batch = dualkv.pack_sequences(*_of_shape(prompt, responses, length))
    limit = Memory(bytes_, LAYERS._replace(kv_heads=8))
    found = fitting(batch, limit)
    assert 0.98 * bytes_ < found.bytes <= bytes_
    assert all(part.keeps == 1 for part in found.parts)
    assert sum(part.is_trunk for part in found.parts) == trunks
    assert [len(part.rows) for part in found.parts if not part.is_trunk] == [4096] * 8
    count = max(1, (32768 - prompt) // length) if prompt < 32768 else responses
    cut = dualkv.pack_sequences(*_of_shape(prompt, count, length))
    one = costed(plan_parts(cut, cut.layout.num_tokens), Memory(2**62, LAYERS), False)
    assert found.time * speed_up < one.time * responses / count
    with_head = fitting(batch, Memory(bytes_, LAYERS._replace(kv_heads=8, head=HEAD)))
    assert found.time < with_head.time < 1.12 * found.time
    assert with_head.bytes <= bytes_


def _of_shape(prompt, responses, length):
    shared = torch.arange(prompt)
    sequences = [torch.cat([shared, torch.arange(length) + (i + 1) * 10**6]) for i in range(responses)]
    return sequences, [[0] * prompt + [1] * length] * responses

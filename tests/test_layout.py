from __future__ import annotations

import copy
import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensor, FakeTensorMode

from dualkv import Layout
from dualkv.segments import segments_of
from tests import oracle, strategies


def visible_pairs(layout: Layout) -> set[tuple[int, int]]:
    end = layout.visible_end.tolist()
    return {(q, k) for k in range(layout.num_tokens) for q in range(k, end[k])}


@settings(max_examples=150, deadline=None)
@given(strategies.trees())
def test_visibility_is_that_of_the_replicated_sequences(tree):
    offsets, parent = tree
    layout = Layout.from_segments(offsets, parent)
    expected = set()
    for s, rows in enumerate(oracle.paths(offsets, parent)):
        own = offsets[s + 1] - offsets[s]
        first = len(rows) - own
        expected |= {(rows[i], k) for i in range(first, len(rows)) for k in rows[: i + 1]}
        assert layout.position_ids[offsets[s] : offsets[s + 1]].tolist() == list(range(first, len(rows)))
    assert visible_pairs(layout) == expected


def test_fake_tensors_do_not_outlive_their_mode():
    segments = Layout.from_lengths([4], [[2, 3]])._segments

    def first() -> tuple[int, list[torch.Tensor]]:
        return 1, [torch.zeros(2)]

    with FakeTensorMode():
        assert isinstance(segments.cached("parts", first)[1][0], FakeTensor)
    made = segments.cached("parts", first)
    assert type(made[1][0]) is torch.Tensor
    assert segments.cached("parts", first) is made


def test_rows_of_each_group_that_ask_nothing():
    layout = Layout.from_lengths([10, 0, 3], [[3, 5], [], [0, 2]])
    assert layout.without_queries([11, 0, 0])._segments.first_query.tolist() == [11, 18, 18]
    assert layout.without_queries([0, 0, 4])._segments.first_query.tolist() == [0, 18, 22]
    assert layout.without_queries([11])._segments.first_query.tolist() == [11, 18, 18]
    for rows in ([18], [18, 0, 0], [0, -1, 0], [0, 0, 0, 0]):
        with pytest.raises(ValueError, match=r"expected a number for each group, fewer than \[18, 0, 5\]"):
            layout.without_queries(rows)
    with pytest.raises(ValueError, match=r"fewer than \[\]"):
        Layout.from_lengths([], []).without_queries([1])
    for wrong in (1.5, "1", [1.5, 0, 0]):
        with pytest.raises(TypeError, match="rows"):
            layout.without_queries(wrong)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=7))
def test_parents_that_cross_are_refused(choices):
    parent = [min(up, s) - 1 for s, up in enumerate(choices)]  # each -1 or an earlier segment
    path, in_order = [], True
    for s, up in enumerate(parent):
        in_order &= up == -1 or up in path
        path = path[: path.index(up) + 1] if up in path else []
        path.append(s)
    if in_order:
        Layout.from_segments(range(len(parent) + 1), parent)
    else:
        with pytest.raises(ValueError, match="has closed it: a parent may not cross groups"):
            Layout.from_segments(range(len(parent) + 1), parent)


@settings(max_examples=150, deadline=None)
@given(strategies.groups())
def test_counts_and_bounds_of_groups(groups):
    prompts, responses = groups
    layout = Layout.from_lengths(prompts, responses)
    assert layout.prompt_lens == prompts
    assert layout.response_lens == responses
    assert layout.num_groups == len(prompts)
    assert layout.num_responses == sum(map(len, responses))
    assert layout.num_tokens == sum(prompts) + sum(map(sum, responses))
    nominal = sum(sum(p + r for r in rs) if rs else p for p, rs in zip(prompts, responses, strict=True))
    assert layout.nominal_tokens == nominal
    assert layout.dedup_ratio == pytest.approx(nominal / layout.num_tokens if layout.num_tokens else 1.0)


def test_one_group_in_numbers():
    layout = Layout.from_lengths([3], [[2, 0, 1]])
    assert layout.offsets.tolist() == [0, 3, 5, 5, 6]
    assert layout.parent.tolist() == [-1, 0, 0, 0]
    assert layout.offsets.dtype == layout.parent.dtype == torch.int32
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert layout.position_ids.dtype == torch.int64
    assert layout.visible_end.tolist() == [6, 6, 6, 5, 5, 6]
    assert layout.dedup_ratio == (5 + 3 + 4) / 6
    assert "6 tokens" in repr(layout)
    assert "3 responses" in repr(layout)


def test_every_constructor_agrees():
    expected = Layout.from_lengths([3, 0, 4], [[2, 0], [1], []])
    cu = Layout.from_cu_seqlens(torch.tensor([0, 3, 3, 7]), torch.tensor([0, 2, 2, 3], dtype=torch.int32), [0, 2, 3, 3])
    segments = Layout.from_segments(np.array([0, 3, 5, 5, 5, 6, 10]), torch.tensor([-1, 0, 0, -1, 3, -1]))
    assert expected == cu == segments
    assert expected != Layout.from_lengths([3, 0, 4], [[2, 0], [1], [0]])
    assert Layout.from_cu_seqlens([0, 3], [0, 1, 5]) == Layout.from_lengths([3], [[1, 4]])
    assert Layout.from_lengths(torch.tensor([3]), [np.array([1, 4])]) == Layout.from_lengths([3], [[1, 4]])


def test_empty_layouts():
    assert Layout.from_lengths([], []).num_tokens == 0
    layout = Layout.from_lengths([0, 0], [[0], []])
    assert layout.num_tokens == 0
    assert layout.dedup_ratio == 1.0


@pytest.mark.parametrize("silent", [None, [3]])
def test_copies_and_pickles_are_layouts_of_their_own(silent):
    layout = Layout.from_lengths([3], [[2, 1]])
    layout = layout if silent is None else layout.without_queries(silent)
    assert layout.visible_end is not None  # something made that must not travel
    for twin in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert twin == layout
        assert twin.offsets is not layout.offsets
        assert twin._segments._cache == {}
        assert segments_of(twin.offsets, twin.parent) is twin._segments


def test_equal_layouts_have_equal_hashes():
    """Layouts are equal wherever their tensors are."""
    one = Layout.from_lengths([3, 2], [[2, 4], [1]])
    same = Layout.from_segments(one.offsets, one.parent), one.to("meta"), copy.deepcopy(one)
    assert {hash(other) for other in same} == {hash(one)}
    assert {one, *same} == {one}
    others = Layout.from_lengths([3, 2], [[4, 2], [1]]), one.without_prompt_queries(), Layout.from_lengths([3], [[2]])
    assert len({one, *others}) == 4
    assert one.without_prompt_queries() == others[1]
    assert {one: "found"}[same[0]] == "found"


def test_what_is_made_in_inference_mode_can_be_trained_through():
    with torch.inference_mode():
        made = Layout.from_lengths([3], [[2, 2]])
        for layout in (made, made.without_prompt_queries()):
            for name in ("offsets", "parent", "position_ids", "visible_end"):
                assert not getattr(layout, name).is_inference(), name


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Layout.from_lengths([-1], [[1]]), ValueError, r"prompt_lens\[0\] is -1"),
        (lambda: Layout.from_lengths([1], [[1, -2]]), ValueError, r"response_lens\[0\]\[1\] is -2"),
        (lambda: Layout.from_lengths([1.5], [[1]]), TypeError, "prompt_lens must hold integers"),
        (lambda: Layout.from_lengths([True], [[1]]), TypeError, "prompt_lens must hold integers"),
        (lambda: Layout.from_lengths(["3"], [[1]]), TypeError, "prompt_lens must hold integers"),
        (lambda: Layout.from_lengths([[1, 2]], [[1]]), ValueError, "one dimension"),
        (lambda: Layout.from_lengths([1, 2], [[1]]), ValueError, "1 lists for 2 prompts"),
        (lambda: Layout.from_lengths([2**31 - 2**10 + 1], [[]]), ValueError, "at most 2147482624"),
        (
            lambda: Layout.from_lengths([2**62] * 4, [[]] * 4),
            ValueError,
            r"prompt_lens\[0\] is 4611686018427387904, a length",
        ),
        (
            lambda: Layout.from_lengths([1], [[7, 2**63 - 1]]),
            ValueError,
            r"response_lens\[0\]\[1\] is 9223372036854775807",
        ),
        (
            lambda: Layout.from_lengths([2**63 + 5], [[1]]),
            ValueError,
            "prompt_lens holds 9223372036854775813, expected",
        ),
        (lambda: Layout.from_segments([1, 2], [-1]), ValueError, "offsets must start with 0"),
        (lambda: Layout.from_segments([], []), ValueError, "offsets must start with 0"),
        (lambda: Layout.from_segments([0, 4, 2], [-1, 0]), ValueError, "must not decrease, got 4 then 2"),
        (lambda: Layout.from_segments([0, 4], [-1, 0]), ValueError, "expected 3"),
        (lambda: Layout.from_segments([0, 4, 5], [-1, 1]), ValueError, r"parent\[1\] is 1"),
        (lambda: Layout.from_segments([0, 4, 5], [-2, 0]), ValueError, r"parent\[0\] is -2"),
        (lambda: Layout.from_segments([0, 4, 5, 6], [-1, -1, 0]), ValueError, "cross groups"),
        (lambda: Layout.from_segments([0, 1, 2, 3, 4], [-1, 0, 0, 1]), ValueError, "depth-first"),
        (lambda: Layout.from_cu_seqlens([0, 3, 4], [0, 1]), ValueError, "cu_responses is missing"),
        (lambda: Layout.from_cu_seqlens([0, 3, 4], [0, 1], [0, 1]), ValueError, "cu_responses names 1 groups"),
        (lambda: Layout.from_cu_seqlens([0, 3, 4], [0, 1], [0, 1, 2]), ValueError, "cu_responses ends at 2"),
    ],
)
def test_bad_input_gets_one_sentence(make, error, words):
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_host_time_does_not_grow_with_the_square_of_depth():
    """10,000 segments under one another; 0.01 s on an idle core, 2 s when every level looked at every segment."""
    best = np.inf
    for _ in range(3):
        start = time.process_time()
        chain = Layout.from_segments(range(10_001), range(-1, 9_999))
        assert chain.visible_end.tolist() == [10_000] * 10_000
        assert chain.position_ids.tolist() == list(range(10_000))
        best = min(best, time.process_time() - start)
    assert best < 0.5

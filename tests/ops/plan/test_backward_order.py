"""The order in which the backward's items start: each policy by itself, on pieces made by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkv.ops.plan.backward_order import (
    PIECE_OVERHEAD,
    Pieces,
    by_queries,
    delayed_responses,
    in_key_order,
    in_tree_order,
    in_waves,
    lengths_in,
    longest_first,
)
from tests.strategies import examples


def pieces_of(*key_ranges):
    """Pieces of key ranges (group, run, first block, one past the last, pieces), cut into equal lengths."""
    rows = []
    for item, (group, run, begin, end, count) in enumerate(key_ranges):
        length = -(-(end - begin) // count)
        rows += [
            (item, n, count, max(end - (n + 1) * length, begin), end - n * length, group, run) for n in range(count)
        ]
    return Pieces(*np.array(rows, np.int64).reshape(-1, 7).T.copy())


@st.composite
def any_pieces(draw):
    """Key ranges of a few groups, whose runs end at one block, as plans have them; some are cut."""
    ranges, run = [], 0
    for group in range(draw(st.integers(0, 3))):
        for _ in range(draw(st.integers(1, 4))):
            begin, end = draw(st.integers(0, 5)), draw(st.integers(20, 60))
            for i in range(draw(st.integers(1, 6))):
                ranges.append((group, run, begin + i, end, draw(st.sampled_from([1, 1, 1, 2, 3]))))
            run += 1
    return pieces_of(*ranges)


POLICIES = {
    "in_key_order": lambda p, kv_heads, wave: in_key_order(p, p.item % 3, kv_heads, wave),
    "in_tree_order": in_tree_order,
    "by_queries": lambda p, kv_heads, _: by_queries(p, kv_heads, 4),
    "by_queries of trees": lambda p, kv_heads, _: by_queries(p, kv_heads, 4, trees=True),
    "in_waves": in_waves,
    "longest_first": lambda p, kv_heads, wave: longest_first(in_waves(p, kv_heads, wave), p),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
@examples(100)
@given(any_pieces(), st.integers(1, 3), st.sampled_from([1, 2, 22]))
def test_every_piece_of_every_kv_head_starts_once(policy, pieces, kv_heads, wave):
    order = policy(pieces, kv_heads, wave)
    assert sorted(order.tolist()) == list(range(kv_heads * len(pieces.item)))


@examples(100)
@given(any_pieces(), st.integers(1, 3), st.sampled_from([1, 2, 22]))
def test_in_key_order_no_piece_starts_before_one_of_earlier_keys(pieces, kv_heads, wave):
    order = in_key_order(pieces, np.zeros_like(pieces.item), kv_heads, wave)
    for kv_head in range(kv_heads):
        of_head = order[order // len(pieces.item) == kv_head] if len(order) else order
        assert (np.diff(of_head) > 0).all()


def test_in_key_order_priorities_come_first_and_kv_heads_follow_run_by_run():
    pieces = pieces_of((0, 0, 0, 9, 1), (0, 0, 1, 9, 1), (0, 1, 2, 9, 1), (1, 2, 9, 12, 1))
    assert in_key_order(pieces, np.zeros(4, int), 2, 22).tolist() == [0, 1, 4, 5, 2, 6, 3, 7]
    assert in_key_order(pieces, np.array([0, 0, 5, 4]), 2, 22).tolist() == [0, 1, 4, 5, 3, 7, 2, 6]


def test_responses_are_delayed_behind_the_next_prompt_where_it_fits():
    """Three groups of a prompt and a response; the second prompt has more items than start at once."""
    group = np.array([0, 0, 1, 1, 1, 1, 2, 2])
    is_response = np.array([0, 1, 0, 0, 0, 1, 0, 1], bool)
    shares_block = np.array([0, 0, 1, 0, 0, 0, 1, 0], bool)
    priority, separate = delayed_responses(group, is_response, shares_block, at_once=2)
    start = np.argsort(priority, kind="stable").tolist()
    assert start == [0, 1, 2, 3, 4, 6, 5, 7], "the first response is not delayed: the next prompt fills the device"
    assert separate.tolist() == [False] * 6 + [True, False], "the third group's first block waits for the second"
    assert priority[6] < priority[5] < priority[6] + 2 < priority[7], "that block starts behind the delayed response"
    priority, separate = delayed_responses(group, is_response, shares_block, at_once=3)
    assert np.argsort(priority, kind="stable").tolist() == [0, 2, 3, 4, 1, 6, 5, 7]
    assert separate.tolist() == shares_block.tolist()


def test_the_last_group_has_no_prompt_to_wait_for():
    priority, separate = delayed_responses(np.array([0, 0]), np.array([False, True]), np.array([False, False]), 132)
    assert priority.tolist() == [0, 3]
    assert not separate.any()


def test_trees_start_from_the_last_block_on_and_end_longest_first():
    pieces = pieces_of((0, 0, 0, 100, 1), (0, 1, 50, 70, 1), (0, 2, 60, 100, 1), (0, 3, 2, 4, 1), (0, 4, 1, 3, 1))
    assert in_tree_order(pieces, 1, 22).tolist() == [0, 2, 1, 3, 4]
    tail = pieces_of((0, 0, 0, 1000, 1), (0, 1, 9, 10, 1), (0, 2, 1, 9, 1), (0, 3, 3, 8, 1))
    assert in_tree_order(tail, 1, 22).tolist() == [0, 2, 3, 1], "all but the first are the tail: 8, 5 and 1 blocks"


def test_pieces_of_a_tree_that_end_at_one_block_go_kv_head_by_kv_head():
    pieces = pieces_of((0, 0, 0, 500, 1), (0, 1, 100, 500, 1), (0, 2, 200, 400, 1))
    assert in_tree_order(pieces, 2, 22).tolist() == [0, 1, 3, 4, 2, 5]
    assert in_tree_order(pieces, 2, 1).tolist() == [0, 3, 1, 4, 2, 5]


def test_a_piece_of_a_split_range_is_sorted_with_its_range_where_trees_start():
    pieces = pieces_of((0, 0, 0, 100, 2), (0, 1, 60, 80, 1))
    assert in_tree_order(pieces, 1, 22).tolist() == [0, 1, 2], "the second piece ends at 50, its range at 100"


def test_by_queries_a_response_starts_when_the_prompts_items_come_to_its_last_block():
    """A prompt of two items that walk from block 40 down, and responses that end at blocks 40, 30 and 20."""
    pieces = pieces_of((0, 0, 0, 40, 1), (0, 0, 2, 40, 1), (0, 1, 10, 20, 1), (0, 2, 20, 30, 1), (0, 3, 30, 40, 1))
    assert by_queries(pieces, 1, 8).tolist() == [0, 1, 4, 3, 2]


def test_by_queries_kv_heads_and_groups_follow_one_another_the_longest_first():
    short, long = [(0, 0, 0, 10, 1)] * 8, [(1, 1, 10, 40, 1)] * 8
    order = by_queries(pieces_of(*short, *long), 2, 2)
    groups = [(index % 16 // 8, index // 16) for index in order.tolist()]
    assert list(dict.fromkeys(groups)) == [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert groups == sorted(groups, key=[(1, 0), (1, 1), (0, 0), (0, 1)].index)


def test_by_queries_a_long_prompt_starts_early_enough_to_end_with_the_rest():
    """One item of 100 blocks in the second KV head would otherwise start at 7 of 14 blocks a cluster."""
    pieces = pieces_of((0, 0, 0, 100, 1), *[(0, 1, 95, 97, 1)] * 60)
    order = by_queries(pieces, 2, 40)
    load = (pieces.blocks + PIECE_OVERHEAD).sum() / 40
    assert 2 * load < 100
    assert order[:2].tolist() == [0, 61], "both KV heads' long items, at once"


def test_by_queries_a_long_branch_of_a_tree_starts_early_enough_too():
    """A branch of 60 blocks ends where the root's item comes late."""
    pieces = pieces_of((0, 0, 0, 100, 1), *[(0, 1, 63, 75, 1)] * 60, (0, 2, 10, 70, 1))
    late, early = (by_queries(pieces, 1, 12, trees).tolist().index(61) for trees in (False, True))
    assert (late, early) == (61, 1)


def test_by_queries_first_pieces_of_split_ranges_come_before_second_ones():
    pieces = pieces_of((0, 0, 0, 40, 2), (0, 0, 0, 40, 2))
    assert by_queries(pieces, 1, 8).tolist() == [0, 2, 1, 3]


def test_waves_take_the_run_with_the_longest_piece_first():
    pieces = pieces_of((0, 0, 0, 10, 1), (0, 0, 1, 10, 1), (0, 1, 0, 30, 1), (0, 1, 1, 30, 1))
    assert in_waves(pieces, 2, 22).tolist() == [2, 3, 6, 7, 0, 1, 4, 5]
    assert in_waves(pieces, 2, 1).tolist() == [2, 6, 3, 7, 0, 4, 1, 5]


def test_waves_do_not_end_between_pieces_of_split_ranges():
    pieces = pieces_of((0, 0, 0, 30, 3), (0, 0, 0, 30, 3))
    assert in_waves(pieces, 2, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11], "first pieces together"


def test_longest_first_keeps_the_order_of_pieces_of_one_length():
    pieces = pieces_of((0, 0, 0, 5, 1), (0, 1, 0, 9, 1), (0, 2, 0, 5, 1))
    order = np.array([5, 0, 1, 3, 4, 2])
    assert longest_first(order, pieces).tolist() == [1, 4, 5, 0, 3, 2]
    assert lengths_in(order, pieces).tolist() == [5, 5, 9, 5, 9, 5]

"""The order in which the backward's items start: each policy by itself, on pieces made by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkv.ops.plan.backward_order import (
    Pieces,
    by_queries,
    in_key_order,
    in_tree_order,
    in_waves,
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

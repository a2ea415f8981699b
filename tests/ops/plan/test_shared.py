"""Helpers of several planners, against loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkv import Layout
from dualkv.ops.plan.shared import longest_first, segment_at, visible_end_over
from dualkv.segments import segments_of
from tests.strategies import examples, trees


@examples(100)
@given(trees(), st.data())
def test_lookups_of_segments(tree, data):
    layout = Layout.from_segments(*tree)
    seg = segments_of(layout.offsets, layout.parent)
    if not seg.total:
        return
    rows = np.array(sorted(data.draw(st.lists(st.integers(0, seg.total - 1), max_size=20))), np.int64)
    assert segment_at(seg.offsets, rows).tolist() == seg.segment_of_row[rows].tolist()
    end = np.array([data.draw(st.integers(row + 1, seg.total)) for row in rows.tolist()], np.int64)
    for op in (np.minimum, np.maximum):
        expected = [op.reduce(seg.visible_end[a:b]) for a, b in zip(rows.tolist(), end.tolist(), strict=True)]
        assert visible_end_over(op, seg, rows, end).tolist() == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_longest_first_keeps_the_order_of_equal_tiles(dtype):
    assert longest_first(np.array([3, 7, 3, 9, 7], dtype)).tolist() == [3, 1, 4, 0, 2]
    assert longest_first(np.array([65535, 65536, 2**20, 65534], dtype)).tolist() == [0, 1, 2, 3], "as the limit says"

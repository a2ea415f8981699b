"""Intervals of visible keys and block masks, against the keys that each token sees in the replicated sequences."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkv import Layout
from dualkv.ops import flex, intervals
from tests import oracle, strategies


def visible(offsets, parent, window=None, chunk=None):
    """[T, T] int, from the replicated sequences."""
    seen = np.zeros((offsets[-1],) * 2, int)
    for rows, begin in zip(oracle.paths(offsets, parent), offsets, strict=False):
        for i, row in enumerate(rows):
            if row >= begin:
                low = 0 if window is None else max(0, i - window + 1)
                seen[row, rows[low if chunk is None else i // chunk * chunk : i + 1]] = 1
    return seen


@strategies.examples(100)
@given(strategies.trees(), strategies.windows())
def test_intervals_are_the_visible_keys(tree, window):
    segments, want = Layout.from_segments(*tree)._segments, visible(*tree, **window)
    ends = intervals.interval_ends(segments, strategies.window_of(window))[0].T
    levels = max(segments.max_depth, 1)
    assert ends.shape == (segments.total, 2 * levels - (not window) + bool(window))
    assert (np.diff(ends, axis=1) >= 0).all()
    lengths = intervals.group_lengths(segments)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    got = np.zeros_like(want)
    for row, of_row in enumerate(ends):
        assert of_row.max() <= lengths[np.searchsorted(np.cumsum(lengths), row, "right")]
        for a, b in zip([0, *of_row[1::2]], of_row[::2], strict=True):
            got[row, first[row] + a : first[row] + b] += 1
    assert (got == want).all()


def mask(segments, window, block):
    """`flex.Mask` with blocks of so many rows: lists of partial and whole blocks of keys, the same of queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", block)
        tensors = flex.Mask(segments, torch.device("cpu"), window).blocks
    assert tensors[8:] == (None,) * len(tensors[8:])
    lists = [(count[0, 0].numpy(), which[0, 0].numpy()) for count, which in zip(*[iter(tensors[:8])] * 2, strict=True)]
    n = -(-segments.total // block)
    assert {which.shape for _, which in lists} == {(n, n)}
    return lists


def square(count, which):
    """[n, n] bool of a list, whose numbers rise in each row."""
    n = len(count)
    assert ((which >= 0) & (which < n)).all()  # behind a row's own too
    listed = np.arange(which.shape[1]) < count[:, None]
    assert (np.diff(which, axis=1)[listed[:, 1:]] > 0).all()
    square = np.zeros((n, n), bool)
    square[np.nonzero(listed)[0], which[listed]] = True
    return square


@strategies.examples(100)
@given(strategies.trees(), strategies.windows(), st.sampled_from([1, 4, 16, 128]))
def test_blocks_are_the_visible_keys(tree, window, block):
    segments, want = Layout.from_segments(*tree)._segments, visible(*tree, **window)
    n = -(-segments.total // block)
    padded = np.zeros((n * block,) * 2, int)
    padded[: segments.total, : segments.total] = want
    visible_keys = padded.reshape(n, block, n, block).sum((1, 3))
    # A block that lies in two segments counts as partial even if all of it is seen: its mask then hides nothing.
    ends = np.arange(n) * block, np.minimum(np.arange(1, n + 1) * block, segments.total) - 1
    in_one = np.equal(*(segments.segment_of_row[x] for x in ends))
    whole = (visible_keys == block * block) & in_one
    partial = (visible_keys > 0) & ~whole
    lists = mask(segments, strategies.window_of(window), block)
    for got, expected in zip(lists, (partial, whole, partial.T, whole.T), strict=True):
        assert (square(*got) == expected).all()


def test_the_host_takes_no_square_of_the_rows():
    """One byte for each pair of blocks of 1,040,000 rows would be 66 MB."""
    segments = Layout.from_lengths([2800] * 200, [[300] * 8] * 200)._segments
    mask(Layout.from_lengths([5], [[3]])._segments, None, 128)  # imports what masks need
    assert len(segments.visible_end) == segments.total  # with other numbers of each row
    tracemalloc.start()
    try:
        lists = mask(segments, None, 128)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    n = len(lists[0][0])
    assert peak < 0.9 * n * n  # PyTorch's tensors are not in it

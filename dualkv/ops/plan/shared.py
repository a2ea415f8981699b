"""Common parts of the planners: types of arrays, lookups of segments, the cost of a masked block."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dualkv.arrays import IntArray
from dualkv.segments import Segments

Table = npt.NDArray[np.int32]  # work items as a kernel reads them: a row an item
Rows = npt.NDArray[Any]  # packed rows, in 32 or 64 bits

# What a masked block of the forward costs on top of an unmasked one, in unmasked blocks. Fitted to measured times of
# clusters (docs/tuning.md). The cost of beginning and ending a tile is included: every tile has a masked block.
MASKED_COST = 1.1

SORTED_BLOCKS = np.uint16(2**16 - 1)  # longer tiles count as equal: numpy sorts 16-bit keys five times as fast


def longest_first(blocks: Rows) -> IntArray:
    """The order that puts tiles of so many blocks each longest first; equal ones keep their order."""
    return np.argsort(SORTED_BLOCKS - np.minimum(blocks, SORTED_BLOCKS).astype(np.uint16), kind="stable")


def largest(values: IntArray, number: IntArray) -> IntArray:
    """[n] the largest value of each number from 0 on; values are 0 or more, 0 where there is none."""
    result = np.zeros(number.max(initial=-1) + 1, np.int64)
    np.maximum.at(result, number, values)
    return result


def segment_at(offsets: Rows, rows: Rows) -> IntArray:
    """The segment, one with rows, that holds each of `rows`, which ascend.

    The few offsets are looked up in the many rows, which is faster than the other way round.
    """
    return np.repeat(np.arange(len(offsets) - 1), np.diff(np.searchsorted(rows, offsets)))


def visible_end_over(op: np.ufunc, segments: Segments, key: Rows, key_end: Rows) -> IntArray:
    """`op` (np.minimum or np.maximum) over visible_end of the keys [key[i], key_end[i]), of which none is empty."""
    present = segments.lengths > 0
    begin, end = segments.offsets[:-1][present], segments.subtree_end[present]
    bounds = np.stack([np.searchsorted(begin, key, side="right") - 1, np.searchsorted(begin, key_end, side="left")], 1)
    result: IntArray = op.reduceat(np.append(end, 0), bounds.reshape(-1))[::2]
    return result

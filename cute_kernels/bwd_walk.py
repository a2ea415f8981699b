"""Compute which query blocks the backward up to head dim 128 walks, and of which blocks it takes a part of the rows
only.

It takes integers of Python or of the DSL, without CuTe: the kernel walks so, and tests/ops/plan/test_backward.py walks
plans so.
"""

from typing import NamedTuple

from cute_kernels.abi import part_rows
from cute_kernels.integers import Integer, larger, select, smaller


def first_block(begin: Integer, end: Integer, key: Integer, key_end: Integer, tile_m: int) -> Integer:
    """The first of an item's query blocks [begin, end) with a row that does not precede a CTA's keys [key, key_end).

    For a CTA without keys it is the last block.
    """
    last = end - 1
    return select(key < key_end, larger(begin, smaller(last, key // tile_m)), last)


class Walk(NamedTuple):
    """The query blocks of a CTA with rows that see keys of a warp group.

    Attributes:
        begin, end: all of these blocks.
        whole_begin, whole_end: the blocks of which all rows are needed. The last rows of the block before them are
            enough, and the first rows of the block after them.
    """

    begin: Integer
    whole_begin: Integer
    whole_end: Integer
    end: Integer

    @classmethod
    def of(cls, begin: Integer, end: Integer, first: Integer, last: Integer, tile_m: int) -> "Walk":
        """Choose from a CTA's blocks [begin, end), where rows that see keys of the warp group lie from `first` to below
        `last`.

        Where first >= last there are none.
        """
        part = part_rows(tile_m)
        begin = larger(begin, smaller(end, first // tile_m))
        end = larger(begin, smaller(end, (last + tile_m - 1) // tile_m))
        whole_end = select((begin < end) & (last <= (end - 1) * tile_m + part), end - 1, end)
        whole_begin = select((begin < whole_end) & (first >= (begin + 1) * tile_m - part), begin + 1, begin)
        return cls(begin, whole_begin, whole_end, end)

"""Which query blocks the backward up to head dim 128 walks, and of which it leaves out a half.

Integers of Python or of the DSL, no CuTe: the kernel walks so, and tests/test_plan_backward.py walks plans so.
"""

from typing import Any, NamedTuple

from cute_kernels.integers import larger, select, smaller


def part_rows(tile_m: int) -> int:
    """Rows in a part of a block: the first ones (the last ones) of one whose other rows see no keys."""
    return 16 * -(-tile_m // 32)


def first_block(begin: Any, end: Any, key: Any, key_end: Any, tile_m: int) -> Any:
    """Of an item's query blocks [begin, end), the first with rows that do not all precede a CTA's keys [key, key_end).

    A CTA without keys has the last one left.
    """
    last = end - 1
    return select(key < key_end, larger(begin, smaller(last, key // tile_m)), last)


class Walk(NamedTuple):
    """Of a CTA's query blocks, those with rows that see keys of a warp group.

    Attributes:
        begin, end: all of them.
        whole_begin, whole_end: without those of which a part is enough: of the first one the last rows, of the last
            one the first rows.
    """

    begin: Any
    whole_begin: Any
    whole_end: Any
    end: Any

    @classmethod
    def of(cls, begin: Any, end: Any, first: Any, last: Any, tile_m: int) -> "Walk":
        """Of a CTA's blocks [begin, end), where rows that see keys of the warp group lie from `first` to below `last`.

        Where first >= last there are none.
        """
        part = part_rows(tile_m)
        begin = larger(begin, smaller(end, first // tile_m))
        end = larger(begin, smaller(end, (last + tile_m - 1) // tile_m))
        whole_end = select((begin < end) & (last <= (end - 1) * tile_m + part), end - 1, end)
        whole_begin = select((begin < whole_end) & (first >= (begin + 1) * tile_m - part), begin + 1, begin)
        return cls(begin, whole_begin, whole_end, end)

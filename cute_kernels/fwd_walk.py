"""Compute which of a tile's blocks one of its warp groups walks: the blocks that its rows see.

It takes integers of Python or of the DSL, without CuTe: the kernel walks so, and tests/ops/plan/test_forward.py walks
plans so.
"""

from typing import NamedTuple, Protocol

from cute_kernels.integers import Condition, Integer, larger, select, smaller

LONG = 8  # blocks: a shorter stretch is not worth an end of its own, after which blocks need no mask


class Blocks(Protocol):
    """The fields of a tile (work.Tile) on which its walk depends."""

    own_begin: Integer
    own_blocks: Integer
    own_masked: Integer
    context_begin: Integer
    context_blocks: Integer
    masked: Integer
    straddles: Condition
    tile_n: int


class Walk(NamedTuple):
    """Two stretches of a tile's blocks (work.py has their order): [begin, end) and [rest, blocks). The second may be
    empty.

    Attributes:
        masked: from this block on the rows see all keys of a block, but perhaps of the first block of a stretch.
    """

    begin: Integer
    end: Integer
    rest: Integer
    masked: Integer


def walk(tile: Blocks, first: Integer, last: Integer, first_begin: Integer, last_begin: Integer) -> Walk:
    """Compute the walk of the rows [first, last], whose segments begin at first_begin and last_begin; without rows, of
    no blocks."""
    n, blocks, own_masked = tile.tile_n, tile.own_blocks + tile.context_blocks, tile.own_masked
    own_end = tile.own_begin + tile.own_blocks * n
    context_end = tile.context_begin + tile.context_blocks * n

    # Own blocks with the mask come from the last one down: the first ones may lie behind the rows, the last ones before
    # their segments. Then context blocks come, of which the first may lie behind rows of the prompt.
    begin = smaller((own_end - 1 - last) // n, own_masked)
    end = smaller((own_end - first_begin + n - 1) // n, own_masked)
    end = select(tile.straddles & (tile.context_blocks > 0), end, own_masked)  # else no block comes after these
    rest = own_masked + larger(context_end - 1 - last, 0) // n

    # Rows of one segment see all of a block that lies before them, back to where their segment begins.
    one_segment = (first_begin == tile.own_begin) & (last_begin == tile.own_begin)
    own_partial, context_partial = (own_end - 1 - first) // n + 1, (context_end - 1 - first) // n + 1
    masked = select(one_segment & (tile.masked == own_masked), smaller(own_partial, own_masked), tile.masked)
    masked = select(tile.own_blocks == 0, smaller(context_partial, tile.masked), masked)
    # The context's one masked block, its last, begins the second stretch; own blocks before it then need no mask.
    split = one_segment & (tile.masked == own_masked + 1) & (own_masked >= own_partial + LONG)
    masked = select(split, own_partial, masked)

    contiguous = (select(split, 0, 1) == 1) & (end == own_masked) & (rest == own_masked)
    end, rest = select(contiguous, blocks, end), select(contiguous, blocks, rest)
    empty = begin >= end  # the first stretch; then the second one is the first
    walked = select(empty, rest, begin), select(empty, blocks, end), select(empty, blocks, rest)
    return Walk(*(select(first > last, blocks, block) for block in walked), masked)

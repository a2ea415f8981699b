"""Which of a tile's blocks one of its warp groups walks: those that its rows see.

Integers of Python or of the DSL, no CuTe: the kernel walks so, and tests/test_plan.py walks plans so.
"""

from typing import Any, NamedTuple

from cute_kernels.integers import larger, select, smaller

LONG = 8  # blocks: a stretch of fewer is not worth an end of its own, to go on without the mask


class Walk(NamedTuple):
    """Two stretches of a tile's blocks (work.py has their order): [begin, end) and [rest, blocks), which may be empty.

    Attributes:
        masked: from this block on, but for the first one of a stretch, rows see all keys of a block.
    """

    begin: Any
    end: Any
    rest: Any
    masked: Any


def walk(tile: Any, first: Any, last: Any, first_begin: Any, last_begin: Any) -> Walk:
    """Of the rows [first, last], whose segments begin at first_begin and last_begin; tile: see work.Tile."""
    n, blocks, own_masked = tile.tile_n, tile.own_blocks + tile.context_blocks, tile.own_masked
    own_end = tile.own_begin + tile.own_blocks * n
    context_end = tile.context_begin + tile.context_blocks * n

    # Own blocks with the mask come from the last one down: the first ones may lie behind the rows, the last ones before
    # their segments. Then context ones, of which the first may lie behind rows of the prompt.
    begin = smaller((own_end - 1 - last) // n, own_masked)
    end = smaller((own_end - first_begin + n - 1) // n, own_masked)
    end = select(tile.straddles & (tile.context_blocks > 0), end, own_masked)  # or there is nothing after these
    rest = own_masked + larger(context_end - 1 - last, 0) // n

    # Rows of one segment see all of a block that lies before them, back to where their segment begins.
    of_first = (first_begin == tile.own_begin) & (last_begin == tile.own_begin)
    own_seen, context_seen = (own_end - 1 - first) // n + 1, (context_end - 1 - first) // n + 1
    masked = select(of_first & (tile.masked == own_masked), smaller(own_seen, own_masked), tile.masked)
    masked = select(tile.own_blocks == 0, smaller(context_seen, tile.masked), masked)
    apart = of_first & (tile.masked == own_masked + 1) & (own_masked >= own_seen + LONG)  # the context's last block
    masked = select(apart, own_seen, masked)

    at_once = (select(apart, 0, 1) == 1) & (end == own_masked) & (rest == own_masked)
    end, rest = select(at_once, blocks, end), select(at_once, blocks, rest)
    none = begin >= end
    return Walk(select(none, rest, begin), select(none, blocks, end), select(none, blocks, rest), masked)

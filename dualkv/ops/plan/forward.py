"""Work plans: how a layout is cut into the tiles that the kernels walk. Made on the host once a batch, numpy only.

`cute_kernels.abi.ForwardFields` says what a tile is and what the fields of a work item mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cute_kernels.abi import ForwardFields as items
from dualkv.arrays import IntArray, positions
from dualkv.layout import Segments

WorkItems = npt.NDArray[np.int32]
Rows = npt.NDArray[Any]  # packed rows, in 32 or 64 bits

PART_TILES = 2**14  # what is computed at a time stays in a core's cache, and in memory that the process already has
# Tiles come longest first if there are no more packed rows, else in runs of so many that do. Of one KV head: K and V of
# head_dim 128 are 16 MB, of an H200's 50 MB of L2.
L2_ROWS = 2**15
# What a masked block takes besides what a whole one does, in whole blocks; less if not all rows see it. Fitted to times
# of clusters (docs/tuning.md). It has in it what a tile takes to begin and end: at least one block is masked.
MASKED, MASKED_OF_SOME = 1.1, 0.4
SORTED_BLOCKS = np.uint16(2**16 - 1)  # longer tiles count as equal: numpy sorts 16-bit keys five times as fast


def forward_work(segments: Segments, tokens: int, tile_n: int) -> WorkItems:
    """The forward's work items in the order of :func:`tile_order`; the same tiles serve every KV head.

    Args:
        segments: prompts and responses; trees of at most two levels.
        tokens: packed rows a tile (`ForwardTile.tokens`).
        tile_n: keys a block.

    Returns:
        [n, items.NUM_FIELDS] int32: every packed row that is asked for lies in exactly one tile, tiles end where their
        group ends.

    Raises:
        ValueError: for trees deeper than two, whose rows see more than two regions.
    """
    if segments.max_depth > 2:
        raise ValueError(f"a plan describes two key regions a tile, this layout is {segments.max_depth} levels deep")
    # Rows in 32 bits, half the time of 64, wherever a tile or a block past the last one still fits.
    integer: type[Any] = np.int32 if segments.total + tokens + tile_n < 2**31 else np.int64
    offsets, roots = segments.offsets.astype(integer), np.flatnonzero(segments.parent == -1)
    first_row, group_end = segments.first_query.astype(integer), segments.subtree_end.astype(integer)[roots]
    count = -(-(group_end - first_row) // tokens)  # tiles of each group
    ends = np.cumsum(count)
    work = np.empty((int(ends[-1]) if len(roots) else 0, items.NUM_FIELDS), np.int32)
    for groups in _parts(offsets[roots], count):
        first, last = roots[groups.start], np.append(roots, len(offsets) - 1)[groups.stop]
        begin, part = ends[groups.start] - count[groups.start], offsets[first : last + 1]
        table = work[begin : ends[groups.stop - 1]]
        _tiles(table, part, roots[groups] - first, first_row[groups], group_end[groups], count[groups], tokens, tile_n)
    return work


def _parts(group_begin: Rows, count: IntArray) -> Iterator[slice]:
    """Groups that are worked on together: about PART_TILES, cut where :func:`tile_order` cuts them in any case."""
    starts = np.flatnonzero(np.diff(group_begin // L2_ROWS, prepend=-1))
    before = (np.cumsum(count) - count)[starts] // PART_TILES
    cuts = starts[np.flatnonzero(np.diff(before, prepend=-1))].tolist()
    return itertools.starmap(slice, itertools.pairwise([*cuts, len(count)]))


def _tiles(
    work: WorkItems, offsets: Rows, roots: IntArray, first_row: Rows, group_end: Rows, count: IntArray, tokens: int,
    tile_n: int,
) -> None:  # fmt: skip
    """Write the tiles of some groups into `work`, in their order.

    Args:
        work: [n, items.NUM_FIELDS].
        offsets: of the groups' segments, and where the last one ends.
        roots: the segments that are prompts.
        first_row, group_end, count: of each group the rows that its tiles share, and how many these are.
        tokens, tile_n: see :func:`forward_work`.
    """
    context_begin, prompt_end = np.repeat(offsets[roots], count), np.repeat(offsets[roots + 1], count)
    row = np.repeat(first_row, count) + positions(count).astype(offsets.dtype) * tokens
    row_end = np.minimum(row + tokens, np.repeat(group_end, count))
    context_end = np.minimum(prompt_end, row_end)

    has_own = row_end > prompt_end
    first = segment_at(offsets, np.minimum(np.maximum(row, prompt_end), row_end - 1))
    straddles = has_own & ((row < prompt_end) | (first != segment_at(offsets, row_end - 1)))
    own_begin = np.where(has_own, offsets[first], row_end)

    # A whole block holds only keys before the first row, and none of another segment than all rows': every row sees a
    # key of a masked block, its own, and has the reference of its softmax from there; a row without one would make the
    # tile be done again. The block that a tile begins with is masked in any case: an own one if there is one.
    context_blocks = _blocks(context_begin, context_end, tile_n)
    context_masked = context_blocks - (np.minimum(row, context_end) - context_begin) // tile_n
    own_blocks = _blocks(own_begin, row_end, tile_n)
    own_masked = own_blocks - np.where(straddles | ~has_own, 0, row - own_begin) // tile_n
    context_masked = np.maximum(context_masked, ~has_own)
    own_masked = np.maximum(own_masked, has_own)

    order = tile_order(context_blocks + own_blocks, context_begin)
    for field, values in (
        (items.ROW, row),
        (items.ROW_END, row_end),
        (items.CONTEXT_BEGIN, context_begin),
        (items.CONTEXT_END, context_end),
        (items.OWN_BEGIN, own_begin),
        (items.CONTEXT_MASKED, context_masked),
        (items.OWN_MASKED, own_masked),
        (items.STRADDLES, straddles),
    ):
        work[:, field] = values.take(order)


def tile_cost(work: WorkItems, tile_n: int) -> Rows:
    """[n] time that the tiles take, in whole blocks."""
    context = _blocks(work[:, items.CONTEXT_BEGIN], work[:, items.CONTEXT_END], tile_n)
    own = _blocks(work[:, items.OWN_BEGIN], work[:, items.ROW_END], tile_n)
    masked = work[:, items.CONTEXT_MASKED] + work[:, items.OWN_MASKED]
    return context + own + np.where(work[:, items.STRADDLES], MASKED_OF_SOME, MASKED) * masked


def segment_begin(segments: Segments) -> npt.NDArray[np.int32]:
    """[T] int32: the packed row where each row's segment begins."""
    return np.repeat(segments.offsets[:-1].astype(np.int32), segments.lengths)


def tile_order(blocks: Rows, group_begin: Rows) -> IntArray:
    """The order of tiles of so many blocks each, whose groups begin at these packed rows (ascending).

    Longest first, so that all clusters end together; but groups whose keys and values do not stay in L2 side by side
    come one after another.
    """
    order = longest_first(blocks)
    if not len(order) or group_begin[-1] < L2_ROWS:
        return order
    return order[np.argsort((group_begin // L2_ROWS).astype(np.uint16)[order], kind="stable")]


def longest_first(blocks: Rows) -> IntArray:
    """The order of tiles of so many blocks each."""
    return np.argsort(SORTED_BLOCKS - np.minimum(blocks, SORTED_BLOCKS).astype(np.uint16), kind="stable")


def segment_at(offsets: Rows, rows: Rows) -> IntArray:
    """The (non-empty) segment that holds each row; rows ascend. Few segments are looked up, not many rows."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(np.searchsorted(rows, offsets)))


def _blocks(begin: Rows, end: Rows, tile_n: int) -> Any:
    return -(-(end - begin) // tile_n)


def visible_end_over(op: np.ufunc, segments: Segments, key: Rows, key_end: Rows) -> IntArray:
    """op (np.minimum, np.maximum) over visible_end of the keys [key[i], key_end[i]), at least one each."""
    present = segments.lengths > 0
    begin, end = segments.offsets[:-1][present], segments.subtree_end[present]
    bounds = np.stack([np.searchsorted(begin, key, side="right") - 1, np.searchsorted(begin, key_end, side="left")], 1)
    result: IntArray = op.reduceat(np.append(end, 0), bounds.reshape(-1))[::2]
    return result

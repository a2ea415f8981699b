"""The forward's work plan for prompts with responses: which rows a tile takes and which blocks of keys it walks.

Made on the host with numpy, once a batch. `cute_kernels.abi.ForwardFields` says what a tile is and what the fields of a
work item mean. Deeper trees: `dualkv.ops.plan.paths`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.tiles import ForwardTile
from cute_kernels.abi import ForwardFields as items
from dualkv.arrays import IntArray, positions
from dualkv.ops.plan.shared import MASKED_COST, Rows, Table, longest_first, segment_at
from dualkv.segments import Segments

PART_TILES = 2**14  # tiles computed at a time: their arrays stay in a core's cache, and in memory already mapped
# Tiles of up to this many packed rows are sorted longest first; more rows are sorted range by range. K and V of one KV
# head and so many rows are 16 MB at head_dim 128, of an H200's 50 MB of L2.
L2_ROWS = 2**15
MASKED_COST_OF_SOME = 0.4  # MASKED_COST of a tile with rows of several segments: not all of them see the block


def forward_work(segments: Segments, tokens: int, tile_n: int) -> Table:
    """The forward's work items in the order of :func:`tile_order`; the same tiles serve every KV head.

    Args:
        segments: prompts and responses; trees of at most two levels.
        tokens: packed rows a tile (`ForwardTile.tokens`).
        tile_n: keys a block.

    Returns:
        [n, items.NUM_FIELDS] int32: every packed row whose result is needed lies in exactly one tile, and no tile
        reaches into the next group.

    Raises:
        ValueError: for trees of more than two levels, whose rows see more than two regions.
    """
    if segments.max_depth > 2:
        raise ValueError(f"a plan describes two key regions a tile, this layout is {segments.max_depth} levels deep")
    # 32-bit rows take half the time of 64-bit ones. They serve wherever a tile and a block past the last row still fit.
    integer: type[Any] = np.int32 if segments.total + tokens + tile_n < 2**31 else np.int64
    offsets, roots = segments.offsets.astype(integer), segments.roots
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


def made_work(segments: Segments, tokens: int, tile_n: int) -> Table:
    """:func:`forward_work`, computed once for a layout."""
    return segments.cached(("forward_work", tokens, tile_n), lambda: forward_work(segments, tokens, tile_n))


def _parts(group_begin: Rows, count: IntArray) -> Iterator[slice]:
    """Groups whose tiles are computed together, about PART_TILES. Parts end at range ends of :func:`tile_order`, so the
    order of all tiles is that of each part in turn."""
    starts = np.flatnonzero(np.diff(group_begin // L2_ROWS, prepend=-1))
    before = (np.cumsum(count) - count)[starts] // PART_TILES
    cuts = starts[np.flatnonzero(np.diff(before, prepend=-1))].tolist()
    return itertools.starmap(slice, itertools.pairwise([*cuts, len(count)]))


def _tiles(
    work: Table, offsets: Rows, roots: IntArray, first_row: Rows, group_end: Rows, count: IntArray, tokens: int,
    tile_n: int,
) -> None:  # fmt: skip
    """Write the tiles of some groups into `work`, in their order.

    Args:
        work: [n, items.NUM_FIELDS].
        offsets: first rows of the groups' segments, and the end of the last one.
        roots: the segments that are prompts.
        first_row, group_end, count: of each group, the rows that its tiles cover and the number of its tiles.
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

    # An unmasked block holds only keys before the tile's first row, and only keys that all its rows see. So every row's
    # own key is in a masked block, and the row has a reference maximum from there; a row without one would force a
    # recompute pass of the tile. The block that a tile begins with is always masked, an own one if there is one.
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


def tile_cost(work: Table, tile_n: int) -> Rows:
    """[n] time that each tile takes, in unmasked blocks."""
    context = _blocks(work[:, items.CONTEXT_BEGIN], work[:, items.CONTEXT_END], tile_n)
    own = _blocks(work[:, items.OWN_BEGIN], work[:, items.ROW_END], tile_n)
    masked = work[:, items.CONTEXT_MASKED] + work[:, items.OWN_MASKED]
    return context + own + np.where(work[:, items.STRADDLES], MASKED_COST_OF_SOME, MASKED_COST) * masked


def cost_walked(segments: Segments, tile: ForwardTile, packed_heads: int) -> float:
    """Time that a layout's tiles take for one head group, times the warp groups of a tile. In blocks without a mask."""
    tokens = tile.tokens(packed_heads)
    return float(tile_cost(made_work(segments, tokens, tile.tile_n), tile.tile_n).sum()) * tile.parts


def segment_begin(segments: Segments) -> npt.NDArray[np.int32]:
    """[T] int32: the packed row where each row's segment begins."""
    return np.repeat(segments.offsets[:-1].astype(np.int32), segments.lengths)


def tile_order(blocks: Rows, group_begin: Rows) -> IntArray:
    """The order of tiles: longest first, so that all clusters finish together. But groups whose keys and values do not
    fit into L2 side by side come one after another.

    Args:
        blocks: [n] of each tile.
        group_begin: [n] the first packed row of each tile's group, ascending.
    """
    order = longest_first(blocks)
    if not len(order) or group_begin[-1] < L2_ROWS:
        return order
    return order[np.argsort((group_begin // L2_ROWS).astype(np.uint16)[order], kind="stable")]


def _blocks(begin: Rows, end: Rows, tile_n: int) -> Any:
    return -(-(end - begin) // tile_n)

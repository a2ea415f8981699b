"""The visibility rule on the device: which scores of a masked key block a query row keeps.

`RegionMask` serves prompts with responses, `PathMask` trees, windows and chunks. tests/ops/plan/ has the same rules in
numpy and proves them together with the plans.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.accumulator import column, row_elements


class RegionMask(NamedTuple):
    """The mask of a block of a region: rows q keep keys k <= q below the limit, and where rows of several segments
    straddle the tile, only keys of their own segment."""

    key_row: Int32  # packed row of the block's first key
    limit: Int32  # first key row past the region
    straddles: Boolean  # own keys of a tile with rows of several segments

    @cute.jit
    def apply(
        self,
        acc_S: cute.Tensor,
        q_row: cute.Tensor,  # (2) packed row of each of the thread's query rows
        segment_begin: cute.Tensor,  # (2) of these rows
    ) -> None:
        """-inf for the scores that rows do not keep."""
        keep_before(acc_S, q_row, self.key_row, self.limit)
        if self.straddles:
            keep_from(acc_S, segment_begin, self.key_row)

    def sees(self, r: int, row: Int32, key: Int32, segment_begin: cute.Tensor) -> Boolean:
        """Whether `apply` keeps a key for the thread's row r, which is packed row `row`."""
        return (key <= row) & (key < self.limit) & (~self.straddles | (key >= segment_begin[r]))

    def first_hidden(self) -> Int32:
        """The first key of the block, counted from 0, that may be hidden from all rows of the tile: from the limit on
        keys are another segment's."""
        return self.limit - self.key_row

    def hides(self, key: Int32, segment_begin: cute.Tensor) -> bool:
        """Whether a key from `first_hidden` on is hidden from all rows of the tile."""
        return True


class PathBounds(NamedTuple):
    """The bounds that a `PathMask` reads."""

    visible_end: cute.Tensor  # (T + N) past the last query row that sees a key
    first_key: cute.Tensor | None  # (T) packed row of the first key that each row sees, with a window or chunks
    own: cute.Tensor | None = None  # (2) first_key of the thread's rows

    def of_rows(self, q_row: cute.Tensor) -> "PathBounds":
        """Add the first keys of the thread's rows. They are in registers before the first block, as a load in a block
        would hold its softmax up."""
        own = cute.make_rmem_tensor(2, Int32)
        for r in range(2):
            own[r] = self.first_key[q_row[r]]
        return self._replace(own=own)


class PathMask(NamedTuple):
    """The mask of a block of a path: rows q keep keys k <= q below the limit, and where `by_key`, only keys whose
    `visible_end` is above q. With a window or chunks they keep keys from their first one on."""

    key_row: Int32  # packed row of the block's first key
    limit: Int32  # no row sees keys from here on
    by_key: Boolean  # rows do not see all keys before
    tile_row: Int32  # the tile's first row

    @cute.jit
    def apply(
        self,
        acc_S: cute.Tensor,
        q_row: cute.Tensor,  # (2) packed row of each of the thread's query rows
        bounds: PathBounds,
    ) -> None:
        """-inf for the scores that rows do not keep."""
        keep_before(acc_S, q_row, self.key_row, self.limit)
        if self.by_key:
            first = first_key(self.key_row)
            for e0, e1 in zip(row_elements(acc_S, 0), row_elements(acc_S, 1), strict=True):
                end = bounds.visible_end[first + column(e0)]
                acc_S[e0] = acc_S[e0] if q_row[0] < end else -Float32.inf
                acc_S[e1] = acc_S[e1] if q_row[1] < end else -Float32.inf
        if const_expr(bounds.first_key is not None):
            keep_from(acc_S, bounds.own, self.key_row)

    def sees(self, r: int, row: Int32, key: Int32, bounds: PathBounds) -> Boolean:
        """Whether `apply` keeps a key for the thread's row r, which is packed row `row`."""
        seen = (key <= row) & (key < self.limit) & (~self.by_key | (row < bounds.visible_end[key]))
        return seen if const_expr(bounds.first_key is None) else seen & (key >= bounds.own[r])

    def first_hidden(self) -> Int32:
        """The first key of the block, counted from 0, that may be hidden from all rows of the tile."""
        return cutlass.select_(self.by_key, Int32(0), self.limit - self.key_row)

    @cute.jit
    def hides(self, key: Int32, bounds: PathBounds) -> Boolean:
        """Whether a key from `first_hidden` on is hidden from all rows of the tile. No block has keys of the path that
        are outside of all windows."""
        hidden = key >= self.limit
        if not hidden:  # nothing is loaded for the keys past a limit
            hidden = bounds.visible_end[key] <= self.tile_row
        return hidden


@cute.jit
def keep_before(acc_S: cute.Tensor, q_row: cute.Tensor, key_row: Int32, limit: Int32) -> None:
    """-inf for the scores of keys after their row, and from the limit on."""
    ends = [cutlass.min(q_row[r] + 1, limit) - key_row for r in range(2)]
    if cute.arch.vote_any_sync(cutlass.min(*ends) < 2 * cute.size(acc_S)):  # not where windows or segments begin
        for r in cutlass.range_constexpr(2):
            end = ends[r] - first_key(Int32(0))
            for e in row_elements(acc_S, r):
                acc_S[e] = acc_S[e] if column(e) < end else -Float32.inf


@cute.jit
def keep_from(acc_S: cute.Tensor, first_keys: cute.Tensor, key_row: Int32) -> None:
    """-inf for the scores of keys before the first one that their row sees."""
    low = [first_keys[r] - first_key(key_row) for r in range(2)]
    if cute.arch.vote_any_sync((low[0] > 0) | (low[1] > 0)):  # not in most blocks
        for r in cutlass.range_constexpr(2):
            for e in row_elements(acc_S, r):
                acc_S[e] = acc_S[e] if column(e) >= low[r] else -Float32.inf


def first_key(key_row: Int32) -> Int32:
    """The key of a thread's first score in each row; `column` counts from there."""
    return key_row + cute.arch.lane_idx() % 4 * 2

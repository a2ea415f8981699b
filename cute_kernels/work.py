"""Work items on the device: which tiles a cluster takes, which key blocks a tile walks, and with what masks."""

from dataclasses import dataclass
from typing import TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_kernels.abi import ForwardFields, PathFields
from cute_kernels.mask import PathBounds, PathMask, RegionMask


def first_and_step(cluster_size: int) -> tuple[Int32, Int32]:
    """The cluster's first item and the step to its next one, so that neighbours in the list run side by side."""
    return cute.arch.block_idx()[0] // cluster_size, cute.arch.grid_dim()[0] // cluster_size


@dataclass
class Tile:
    """One work item (abi.ForwardFields) of a layout of two levels.

    The order of its blocks: own blocks that need the mask from the last one down, context blocks that do, the context's
    whole blocks, the own whole blocks. tests/ops/plan/test_forward.py has the same walk in numpy (`key_blocks`).
    """

    row: Int32
    row_end: Int32
    context_begin: Int32
    context_end: Int32
    own_begin: Int32
    own_masked: Int32
    masked: Int32  # masked blocks of both regions, at least 1
    straddles: Boolean
    context_blocks: Int32
    own_blocks: Int32
    context_whole: Int32
    tile_n: int

    @classmethod
    def load(cls, fields: cute.Tensor | list[Int32], tile_n: int) -> "Tile":
        items = ForwardFields
        field = [fields[f] for f in range(items.NUM_FIELDS)]
        row, row_end, own_begin = field[items.ROW], field[items.ROW_END], field[items.OWN_BEGIN]
        context_begin, context_end = field[items.CONTEXT_BEGIN], field[items.CONTEXT_END]
        context_blocks = (context_end - context_begin + tile_n - 1) // tile_n
        own_blocks = (row_end - own_begin + tile_n - 1) // tile_n
        context_masked, own_masked = field[items.CONTEXT_MASKED], field[items.OWN_MASKED]
        return cls(
            row,
            row_end,
            context_begin,
            context_end,
            own_begin,
            own_masked,
            own_masked + context_masked,
            field[items.STRADDLES] != 0,
            context_blocks,
            own_blocks,
            context_blocks - context_masked,
            tile_n,
        )

    @property
    def blocks(self) -> Int32:
        return self.context_blocks + self.own_blocks

    @cute.jit
    def bounds_of(self, q_row: cute.Tensor, segment_begin: cute.Tensor) -> cute.Tensor:
        """(2) where the segments of a thread's rows begin. In registers before the first block, as a load in a block
        would hold its softmax up."""
        own = cute.make_rmem_tensor(2, Int32)
        own.fill(0)
        if self.straddles:
            for r in cutlass.range_constexpr(2):
                own[r] = segment_begin[q_row[r]]
        return own

    def key_row(self, i: Int32) -> Int32:
        """Packed row of the first key of the i-th block."""
        n, j = self.tile_n, i - self.masked
        whole = cutlass.select_(
            j < self.context_whole, self.context_begin + j * n, self.own_begin + (j - self.context_whole) * n
        )
        context = self.context_begin + (self.context_blocks - 1 - i + self.own_masked) * n
        own = self.own_begin + (self.own_blocks - 1 - i) * n
        return cutlass.select_(i < self.own_masked, own, cutlass.select_(j < 0, context, whole))

    def mask(self, i: Int32) -> RegionMask:
        """The mask of the i-th block; the mask of a whole block keeps all of it."""
        own = (i < self.own_masked) | (i >= self.masked + self.context_whole)
        return RegionMask(self.key_row(i), cutlass.select_(own, self.row_end, self.context_end), own & self.straddles)


@dataclass
class PathTile:
    """One work item (abi.PathFields) of a tree.

    tests/ops/plan/test_paths.py has the same walk in numpy (`key_blocks`).
    """

    row: Int32
    row_end: Int32
    masked: Int32  # masked blocks, at least 1
    blocks: Int32
    key: Int32  # first key of the first block
    limit: Int32  # limit of the first block
    region: Int32  # the tile's first row in the table of regions
    regions: cute.Tensor
    run: cute.Tensor  # (3) where `key_row` is: the table's next row, blocks left of this run, the next block's key
    tile_n: int

    @classmethod
    def load(cls, fields: cute.Tensor | list[Int32], regions: cute.Tensor, tile_n: int) -> "PathTile":
        row, row_end, region, masked, blocks, key, limit = [fields[f] for f in range(PathFields.NUM_FIELDS)]
        run = cute.make_rmem_tensor(3, Int32)
        run[0], run[1], run[2] = region, Int32(1), key
        return cls(row, row_end, masked, blocks, key, limit, region, regions, run, tile_n)

    @property
    def straddles(self) -> Boolean:
        """Rows of a tile may be of several segments."""
        return Boolean(True)

    def bounds_of(self, q_row: cute.Tensor, bounds: PathBounds) -> PathBounds:
        """Add the first keys of a thread's rows to the bounds, where keys are hidden before them."""
        return bounds if bounds.first_key is None else bounds.of_rows(q_row)

    @cute.jit
    def key_row(self, i: Int32) -> Int32:
        """Packed row of the first key of the i-th block; blocks must be asked for in order."""
        if self.run[1] == 0:
            region = self.run[0]
            self.run[0] = region + 1
            self.run[1] = cutlass.select_(i < self.masked, Int32(1), self.regions[region, 1])
            self.run[2] = self.regions[region, 0]
        row = self.run[2]
        self.run[1] -= 1
        self.run[2] = row + self.tile_n
        return row

    @cute.jit
    def mask(self, i: Int32) -> PathMask:
        """The mask of the i-th block. The mask of a whole block, wherever it begins, keeps all of it: rows that see so
        many keys before the tile have their first key before them."""
        row, limit = self.row - self.tile_n, self.row
        if i == 0:
            row, limit = self.key, self.limit
        elif i < self.masked:
            row, limit = self.regions[self.region + i - 1, 0], self.regions[self.region + i - 1, 1]
        return PathMask(row, cutlass.select_(limit < 0, -limit, limit), limit < 0, self.row)


AnyTile: TypeAlias = Tile | PathTile
Mask: TypeAlias = RegionMask | PathMask

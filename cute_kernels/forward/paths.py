"""Attention forward on Hopper over trees of any depth: the forward, with the keys of a path instead of two regions.

Windows and chunks run here too, whatever the depth: with them, tiles see a few runs of keys of their path.
"""

from collections.abc import Sequence
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels import fakes
from cute_kernels.abi import PathFields
from cute_kernels.forward.arguments import Global, Thread
from cute_kernels.forward.frame import Items
from cute_kernels.forward.kernel import ForwardKernel
from cute_kernels.forward.walk import Walk
from cute_kernels.mask import PathBounds
from cute_kernels.work import PathTile


class PathItems(Items):
    """The work items of trees."""

    tile_fields: ClassVar[int] = PathFields.NUM_FIELDS
    finds_walks: ClassVar[bool] = False
    num_tables: ClassVar[int] = 2

    @property
    def num_fields(self) -> int:
        return self.tile_fields + self.kernel.cluster * self.kernel.warp_groups * PathFields.NUM_PART_FIELDS

    def fake_tables(self, rows: cute.SymInt) -> tuple[cute.Tensor, ...]:
        return fakes.table(self.num_fields), fakes.table(2), fakes.flat(Int32, cute.sym_int32())

    def bounds(self, tables: Sequence[cute.Tensor], first_key: cute.Tensor | None) -> tuple[PathBounds, cute.Tensor]:
        regions, visible_end = tables
        return PathBounds(visible_end, first_key), regions

    def tile(self, g: Global, fields: cute.Tensor | list[Int32]) -> PathTile:
        return PathTile.load(fields, g.regions, self.kernel.tile_n)

    def walk(self, tile: PathTile, item: cute.Tensor, thread: Thread) -> Walk:
        part = thread.wg * self.kernel.cluster + self.kernel.rank()
        first = self.tile_fields + part * PathFields.NUM_PART_FIELDS
        begin, end, rest = [item[first + j] for j in range(PathFields.NUM_PART_FIELDS)]
        return Walk(begin, end, rest, tile.masked)


class PathForwardKernel(ForwardKernel):
    """The forward over trees: arguments as of :class:`ForwardFrame`, but for these after lse:

        work: [n, 7] int32, the tiles of `dualkv.ops.plan.paths` for this kernel's tile; with a window 3 numbers more a
            warp group of the cluster.
        schedule: as of :class:`ForwardFrame`.
        regions: [m, 2] int32, of the same plan (both: abi.PathFields).
        visible_end: [T + tile_n] int32, zeros past T.

    NaN and infinity in V stay with the rows that see them.
    """

    items_class = PathItems

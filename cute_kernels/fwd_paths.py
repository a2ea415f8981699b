"""Attention forward on Hopper over trees of any depth: the forward, with the keys of a path instead of two regions."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels import fakes
from cute_kernels.abi import PathFields as items
from cute_kernels.accumulator import column, row_elements
from cute_kernels.fwd import ForwardKernel
from cute_kernels.fwd_frame import Global
from cute_kernels.mask import mask


@dataclass
class PathTile:
    """One work item. tests/test_plan_paths.py has the same walk in numpy (`key_blocks`)."""

    row: Any
    row_end: Any
    masked: Any  # masked blocks, at least 1
    blocks: Any
    key: Any  # first key of the first block
    limit: Any  # and its limit
    region: Any  # the tile's first row in the table
    regions: cute.Tensor
    run: cute.Tensor  # (3) where key_row is: next row of the table, blocks left of this run, key of the next
    tile_n: int

    @classmethod
    def load(cls, fields: cute.Tensor | list[Int32], regions: cute.Tensor, tile_n: int) -> "PathTile":
        row, row_end, region, masked, blocks, key, limit = [fields[f] for f in range(items.NUM_FIELDS)]
        run = cute.make_rmem_tensor(3, Int32)
        run[0], run[1], run[2] = region, Int32(1), key
        return cls(row, row_end, masked, blocks, key, limit, region, regions, run, tile_n)

    @property
    def straddles(self) -> cutlass.Boolean:
        """Rows of a tile may be of several segments."""
        return cutlass.Boolean(True)

    @cute.jit
    def key_row(self, i: Int32) -> Int32:
        """Packed row of the first key of the i-th block; to be asked for one after another."""
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
    def mask_arguments(self, i: Int32) -> tuple[Int32, Int32, cutlass.Boolean, Int32]:
        """(key_row, limit, by_key, the tile's first row) of the i-th block, for mask_path.

        Of a whole block, wherever it is, what keeps all of it.
        """
        row, limit = self.row - self.tile_n, self.row
        if i == 0:
            row, limit = self.key, self.limit
        elif i < self.masked:
            row, limit = self.regions[self.region + i - 1, 0], self.regions[self.region + i - 1, 1]
        return row, cutlass.select_(limit < 0, -limit, limit), limit < 0, self.row


@cute.jit
def mask_path(
    acc_S: cute.Tensor,
    q_row: cute.Tensor,  # (2) packed row of each of the thread's query rows
    visible_end: cute.Tensor,  # (T + N) past the last query row that sees a key
    key_row: Int32,  # packed row of the block's first key
    limit: Int32,  # keys from here on are nobody's
    by_key: cutlass.Boolean,  # rows do not see all keys before
    tile_row: Int32,
) -> None:
    """Keep keys k <= q below the limit, and by key, q < visible_end[k]; the rest becomes -inf."""
    mask(acc_S, q_row, visible_end, key_row, limit, False)
    if by_key:
        first = key_row + cute.arch.lane_idx() % 4 * 2
        for e0, e1 in zip(row_elements(acc_S, 0), row_elements(acc_S, 1), strict=True):
            end = visible_end[first + column(e0)]
            acc_S[e0] = acc_S[e0] if q_row[0] < end else -Float32.inf
            acc_S[e1] = acc_S[e1] if q_row[1] < end else -Float32.inf


class PathForwardKernel(ForwardKernel):
    """The forward over trees: arguments as of :class:`ForwardFrame`, but for these after lse:

        work: [n, 7] int32, the tiles of `dualkv.plan_paths` for this kernel's tile.
        schedule: as there.
        regions: [m, 2] int32, of the same plan (both: abi.PathFields).
        visible_end: [T + tile_n] int32, zeros past T.

    What is not finite in V stays with the rows that see it.
    """

    mask = staticmethod(mask_path)
    num_fields = items.NUM_FIELDS
    walks = False  # what the rows of a warp group see is not in the tables

    def fake_arguments(self) -> tuple[object, ...]:
        q, k, v, out, lse, _, schedule, _, *rest = super().fake_arguments()
        work, regions = fakes.table(items.NUM_FIELDS), fakes.table(2)
        visible_end = fakes.flat(Int32, cute.sym_int32())
        return q, k, v, out, lse, work, schedule, regions, visible_end, *rest

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (T, H, D)
        k: cute.Tensor,  # (T, Hk, D)
        v: cute.Tensor,  # (T, Hk, D)
        out: cute.Tensor,  # (T, H, D)
        lse: cute.Tensor,  # (H, T)
        work: cute.Tensor,  # (n, 7)
        schedule: cute.Tensor,  # (n * head groups, 2)
        regions: cute.Tensor,  # (m, 2)
        visible_end: cute.Tensor,  # (T + N)
        softmax_scale: Float32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.launch(q, k, v, out, lse, work, schedule, (visible_end, regions), softmax_scale, num_sms, stream)

    def tile(self, g: Global, fields: cute.Tensor | list[Int32]) -> PathTile:
        return PathTile.load(fields, g.regions, self.tile_n)

    def first_unseen(self, key_row: Int32, limit: Int32, by_key: cutlass.Boolean, tile_row: Int32) -> Int32:
        return cutlass.select_(by_key, Int32(0), limit - key_row)

    @cute.jit
    def unseen(
        self,
        key: Int32,
        bounds: cute.Tensor,
        key_row: Int32,
        limit: Int32,
        by_key: cutlass.Boolean,
        tile_row: Int32,
    ) -> cutlass.Boolean:
        unseen = key >= limit
        if not unseen:  # nothing is loaded for the keys past a limit
            unseen = bounds[key] <= tile_row
        return unseen

    def sees(
        self,
        row: Int32,
        key: Int32,
        bounds: cute.Tensor,
        key_row: Int32,
        limit: Int32,
        by_key: cutlass.Boolean,
        tile_row: Int32,
    ) -> cutlass.Boolean:
        return (key <= row) & (key < limit) & (~by_key | (row < bounds[key]))

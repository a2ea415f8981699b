"""Attention forward on Hopper over trees of any depth: the forward, with the keys of a path instead of two regions.

Windows and chunks run here too, whatever the depth: with them, tiles see a few runs of keys of their path.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels import fakes
from cute_kernels.abi import PathFields
from cute_kernels.fwd import ForwardKernel
from cute_kernels.fwd_frame import Arguments, Global, Thread
from cute_kernels.fwd_walk import Walk
from cute_kernels.mask import PathBounds
from cute_kernels.work import PathTile


class PathForwardKernel(ForwardKernel):
    """The forward over trees: arguments as of :class:`ForwardFrame`, but for these after lse:

        work: [n, 7] int32, the tiles of `dualkv.ops.plan.paths` for this kernel's tile; with a window 3 numbers more a
            warp group of the cluster.
        schedule: as of :class:`ForwardFrame`.
        regions: [m, 2] int32, of the same plan (both: abi.PathFields).
        visible_end: [T + tile_n] int32, zeros past T.

    NaN and infinity in V stay with the rows that see them.
    """

    tile_fields = PathFields.NUM_FIELDS
    finds_walks = False

    @property
    def num_fields(self) -> int:
        return self.tile_fields + self.cluster * self.warp_groups * PathFields.NUM_PART_FIELDS

    def fake_arguments(self) -> tuple[object, ...]:
        q, k, v, out, lse, _, schedule, _, *rest = super().fake_arguments()
        work, regions = fakes.table(self.num_fields), fakes.table(2)
        visible_end = fakes.flat(Int32, cute.sym_int32())
        return q, k, v, out, lse, work, schedule, regions, visible_end, *rest

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (T, H, D)
        k: cute.Tensor,  # (T, Hk, D)
        v: cute.Tensor,  # (T, Hk, Dv)
        out: cute.Tensor,  # (T, H, Dv)
        lse: cute.Tensor,  # (H, T)
        work: cute.Tensor,  # (n, num_fields)
        schedule: cute.Tensor,  # (items, 2)
        regions: cute.Tensor,  # (m, 2)
        visible_end: cute.Tensor,  # (T + N)
        softmax_scale: Float32,
        num_sms: Int32,
        stream: cuda.CUstream,
        *features: object,
    ) -> None:
        given = self.features(features)
        bounds = PathBounds(visible_end, given.first_key)
        arguments = Arguments(q, k, v, out, lse, work, schedule, bounds, regions, given)
        self.launch(arguments, softmax_scale, num_sms, stream)

    def tile(self, g: Global, fields: cute.Tensor | list[Int32]) -> PathTile:
        return PathTile.load(fields, g.regions, self.tile_n)

    def part_walk(self, tile: PathTile, item: cute.Tensor, thread: Thread) -> Walk:
        part = thread.wg * self.cluster + self.rank()
        first = self.tile_fields + part * PathFields.NUM_PART_FIELDS
        begin, end, rest = [item[first + j] for j in range(PathFields.NUM_PART_FIELDS)]
        return Walk(begin, end, rest, tile.masked)

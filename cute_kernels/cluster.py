"""What kernels of both directions do as a cluster of CTAs."""

from collections.abc import Iterable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.pipeline import Pipeline, Stage

SMEM_BYTES = 227 * 1024  # a CTA's shared memory


def check_smem(needed: int, configuration: str) -> None:
    """Raise ValueError where a configuration needs more bytes of shared memory than a CTA has."""
    if needed > SMEM_BYTES:
        raise ValueError(f"{configuration} need {needed} bytes of shared memory, a CTA has {SMEM_BYTES}")


class Clustered:
    """A kernel of clusters of `cluster` CTAs."""

    cluster: int

    def rank(self) -> Int32:
        """This CTA's number in its cluster."""
        return Int32(0) if self.cluster == 1 else cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def sync_cluster(self) -> None:
        self.arrive_cluster()
        self.await_cluster()

    def arrive_cluster(self) -> None:
        """The first half of `sync_cluster`. A thread may do between the halves what needs no other thread."""
        if self.cluster > 1:
            cute.arch.cluster_arrive()

    def await_cluster(self) -> None:
        if self.cluster == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_wait()

    @cute.jit
    def arrive(self, bar: cute.Pointer) -> None:
        """This warp is done with a stage: tell the producer of every CTA that writes into it."""
        if const_expr(self.cluster == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bar)
        else:
            if cute.arch.lane_idx() < self.cluster:
                cute.arch.mbarrier_arrive(bar, cute.arch.lane_idx())  # second argument: CTA of the cluster

    def multicast(
        self, atom: cute.CopyAtom, block: cute.Tensor, shared: cute.Tensor, pipeline: Pipeline, stage: Stage
    ) -> None:
        """Copy a block of a tensor in global memory into a stage of every CTA of the cluster: each copies its part.

        shared: the tiles of all stages, (rows, columns, stages).
        """
        ctas = cute.make_layout(self.cluster)
        tile, source = cpasync.tma_partition(
            atom, self.rank(), ctas, cute.group_modes(shared, 0, 2), cute.group_modes(block, 0, 2)
        )
        mask = {} if self.cluster == 1 else {"mcast_mask": cutlass.Int16((1 << self.cluster) - 1)}
        cute.copy(atom, source, tile[None, stage.index], tma_bar_ptr=pipeline.full[stage.index], **mask)

    def init_mbarriers(self, bars: cute.Pointer, kinds: Iterable[tuple[int, int, int]]) -> None:
        """kinds: of consecutive mbarriers the first one's number, how many, and arrivals that complete a phase."""
        with cute.arch.elect_one():
            for first, count, arrivals in kinds:
                for j in range(count):
                    cute.arch.mbarrier_init(bars + first + j, arrivals)

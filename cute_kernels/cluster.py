"""The parts that kernels of both directions share as clusters of CTAs."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
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
        """This CTA's number in its cluster. By all lanes of a warp together: one that is in a branch without the others
        would wait for them there."""
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

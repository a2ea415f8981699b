"""What kernels of both directions do as a cluster of CTAs."""

from collections.abc import Iterable

import cutlass.cute as cute
from cutlass import Int32, const_expr

SMEM_BYTES = 227 * 1024  # a CTA's shared memory


class Clustered:
    """A kernel of clusters of `cluster` CTAs."""

    cluster: int

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

    def rank(self) -> Int32:
        """This CTA's place in its cluster."""
        return Int32(0) if self.cluster == 1 else cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def init_mbarriers(self, bars: cute.Pointer, kinds: Iterable[tuple[int, int, int]]) -> None:
        """kinds: of consecutive mbarriers the first one's number, how many, and arrivals that complete a phase."""
        with cute.arch.elect_one():
            for first, count, arrivals in kinds:
                for j in range(count):
                    cute.arch.mbarrier_init(bars + first + j, arrivals)

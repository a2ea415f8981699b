"""What kernels of both directions do as a cluster of CTAs."""

from collections.abc import Iterable

import cutlass.cute as cute
from cutlass import Int32


class Clustered:
    """A kernel of clusters of `cluster` CTAs."""

    cluster: int

    def sync_cluster(self) -> None:
        if self.cluster == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def rank(self) -> Int32:
        """This CTA's place in its cluster."""
        return Int32(0) if self.cluster == 1 else cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def init_mbarriers(self, bars: cute.Pointer, kinds: Iterable[tuple[int, int, int]]) -> None:
        """kinds: of consecutive mbarriers the first one's number, how many, and arrivals that complete a phase."""
        with cute.arch.elect_one():
            for first, count, arrivals in kinds:
                for j in range(count):
                    cute.arch.mbarrier_init(bars + first + j, arrivals)

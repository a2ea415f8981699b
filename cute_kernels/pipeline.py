"""Pipelines: how the warps of a kernel hand stages of shared memory to each other, over mbarriers.

A pipeline has `stages` stages, which are used in rotation. The producer fills a stage, the consumers use the data and
release the stage:

    producer                                      consumers
    stage = pipeline.stage(it)                    stage = pipeline.stage(it)
    pipeline.producer_acquire(stage)              pipeline.consumer_wait(stage)
    pipeline.producer_expect(stage, num_bytes)    ... use the data of stage.index ...
    copy(..., bar=pipeline.full[stage.index])     pipeline.consumer_release(stage)

`it` counts the uses from 0, the same on both sides. Each side goes through every use in order and skips none: a
consumer that does not need a block waits for its stage and releases it nevertheless.

Why that is safe. A wait names a phase by its parity only. So it is right as long as the phase after the one that is
waited for does not end before the wait has returned; else the warp waits for a phase that is over, and hangs. For the
two kinds of barriers of a pipeline that always holds: no stage becomes full again before all consumers have released
it, which they do after their wait, and none becomes empty again before the producer has filled it, after its wait.
A :class:`Signal` has no empty barriers, so it does not keep its producer from running ahead. The place where a signal
is declared says what does.

Pipelines are frozen dataclasses because the DSL takes a method call on any other object within a dynamic loop or branch
for a change of that object, and then carries all of its members through the loop.

`tests/protocol` runs these objects with the kernels on the CPU, under random schedules. It fails if a wait is for a
phase that is over, if a barrier has more arrivals than its count, or if nothing orders a write of a stage after its
reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


class Stage(NamedTuple):
    """One use of a stage.

    Attributes:
        index: the stage, which selects the mbarrier and the tile in shared memory.
        phase: parity of the number of times that the stage was used before.
    """

    index: Int32 | int
    phase: Int32 | int


def stage_of(it: Int32 | int, stages: int) -> Stage:
    """The stage of use `it` (from 0 on) where `stages` stages rotate."""
    return Stage(it % stages, (it // stages) & 1)


# ---------------------------------------------------------------- mbarriers
@dataclass(frozen=True)
class Mbarriers:
    """Mbarriers of one kind, one a stage. Here every calling thread arrives; pipelines and signals arrive once a warp.

    Attributes:
        bars: the first mbarrier of the CTA; None on the host, where only their number counts.
        first: the number of this kind's first one among the CTA's.
        count: how many.
        arrivals: how many complete a phase (of threads; bytes that are expected come on top).
    """

    bars: cute.Pointer | None
    first: int
    count: int
    arrivals: int

    def __getitem__(self, index: Int32 | int) -> cute.Pointer:
        """The mbarrier of a stage. Computed at each use: an address kept from the kernel's start on takes registers."""
        return self.bars + self.first + index

    def wait(self, stage: Stage) -> None:
        """Wait until the phase has ended. What arriving threads wrote before is visible then."""
        cute.arch.mbarrier_wait(self[stage.index], stage.phase)

    def arrive(self, index: Int32 | int) -> None:
        cute.arch.mbarrier_arrive(self[index])

    def expect(self, index: Int32 | int, num_bytes: int) -> None:
        """Arrive; the phase ends when the copy engine has also brought `num_bytes`."""
        cute.arch.mbarrier_arrive_and_expect_tx(self[index], num_bytes)


@cute.jit
def arrive_at_cluster(bar: cute.Pointer, cluster: cutlass.Constexpr) -> None:
    """The warp arrives once at the mbarrier that lies where `bar` does, in every CTA of its cluster."""
    if const_expr(cluster == 1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bar)
    else:
        if cute.arch.lane_idx() < cluster:
            cute.arch.mbarrier_arrive(bar, cute.arch.lane_idx())  # second argument: CTA of the cluster


class MbarrierAllocator:
    """Hands out the mbarriers of a CTA, in order.

    Host and device run the same code that declares a kernel's pipelines: the host without `bars`, for their number.
    """

    def __init__(self, bars: cute.Pointer | None = None) -> None:
        self.bars, self.num_bars = bars, 0
        self.kinds: list[Mbarriers] = []

    def take(self, count: int, arrivals: int) -> Mbarriers:
        self.kinds.append(Mbarriers(self.bars, self.num_bars, count, arrivals))
        self.num_bars += count
        return self.kinds[-1]


def init_mbarriers(kinds: Sequence[Mbarriers]) -> None:
    """Initialize all mbarriers, by one warp. Other threads need a fence and a barrier before they use them."""
    with cute.arch.elect_one():
        for kind in kinds:
            for j in range(kind.count):
                cute.arch.mbarrier_init(kind[j], kind.arrivals)


# ---------------------------------------------------------------- pipelines
@dataclass(frozen=True)
class Pipeline:
    """Stages that the producer fills and the consumers release.

    Invariant: the producer writes a stage only after `producer_acquire`, which waits until every consumer has released
    the previous use; a consumer reads it only between `consumer_wait` and `consumer_release`. So at most `stages` uses
    are in flight.

    Attributes:
        full: complete when a stage's data is there.
        empty: complete when all consumers have released a stage.
        cluster: CTAs whose consumers read what this producer writes (multicast). Their releases arrive at every CTA.
    """

    full: Mbarriers
    empty: Mbarriers
    cluster: int = 1

    @classmethod
    def make(
        cls, barriers: MbarrierAllocator, stages: int, *, producers: int, consumers: int, cluster: int = 1
    ) -> Self:
        """
        Args:
            barriers: hands out `stages` full barriers, then `stages` empty ones.
            producers: arrivals that fill a stage: warps that write it, or 1 for a warp that has the copy engine do it.
            consumers: arrivals that empty a stage: warps of one CTA that release it.
            cluster: see the class.
        """
        return cls(barriers.take(stages, producers), barriers.take(stages, consumers * cluster), cluster)

    @property
    def stages(self) -> int:
        return self.full.count

    def stage(self, it: Int32 | int) -> Stage:
        """The stage of use `it`, counted from 0."""
        return stage_of(it, self.stages)

    # ------------------------------------------------------------ producer
    def producer_acquire(self, stage: Stage) -> None:
        """Wait until the stage may be written. The first use of each stage does not wait."""
        cute.arch.mbarrier_wait(self.empty[stage.index], stage.phase ^ 1)

    def producer_expect(self, stage: Stage, num_bytes: int) -> None:
        """The stage is full when the copy engine has brought `num_bytes`; its copies name `full[stage.index]`."""
        with cute.arch.elect_one():
            self.full.expect(stage.index, num_bytes)

    def producer_commit(self, stage: Stage) -> None:
        """This warp has written its part of the stage."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(stage.index)

    # ------------------------------------------------------------ consumers
    def consumer_wait(self, stage: Stage) -> None:
        """Wait until the stage is full."""
        self.full.wait(stage)

    def consumer_release(self, stage: Stage, sync_warp: bool = True) -> None:
        """This warp no longer reads the stage; every CTA of the cluster hears of it.

        sync_warp: bring the lanes together first. Not needed right after a wait for products (wgmma), if no lane has
            read the stage otherwise.
        """
        bar = self.empty[stage.index]
        if sync_warp:
            cute.arch.sync_warp()
        arrive_at_cluster(bar, self.cluster)


class WrappingPipeline(Pipeline):
    """A pipeline whose uses are counted from 0 to 2 * stages - 1 and then from 0 again.

    So neither stage nor phase takes a division by a number of stages that is no power of two.
    """

    def stage(self, it: Int32 | int) -> Stage:
        second = it >= self.stages
        return Stage(cutlass.select_(second, it - self.stages, it), cutlass.select_(second, Int32(1), Int32(0)))

    def next(self, it: Int32) -> Int32:
        """The count of the next use."""
        return cutlass.select_(it == 2 * self.stages - 1, Int32(0), it + 1)


@dataclass(frozen=True)
class Signal:
    """One-way barriers, which say that something is done. There are no empty barriers: another pipeline or signal keeps
    the producer from lapping its consumers.

    Invariant: use `it` + stages, the next one of the same barrier, is not complete before every warp that waits for use
    `it` has seen it. The place where a signal is declared says why.

    Attributes:
        full: complete when all have arrived.
    """

    full: Mbarriers

    @classmethod
    def make(cls, barriers: MbarrierAllocator, stages: int, *, producers: int) -> Self:
        return cls(barriers.take(stages, producers))

    @property
    def stages(self) -> int:
        return self.full.count

    def stage(self, it: Int32 | int) -> Stage:
        """The stage of use `it`, counted from 0."""
        return stage_of(it, self.stages)

    def arrive(self, it: Int32, sync_warp: bool = True) -> None:
        """This warp has done its part of use `it`. sync_warp: bring the lanes together first."""
        if sync_warp:
            cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(self.stage(it).index)

    def wait(self, it: Int32 | int) -> None:
        """Wait for use `it`."""
        self.full.wait(self.stage(it))

    def wait_previous(self, it: Int32) -> None:
        """Wait for use `it` - stages, the one before of the same barrier; return at once if there was none."""
        stage = self.stage(it)
        cute.arch.mbarrier_wait(self.full[stage.index], stage.phase ^ 1)

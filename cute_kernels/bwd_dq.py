"""dQ of the backward up to head dim 128, from shared memory to global memory, by the warps beside the producer."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.abi import BlockFields
from cute_kernels.bwd_arguments import BackwardPipelines, Global, Item, Shared
from cute_kernels.bwd_frame import BackwardFrame, split_rows
from cute_kernels.pipeline import Pipeline, Signal, Stage
from cute_kernels.ptx import (
    bulk_add,
    bulk_store,
    load_acquire,
    load_volatile,
    sleep,
    store_release,
    store_volatile,
)

CLEAR_AHEAD = 8  # steps between clearing and adding up: some 20 us
CLAIMED, CLEARED = 1, 2  # states of a block's dQ, whose lock is 0 before


class StagedDq(Pipeline):
    """dQ in shared memory. Stages do not rotate: each warp group has one of its own, and fills it in every step."""

    def stage_of_warp_group(self, it: Int32, wg: Int32 | int) -> Stage:
        return Stage(wg, it & 1)


@dataclass(frozen=True)
class NarrowPipelines(BackwardPipelines):
    """
    Attributes:
        dS: complete for step `it` when all MMA warps have written dS of step `it` and no longer read dS of step
            `it` - 1. So one barrier says both that a block's dS is there and that the buffer of the block before may
            be written again, for which there are two buffers. Every MMA warp waits for step `it` - 1 before it arrives
            for step `it`, so no warp is a phase behind. That one wait, in `write_dS`, stands before both uses of step
            `it`: the store over dS of step `it` - 2, and the product dQ of step `it` - 1 (`issue_dq`).
        dQ: from the warp group that makes a part of dQ to the warp that adds it up.
    """

    dS: Signal
    dQ: StagedDq


class NarrowDq(BackwardFrame):
    """A mixin of :class:`cute_kernels.bwd_narrow.NarrowBackward`: it adds dQ up."""

    @property
    def dq_warps(self) -> list[int]:
        """The number of warps of each warp group that hold columns of dQ."""
        return [4, 4 if split_rows(self.head_dim) else self.head_dim // 16 - 4]

    @property
    def dq_rows(self) -> int:
        """Rows of dQ (columns of the product) a warp group."""
        return self.tile_m // 2 if split_rows(self.head_dim) else self.tile_m

    @property
    def dq_chunks(self) -> int:
        """Quads of floats of dQ a thread, for one query block."""
        return self.dq_rows // 8

    @property
    def dq_warp_floats(self) -> int:
        """Floats of dQ a warp, for one query block: [warp][chunk of 8 rows][lane][4]."""
        return 16 * self.dq_rows

    @cute.jit
    def assist(
        self, g: Global, s: Shared, p: NarrowPipelines, item: Item, heads_per_kv: Int32, warp_idx: Int32
    ) -> None:
        if const_expr(self.want_dq):
            for wg in cutlass.range_constexpr(2):
                if warp_idx == 1 + wg:
                    self.add_dq(g, s, p, item, heads_per_kv, wg)
            if warp_idx == 3:
                self.clear_dq(g, s, item, heads_per_kv)

    @cute.jit
    def add_dq(
        self, g: Global, s: Shared, p: NarrowPipelines, item: Item, heads_per_kv: Int32, wg: cutlass.Constexpr
    ) -> None:
        """Add a warp group's part of dQ to global memory, block by block.

        If deterministic, wait until all predecessors have added theirs. The CTAs of a cluster add to the same rows one
        after the other; the products of the second one go on until its next dQ is ready, so that it releases the
        stages which the first one waits for.
        """
        m_block, h = item.block_end - 1, item.kv_head * heads_per_kv
        own = Int32(0)  # steps so far in which this CTA makes dQ, with a window
        for it in cutlass.range(0, (item.block_end - self.first_block(item)) * heads_per_kv, 1, unroll=1):
            if const_expr(self.windowed):
                if self.is_own(g.blocks[m_block, BlockFields.FLAGS], self.rank()):
                    self.add_dq_block(g, s, p, item, own, m_block, h, wg)
                    own += 1
            else:
                self.add_dq_block(g, s, p, item, it, m_block, h, wg)
            m_block, h = self.next_block(m_block, h, item, heads_per_kv)

    @cute.jit
    def add_dq_block(
        self, g: Global, s: Shared, p: NarrowPipelines, item: Item, it: Int32, m_block: Int32, h: Int32,
        wg: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """`add_dq` of one step. m_block: with a window the row of the table, else the query block."""
        first, num_bytes = 4 * wg * self.dq_warp_floats, 4 * self.dq_warps[wg] * self.dq_warp_floats
        source, num_blocks = s.dQ.iterator + first, g.stats.shape[1]
        row, rank = m_block, self.rank()
        if const_expr(self.windowed):
            m_block = g.blocks[row, BlockFields.M_BLOCK]
        target = self.dq_block(g.dq_acc.iterator, num_blocks, m_block, h) + first
        stage = p.dQ.stage_of_warp_group(it, wg)
        if const_expr(self.deterministic):
            lock = self.lock_of(g, m_block, h, wg)
            if const_expr(self.windowed):
                before = self.turn(g, row)
            else:
                before = item.predecessors(m_block) * self.cluster
                if const_expr(self.cluster == 2):
                    before = cutlass.select_(rank == 0, before, item.order * 2 + 1)
            while load_acquire(lock) != before:
                pass
            cute.arch.sync_warp()
            p.dQ.consumer_wait(stage)
            with cute.arch.elect_one():
                if before == 0:
                    bulk_store(target, source, num_bytes)
                else:
                    bulk_add(target, source, num_bytes)
                self.release_dq(p, stage)
                cute.arch.cp_async_bulk_wait_group(0)
                if const_expr(self.windowed):
                    store_release(lock, before + 1)
                else:
                    store_release(lock, item.order * self.cluster + rank + 1)
        else:
            while load_acquire(self.lock_of(g, m_block, h, 0)) != CLEARED:
                pass
            cute.arch.sync_warp()
            p.dQ.consumer_wait(stage)
            with cute.arch.elect_one():
                bulk_add(target, source, num_bytes)
                self.release_dq(p, stage)
                if const_expr(wg == 0):
                    store_volatile(s.dq_progress, it)

    def release_dq(self, p: NarrowPipelines, stage: Stage) -> None:
        """This thread's copies have read the stage, which the warp group may write again."""
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        p.dQ.empty.arrive(stage.index)  # by hand: `consumer_release` is for whole warps, here one lane is elected

    @cute.jit
    def clear_dq(self, g: Global, s: Shared, item: Item, heads_per_kv: Int32) -> None:
        """Zeros for dQ of blocks that no CTA has claimed yet, CLEAR_AHEAD steps before this CTA adds to them."""
        if const_expr(self.deterministic):
            return
        m_block, h = item.block_end - 1, item.kv_head * heads_per_kv
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        own = Int32(0)
        for it in cutlass.range(0, (item.block_end - self.first_block(item)) * heads_per_kv, 1, unroll=1):
            if const_expr(self.windowed):
                if self.is_own(g.blocks[m_block, BlockFields.FLAGS], self.rank()):
                    self.clear_dq_block(g, s, own, g.blocks[m_block, BlockFields.M_BLOCK], h, zeros)
                    own += 1
            else:
                self.clear_dq_block(g, s, it, m_block, h, zeros)
            m_block, h = self.next_block(m_block, h, item, heads_per_kv)

    @cute.jit
    def clear_dq_block(self, g: Global, s: Shared, it: Int32, m_block: Int32, h: Int32, zeros: cute.Tensor) -> None:
        """`clear_dq` of one step."""
        num_blocks, lane = g.stats.shape[1], cute.arch.lane_idx()
        with cute.arch.elect_one():  # one lane, and seldom: shared memory has no clock to spare
            while load_volatile(s.dq_progress) < it - CLEAR_AHEAD:
                sleep(1000)
        cute.arch.sync_warp()
        lock, state = self.lock_of(g, m_block, h, 0), Int32(0)
        if lane == 0:
            state = load_acquire(lock)
            if state == 0:
                state = Int32(cute.arch.atomic_cas(lock, cmp=Int32(0), val=Int32(CLAIMED), sem="relaxed", scope="gpu"))
        if cute.arch.shuffle_sync(state, 0) == 0:
            quads = self.tile_m * self.head_dim // 128  # a lane
            block = (self.dq_block(g.dq_acc.iterator, num_blocks, m_block, h) + lane * 4).align(16)
            dst = cute.make_tensor(block, cute.make_layout((4, quads), stride=(1, 128)))
            for i in cutlass.range(0, quads, 1, unroll=8):
                cute.autovec_copy(zeros, dst[None, i])
            cute.arch.fence_proxy("async.global")  # the copy engine adds to them
            cute.arch.sync_warp()
            if lane == 0:
                store_release(lock, CLEARED)

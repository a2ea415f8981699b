"""Attention backward for head dim 512: the two CTAs of a cluster have the same keys, and one half of all columns each.

Each CTA does what the kernel of head dim 256 does, on its columns of Q, K, V, dO, dQ, dK and dV. Only S and dP are sums
over all columns: each CTA has a part of them, sends it to the other one in fp32, and adds the other's. A sum of two
numbers does not depend on their order, so both CTAs go on with the same S and dP. The statistics are added to the first
CTA's part.

Besides what `bwd_frame` says of the wide kernel (there is no peer_dS):

    pipeline      stages      full: arrivals of                          empty: arrivals of
    parts         1 each      4 MMA warps of the warp group, and bytes   4 MMA warps of the other CTA
    marks         1           MMA warp 0, and bytes of the other CTA     (once, never overwritten)
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.abi import partial_floats
from cute_kernels.accumulator import gemm, part
from cute_kernels.bwd_arguments import BackwardPipelines, Global, Item, Load, Loads, Mask, Shared
from cute_kernels.bwd_contain import ALL_MASKED, BAR_CONTAIN
from cute_kernels.bwd_frame import BackwardFrame
from cute_kernels.bwd_results import Destination, rows_of, store_chunks
from cute_kernels.bwd_stats import fill_keys
from cute_kernels.bwd_wide import DqOrder, Operands, WideBackward
from cute_kernels.pipeline import MbarrierAllocator, Pipeline, Signal, Stage
from cute_kernels.ptx import any_nonzero, send_to_cta

MARKS = 4 + 64  # floats: whether anything was removed; and of each key


class PartPipeline(Pipeline):
    """A part of a sum from the same warp group of the other CTA, which is both producer and consumer.

    `full` is of this CTA; its warps expect the bytes that the other CTA's warps send. `empty` is of this CTA too: the
    other CTA's warps arrive when they have read what this CTA has sent.
    """

    def expect(self, stage: Stage, num_bytes: int) -> None:
        """This warp's share of the bytes to come."""
        with cute.arch.elect_one():
            self.full.expect(stage.index, num_bytes)

    def release_to(self, stage: Stage, cta: Int32) -> None:
        """This warp has read the part; the CTA that sent it hears of it.

        The fence waits for the loads: an arrival in another CTA may overtake loads that are under way.
        """
        cute.arch.sync_warp()
        cute.arch.fence_acq_rel_cta()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty[stage.index], cta)


@dataclass(frozen=True)
class SplitPipelines(BackwardPipelines):
    """
    Attributes:
        P, dS, dq_order: as in `bwd_wide.WidePipelines`. dS of step `it` comes after P of that step, for which the first
            warp group has seen dS of step `it` - 1.
        parts: of S, and of dP.
        marks: the other CTA's marks are there; see `SplitBackward.share_marks`.
    """

    P: Signal
    dS: Signal
    dq_order: DqOrder
    parts_S: PartPipeline
    parts_dP: PartPipeline
    marks: Signal


class SplitDq(NamedTuple):
    """A warp group's part of dQ^T: two tiles of 64 columns, one after the other."""

    mma: cute.TiledMma
    Kt: cute.Tensor  # (MMA, 1, N/16), of the first tile
    second_Kt: cute.Tensor
    dS: cute.Tensor  # (MMA, 1, N/16, buffers)
    acc: cute.Tensor  # (64, rows)
    target: cute.Pointer  # this thread's first element in block 0 of dq_acc


class SplitBackward(WideBackward):
    __doc__ = BackwardFrame.__doc__

    HEAD_DIMS = (512,)
    MIXED = ()

    def check_tile(self) -> None:
        if self.tile_n != 64 or self.cluster != 1 or self.stages != 2:
            raise ValueError("expected tile_n 64, clusters of 1 (a pair of CTAs) and 2 stages")
        if self.tile_m % 16 or not 16 <= self.tile_m <= 64:
            raise ValueError(f"tile_m is {self.tile_m}, expected a multiple of 16 up to 64")

    def divide(self) -> None:
        self.whole = self.head_dim
        self.head_dim = self.head_dim_v = self.whole // 2
        self.cluster = 2

    # ---------------------------------------------------------------- what the CTAs of a cluster share
    @property
    def dq_columns(self) -> int:
        return self.whole

    @property
    def row_ctas(self) -> int:
        return 1

    def key_rank(self) -> Int32:
        return Int32(0)

    def partial_floats(self) -> int:
        return partial_floats(self.whole, self.whole, self.tile_n, 1)

    def fill_keys(self, s: Shared) -> None:
        fill_keys(s.stat_keys, self.rank() == 0)

    # ---------------------------------------------------------------- shared memory and pipelines
    @property
    def peer_columns(self) -> int:
        return 0

    @property
    def buffers(self) -> int:
        """P, and dS of two steps: dS of step `it` is written after the wait for dO of its step. So both warp groups
        have released dO of the step before, which the first one does after dQ of two steps back."""
        return 3

    @property
    def staged_floats(self) -> int:
        """The other CTA's parts of S and dP, and its marks."""
        return 2 * self.tile_n * self.tile_m + MARKS

    @property
    def smem_order(self) -> tuple[str, ...]:
        return "K", "V", "Q", "dO", "dS", "small", "dQ"

    def pipelines(self, barriers: MbarrierAllocator) -> SplitPipelines:
        K, V = self.key_signals(barriers)
        P = Signal.make(barriers, 1, producers=4)
        dS = Signal.make(barriers, 2, producers=4)
        dq_order = DqOrder.make(barriers, warps=4 * self.warp_groups)
        parts_S, parts_dP = [PartPipeline.make(barriers, 1, producers=4, consumers=4) for _ in range(2)]
        marks = Signal.make(barriers, 1, producers=1)
        Q, dO = self.row_pipelines(barriers)
        return SplitPipelines(K, V, Q, dO, P, dS, dq_order, parts_S, parts_dP, marks)

    # ---------------------------------------------------------------- the warps beside the MMA warps
    def load_keys(self, loads: Loads, s: Shared, p: SplitPipelines, item: Item) -> None:
        first = item.key, self.rank() * self.head_dim
        self.load_tile(loads.K, item.kv_head, first, s.K, self.head_dim, p.K)
        if self.want_dp:
            self.load_tile(loads.V, item.kv_head, first, s.V, self.head_dim, p.V)

    def load_rows(
        self,
        load: Load,
        h: Int32,
        m_block: Int32,
        target: cute.Tensor,  # (M, D/2, stages)
        pipeline: Pipeline,
        stage: Stage,
        extra_bytes: int,
    ) -> None:
        """A block of this CTA's columns of Q or dO of one head."""
        pipeline.producer_acquire(stage)
        pipeline.producer_expect(stage, self.tile_m * self.head_dim * 2 + extra_bytes)
        block = cute.local_tile(load.tensor[None, None, h], (self.tile_m, self.head_dim), (m_block, self.rank()))
        tile, source = cpasync.tma_partition(
            load.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(block, 0, 2)
        )
        cute.copy(load.atom, source, tile[None, stage.index], tma_bar_ptr=pipeline.full[stage.index])

    @cute.jit
    def assist(self, g: Global, s: Shared, p: SplitPipelines, item: Item, heads_per_kv: Int32, warp_idx: Int32) -> None:
        if warp_idx == 1:
            self.grant_dq(g, p, item, heads_per_kv)
        if warp_idx == 2:
            self.pass_dq_on(g, p, item, heads_per_kv)

    # ---------------------------------------------------------------- S and dP
    def complete(self, acc: cute.Tensor, s: Shared, p: SplitPipelines, it: Int32, which: int) -> None:
        """Send this CTA's part of S^T (0) or dP^T (1) to the other one, and add the other's part."""
        pipe, peer = (p.parts_S, p.parts_dP)[which], 1 - self.rank()
        stage, tid, chunks = pipe.stage(it), cute.arch.thread_idx()[0] % 128, cute.size(acc) // 4
        # As it lies in registers: a thread reads what the same thread of the other CTA has sent.
        own = (s.dQ.iterator + (which * (self.tile_n * self.tile_m) + tid * 4)).align(16)
        pipe.expect(stage, 16 * chunks * 32)
        pipe.producer_acquire(stage)
        for c in range(chunks):
            send_to_cta(own + c * 512, pipe.full[stage.index], peer, *[acc[4 * c + j] for j in range(4)])
        pipe.consumer_wait(stage)
        for c in range(chunks):
            quad = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(cute.make_tensor((own + c * 512).align(16), cute.make_layout(4)), quad)
            for j in range(4):
                acc[4 * c + j] = acc[4 * c + j] + quad[j]
        pipe.release_to(stage, peer)

    # ---------------------------------------------------------------- dQ
    def dq_operands(self, g: Global, s: Shared, wg: int, tid: Int32) -> SplitDq:
        N, first = self.tile_n, 2 * wg  # of the CTA's tiles of 64 columns
        mma = self.mma_dQ(self.tile_m)
        thr = mma.get_slice(0)
        Kt, second_Kt = [
            mma.make_fragment_A(thr.partition_A(cute.local_tile(self.transposed(s.K), (64, N), (first + j, 0))))
            for j in range(2)
        ]
        column_tile = self.rank() * (self.head_dim // 64) + first
        return SplitDq(
            mma=mma,
            Kt=Kt,
            second_Kt=second_Kt,
            dS=mma.make_fragment_B(thr.partition_B(s.dS)),
            acc=cute.make_rmem_tensor(mma.partition_shape_C((64, self.tile_m)), Float32),
            target=g.dq_acc.iterator + (column_tile * 128 + tid) * 4,  # of a block: [chunk of 8 rows][thread][4]
        )

    def issue_peer_dq(self, p: SplitPipelines, x: Operands, it: Int32) -> None:
        """This CTA has all keys of its cluster."""

    def add_dq(self, g: Global, p: SplitPipelines, x: Operands, it: Int32, block: tuple[Int32, Int32]) -> None:
        """Add dQ^T of step `it`, whose first tile is ready, to global memory; if deterministic in order."""
        if self.deterministic:
            p.dq_order.granted.wait(it)
        target = self.dq_block(x.dq.target, g.stats.shape[1], *block)
        self.add_chunks(x.dq.acc, target)
        gemm(x.dq.mma, x.dq.acc, x.dq.second_Kt, x.dq.dS[None, None, None, self.own_dS(it)], True)
        warpgroup.wait_group(0)
        self.add_chunks(x.dq.acc, target + 512)
        if self.deterministic:
            p.dq_order.added.arrive(it)

    # ---------------------------------------------------------------- NaN and infinity
    def await_keys(self, s: Shared, p: SplitPipelines, mask: Mask) -> Mask:
        self.await_cluster()
        p.K.wait(0)
        if not self.want_dp:
            return mask
        p.V.wait(0)
        begin = self.contain_keys(s, mask.unmasked_begin)
        return mask._replace(unmasked_begin=self.share_marks(s, p, begin))

    @cute.jit
    def share_marks(self, s: Shared, p: SplitPipelines, unmasked_begin: Int32) -> Int32:
        """Both CTAs learn which keys `contain_keys` has marked in V of either, and whether it has removed anything."""
        tid, lane, marks = cute.arch.thread_idx()[0] - 128, cute.arch.lane_idx(), p.marks
        peer = 1 - self.rank()  # here: in the branch below lanes would wait for lanes that are not in it
        received = s.dQ.iterator + 2 * self.tile_n * self.tile_m
        if tid < 32:
            with cute.arch.elect_one():
                marks.full.expect(0, 4 * MARKS)
            if lane <= self.tile_n // 4:
                found = cutlass.select_(unmasked_begin == ALL_MASKED, Float32(1.0), Float32(0.0))
                key = cutlass.max(lane - 1, 0) * 4
                values = [cutlass.select_(lane > 0, Float32(s.V[key + j, 0]), found) for j in range(4)]
                send_to_cta((received + lane * 4).align(16), marks.full[0], peer, *values)
        marks.wait(0)
        flag = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(cute.make_tensor(received.align(16), cute.make_layout(4)), flag)
        threads = 128 * self.warp_groups
        found = cutlass.select_((flag[0] != 0.0) | (unmasked_begin == ALL_MASKED), Int32(1), Int32(0))
        if any_nonzero(Int32(BAR_CONTAIN), found, threads):
            unmasked_begin = Int32(ALL_MASKED)
            if tid < self.tile_n:
                quad = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(
                    cute.make_tensor((received + (4 + tid // 4 * 4)).align(16), cute.make_layout(4)), quad
                )
                for j in cutlass.range_constexpr(4):
                    if (tid % 4 == j) & (quad[j] != quad[j]):
                        s.V[tid, 0] = self.dtype(quad[j])
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)
        return cute.arch.make_warp_uniform(unmasked_begin)  # which the compiler cannot know

    # ---------------------------------------------------------------- dK and dV
    @cute.jit
    def store_keys(
        self,
        results: tuple[tuple[cute.Tensor, cute.Tensor, int], ...],
        partials: cute.Tensor,
        end: Destination,
        row: Int32,
        first_partial: Int64 | None = None,
    ) -> None:
        """This CTA's columns of dK and dV, or of their partial sums."""
        chunk = self.rank() * (self.head_dim // 8)  # of 8 columns
        if end.partial < 0:
            for acc, out, _ in results:
                rows = rows_of(out, end.kv_head, end.key + row, end.key_end)
                for c in range(0, cute.size(acc) // 4, 4):
                    store_chunks(part(acc, 4 * c, 16), self.dtype, rows, chunk + c, out.shape[2])
        else:
            chunks = self.whole // 8  # of a row
            for acc, _, which in results:
                first = first_partial + which * (self.tile_n * self.whole)
                own = partials.iterator + (first + (row // 16 * chunks + chunk) * 128 + cute.arch.lane_idx() * 4)
                count = cute.size(acc) // 4
                dst = cute.make_tensor(own.align(16), cute.make_layout((4, count), stride=(1, 128)))
                for c in range(count):
                    cute.autovec_copy(part(acc, 4 * c, 4), dst[None, c])

    def first_partial(self, partial: Int32) -> Int64:
        return Int64(partial) * self.partial_floats()

"""Attention backward for head dims 192 (also with values of 128) and 256: clusters share dQ, warp groups divide work.

The first warp group makes S, P and dV of the CTA's 64 keys, the second one dP, dS and dK; P and dS feed dV and dK from
registers. Neither waits for a product of the other's, and the tensor cores always have one of them to work for.

To add dQ up in global memory for 64 keys at a time would be too much traffic. So the CTAs of a cluster hand each other
dS, and each makes one half of dQ over the keys of both, which halves the traffic. Each warp group has a tile of 64
columns. Head dim 192 has three such tiles: the middle one is the second warp group's, for one half of the query rows in
either CTA, because that warp group has more other work.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.abi import BlockFields
from cute_kernels.accumulator import gemm, part, round_to
from cute_kernels.bwd_arguments import BackwardPipelines, Global, Item, Mask, Shared
from cute_kernels.bwd_frame import BackwardFrame
from cute_kernels.bwd_softcap import Softcap, to_probabilities, to_tanh
from cute_kernels.bwd_stats import Statistics
from cute_kernels.pipeline import MbarrierAllocator, Signal
from cute_kernels.ptx import add_to_global, copy_to_peer, load_acquire, store_release


@dataclass(frozen=True)
class DqOrder:
    """The order in which CTAs add to dQ of a block, if deterministic: the order of their keys. Warps 1 and 2 do the
    waiting in memory.

    A ring of two steps: warp 1 grants step `it` after warp 2 has passed step `it` - 2 on; the MMA warps add after the
    grant; warp 2 passes the step on after all of them have added. So each of the three signals is at most two steps
    ahead of the warps that wait for it.

    Attributes:
        granted: all predecessors have added to the block of a step (warp 1 to the MMA warps).
        added: this CTA has added to the block (MMA warps to warp 2).
        passed: warp 2 has seen that (to warp 1), and tells the next CTA.
    """

    granted: Signal
    added: Signal
    passed: Signal

    @classmethod
    def make(cls, barriers: MbarrierAllocator, *, warps: int) -> Self:
        granted, added, passed = (Signal.make(barriers, 2, producers=n) for n in (1, warps, 1))
        return cls(granted, added, passed)


@dataclass(frozen=True)
class WidePipelines(BackwardPipelines):
    """
    Attributes:
        P: the first warp group has written P of a step. It writes P of step `it` + 1 after it has seen dS of step
            `it`, where the second warp group arrives after it has read P of step `it`.
        dS: the second warp group has written dS of a step. There are two barriers, for even and odd steps. On a single
            one, dS of step `it` + 1 could arrive before the exchange warp (3) has seen dS of step `it`; that warp would
            then wait for a phase that is over. It is never two steps behind: dS of step `it` + 2 comes after dQ of step
            `it`, which waits for peer_dS of step `it`, where this CTA's exchange warp arrives after it has seen dS of
            step `it`. Where dQ is not asked the exchange warp does nothing, and P holds dS up: dS of step `it` + 1
            comes after P of step `it` + 1, for which the first warp group has seen dS of step `it`.
        peer_dS: dS of the other CTA of the cluster is there. The MMA warps wait for step `it` in step `it` + 1; the
            exchange warp arrives for step `it` + 3 after dS of step `it` + 3, which comes after P of that step: by then
            both warp groups are past their wait.
        dq_order: see :class:`DqOrder`.
    """

    P: Signal
    dS: Signal
    dq_order: DqOrder
    peer_dS: Signal


class DqOperands(NamedTuple):
    """A warp group's part of dQ^T: a tile of 64 columns, over all rows of a block or one half of them."""

    mma: cute.TiledMma
    Kt: cute.Tensor  # (MMA, 1, N/16)
    peer_Kt: cute.Tensor  # (MMA, 1, N/16)
    dS: cute.Tensor  # (MMA, 1, N/16, buffers)
    acc: cute.Tensor  # (64, rows)
    target: cute.Pointer  # this thread's first element in block 0 of dq_acc


class Operands(NamedTuple):
    """Operands in shared memory, and a warp group's accumulators."""

    mma_S: cute.TiledMma
    mma_dK: cute.TiledMma
    mma_dV: cute.TiledMma
    K: cute.Tensor  # (MMA, 1, D/16), of S^T
    V: cute.Tensor  # (MMA, 1, Dv/16), of dP^T
    Q: cute.Tensor  # (MMA, 1, D/16, stages), of S^T
    dO: cute.Tensor  # (MMA, 1, Dv/16, do_stages), of dP^T
    Qt: cute.Tensor  # (MMA, 1, M/16, stages), of dK
    dOt: cute.Tensor  # (MMA, 1, M/16, do_stages), of dV
    stats: Statistics
    P: cute.Tensor  # (8, M/16): this thread's part of P^T
    dS_target: cute.Tensor  # where this thread writes dS^T (with `copy_of_dS`), of each buffer
    acc: cute.Tensor | None = None  # (64, Dv) dV, or (64, D) dK
    cap: Softcap | None = None
    dq: DqOperands | None = None


class WideBackward(BackwardFrame):
    __doc__ = BackwardFrame.__doc__

    HEAD_DIMS = (192, 256)
    MIXED = ((192, 128),)

    def check_tile(self) -> None:
        if self.tile_n != 64 or self.cluster != 2 or self.stages != 2:
            raise ValueError("expected tile_n 64, clusters of 2 and 2 stages")
        if self.tile_m % 16 or not 16 <= self.tile_m <= 96:
            raise ValueError(f"tile_m is {self.tile_m}, expected a multiple of 16 up to 96")

    # ---------------------------------------------------------------- shared memory and pipelines
    @property
    def peer_columns(self) -> int:
        return 128

    @property
    def do_stages(self) -> int:
        """There is no room for more, and a block of dO is needed for about half a step only."""
        return 1

    @property
    def buffers(self) -> int:
        """P; dS of this CTA, which is read until the other CTA has released a block of dO; dS of the other CTA."""
        # dS of this CTA is written after the wait for dO of its step. So both CTAs have released dO of the step before,
        # which their first warp groups do after dQ of two steps back: its copy to the other CTA is over as well.
        return 1 + (self.do_stages + 1) + self.peer_buffers

    @property
    def peer_buffers(self) -> int:
        """Buffers of the other CTA's dS: three, or two to make room for 96 rows. `exchange_dS` waits for more then."""
        return 3 if self.tile_m <= 80 else 2

    def own_dS(self, it: Int32) -> Int32:
        """Buffer of this CTA's dS of step `it`."""
        return 1 + it % (self.do_stages + 1)

    def peer_dS(self, it: Int32) -> Int32:
        """Buffer of the other CTA's dS of step `it`."""
        return self.buffers - self.peer_buffers + it % self.peer_buffers

    @property
    def smem_order(self) -> tuple[str, ...]:
        return "K", "V", "Q", "dO", "dS", "small", "peer_K"

    def pipelines(self, barriers: MbarrierAllocator) -> WidePipelines:
        K, V = self.key_signals(barriers)
        P = Signal.make(barriers, 1, producers=4)
        dS = Signal.make(barriers, 2, producers=4)
        dq_order = DqOrder.make(barriers, warps=4 * self.warp_groups)
        peer_dS = Signal.make(barriers, 3, producers=1)
        Q, dO = self.row_pipelines(barriers)
        return WidePipelines(K, V, Q, dO, P, dS, dq_order, peer_dS)

    # ---------------------------------------------------------------- the shape of products
    def mma_S(self) -> cute.TiledMma:
        """S^T (64, M) = K (64, D) Q^T, and dP^T likewise"""
        K_major, shape = warpgroup.OperandMajorMode.K, (64, self.tile_m)
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, K_major, K_major, Float32, (1, 1, 1), shape)

    def mma_dQ(self, rows: int) -> cute.TiledMma:
        """dQ^T (64 columns, rows) = K^T dS^T"""
        K_major, MN_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, MN_major, K_major, Float32, (1, 1, 1), (64, rows))

    def dq_rows(self, wg: int) -> int:
        """Query rows of a warp group's tile of dQ: half of a block's where both CTAs have that tile."""
        return self.tile_m // 2 if self.head_dim == 192 and wg == 1 else self.tile_m

    # ---------------------------------------------------------------- the warps beside the producer
    @cute.jit
    def assist(self, g: Global, s: Shared, p: WidePipelines, item: Item, heads_per_kv: Int32, warp_idx: Int32) -> None:
        if warp_idx == 1:
            self.grant_dq(g, p, item, heads_per_kv)
        if warp_idx == 2:
            self.pass_dq_on(g, p, item, heads_per_kv)
        if warp_idx == 3:
            self.exchange_dS(s, p, item, heads_per_kv)

    @cute.jit
    def grant_dq(self, g: Global, p: WidePipelines, item: Item, heads_per_kv: Int32) -> None:
        """Deterministic: wait until this CTA may add to dQ of a block, up to two steps ahead of the MMA warps."""
        if const_expr(not self.deterministic):
            return
        row, h = item.block_end - 1, item.kv_head * heads_per_kv
        for it in cutlass.range(0, (item.block_end - item.block_begin) * heads_per_kv, 1, unroll=1):
            m_block = g.blocks[row, BlockFields.M_BLOCK] if const_expr(self.windowed) else row
            lock = self.lock_of(g, m_block, h, self.rank())
            before = g.blocks[row, BlockFields.BEFORE] if const_expr(self.windowed) else item.predecessors(m_block)
            while load_acquire(lock) != before:
                pass
            cute.arch.sync_warp()
            p.dq_order.passed.wait_previous(it)
            p.dq_order.granted.arrive(it, sync_warp=False)
            row, h = self.next_block(row, h, item, heads_per_kv)

    @cute.jit
    def pass_dq_on(self, g: Global, p: WidePipelines, item: Item, heads_per_kv: Int32) -> None:
        """Deterministic: let the next CTA add when this CTA's sums are in memory, for which no MMA warp waits."""
        if const_expr(not self.deterministic):
            return
        row, h = item.block_end - 1, item.kv_head * heads_per_kv
        for it in cutlass.range(0, (item.block_end - item.block_begin) * heads_per_kv, 1, unroll=1):
            m_block, before = row, item.order
            if const_expr(self.windowed):
                m_block, before = g.blocks[row, BlockFields.M_BLOCK], g.blocks[row, BlockFields.BEFORE]
            p.dq_order.added.wait(it)
            lock = self.lock_of(g, m_block, h, self.rank())
            with cute.arch.elect_one():
                p.dq_order.passed.full.arrive(p.dq_order.passed.stage(it).index)
                store_release(lock, before + 1)
            row, h = self.next_block(row, h, item, heads_per_kv)

    @cute.jit
    def exchange_dS(self, s: Shared, p: WidePipelines, item: Item, heads_per_kv: Int32) -> None:
        """This CTA's dS of every step to the other CTA.

        Its buffer there is free: dO of this step is here, so both CTAs have released the block before in that stage,
        and then they were done with dQ of three steps back; their first warp groups even with dQ of two steps back.
        Where there are two buffers, the second warp groups must be as well: they release Q of a step after that. The
        barrier cannot be a phase ahead: Q of the next step is released after dQ of this one, for which the other CTA
        waits for this copy.
        """
        if const_expr(not self.want_dq):
            return
        steps, num_bytes = (item.block_end - item.block_begin) * heads_per_kv, 2 * self.tile_m * self.tile_n
        peer = 1 - self.rank()
        for it in cutlass.range(0, steps, 1, unroll=1):
            p.dS.wait(it)
            if const_expr(self.peer_buffers == 2):
                p.Q.producer_acquire(p.Q.stage(it + 1))  # Q of the step before is released
            bar = p.peer_dS.full[p.peer_dS.stage(it).index]
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, num_bytes)
                source, target = (s.dS[None, None, i].iterator for i in (self.own_dS(it), self.peer_dS(it)))
                copy_to_peer(target, source, bar, num_bytes, peer)

    # ---------------------------------------------------------------- MMA warp groups
    @cute.jit
    def mma(
        self, g: Global, s: Shared, p: WidePipelines, item: Item, scale: Float32, heads_per_kv: Int32, warp_id: Int32
    ) -> None:
        wg, tid, lane = self.warp_group(warp_id)
        x = self.operands(s, tid)
        mask = self.mask_of(g, item, item.key, warp_id)
        mask = self.await_keys(s, p, mask)
        acc = cute.make_rmem_tensor(x.mma_dK.partition_shape_C((64, self.head_dim)), Float32)  # dV or dK
        acc.fill(0.0)
        acc_dV = self.of_values(x, acc)
        scale_log2 = scale * math.log2(math.e)
        if const_expr(self.capped):
            x = x._replace(cap=Softcap.of(g.cap, scale_log2))
        steps = (item.block_end - item.block_begin) * heads_per_kv
        m_block, h = item.block_end - 1, item.kv_head * heads_per_kv
        values, keys = [x._replace(acc=y, dq=self.dq_operands(g, s, i, tid)) for i, y in enumerate((acc_dV, acc))]
        if wg == 0:
            self.loop(self.values_step, g, s, p, values, mask, item, scale_log2, heads_per_kv, steps, m_block, h)
        else:
            self.loop(self.keys_step, g, s, p, keys, mask, item, scale_log2, heads_per_kv, steps, m_block, h)

        row = warp_id % 4 * 16 + lane // 4  # of this CTA's keys
        end = self.destination(s)
        first_partial = self.first_partial(end.partial)
        if wg == 0:
            if const_expr(self.want_dv):
                if const_expr(self.want_dq):
                    self.mark_keys(acc_dV, s.V, row)
                self.store_keys(((acc_dV, g.dv, 1),), g.partials, end, row, first_partial)
        else:
            if const_expr(self.want_dk):
                for e in cutlass.range_constexpr(cute.size(acc)):
                    acc[e] = acc[e] * scale
                self.store_keys(((acc, g.dk, 0),), g.partials, end, row, first_partial)

    def of_values(self, x: Operands, acc: cute.Tensor) -> cute.Tensor:
        """The registers of dV, among the registers for dV or dK."""
        if self.head_dim_v == self.head_dim:
            return acc
        return cute.make_tensor(acc.iterator, cute.make_layout(x.mma_dV.partition_shape_C((64, self.head_dim_v))))

    def operands(self, s: Shared, tid: Int32) -> Operands:
        mma_S, mma_dK, mma_dV = self.mma_S(), self.mma_dKV(self.head_dim), self.mma_dKV(self.head_dim_v)
        thr_S, thr_dK, thr_dV = mma_S.get_slice(0), mma_dK.get_slice(0), mma_dV.get_slice(0)
        return Operands(
            mma_S=mma_S,
            mma_dK=mma_dK,
            mma_dV=mma_dV,
            K=mma_S.make_fragment_A(thr_S.partition_A(s.K)),
            V=mma_S.make_fragment_A(thr_S.partition_A(s.V)),
            Q=mma_S.make_fragment_B(thr_S.partition_B(s.Q)),
            dO=mma_S.make_fragment_B(thr_S.partition_B(s.dO)),
            Qt=mma_dK.make_fragment_B(thr_dK.partition_B(self.transposed(s.Q))),
            dOt=mma_dV.make_fragment_B(thr_dV.partition_B(self.transposed(s.dO))),
            stats=Statistics.of(s.stats, s.stat_keys, 0, self.tile_m),
            dS_target=self.copy_of_dS().get_slice(tid).partition_D(self.transposed(s.dS)),
            P=self.P_of_thread(s, tid),
        )

    def P_of_thread(self, s: Shared, tid: Int32) -> cute.Tensor:
        """P^T passes from a thread to the same thread of the other warp group: any order of elements serves."""
        first = cute.recast_ptr(s.dS[None, None, 0].iterator, cute.make_swizzle(0, 4, 3)) + tid * 8
        return cute.make_tensor(first, cute.make_layout((8, self.tile_m // 16), stride=(1, 1024)))

    def dq_operands(self, g: Global, s: Shared, wg: int, tid: Int32) -> DqOperands:
        D, N, rank, rows = self.head_dim, self.tile_n, self.rank(), self.dq_rows(wg)
        shared = rows < self.tile_m  # the other CTA has the other rows
        mma = self.mma_dQ(rows)
        thr = mma.get_slice(0)
        column_tile, rows_tile = (1, rank) if shared else (2 * rank + wg, 0)
        peer_tile = column_tile - rank * ((D - self.peer_columns) // 64)  # among the columns in peer_K
        sKt = cute.local_tile(self.transposed(s.K), (64, N), (column_tile, 0))
        peer_sKt = cute.local_tile(self.transposed(s.peer_K), (64, N), (peer_tile, 0))
        sdS = cute.local_tile(s.dS, (rows, N), (rows_tile, 0, None))
        first_row = g.dq_acc.iterator + rows_tile * (rows * D)  # of the block: [chunk of 8 rows][thread][4]
        return DqOperands(
            mma=mma,
            Kt=mma.make_fragment_A(thr.partition_A(sKt)),
            peer_Kt=mma.make_fragment_A(thr.partition_A(peer_sKt)),
            dS=mma.make_fragment_B(thr.partition_B(sdS)),
            acc=cute.make_rmem_tensor(mma.partition_shape_C((64, rows)), Float32),
            target=first_row + (column_tile * 128 + tid) * 4,
        )

    @cute.jit
    def loop(
        self,
        step: Callable[..., None],
        g: Global,
        s: Shared,
        p: WidePipelines,
        x: Operands,
        mask: Mask,
        item: Item,
        scale_log2: Float32,
        heads_per_kv: Int32,
        steps: Int32,
        m_block: Int32,  # and head of the first step
        h: Int32,
    ) -> None:
        """The steps of one warp group. dQ of a step is made in the next one."""
        if const_expr(self.windowed):
            index, place = m_block, p.Q.stage(Int32(0))  # of the table, and of the block's Q
            p.Q.consumer_wait(place)
            m_block, block_mask = self.block_of_stage(s, mask, place)
            step(g, s, p, x, block_mask, Int32(0), m_block, None, scale_log2)
            for it in cutlass.range(1, steps, 1, unroll=1):
                previous = (m_block, h)
                index, h = self.next_block(index, h, item, heads_per_kv)
                stage = p.Q.stage(it)
                p.Q.consumer_wait(stage)
                m_block, its_mask = self.block_of_stage(s, mask, stage)
                step(g, s, p, x, its_mask, it, m_block, previous, scale_log2)
        else:
            step(g, s, p, x, mask, Int32(0), m_block, None, scale_log2)
            for it in cutlass.range(1, steps, 1, unroll=1):
                previous = (m_block, h)
                m_block, h = self.next_block(m_block, h, item, heads_per_kv)
                step(g, s, p, x, mask, it, m_block, previous, scale_log2)
        if const_expr(self.want_dq):
            p.dS.wait(steps - 1)
            self.issue_own_dq(x, steps - 1)
            self.issue_peer_dq(p, x, steps - 1)
            warpgroup.wait_group(0)
            self.add_dq(g, p, x, steps - 1, (m_block, h))

    def values_step(
        self,
        g: Global,
        s: Shared,
        p: WidePipelines,
        x: Operands,
        mask: Mask,
        it: Int32,
        m_block: Int32,
        previous: tuple[Int32, Int32] | None,  # block and head of the step before
        scale_log2: Float32,
    ) -> None:
        """S, P and dV of step `it`; dQ of the step before. No product is in flight at either end."""
        stage, do_stage = p.Q.stage(it), p.dO.stage(it)
        with_dq = self.want_dq and previous is not None
        p.Q.consumer_wait(stage)
        acc_S = cute.make_rmem_tensor(x.mma_S.partition_shape_C((64, self.tile_m)), Float32)
        lse = [] if self.capped else [x.stats.lse(stage.index)]
        gemm(x.mma_S, acc_S, x.K, x.Q[None, None, None, stage.index], True, addends=lse)
        warpgroup.wait_group(0)
        self.complete(acc_S, s, p, it, 0)
        if self.capped:
            to_tanh(acc_S, x.cap)
        self.mask(acc_S, m_block * self.tile_m, mask)
        shape = x.mma_dV.partition_shape_A((64, self.tile_m))
        tP = cute.make_rmem_tensor(shape, self.dtype)
        passed = tP  # to the other warp group, for dS
        if self.capped:
            passed = cute.make_rmem_tensor(shape, self.dtype) if self.want_dp else None
            to_probabilities(acc_S, tP, passed, s.stats, 0, stage.index, x.cap, self.dtype)
        else:
            for c in range(self.tile_m // 16):  # 16 query rows at a time
                for e in range(8 * c, 8 * c + 8):
                    acc_S[e] = cute.math.exp2(acc_S[e] * scale_log2, fastmath=True)
                round_to(part(acc_S, 8 * c, 8), part(tP, 8 * c, 8))
        if self.want_dp:
            if previous is not None:  # then the other warp group has read P of the step before
                p.dS.wait(it - 1)
            for c in range(self.tile_m // 16):
                cute.autovec_copy(part(passed, 8 * c, 8), x.P[None, c])
            p.P.arrive(it)
        if with_dq:
            self.issue_own_dq(x, it - 1)
            self.issue_peer_dq(p, x, it - 1)
        p.dO.consumer_wait(do_stage)
        if self.want_dv:
            of_block = stage.index, do_stage.index, m_block * self.tile_m
            self.contain(mask, s, *of_block, acc_dV=x.acc, remove_from=("dO",), wg=0)
        p.Q.consumer_release(stage)
        if self.want_dv:
            gemm(x.mma_dV, x.acc, tP, x.dOt[None, None, None, do_stage.index], False)
        if with_dq:
            warpgroup.wait_group(1 if self.want_dv else 0)
            self.add_dq(g, p, x, it - 1, previous)
        warpgroup.wait_group(0)
        p.dO.consumer_release(do_stage)

    def keys_step(
        self,
        g: Global,
        s: Shared,
        p: WidePipelines,
        x: Operands,
        mask: Mask,
        it: Int32,
        m_block: Int32,
        previous: tuple[Int32, Int32] | None,
        scale_log2: Float32,
    ) -> None:
        """dP, dS and dK of step `it`; dQ of the step before. No product is in flight at either end."""
        stage, do_stage = p.Q.stage(it), p.dO.stage(it)
        with_dq = self.want_dq and previous is not None
        p.Q.consumer_wait(stage)
        p.dO.consumer_wait(do_stage)
        if self.want_dp:
            acc_dP = cute.make_rmem_tensor(x.mma_S.partition_shape_C((64, self.tile_m)), Float32)
            dO, addends = x.dO[None, None, None, do_stage.index], [x.stats.dpsum(stage.index)]
            gemm(x.mma_S, acc_dP, x.V, dO, True, addends=addends)
        if with_dq:
            p.dS.wait(it - 1)
            self.issue_own_dq(x, it - 1)
        warpgroup.wait_group(1 if with_dq else 0)
        p.dO.consumer_release(do_stage)
        if self.want_dp:
            self.complete(acc_dP, s, p, it, 1)
            p.P.wait(it)
            # The other warp group may still read Q for S, where such a row's P is infinite or 0.
            of_block = stage.index, do_stage.index, m_block * self.tile_m
            self.contain(mask, s, *of_block, acc_dP=acc_dP, remove_from=("Q",) if self.want_dk else (), wg=1)
            tdS = cute.make_rmem_tensor(x.mma_dK.partition_shape_A((64, self.tile_m)), self.dtype)
            for c in range(self.tile_m // 16):
                ds, prob = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(8, self.dtype)
                cute.autovec_copy(x.P[None, c], prob)
                for e in range(8):
                    ds[e] = Float32(prob[e]) * acc_dP[8 * c + e]
                round_to(ds, part(tdS, 8 * c, 8))
            if self.want_dq:
                self.write_dS(x, tdS, acc_dP.shape, it)
            p.dS.arrive(it)
        if with_dq:
            self.issue_peer_dq(p, x, it - 1)
        if self.want_dk:
            gemm(x.mma_dK, x.acc, tdS, x.Qt[None, None, None, stage.index], False)
        if with_dq:
            warpgroup.wait_group(1 if self.want_dk else 0)
            self.add_dq(g, p, x, it - 1, previous)
        warpgroup.wait_group(0)
        p.Q.consumer_release(stage)

    # ---------------------------------------------------------------- parts of a step
    def complete(self, acc: cute.Tensor, s: Shared, p: WidePipelines, it: Int32, which: int) -> None:
        """Add what other CTAs have of S^T (0) or dP^T (1) of step `it`."""

    def write_dS(self, x: Operands, tdS: cute.Tensor, shape: cute.Shape, it: Int32) -> None:
        """dS^T of step `it` (of an accumulator's shape) to shared memory, for products and the exchange."""
        copy, tid = self.copy_of_dS(), cute.arch.thread_idx()[0] % 128
        source = cute.make_tensor(tdS.iterator, cute.make_layout(shape))
        cute.copy(copy, copy.get_slice(tid).retile(source), x.dS_target[None, None, None, self.own_dS(it)])
        cute.arch.fence_view_async_shared()

    def issue_own_dq(self, x: Operands, it: Int32) -> None:
        """Issue this warp group's part of dQ^T of step `it` over this CTA's keys, whose dS is there."""
        gemm(x.dq.mma, x.dq.acc, x.dq.Kt, x.dq.dS[None, None, None, self.own_dS(it)], True)

    def issue_peer_dq(self, p: WidePipelines, x: Operands, it: Int32) -> None:
        """Issue this warp group's part of dQ^T of step `it` over the other CTA's keys, once their dS is there."""
        p.peer_dS.wait(it)
        gemm(x.dq.mma, x.dq.acc, x.dq.peer_Kt, x.dq.dS[None, None, None, self.peer_dS(it)], False)

    def add_dq(self, g: Global, p: WidePipelines, x: Operands, it: Int32, block: tuple[Int32, Int32]) -> None:
        """Add dQ^T of step `it`, which is ready, to global memory; if deterministic once the predecessors have."""
        if self.deterministic:
            p.dq_order.granted.wait(it)
        self.add_chunks(x.dq.acc, self.dq_block(x.dq.target, g.stats.shape[1], *block))
        if self.deterministic:
            p.dq_order.added.arrive(it)

    def add_chunks(self, acc_dQ: cute.Tensor, target: cute.Pointer) -> None:
        """Chunks of 8 query rows, of which each is four floats a thread."""
        for c in range(cute.size(acc_dQ) // 4):
            add_to_global(target + c * (8 * self.dq_columns), *[acc_dQ[4 * c + j] for j in range(4)])

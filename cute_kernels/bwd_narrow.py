"""Attention backward for head dims up to 128: two MMA warp groups; P and dS feed dV and dK from registers.

Transposed products, so that rows are keys (S^T = K Q^T) or columns of the head dim (dQ^T = K^T dS^T). For S, dP, dV and
dK each warp group has 64 of the 128 keys. dQ needs all keys: dS passes through shared memory, and each warp group has
64 columns of the head dim, or (head dim 64) half of the query rows.

dQ leaves through shared memory too. There a warp beside the producer has the copy engine add it to global memory, if
deterministic once the item's predecessors have added theirs: additions from registers would hold the products up.
Another warp clears the sums in global memory a few blocks ahead, so they are still in L2 when they are added to; to
clear all of them beforehand would write them to memory and read them back. If deterministic, the first item of a block
stores its values instead.

The tensor cores and the arithmetic between products take about equally long, so warp groups must not wait for one
another. Therefore a step makes dQ of the step before: by then dS of the other warp group has long been there.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.abi import BlockFields, part_rows
from cute_kernels.accumulator import gemm, part, round_to
from cute_kernels.bwd_arguments import Global, Item, Mask, Shared
from cute_kernels.bwd_dq import NarrowDq, NarrowPipelines, StagedDq
from cute_kernels.bwd_frame import BackwardFrame, split_rows
from cute_kernels.bwd_softcap import Softcap, slope_of, to_probabilities, to_tanh
from cute_kernels.bwd_stats import Statistics
from cute_kernels.bwd_walk import Walk, first_block
from cute_kernels.bwd_window import FLAGS, OWN_STEP
from cute_kernels.pipeline import MbarrierAllocator, Signal, Stage
from cute_kernels.ptx import thread_here


class ScoreOperands(NamedTuple):
    """S^T and dP^T of a part of the rows of a query block: the product, and its operands in shared memory."""

    begin: int  # sixteens of rows [begin, end)
    end: int
    mma: cute.TiledMma
    Q: cute.Tensor  # (MMA, 1, D/16, stages)
    dO: cute.Tensor  # (MMA, 1, D/16, stages)
    stats: Statistics | None = None  # from `with_late_operands` on


class Operands(NamedTuple):
    """A warp group's operands in shared memory, and its accumulators."""

    K: cute.Tensor  # (MMA, 1, D/16), of S^T
    V: cute.Tensor  # (MMA, 1, D/16), of dP^T
    whole: ScoreOperands
    first_rows: ScoreOperands
    last_rows: ScoreOperands
    mma_dKV: cute.TiledMma
    mma_dQ: cute.TiledMma
    Qt: cute.Tensor  # (MMA, 1, M/16, stages), of dK
    dOt: cute.Tensor  # (MMA, 1, M/16, stages), of dV
    Kt: cute.Tensor  # (MMA, 1, N/16), of dQ^T
    dS: cute.Tensor  # (MMA, 1, N/16, buffers), of dQ^T
    dS_target: cute.Tensor  # where this thread writes dS^T (with `copy_of_dS`), of each buffer
    dQ_target: cute.Pointer | None  # and dQ^T
    acc_dK: cute.Tensor  # (64, D)
    acc_dV: cute.Tensor  # (64, D)
    cap: Softcap | None = None


class NarrowBackward(NarrowDq):
    __doc__ = BackwardFrame.__doc__

    HEAD_DIMS = (64, 96, 128)
    flags_ahead = True

    def check_tile(self) -> None:
        if self.tile_n != 128 or self.stages != 2:
            raise ValueError("expected tile_n 128 and 2 stages")
        if self.tile_m % 16 or not 16 <= self.tile_m <= 256:
            raise ValueError(f"tile_m is {self.tile_m}, expected a multiple of 16 up to 256")

    # ---------------------------------------------------------------- shared memory and pipelines
    @property
    def k_columns(self) -> int:
        return -(-self.head_dim // 128) * 128 if self.head_dim > 64 else 64

    @property
    def buffers(self) -> int:
        return 2  # of dS

    @property
    def staged_floats(self) -> int:
        return self.tile_m * self.head_dim if self.want_dq else 0

    @property
    def smem_order(self) -> tuple[str, ...]:
        if split_rows(self.head_dim) or not self.staged_floats:  # the former 1 % faster so; the latter have no dQ
            return "small", "K", "V", "Q", "dO", "dS", "dQ"
        return "K", "Q", "V", "dO", "dS", "small", "dQ"

    def pipelines(self, barriers: MbarrierAllocator) -> NarrowPipelines:
        warps, with_dq = 4 * self.warp_groups, int(self.want_dq)
        K, V = self.key_signals(barriers)
        dS = Signal.make(barriers, with_dq, producers=warps)
        dQ = StagedDq.make(barriers, self.warp_groups * with_dq, producers=4, consumers=1)
        Q, dO = self.row_pipelines(barriers)
        return NarrowPipelines(K, V, Q, dO, dS, dQ)

    # ---------------------------------------------------------------- the shape of products
    @property
    def part(self) -> int:
        """Sixteens of rows in a part of a block."""
        return part_rows(self.tile_m) // 16

    def mma_S(self) -> cute.TiledMma:
        return self.mma_of_rows(self.tile_m)

    def mma_of_rows(self, rows: int) -> cute.TiledMma:
        """S^T (64, rows) = K (64, D) Q^T, and dP^T likewise"""
        K_major = warpgroup.OperandMajorMode.K
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, K_major, K_major, Float32, (1, 1, 1), (64, rows))

    def mma_dQ(self) -> cute.TiledMma:
        """dQ^T (64 columns, dq_rows) = K^T dS^T"""
        K_major, MN_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        shape = (64, self.dq_rows)
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, MN_major, K_major, Float32, (1, 1, 1), shape)

    def first_block(self, item: Item) -> Int32:
        """The first query block to whose dQ the CTA adds. If deterministic, it adds zeros to all blocks of the item, as
        other CTAs wait for it to have added."""
        if self.deterministic or self.windowed:
            return item.block_begin
        return first_block(item.block_begin, item.block_end, item.key, item.key_end, self.tile_m)

    # ---------------------------------------------------------------- MMA warp groups
    @cute.jit
    def mma(
        self, g: Global, s: Shared, p: NarrowPipelines, item: Item, scale: Float32, heads_per_kv: Int32, warp_id: Int32
    ) -> None:
        wg, _, lane = self.warp_group(warp_id)
        x = self.operands(s, warp_id)
        for acc, wanted in ((x.acc_dK, self.want_dk), (x.acc_dV, self.want_dv)):
            if const_expr(wanted):
                acc.fill(0.0)
        first_key = item.key + wg * 64
        mask = self.mask_of(g, item, first_key, warp_id)
        row_end = Int32(0)
        if const_expr(not self.windowed):
            for n in (first_key + lane, first_key + 32 + lane):
                row_end = cutlass.max(row_end, self.visible_end(g, item, n))
            row_end = cute.arch.warp_redux_sync(row_end, "max")

        mask = self.await_keys(s, p, mask)
        x = self.with_late_operands(s, x, warp_id)
        scale_log2 = scale * math.log2(math.e)
        if const_expr(self.capped):
            x = x._replace(cap=Softcap.of(g.cap, scale_log2))
        if const_expr(self.windowed):
            self.walk_table(g, s, p, x, mask, item, scale_log2, heads_per_kv, wg)
        else:
            self.walk(s, p, x, mask, item, (first_key, row_end), scale_log2, heads_per_kv)

        if const_expr(self.want_dk):
            for e in cutlass.range_constexpr(cute.size(x.acc_dK)):
                x.acc_dK[e] = x.acc_dK[e] * scale
        if const_expr(self.want_dq and self.want_dv):
            self.mark_keys(x.acc_dV, s.V, self.first_row(warp_id))
        end = self.destination(s)
        dK, dV = (x.acc_dK, g.dk, 0), (x.acc_dV, g.dv, 1)
        results = ((dK,) if self.want_dk else ()) + ((dV,) if self.want_dv else ())
        self.store_keys(results, g.partials, end, self.first_row(warp_id))

    def first_row(self, warp_id: Int32) -> Int32:
        """The first of a thread's two keys, among the CTA's."""
        wg, _, lane = self.warp_group(warp_id)
        if self.capped:  # no register holds it during the loop
            return thread_here() // 32 * 16 - 64 + lane // 4
        return wg * 64 + warp_id % 4 * 16 + lane // 4

    def operands(self, s: Shared, warp_id: Int32) -> Operands:
        D, M, N, whole = self.head_dim, self.tile_m, self.tile_n, self.tile_m // 16
        wg, tid, _ = self.warp_group(warp_id)
        sK = s.K  # K's first D columns
        if self.k_columns != D:
            layout = cute.tile_to_shape(self.row_atom(self.k_columns, D), (N, D), (0, 1))
            sK = cute.make_tensor(s.K.iterator, layout.outer)
        column_tile, rows_tile = (0, wg) if split_rows(D) else (wg, 0)
        mma_S, mma_dKV, mma_dQ = self.mma_S(), self.mma_dKV(self.head_dim), self.mma_dQ()
        thr_S, thr_dKV, thr_dQ = mma_S.get_slice(0), mma_dKV.get_slice(0), mma_dQ.get_slice(0)
        sKt = cute.local_tile(self.transposed(s.K), (64, N), (column_tile, 0))
        sdS = cute.local_tile(s.dS, (self.dq_rows, N), (rows_tile, 0, None))
        dS_target = cute.local_tile(self.transposed(s.dS), (64, M), (wg, 0, None))
        acc_dK, acc_dV = [cute.make_rmem_tensor(mma_dKV.partition_shape_C((64, D)), Float32) for _ in range(2)]
        return Operands(
            K=mma_S.make_fragment_A(thr_S.partition_A(cute.local_tile(sK, (64, D), (wg, 0)))),
            V=mma_S.make_fragment_A(thr_S.partition_A(cute.local_tile(s.V, (64, D), (wg, 0)))),
            whole=self.score_operands(s, 0, whole),
            first_rows=self.score_operands(s, 0, self.part),
            last_rows=self.score_operands(s, whole - self.part, whole),
            mma_dKV=mma_dKV,
            mma_dQ=mma_dQ,
            Qt=mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(s.Q))),
            dOt=mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(s.dO))),
            Kt=mma_dQ.make_fragment_A(thr_dQ.partition_A(sKt)),
            dS=mma_dQ.make_fragment_B(thr_dQ.partition_B(sdS)),
            dS_target=self.copy_of_dS().get_slice(tid).partition_D(dS_target),
            dQ_target=None,
            acc_dK=acc_dK,
            acc_dV=acc_dV,
        )

    def score_operands(self, s: Shared, begin: int, end: int) -> ScoreOperands:
        """The operands of the sixteens of rows [begin, end) of each block."""
        rows = 16 * (end - begin)
        mma = self.mma_of_rows(rows)
        thr, sQ, sdO = mma.get_slice(0), s.Q, s.dO
        if rows < self.tile_m:
            tiler = tuple(cute.make_layout(n) for n in (rows, self.head_dim, self.stages))
            sQ, sdO = (cute.composition(cute.domain_offset((16 * begin, 0, 0), x), tiler) for x in (sQ, sdO))
        Q, dO = (mma.make_fragment_B(thr.partition_B(x)) for x in (sQ, sdO))
        return ScoreOperands(begin, end, mma, Q, dO)

    def with_late_operands(self, s: Shared, x: Operands, warp_id: Int32) -> Operands:
        """The operands that are set up after the wait for keys. Only their place in the machine code differs."""
        dQ_target = None
        if self.want_dq:
            dQ_target = s.dQ.iterator + (warp_id * self.dq_warp_floats + cute.arch.lane_idx() * 4)
        whole, first_rows, last_rows = (
            rows._replace(stats=Statistics.of(s.stats, s.stat_keys, 16 * rows.begin, 16 * (rows.end - rows.begin)))
            for rows in (x.whole, x.first_rows, x.last_rows)
        )
        return x._replace(dQ_target=dQ_target, whole=whole, first_rows=first_rows, last_rows=last_rows)

    @cute.jit
    def walk(
        self,
        s: Shared,
        p: NarrowPipelines,
        x: Operands,
        mask: Mask,
        item: Item,
        visible: tuple[Int32, Int32],  # query rows [begin, end) that may see keys of this warp group
        scale_log2: Float32,
        heads_per_kv: Int32,
    ) -> None:
        """The loop over the steps.

        It is several loops, from the last block down: blocks that see no key of this warp group, blocks whose first
        rows alone do, whole blocks, blocks whose last rows alone do, blocks that see no key, and last the blocks that
        see no key of the CTA, which only the other CTA of the cluster needs.
        """
        first, end = self.first_block(item), item.block_end
        m_block, h = end - 1, item.kv_head * heads_per_kv
        blocks = Walk.of(first, end, *visible, self.tile_m)
        # Steps go from the last block down, so a loop over steps ends where a run of blocks begins: `part_end` here is
        # from Walk's `whole_end`, and `whole_end` here from Walk's `whole_begin`.
        skipped, part_end, whole_end, visible_end = ((end - i) * heads_per_kv for i in reversed(blocks))
        for it in cutlass.range(0, skipped, 1, unroll=1):
            self.skip_block(s, p, x, mask, it, m_block)
            m_block, h = self.next_block(m_block, h, item, heads_per_kv)
        for it in cutlass.range(skipped, part_end, 1, unroll=1):
            self.block(s, p, x, mask, it, m_block, x.first_rows, scale_log2)
            m_block, h = self.next_block(m_block, h, item, heads_per_kv)
        for it in cutlass.range(part_end, whole_end, 1, unroll=1):
            self.block(s, p, x, mask, it, m_block, x.whole, scale_log2)
            m_block, h = self.next_block(m_block, h, item, heads_per_kv)
        for it in cutlass.range(whole_end, visible_end, 1, unroll=1):
            self.block(s, p, x, mask, it, m_block, x.last_rows, scale_log2)
            m_block, h = self.next_block(m_block, h, item, heads_per_kv)
        own_steps, steps = self.saved(s, "own_steps", "steps")
        for it in cutlass.range(visible_end, own_steps, 1, unroll=1):
            self.skip_block(s, p, x, mask, it, m_block)
            m_block, h = self.next_block(m_block, h, item, heads_per_kv)
        self.finish_last_dq(p, x, own_steps - 1)
        for it in cutlass.range(own_steps, steps, 1, unroll=1):
            self.release_block(p, it)

    @cute.jit
    def walk_table(
        self, g: Global, s: Shared, p: NarrowPipelines, x: Operands, mask: Mask, item: Item, scale_log2: Float32,
        heads_per_kv: Int32, wg: Int32,
    ) -> None:  # fmt: skip
        """The loop over the steps of `walk`, with the rows of the table.

        One loop over steps, whose registers are few, and not one over rows with one over heads inside.
        """
        steps = (item.block_end - item.block_begin) * heads_per_kv
        following, flags = g.blocks[item.block_end - 1, BlockFields.FLAGS], Int32(0)
        for it in cutlass.range(0, steps, 1, unroll=1):
            flags = self.uniform(following)
            stage = p.Q.stage(it)
            p.Q.consumer_wait(stage)
            following = s.blocks[FLAGS, stage.index]  # of the next step
            rows = (flags >> (4 * self.rank() + 2 * wg)) & 3
            if not self.is_own(flags, self.rank()):
                self.release_block(p, it)
            elif rows == BlockFields.SKIP:
                self.skip_block(s, p, x, mask, it, None, flags)
            elif rows == BlockFields.FIRST_ROWS:
                self.block(s, p, x, mask, it, None, x.first_rows, scale_log2, flags)
            elif rows == BlockFields.WHOLE:
                self.block(s, p, x, mask, it, None, x.whole, scale_log2, flags)
            else:
                self.block(s, p, x, mask, it, None, x.last_rows, scale_log2, flags)
        own = s.blocks[OWN_STEP, p.Q.stage(steps - 1).index]
        own += cutlass.select_(self.is_own(flags, self.rank()), Int32(1), Int32(0))
        if own > 0:
            self.finish_last_dq(p, x, own - 1)

    def block(
        self,
        s: Shared,
        p: NarrowPipelines,
        x: Operands,
        mask: Mask,
        it: Int32,
        m_block: Int32 | None,  # None with a window: it lies beside Q
        rows: ScoreOperands,  # of the block's rows that may see keys of this warp group
        scale_log2: Float32,
        flags: Int32 | None = None,  # with a window
    ) -> None:
        """S, dP, dV and dK of step `it`, and dQ of the step before.

        No product is in flight at either end, and few accumulators are at a time: else the compiler makes every product
        wait.
        """
        stage, mma, mma_dKV = p.Q.stage(it), rows.mma, x.mma_dKV
        m0 = Int32(0) if m_block is None else m_block * self.tile_m
        early_dK = self.windowed and self.want_dk and not self.want_dq  # else dS is made behind the issue of dV
        lse, count = rows.stats.lse(stage.index), rows.end - rows.begin
        acc_S, acc_dP, dP = [cute.make_rmem_tensor(mma.partition_shape_C((64, 16 * count)), Float32) for _ in range(3)]

        # S^T and dP^T
        if not self.windowed:  # else `walk_table` has waited
            p.Q.consumer_wait(stage)
        gemm(mma, acc_S, x.K, rows.Q[None, None, None, stage.index], True, addends=[] if self.capped else [lse])
        if not self.capped:
            self.issue_dP(p, x, rows, acc_dP, stage)
        if self.windowed:
            m_block, mask = self.block_of_stage(s, mask, stage, flags)
            m0 = m_block * self.tile_m
        warpgroup.wait_group(1 if self.want_dp and not self.capped else 0)

        # P^T beside the product dP^T, then dS^T
        tP, tdS, slope = [self.dKV_operand(16 * count) for _ in range(3)]
        if self.capped:
            to_tanh(acc_S, x.cap)
        self.mask(acc_S, m0 + 16 * rows.begin, mask)
        if self.capped:
            slope = slope if self.want_dp else None
            to_probabilities(acc_S, tP, slope, s.stats, 16 * rows.begin, stage.index, x.cap, self.dtype)
        else:
            for e in range(8 * count):
                acc_S[e] = cute.math.exp2(acc_S[e] * scale_log2, fastmath=True)
        self.compiler_fence(p)  # keeps the exponentials before the wait for dP^T
        if self.capped:  # there were no registers for dP^T beside tanh
            self.issue_dP(p, x, rows, acc_dP, stage)
        warpgroup.wait_group(0)
        own = self.own_step(s, stage, it)
        if self.want_dp:
            for e in range(8 * count):
                dP[e] = acc_dP[e]
        self.contain_block(s, x, mask, stage, m0, dP, rows.begin)
        if not self.capped:
            round_to(acc_S, tP)
        if self.want_dp:
            for e in range(8 * count):
                acc_dP[e] = (slope_of(slope, e) if self.capped else acc_S[e]) * dP[e]
            round_to(acc_dP, tdS)
        if self.want_dq:
            self.write_dS(p, x, tdS, own, rows.begin)
        else:
            self.compiler_fence(p)  # keeps dS before the issue of dV: behind it there are not the registers

        # dV, dQ^T of the step before, dK
        if early_dK:
            gemm(mma_dKV, x.acc_dK, tdS, x.Qt[None, None, None, stage.index], False, rows.begin)
        if self.want_dv:
            gemm(mma_dKV, x.acc_dV, tP, x.dOt[None, None, None, stage.index], False, rows.begin)
        if self.want_dq:
            # dQ of the step before, whose dS `write_dS` has waited for; in the first step, of whatever is in the
            # buffer.
            acc_dQ = self.issue_dq(x, own + 1)
            warpgroup.wait_group(1)  # dV
            p.dO.consumer_release(stage)
        if self.want_dk and not early_dK:
            gemm(mma_dKV, x.acc_dK, tdS, x.Qt[None, None, None, stage.index], False, rows.begin)
        warpgroup.wait_group(1 if self.want_dk else 0)  # dQ, or dV where there is none
        if self.want_dq:
            self.finish_previous_dq(p, x, acc_dQ, own)
        else:
            p.dO.consumer_release(stage)
        warpgroup.wait_group(0)
        p.Q.consumer_release(stage)

    def issue_dP(
        self, p: NarrowPipelines, x: Operands, rows: ScoreOperands, acc_dP: cute.Tensor, stage: Stage
    ) -> None:  # fmt: skip
        """Wait for dO, and issue dP^T where it is needed."""
        p.dO.consumer_wait(stage)
        if self.want_dp:
            dO, dpsum = rows.dO[None, None, None, stage.index], rows.stats.dpsum(stage.index)
            gemm(rows.mma, acc_dP, x.V, dO, True, addends=[dpsum])

    def skip_block(
        self, s: Shared, p: NarrowPipelines, x: Operands, mask: Mask, it: Int32, m_block: Int32 | None,
        flags: Int32 | None = None,
    ) -> None:  # fmt: skip
        """A step whose rows see no key of this warp group: only dQ of the step before is made. See `block`."""
        stage = p.Q.stage(it)
        p.Q.consumer_wait(stage)  # a stage may be released once it is full
        p.dO.consumer_wait(stage)
        own = self.own_step(s, stage, it)
        if self.windowed:
            m_block, mask = self.block_of_stage(s, mask, stage, flags)
        self.contain_block(s, x, mask, stage, m_block * self.tile_m, None, 0)
        if self.want_dq:
            self.write_dS(p, x, None, own)
            acc_dQ = self.issue_dq(x, own + 1)
            warpgroup.wait_group(0)
            self.finish_previous_dq(p, x, acc_dQ, own)
        p.dO.consumer_release(stage)
        p.Q.consumer_release(stage)

    def release_block(self, p: NarrowPipelines, it: Int32) -> None:
        """A step of the other CTA of the cluster alone, whose Q and dO come to this CTA too."""
        stage = p.Q.stage(it)  # of dO too, which has as many stages
        for pipeline in (p.Q, p.dO):
            pipeline.consumer_wait(stage)
            pipeline.consumer_release(stage)

    # ---------------------------------------------------------------- parts of a step
    def own_step(self, s: Shared, stage: Stage, it: Int32) -> Int32:
        """Number of step `it` among those in which this CTA makes dQ: with a window it skips some (`release_block`)."""
        return s.blocks[OWN_STEP, stage.index] if self.windowed else it

    def compiler_fence(self, p: NarrowPipelines) -> None:
        """A workaround for the compiler, which moves arithmetic past a wait for products but not past a branch.

        This wait is a branch, and never waits: K has been there since the first step.
        """
        p.K.wait(0)

    def contain_block(
        self, s: Shared, x: Operands, mask: Mask, stage: Stage, m0: Int32, dP: cute.Tensor | None, begin: int
    ) -> None:
        """`contain` by all MMA warps. dP: of rows from the sixteen `begin` on; None: the rows see no key."""
        self.contain(
            mask,
            s,
            stage.index,
            stage.index,
            m0,
            acc_dV=x.acc_dV if dP is not None and self.want_dv else None,
            acc_dP=dP if self.want_dp else None,
            dP_row=16 * begin,
            remove_from=("Q", "dO"),
        )

    def write_dS(self, p: NarrowPipelines, x: Operands, tdS: cute.Tensor | None, it: Int32, begin: int = 0) -> None:
        """dS^T of step `it` to shared memory, once no warp reads dS of step `it` - 2 there.

        tdS: of rows from the sixteen `begin` on, None for no rows; of the others it is 0.
        """
        p.dS.wait_previous(it)
        source = cute.make_rmem_tensor(self.mma_S().partition_shape_C((64, self.tile_m)), self.dtype)
        first, size = 8 * begin, cute.size(tdS) if tdS is not None else 0
        for e in range(cute.size(source)):
            source[e] = tdS[e - first] if 0 <= e - first < size else self.dtype(0.0)
        copy, target = self.copy_of_dS(), x.dS_target[None, None, None, it % self.buffers]
        cute.copy(copy, copy.get_slice(cute.arch.thread_idx()[0] % 128).retile(source), target)
        cute.arch.fence_view_async_shared()

    def issue_dq(self, x: Operands, it: Int32) -> cute.Tensor:
        """Issue dQ^T of the step whose dS is in the buffer of step `it`: `it` itself, or `it` - 2."""
        acc_dQ = cute.make_rmem_tensor(x.mma_dQ.partition_shape_C((64, self.dq_rows)), Float32)
        gemm(x.mma_dQ, acc_dQ, x.Kt, x.dS[None, None, None, it % self.buffers], True)
        return acc_dQ

    def finish_last_dq(self, p: NarrowPipelines, x: Operands, it: Int32) -> None:
        """dQ of the last step, after the loop."""
        if self.want_dq:
            p.dS.wait(it)
            acc_dQ = self.issue_dq(x, it)
            warpgroup.wait_group(0)
            self.stage_dq(p, x, acc_dQ, it)

    def dKV_operand(self, rows: int) -> cute.Tensor:
        """Registers of P^T or dS^T (64 keys, rows) in 16 bits."""
        return cute.make_rmem_tensor(self.mma_dKV(self.head_dim).partition_shape_A((64, rows)), self.dtype)

    @cute.jit
    def finish_previous_dq(self, p: NarrowPipelines, x: Operands, acc_dQ: cute.Tensor, it: Int32) -> None:
        """dQ^T of step `it` - 1 is ready: its dS is no longer read, and dS of step `it` is written."""
        p.dS.arrive(it)
        if it > 0:
            self.stage_dq(p, x, acc_dQ, it - 1)

    @cute.jit
    def stage_dq(self, p: NarrowPipelines, x: Operands, acc_dQ: cute.Tensor, it: Int32) -> None:
        """dQ^T of step `it`, which is ready, to shared memory for `add_dq`."""
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        stage = p.dQ.stage_of_warp_group(it, warp_id // 4)
        p.dQ.producer_acquire(stage)
        if warp_id < sum(self.dq_warps):
            target = x.dQ_target
            for c in cutlass.range_constexpr(self.dq_chunks):
                quad = cute.make_tensor((target + 128 * c).align(16), cute.make_layout(4))
                cute.autovec_copy(part(acc_dQ, 4 * c, 4), quad)
        cute.arch.fence_view_async_shared()
        p.dQ.producer_commit(stage)

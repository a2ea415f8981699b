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
from cute_kernels.backward.arguments import Global, Item, Mask, ScoreOperands, Shared, Step
from cute_kernels.backward.dq import NarrowDq, NarrowPipelines, StagedDq
from cute_kernels.backward.frame import BackwardFrame, dq_by_rows
from cute_kernels.backward.results import apply_mask, destination, saved
from cute_kernels.backward.softcap import Softcap, slope_of, to_probabilities, to_tanh
from cute_kernels.backward.stats import Statistics
from cute_kernels.backward.walk import Walk, first_block
from cute_kernels.backward.window import FLAGS, OWN_STEP, block_of_stage, is_own, uniform
from cute_kernels.pipeline import MbarrierAllocator, Signal
from cute_kernels.ptx import thread_here


class Operands(NamedTuple):
    """A warp group's operands in shared memory, and its accumulators."""

    tSrK: cute.Tensor  # (MMA, 1, D/16), of S^T
    tdPrV: cute.Tensor  # (MMA, 1, D/16), of dP^T
    whole: ScoreOperands
    first_rows: ScoreOperands
    last_rows: ScoreOperands
    mma_dKV: cute.TiledMma
    mma_dQ: cute.TiledMma
    tdKrQ: cute.Tensor  # (MMA, 1, M/16, stages), of dK
    tdVrdO: cute.Tensor  # (MMA, 1, M/16, stages), of dV
    tdQrK: cute.Tensor  # (MMA, 1, N/16), of dQ^T
    tdQrdS: cute.Tensor  # (MMA, 1, N/16, buffers), of dQ^T
    dS_target: cute.Tensor  # where this thread writes dS^T (with `copy_of_dS`), of each buffer
    dQ_target: cute.Pointer | None  # and dQ^T
    acc_dK: cute.Tensor  # (64, D)
    acc_dV: cute.Tensor  # (64, D)
    scale_log2: Float32 | None = None
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
        if dq_by_rows(self.head_dim) or not self.staged_floats:  # the former 1 % faster so; the latter have no dQ
            return "small", "sK", "sV", "sQ", "sdO", "sdS", "sdQ"
        return "sK", "sQ", "sV", "sdO", "sdS", "small", "sdQ"

    def pipelines(self, barriers: MbarrierAllocator) -> NarrowPipelines:
        warps, with_dq = 4 * self.warp_groups, int(self.want_dq)
        K, V = self.key_signals(barriers)
        dS = Signal.make(barriers, with_dq, producers=warps)
        dQ = StagedDq.make(barriers, self.warp_groups * with_dq, producers=4, consumers=1)
        Q, dO = self.row_pipelines(barriers)
        return NarrowPipelines(K=K, V=V, Q=Q, dO=dO, dS=dS, dQ=dQ)

    # ---------------------------------------------------------------- the shape of products
    @property
    def part_sixteens(self) -> int:
        """Sixteens of rows in the first or the last part of a block (abi.part_rows)."""
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

    def first_dq_block(self, item: Item) -> Int32:
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
        x = x._replace(scale_log2=scale * math.log2(math.e))
        if const_expr(self.capped):
            x = x._replace(cap=Softcap.of(g.cap, x.scale_log2))
        if const_expr(self.windowed):
            self.walk_table(g, s, p, x, mask, item, heads_per_kv, wg)
        else:
            self.walk(s, p, x, mask, item, (first_key, row_end), heads_per_kv)

        if const_expr(self.want_dk):
            for e in cutlass.range_constexpr(cute.size(x.acc_dK)):
                x.acc_dK[e] = x.acc_dK[e] * scale
        if const_expr(self.want_dq and self.want_dv):
            self.containment.mark_keys(x.acc_dV, s.sV, self.first_row(warp_id))
        end = destination(s)
        dK, dV = (x.acc_dK, g.mdK, 0), (x.acc_dV, g.mdV, 1)
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
        sK = s.sK  # K's first D columns
        if self.k_columns != D:
            layout = cute.tile_to_shape(self.row_atom(self.k_columns, D), (N, D), (0, 1))
            sK = cute.make_tensor(s.sK.iterator, layout.outer)
        column_tile, rows_tile = (0, wg) if dq_by_rows(D) else (wg, 0)
        mma_S, mma_dKV, mma_dQ = self.mma_S(), self.mma_dKV(self.head_dim), self.mma_dQ()
        thr_S, thr_dKV, thr_dQ = mma_S.get_slice(0), mma_dKV.get_slice(0), mma_dQ.get_slice(0)
        sKt = cute.local_tile(self.transposed(s.sK), (64, N), (column_tile, 0))
        sdS = cute.local_tile(s.sdS, (self.dq_rows, N), (rows_tile, 0, None))
        dS_target = cute.local_tile(self.transposed(s.sdS), (64, M), (wg, 0, None))
        acc_dK, acc_dV = [cute.make_rmem_tensor(mma_dKV.partition_shape_C((64, D)), Float32) for _ in range(2)]
        return Operands(
            tSrK=mma_S.make_fragment_A(thr_S.partition_A(cute.local_tile(sK, (64, D), (wg, 0)))),
            tdPrV=mma_S.make_fragment_A(thr_S.partition_A(cute.local_tile(s.sV, (64, D), (wg, 0)))),
            whole=self.score_operands(s, 0, whole),
            first_rows=self.score_operands(s, 0, self.part_sixteens),
            last_rows=self.score_operands(s, whole - self.part_sixteens, whole),
            mma_dKV=mma_dKV,
            mma_dQ=mma_dQ,
            tdKrQ=mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(s.sQ))),
            tdVrdO=mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(s.sdO))),
            tdQrK=mma_dQ.make_fragment_A(thr_dQ.partition_A(sKt)),
            tdQrdS=mma_dQ.make_fragment_B(thr_dQ.partition_B(sdS)),
            dS_target=self.copy_of_dS().get_slice(tid).partition_D(dS_target),
            dQ_target=None,
            acc_dK=acc_dK,
            acc_dV=acc_dV,
        )

    def score_operands(self, s: Shared, begin: int, end: int) -> ScoreOperands:
        """The operands of the sixteens of rows [begin, end) of each block."""
        rows = 16 * (end - begin)
        mma = self.mma_of_rows(rows)
        thr, sQ, sdO = mma.get_slice(0), s.sQ, s.sdO
        if rows < self.tile_m:
            tiler = tuple(cute.make_layout(n) for n in (rows, self.head_dim, self.stages))
            sQ, sdO = (cute.composition(cute.domain_offset((16 * begin, 0, 0), x), tiler) for x in (sQ, sdO))
        Q, dO = (mma.make_fragment_B(thr.partition_B(x)) for x in (sQ, sdO))
        return ScoreOperands(begin, end, mma, Q, dO)

    def with_late_operands(self, s: Shared, x: Operands, warp_id: Int32) -> Operands:
        """The operands that are set up after the wait for keys. Only their place in the machine code differs."""
        dQ_target = None
        if self.want_dq:
            dQ_target = s.sdQ.iterator + (warp_id * self.dq_warp_floats + cute.arch.lane_idx() * 4)
        whole, first_rows, last_rows = (
            rows._replace(stats=Statistics.of(s.stats, s.stat_keys, 16 * rows.begin, 16 * (rows.end - rows.begin)))
            for rows in (x.whole, x.first_rows, x.last_rows)
        )
        return x._replace(dQ_target=dQ_target, whole=whole, first_rows=first_rows, last_rows=last_rows)

    @cute.jit
    def walk(
        self, s: Shared, p: NarrowPipelines, x: Operands, mask: Mask, item: Item,
        visible: tuple[Int32, Int32],  # query rows [begin, end) that may see keys of this warp group
        heads_per_kv: Int32,
    ) -> None:  # fmt: skip
        """The loop over the steps.

        It is several loops, from the last block down: blocks that see no key of this warp group, blocks whose first
        rows alone do, whole blocks, blocks whose last rows alone do, blocks that see no key, and last the blocks that
        see no key of the CTA, which only the other CTA of the cluster needs.
        """
        first, end = self.first_dq_block(item), item.block_end
        m_block, h = end - 1, item.kv_head * heads_per_kv
        blocks = Walk.of(first, end, *visible, self.tile_m)
        # Steps go from the last block down, so a loop over steps ends where a run of blocks begins: `part_end` here is
        # from Walk's `whole_end`, and `whole_end` here from Walk's `whole_begin`.
        skipped, part_end, whole_end, visible_end = ((end - i) * heads_per_kv for i in reversed(blocks))
        ends, rows = (0, skipped, part_end, whole_end, visible_end), (None, x.first_rows, x.whole, x.last_rows)
        for i, rows_of_run in enumerate(rows):
            for it in cutlass.range(ends[i], ends[i + 1], 1, unroll=1):
                self.block(s, p, x, self.step(p, it, mask, m_block, rows_of_run))
                m_block, h = self.next_block(m_block, h, item, heads_per_kv)
        own_steps, steps = saved(s, "own_steps", "steps")
        for it in cutlass.range(visible_end, own_steps, 1, unroll=1):
            self.block(s, p, x, self.step(p, it, mask, m_block, None))
            m_block, h = self.next_block(m_block, h, item, heads_per_kv)
        self.finish_last_dq(p, x, own_steps - 1)
        for it in cutlass.range(own_steps, steps, 1, unroll=1):
            self.release_block(p, it)

    @cute.jit
    def walk_table(
        self, g: Global, s: Shared, p: NarrowPipelines, x: Operands, mask: Mask, item: Item, heads_per_kv: Int32,
        wg: Int32,
    ) -> None:  # fmt: skip
        """The loop over the steps of `walk`, with the rows of the table.

        One loop over steps, whose registers are few, and not one over rows with one over heads inside.
        """
        steps = (item.block_end - item.block_begin) * heads_per_kv
        following, flags = g.blocks[item.block_end - 1, BlockFields.FLAGS], Int32(0)
        for it in cutlass.range(0, steps, 1, unroll=1):
            flags = uniform(following)
            stage = p.Q.stage(it)
            p.Q.consumer_wait(stage)
            following = s.blocks[FLAGS, stage.index]  # of the next step
            rows = (flags >> (4 * self.rank() + 2 * wg)) & 3
            if not is_own(flags, self.rank()):
                self.release_block(p, it)
            elif rows == BlockFields.SKIP:
                self.block(s, p, x, self.step(p, it, mask, None, None, flags))
            elif rows == BlockFields.FIRST_ROWS:
                self.block(s, p, x, self.step(p, it, mask, None, x.first_rows, flags))
            elif rows == BlockFields.WHOLE:
                self.block(s, p, x, self.step(p, it, mask, None, x.whole, flags))
            else:
                self.block(s, p, x, self.step(p, it, mask, None, x.last_rows, flags))
        own = s.blocks[OWN_STEP, p.Q.stage(steps - 1).index]
        own += cutlass.select_(is_own(flags, self.rank()), Int32(1), Int32(0))
        if own > 0:
            self.finish_last_dq(p, x, own - 1)

    def step(
        self, p: NarrowPipelines, it: Int32, mask: Mask, m_block: Int32 | None, rows: ScoreOperands | None,
        flags: Int32 | None = None,
    ) -> Step:  # fmt: skip
        """Bundle step `it`."""
        return Step(it, p.Q.stage(it), p.dO.stage(it), mask, m_block, None, rows, flags)

    def block(self, s: Shared, p: NarrowPipelines, x: Operands, step: Step) -> None:
        """S, dP, dV and dK of a step, and dQ of the step before.

        No product is in flight at either end, and few accumulators are at a time: else the compiler makes every product
        wait.
        """
        if step.rows is None:
            self.skip_block(s, p, x, step)
            return
        rows, stage, mma_dKV = step.rows, step.stage, x.mma_dKV
        # a thread has `size` elements of an accumulator (64 keys x 2 * size rows)
        size, beside_S = 8 * (rows.end - rows.begin), not self.capped  # there are no registers for dP^T beside tanh
        early_dK = self.windowed and self.want_dk and not self.want_dq  # else dS is made behind the issue of dV
        if not self.windowed:
            step = self.with_block(s, step)
        lse = [rows.stats.lse(stage.index)] if beside_S else []
        acc_S, acc_dP, dP = [
            cute.make_rmem_tensor(rows.mma.partition_shape_C((64, 2 * size)), Float32) for _ in range(3)
        ]

        # (1) S^T = K Q^T - lse / scale
        if not self.windowed:  # else `walk_table` has waited
            p.Q.consumer_wait(stage)
        gemm(rows.mma, acc_S, x.tSrK, rows.tSrQ[None, None, None, stage.index], zero_init=True, addends=lse)
        # (2) dP^T = V dO^T - dpsum
        if beside_S:
            self.issue_dP(p, x, step, acc_dP)
        if self.windowed:  # behind the issue of products, which hides the latency
            step = self.with_block(s, step)
        warpgroup.wait_group(1 if self.want_dp and beside_S else 0)

        # P^T beside (2), then dS^T
        tdVrP, slope = self.to_P(acc_S, s, x, step)
        tdKrdS = self.dKV_operand(2 * size)
        self.compiler_fence(p)  # keeps the exponentials before the wait for dP^T
        if not beside_S:
            self.issue_dP(p, x, step, acc_dP)
        warpgroup.wait_group(0)
        own = self.own_step(s, step)
        if self.want_dp:  # a copy, as acc_dP takes dS below
            for e in range(size):
                dP[e] = acc_dP[e]
        self.contain_block(s, x, step, dP)
        if not self.capped:
            round_to(acc_S, tdVrP)
        if self.want_dp:
            for e in range(size):
                acc_dP[e] = (acc_S[e] if slope is None else slope_of(slope, e)) * dP[e]
            round_to(acc_dP, tdKrdS)
        if self.want_dq:
            self.write_dS(p, x, tdKrdS, own, rows.begin)
        else:
            self.compiler_fence(p)  # keeps dS before the issue of dV: behind it there are not the registers

        # (3) dV += P^T dO
        if early_dK:
            gemm(
                mma_dKV, x.acc_dK, tdKrdS, x.tdKrQ[None, None, None, stage.index], zero_init=False, k_offset=rows.begin
            )
        if self.want_dv:
            gemm(
                mma_dKV, x.acc_dV, tdVrP, x.tdVrdO[None, None, None, stage.index], zero_init=False, k_offset=rows.begin
            )
        # (4) dQ^T = K^T dS^T of the step before, whose dS `write_dS` has waited for; in the first step, of whatever is
        # in the buffer. Of two buffers it is that of step `own` + 1 too (the DSL's remainder of -1 is -1).
        if self.want_dq:
            acc_dQ = self.issue_dq(x, (own + 1) % self.buffers)
            warpgroup.wait_group(1)  # dV
            p.dO.consumer_release(stage)
        # (5) dK += dS^T Q
        if self.want_dk and not early_dK:
            gemm(
                mma_dKV, x.acc_dK, tdKrdS, x.tdKrQ[None, None, None, stage.index], zero_init=False, k_offset=rows.begin
            )
        warpgroup.wait_group(1 if self.want_dk else 0)  # dQ, or dV where there is none
        if self.want_dq:
            self.finish_previous_dq(p, x, acc_dQ, own)
        else:
            p.dO.consumer_release(stage)
        warpgroup.wait_group(0)
        p.Q.consumer_release(stage)

    def issue_dP(self, p: NarrowPipelines, x: Operands, step: Step, acc_dP: cute.Tensor) -> None:
        """Wait for dO, and issue dP^T where it is needed."""
        rows, stage = step.rows, step.stage
        p.dO.consumer_wait(stage)
        if self.want_dp:
            dO, dpsum = rows.tdPrdO[None, None, None, stage.index], rows.stats.dpsum(stage.index)
            gemm(rows.mma, acc_dP, x.tdPrV, dO, zero_init=True, addends=[dpsum])

    def to_P(self, acc_S: cute.Tensor, s: Shared, x: Operands, step: Step) -> tuple[cute.Tensor, cute.Tensor | None]:
        """Turn S^T into P^T. Returns the operand of dV and, with a cap, the slope: P * (1 - tanh^2).

        Without a cap P^T takes the place of S^T, and the operand is still to be filled.
        """
        first, rows = 16 * step.rows.begin, 2 * cute.size(acc_S)
        tdVrP = self.dKV_operand(rows)
        if not self.capped:
            apply_mask(acc_S, step.m0 + first, step.mask, self.windowed)
            for e in range(cute.size(acc_S)):
                acc_S[e] = cute.math.exp2(acc_S[e] * x.scale_log2, fastmath=True)
            return tdVrP, None
        slope = self.dKV_operand(rows) if self.want_dp else None
        to_tanh(acc_S, x.cap)
        apply_mask(acc_S, step.m0 + first, step.mask, self.windowed)
        to_probabilities(acc_S, tdVrP, slope, s.stats, first, step.stage.index, x.cap, self.dtype)
        return tdVrP, slope

    def skip_block(self, s: Shared, p: NarrowPipelines, x: Operands, step: Step) -> None:
        """A step whose rows see no key of this warp group: only (4) is made. See `block`."""
        stage = step.stage
        p.Q.consumer_wait(stage)  # a stage may be released once it is full
        p.dO.consumer_wait(stage)
        own = self.own_step(s, step)
        self.contain_block(s, x, self.with_block(s, step), None)
        if self.want_dq:
            self.write_dS(p, x, None, own)
            acc_dQ = self.issue_dq(x, (own + 1) % self.buffers)
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
    def own_step(self, s: Shared, step: Step) -> Int32:
        """The step's number among those in which this CTA makes dQ: with a window it skips some (`release_block`)."""
        return s.blocks[OWN_STEP, step.stage.index] if self.windowed else step.it

    def with_block(self, s: Shared, step: Step) -> Step:
        """Find the step's first row; with a window read its block and the block's mask from beside Q before."""
        m_block, mask = step.m_block, step.mask
        if self.windowed:
            m_block, mask = block_of_stage(s, mask, step.stage, self.key_rank, step.flags)
        return step._replace(m_block=m_block, mask=mask).with_m0(self.tile_m)

    def compiler_fence(self, p: NarrowPipelines) -> None:
        """A workaround for the compiler, which moves arithmetic past a wait for products but not past a branch.

        This wait is a branch, and never waits: K has been there since the first step.
        """
        p.K.wait(0)

    def contain_block(self, s: Shared, x: Operands, step: Step, dP: cute.Tensor | None) -> None:
        """`contain` by all MMA warps. dP: of the step's rows; None: the rows see no key."""
        self.containment.keep_apart(
            s,
            step,
            acc_dV=x.acc_dV if dP is not None and self.want_dv else None,
            acc_dP=dP if self.want_dp else None,
            dP_row=0 if step.rows is None else 16 * step.rows.begin,
            remove_from=("Q", "dO"),
        )

    def write_dS(self, p: NarrowPipelines, x: Operands, tdKrdS: cute.Tensor | None, it: Int32, begin: int = 0) -> None:
        """dS^T of step `it` to shared memory, once no warp reads dS of step `it` - 2 there.

        tdKrdS: of rows from the sixteen `begin` on, None for no rows; of the others it is 0.
        """
        p.dS.wait_previous(it)
        source = cute.make_rmem_tensor(self.mma_S().partition_shape_C((64, self.tile_m)), self.dtype)
        first, size = 8 * begin, cute.size(tdKrdS) if tdKrdS is not None else 0
        for e in range(cute.size(source)):
            source[e] = tdKrdS[e - first] if 0 <= e - first < size else self.dtype(0.0)
        copy, target = self.copy_of_dS(), x.dS_target[None, None, None, it % self.buffers]
        cute.copy(copy, copy.get_slice(cute.arch.thread_idx()[0] % 128).retile(source), target)
        cute.arch.fence_view_async_shared()

    def issue_dq(self, x: Operands, buffer: Int32) -> cute.Tensor:
        """Issue dQ^T of the step whose dS is in `buffer`."""
        acc_dQ = cute.make_rmem_tensor(x.mma_dQ.partition_shape_C((64, self.dq_rows)), Float32)
        gemm(x.mma_dQ, acc_dQ, x.tdQrK, x.tdQrdS[None, None, None, buffer], zero_init=True)
        return acc_dQ

    def finish_last_dq(self, p: NarrowPipelines, x: Operands, it: Int32) -> None:
        """dQ of the last step, after the loop."""
        if self.want_dq:
            p.dS.wait(it)
            acc_dQ = self.issue_dq(x, it % self.buffers)
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

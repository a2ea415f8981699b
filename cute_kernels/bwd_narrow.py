"""Attention backward for head dims up to 96, and what 128 shares with them.

Two MMA warp groups; P and dS feed dV and dK from registers.

Transposed products, so that rows are keys (S^T = K Q^T) or columns of the head dim (dQ^T = K^T dS^T). For S, dP, dV and
dK each warp group has 64 of the 128 keys. dQ needs all keys: dS passes through shared memory, and each warp group has
64 columns of the head dim, or (head dim 64) half of the query rows.

Sums of dQ in any order go to global memory from registers. Sums in a fixed order must wait for their turn: a warp group
leaves its dQ in shared memory, and a warp beside the loader waits and has the copy engine add it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.accumulator import gemm, part, round_to
from cute_kernels.bwd_contain import BAR_CONTAIN
from cute_kernels.bwd_frame import BackwardFrame, split_rows
from cute_kernels.ptx import bulk_add, load_acquire, store_release

AHEAD = 3  # quads of lse2 asked for before S runs: as many as there are registers for


@dataclass
class State:
    """What a warp group's loop over query blocks works on."""

    mma_S: cute.TiledMma
    mma_dKV: cute.TiledMma
    mma_dQ: cute.TiledMma
    frags: dict[str, cute.Tensor]  # operands in shared memory
    acc_dP: cute.Tensor  # dP^T of the current block
    tP: cute.Tensor  # P^T of the current block, operand of dV
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    stat: cute.Tensor  # (4, M/16, lse2 or dpsum, stage)
    copy_dS: cute.TiledCopy
    dS_dst: cute.Tensor
    tid: Int32
    num_blocks: Int32  # query blocks a head
    dq_dst: cute.Pointer  # this thread's place in block 0 of dQ, or in shared memory where dQ is staged
    dq_wanted: cutlass.Boolean  # this thread holds columns of the head dim
    scale_log2: Float32
    bars: cute.Pointer
    masks: tuple[Any, ...]
    sQ: cute.Tensor
    sdO: cute.Tensor
    sStat: cute.Tensor


class NarrowBackward(BackwardFrame):
    __doc__ = BackwardFrame.__doc__

    HEAD_DIMS: tuple[int, ...] = (64, 96)
    DS: int  # numbers of mbarriers
    USED: int
    STAGED: int
    FREE: int

    def check_tile(self) -> None:
        if self.tile_n != 128:
            raise ValueError(f"tile_n is {self.tile_n}, expected 128")
        if self.tile_m % 16 or not 16 <= self.tile_m <= 256:
            raise ValueError(f"tile_m is {self.tile_m}, expected a multiple of 16 up to 256")
        if not 0 <= self.late <= self.dq_chunks:
            raise ValueError(f"late is {self.late}, expected 0 to {self.dq_chunks}")
        if self.stages < 2:
            raise ValueError(f"got {self.stages} stages, expected 2 or more: the next block is asked for early")

    @property
    def k_columns(self) -> int:
        return -(-self.head_dim // 128) * 128 if self.head_dim > 64 else 64

    @property
    def buffers(self) -> int:
        return 2 if self.staged else 3  # of dS alone

    @property
    def staged(self) -> bool:
        """Whether dQ passes through shared memory: below head dim 128 for sums in a fixed order."""
        return self.want_dq and self.deterministic

    @property
    def dq_warps(self) -> list[int]:
        """Of each warp group, those that hold columns of dQ."""
        return [4, 4 if split_rows(self.head_dim) else self.head_dim // 16 - 4]

    @property
    def staged_floats(self) -> int:
        return self.tile_m * self.head_dim if self.staged else 0

    def own_barriers(self) -> list[tuple[str, int, int]]:
        """dS written; where dQ is staged: a buffer of dS read, a warp group's dQ in shared memory, gone from there."""
        return [("DS", 1, 8), *([("USED", 2, 8), ("STAGED", 2, 4), ("FREE", 2, 1)] if self.staged else [])]

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
        """Floats of dQ a warp, for one query block, where staged: [warp][chunk of 8 rows][lane][4]."""
        return 16 * self.dq_rows

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        K_major, MN_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        dtype, shape = self.dtype, (1, 1, 1)
        mma_S = hopper.make_trivial_tiled_mma(dtype, dtype, K_major, K_major, Float32, shape, (64, self.tile_m))
        mma_dKV = hopper.make_trivial_tiled_mma(
            dtype, dtype, K_major, MN_major, Float32, shape, (64, self.head_dim), warpgroup.OperandSource.RMEM
        )
        mma_dQ = hopper.make_trivial_tiled_mma(dtype, dtype, MN_major, K_major, Float32, shape, (64, self.dq_rows))
        return mma_S, mma_dKV, mma_dQ

    # ---------------------------------------------------------------- beside the loader
    @cute.jit
    def assist(
        self, warp_idx: Int32, sdS: cute.Tensor, own: Any, dq_acc: cute.Tensor, locks: cute.Tensor, num_blocks: Int32,
        bars: cute.Pointer, item: Any, heads_per_kv: Int32,
    ) -> None:  # fmt: skip
        if const_expr(self.staged):
            for wg in cutlass.range_constexpr(2):
                if warp_idx == 1 + wg:
                    self.add_up(wg, own, dq_acc, locks, num_blocks, bars, item, heads_per_kv)

    @cute.jit
    def add_up(
        self, wg: cutlass.Constexpr, sdQ: cute.Tensor, dq_acc: cute.Tensor, locks: cute.Tensor, num_blocks: Int32,
        bars: cute.Pointer, item: Any, heads_per_kv: Int32,
    ) -> None:  # fmt: skip
        """Add a warp group's part of dQ to global memory, block by block; in a fixed order when its turn has come.

        In a fixed order, the CTAs of a cluster add to the same rows one after the other. The second one's products go
        on until its next dQ is ready, so stages that the first one waits for are released.
        """
        kv_head, _, _, mb0, mb1, *_, (place, end, before) = item
        mb, h = mb1 - 1, kv_head * heads_per_kv
        first, floats = 4 * wg * self.dq_warp_floats, self.dq_warps[wg] * self.dq_warp_floats
        for it in cutlass.range(0, (mb1 - mb0) * heads_per_kv, 1, unroll=1):
            lock = self.lock_of(locks, h, num_blocks, mb, wg)
            if const_expr(self.deterministic):
                turn = cutlass.select_(mb < end, place, before) * self.cluster
                if const_expr(self.cluster == 2):
                    turn = cutlass.select_(self.rank() == 0, turn, place * 2 + 1)
                while load_acquire(lock) != turn:
                    pass
                cute.arch.sync_warp()
            cute.arch.mbarrier_wait(bars + self.STAGED + wg, it & 1)
            with cute.arch.elect_one():
                bulk_add(self.dq_slot(dq_acc.iterator, h, num_blocks, mb) + first, sdQ.iterator + first, 4 * floats)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(bars + self.FREE + wg)
                if const_expr(self.deterministic):
                    cute.arch.cp_async_bulk_wait_group(0)
                    store_release(lock, place * self.cluster + self.rank() + 1)
            mb, h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)

    # ---------------------------------------------------------------- MMA warp groups
    @cute.jit
    def mma(
        self,
        mma_S: cute.TiledMma,
        mma_dKV: cute.TiledMma,
        mma_dQ: cute.TiledMma,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq_acc: cute.Tensor,
        slabs: cute.Tensor,
        work: cute.Tensor,
        visible_end: cute.Tensor,
        num_blocks: Int32,
        scale: Float32,
        heads_per_kv: Int32,
        sK: cute.Tensor,
        sV: cute.Tensor,
        sQ: cute.Tensor,
        sdO: cute.Tensor,
        sdS: cute.Tensor,
        sStat: cute.Tensor,
        bars: cute.Pointer,
        item: Any,
        warp_id: Int32,
        sdQ: cute.Tensor | None,
    ) -> None:
        kv_head, n0, key_end, mb0, mb1, clean_begin, clean_end, *_ = item
        D, M, N = self.head_dim, self.tile_m, self.tile_n
        wg, tid, lane = warp_id // 4, cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()
        sK_D = sK  # K's first D columns
        if const_expr(self.k_columns != D):
            layout = cute.tile_to_shape(self.row_atom(self.k_columns, D), (N, D), (0, 1))
            sK_D = cute.make_tensor(sK.iterator, layout.outer)
        dq_half = (0, 0) if const_expr(split_rows(self.head_dim)) else (wg, 0)
        sdS_rows = cute.local_tile(
            sdS, (self.dq_rows, N), (wg if const_expr(split_rows(self.head_dim)) else 0, 0, None)
        )
        thr_S, thr_dKV, thr_dQ = mma_S.get_slice(0), mma_dKV.get_slice(0), mma_dQ.get_slice(0)
        frags = {  # (MMA, 1, D/16, stages) and the like
            "K": mma_S.make_fragment_A(thr_S.partition_A(cute.local_tile(sK_D, (64, D), (wg, 0)))),
            "V": mma_S.make_fragment_A(thr_S.partition_A(cute.local_tile(sV, (64, D), (wg, 0)))),
            "Q": mma_S.make_fragment_B(thr_S.partition_B(sQ)),
            "dO": mma_S.make_fragment_B(thr_S.partition_B(sdO)),
            "Qt": mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(sQ))),
            "dOt": mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(sdO))),
            "Kt": mma_dQ.make_fragment_A(thr_dQ.partition_A(cute.local_tile(self.transposed(sK), (64, N), dq_half))),
            "dS": mma_dQ.make_fragment_B(thr_dQ.partition_B(sdS_rows)),
        }
        acc_dK, acc_dV = [cute.make_rmem_tensor(mma_dKV.partition_shape_C((64, D)), Float32) for _ in range(2)]
        for acc, wanted in ((acc_dK, self.want_dk), (acc_dV, self.want_dv)):
            if const_expr(wanted):
                acc.fill(0.0)
        # The preprocess has interleaved the statistics: what a thread needs of 16 query rows is 4 floats together.
        stat_layout = cute.make_layout((4, 4, M // 16, 2, self.stages), stride=(1, 4, 16, M, 2 * M))
        stat = cute.make_tensor(sStat.iterator, stat_layout)[None, lane % 4, None, None, None]
        copy_dS = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), mma_S)
        dS_dst = copy_dS.get_slice(tid).partition_D(cute.local_tile(self.transposed(sdS), (64, M), (wg, 0, None)))
        key, key_visible = [cute.make_rmem_tensor(2, Int32) for _ in range(2)]
        for r in cutlass.range_constexpr(2):  # this thread's rows of S^T, less its first column
            n = n0 + wg * 64 + warp_id % 4 * 16 + lane // 4 + 8 * r
            key[r] = n - lane % 4 * 2
            key_visible[r] = (visible_end[n] if n < key_end else 0) - lane % 4 * 2

        cute.arch.mbarrier_wait(bars + self.FULL_K, 0)
        if const_expr(self.want_dp):
            cute.arch.mbarrier_wait(bars + self.FULL_V, 0)
            clean_begin = self.clean_keys(sK, sV, clean_begin)

        # Carried from block to block: dP^T in fp32, P^T as the operand of dV.
        acc_dP = cute.make_rmem_tensor(mma_S.partition_shape_C((64, M)), Float32)  # M/2 registers
        tP = cute.make_rmem_tensor(mma_dKV.partition_shape_A((64, M)), self.dtype)  # M/4 registers
        state = State(
            mma_S, mma_dKV, mma_dQ, frags, acc_dP, tP, acc_dK, acc_dV, stat, copy_dS, dS_dst, tid,
            num_blocks,
            sdQ.iterator + (warp_id * self.dq_warp_floats + tid % 32 * 4) if const_expr(self.staged)
            else dq_acc.iterator + (wg * 128 + tid) * 4,
            warp_id < sum(self.dq_warps), scale * math.log2(math.e), bars, (key, key_visible, clean_begin, clean_end),
            sQ, sdO, sStat,
        )  # fmt: skip
        self.walk(state, (kv_head, mb0, mb1), heads_per_kv)
        if const_expr(self.want_dk):
            for e in cutlass.range_constexpr(cute.size(acc_dK)):
                acc_dK[e] = acc_dK[e] * scale
        if const_expr(self.want_dq and self.want_dv):
            self.mark_keys(acc_dV, sV, wg * 64 + warp_id % 4 * 16 + lane // 4)
        kv_head, n0, key_end, *_, slab, _ = self.item(work)  # read again: no register holds them during the loop
        row = wg * 64 + warp_id % 4 * 16 + lane // 4  # of this CTA's keys
        if slab < 0:
            if const_expr(self.want_dk):
                self.store(acc_dK, dk, kv_head, n0 + row, key_end)
            if const_expr(self.want_dv):
                self.store(acc_dV, dv, kv_head, n0 + row, key_end)
        else:
            first = Int64(slab) * self.slab_floats() + self.rank() * (2 * N * D)
            if const_expr(self.want_dk):
                self.store_slab(acc_dK, slabs.iterator + first, row)
            if const_expr(self.want_dv):
                self.store_slab(acc_dV, slabs.iterator + (first + N * D), row)

    @cute.jit
    def walk(self, state: Any, blocks: Any, heads_per_kv: Int32) -> None:
        """The loop over query blocks [mb0, mb1) of a KV head's query heads."""
        kv_head, mb0, mb1 = blocks
        total, mb, h = (mb1 - mb0) * heads_per_kv, mb1 - 1, kv_head * heads_per_kv
        acc_S, acc_new = self.scores(state, Int32(0))
        self.probabilities(state, acc_S, acc_new, Int32(0), mb)
        step = self.ordered_step if self.staged else self.step
        if total == 1:
            step(state, Int32(0), (h, mb), mb, True, True)
        else:
            next_mb, next_h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)
            step(state, Int32(0), (h, mb), next_mb, True, False)
            for it in cutlass.range(1, total - 1, 1, unroll=1):
                previous = (h, mb)
                mb, h = next_mb, next_h
                next_mb, next_h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)
                step(state, it, previous, next_mb, False, False)
            step(state, total - 1, (h, mb), next_mb, False, True)
            mb, h = next_mb, next_h
        if const_expr(self.want_dq):
            cute.arch.mbarrier_wait(state.bars + self.DS, (total - 1) & 1)  # dQ of the last block
            acc_dQ = self.issue_dq(state, total - 1)
            warpgroup.wait_group(0)
            if const_expr(self.staged):
                self.stage_dq(state, acc_dQ, total - 1)
            else:
                self.add_dq(state, acc_dQ, (h, mb), 0, self.dq_chunks)

    def scores(self, state: State, it: Int32, between: Callable[[], None] | None = None) -> tuple[Any, Any]:
        """Issue S^T and dP^T (not for dV alone) of block `it`; `between` is work to do before the second."""
        stage, phase = self.ring(it)
        acc_S, acc_new = [cute.make_rmem_tensor(state.acc_dP.shape, Float32) for _ in range(2)]
        cute.arch.mbarrier_wait(state.bars + self.FULL_Q + stage, phase)
        gemm(state.mma_S, acc_S, state.frags["K"], state.frags["Q"][None, None, None, stage], True)
        if between is not None:
            between()
        cute.arch.mbarrier_wait(state.bars + self.FULL_DO + stage, phase)
        if self.want_dp:
            gemm(state.mma_S, acc_new, state.frags["V"], state.frags["dO"][None, None, None, stage], True)
        return acc_S, acc_new

    def probabilities(
        self, state: State, acc_S: cute.Tensor, acc_new: cute.Tensor, it: Int32, mb: Int32, ahead: Any = ()
    ) -> None:
        """S^T and dP^T of block `it` are in flight: P^T while dP^T runs. Leaves nothing in flight. `ahead`: lse2 of the
        first rows."""
        warpgroup.wait_group(1 if self.want_dp else 0)
        self.mask(acc_S, mb * self.tile_m, *state.masks)
        for c in range(self.tile_m // 16):  # 16 query rows at a time
            lse2 = ahead[c] if c < len(ahead) else self.quad(state, c, 0, it % self.stages)
            for e in range(8 * c, 8 * c + 8):
                acc_S[e] = cute.math.exp2(acc_S[e] * state.scale_log2 - lse2[e // 4 % 2 * 2 + e % 2], fastmath=True)
            round_to(part(acc_S, 8 * c, 8), part(state.tP, 8 * c, 8))
        # The compiler moves arithmetic that should run beside dP^T behind the wait for it, but not past a branch.
        cute.arch.mbarrier_wait(state.bars + self.FULL_K, 0)  # open since the start
        warpgroup.wait_group(0)
        if self.want_dp:
            for e in range(self.tile_m // 2):
                state.acc_dP[e] = acc_new[e]
        self.contain(state, it % self.stages, mb * self.tile_m)

    @cute.jit
    def contain(self, state: Any, stage: Int32, m0: Int32, again: cutlass.Constexpr = None) -> None:
        """What is not finite in rows of Q and dO stays with the keys that see them. All MMA warps agree on it.

        again: called where statistics have changed.
        """
        s, (key, key_visible, clean_begin, clean_end) = state, state.masks
        dpsum, threads = self.dpsums(s.sStat, stage), 128 * self.warp_groups
        if self.any_broken(dpsum, m0, clean_begin, clean_end):
            tid, sQ, sdO = cute.arch.thread_idx()[0] - 128, s.sQ[None, None, stage], s.sdO[None, None, stage]
            if const_expr(self.want_dv):
                self.add_not_finite(s.acc_dV, sdO, dpsum, m0, key, key_visible)
            if const_expr(self.want_dp):
                self.settle(s.acc_dP, lambda c: self.quad(s, c, 1, stage), m0, key, key_visible, clean_begin)
            cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)
            self.clean(sQ, tid, threads)
            self.clean(sdO, tid, threads)
            if tid < self.tile_m:
                dpsum[tid] = cutlass.select_(dpsum[tid] == dpsum[tid], dpsum[tid], Float32(0.0))
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)
            if const_expr(again is not None):
                again()

    def score_gradients(self, state: State, stage: Int32) -> cute.Tensor:
        """dS^T = P^T * (dP^T - dpsum) as the operand of dK. P^T rounded serves: no register holds it in fp32."""
        tdS = cute.make_rmem_tensor(state.tP.shape, self.dtype)
        for c in range(self.tile_m // 16):
            dpsum = self.quad(state, c, 1, stage)
            prob, ds = part(state.tP, 8 * c, 8), cute.make_rmem_tensor(8, Float32)
            for e in range(8):
                ds[e] = Float32(prob[e]) * (state.acc_dP[8 * c + e] - dpsum[e // 4 * 2 + e % 2])
            round_to(ds, part(tdS, 8 * c, 8))
        return tdS

    def step(self, state: State, it: Int32, previous: Any, next_mb: Int32, first: bool, last: bool) -> None:
        """Block `it`, whose P and dP are ready: its dV and dK, the previous block's dQ, the next block's P and dP.

        dQ lags by one block so that neither warp group waits for the other's dS. Nothing is in flight at either end,
        and few accumulators are at a time: else the compiler makes every product wait.
        """
        s, stage = state, it % self.stages
        add_previous = self.want_dq and not first
        if self.want_dv:
            gemm(s.mma_dKV, s.acc_dV, s.tP, s.frags["dOt"][None, None, None, stage], False)
        if self.want_dp:
            tdS = self.score_gradients(s, stage)  # while dV runs
        if self.want_dq:
            self.publish(s, tdS, it, first)  # before the wait, or the compiler moves dS^T behind it
        warpgroup.wait_group(0)
        if add_previous:
            acc_dQ = self.issue_dq(s, it - 1)
        if self.want_dk:
            gemm(s.mma_dKV, s.acc_dK, tdS, s.frags["Qt"][None, None, None, stage], False)
        # Add dQ up: most of it while dK runs, the last `late` reductions while the next S does.
        early = self.dq_chunks - (0 if last else self.late)
        if add_previous:
            warpgroup.wait_group(1 if self.want_dk else 0)
            self.add_dq(s, acc_dQ, previous, 0, early)
        warpgroup.wait_group(0)
        self.release(s.bars + self.EMPTY_DO + stage)
        self.release(s.bars + self.EMPTY_Q + stage)
        if not last:
            rest = (lambda: self.add_dq(s, acc_dQ, previous, early, self.dq_chunks)) if add_previous else None
            acc_S, acc_new = self.scores(s, it + 1, rest)
            self.probabilities(s, acc_S, acc_new, it + 1, next_mb)

    def ordered_step(self, state: State, it: Int32, previous: Any, next_mb: Int32, first: bool, last: bool) -> None:
        """As `step`, for sums in a fixed order: another order of products, which the compiler has registers for."""
        s, stage = state, it % self.stages
        if self.want_dv:
            gemm(s.mma_dKV, s.acc_dV, s.tP, s.frags["dOt"][None, None, None, stage], False)
        tdS = self.score_gradients(s, stage)  # while dV runs
        if self.want_dk:
            gemm(s.mma_dKV, s.acc_dK, tdS, s.frags["Qt"][None, None, None, stage], False)
        if not last:
            lse2 = self.lse2_ahead(s, it + 1)
        self.publish(s, tdS, it, first)
        warpgroup.wait_group(1 if self.want_dk else 0)  # dV
        if not first:
            acc_dQ = self.issue_dq(s, it - 1)
        warpgroup.wait_group(0 if first else 1)  # dK
        self.release(s.bars + self.EMPTY_DO + stage)
        self.release(s.bars + self.EMPTY_Q + stage)
        if not first:
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(s.bars + self.USED + (it - 1) % 2)
            self.stage_dq(s, acc_dQ, it - 1)
        if not last:
            acc_S, acc_new = self.scores(s, it + 1)
            self.probabilities(s, acc_S, acc_new, it + 1, next_mb, lse2)

    def lse2_ahead(self, state: State, it: Int32) -> list[cute.Tensor]:
        """lse2 of the first rows of block `it` once it is there: S, when it runs, keeps such loads waiting."""
        stage, phase = self.ring(it)
        cute.arch.mbarrier_wait(state.bars + self.FULL_Q + stage, phase)
        return [self.quad(state, c, 0, stage) for c in range(AHEAD)]

    def quad(self, state: State, c: int, which: int, stage: Int32) -> cute.Tensor:
        """lse2 (0) or dpsum (1) of this thread's columns among rows [16c, 16c + 16)."""
        values = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(state.stat[None, c, which, stage], values)
        return values

    def publish(self, state: State, tdS: cute.Tensor, it: Int32, first: bool) -> None:
        """dS^T of block `it` to shared memory, for dQ.

        Three buffers: the peer has arrived for block it - 1, so it is done with dQ of it - 3. Two where dQ is staged:
        USED says when it is done with dQ of it - 2.
        """
        if not first:
            if self.staged:
                cute.arch.mbarrier_wait(state.bars + self.USED + it % 2, it // 2 & 1 ^ 1)
            cute.arch.mbarrier_wait(state.bars + self.DS, (it - 1) & 1)
        source = cute.make_tensor(tdS.iterator, cute.make_layout(state.acc_dP.shape))
        dst = state.dS_dst[None, None, None, it % self.buffers]
        cute.copy(state.copy_dS, state.copy_dS.get_slice(state.tid).retile(source), dst)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(state.bars + self.DS)

    def issue_dq(self, state: State, it: Int32) -> cute.Tensor:
        """Issue dQ^T of block `it`."""
        acc_dQ = cute.make_rmem_tensor(state.mma_dQ.partition_shape_C((64, self.dq_rows)), Float32)
        dS = state.frags["dS"][None, None, None, it % self.buffers]
        gemm(state.mma_dQ, acc_dQ, state.frags["Kt"], dS, True)
        return acc_dQ

    @cute.jit
    def stage_dq(self, state: Any, acc_dQ: cute.Tensor, it: Int32) -> None:
        """dQ^T of block `it`, which is ready, to shared memory for `add_up`."""
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        cute.arch.mbarrier_wait(state.bars + self.FREE + warp_id // 4, it & 1 ^ 1)
        if warp_id < sum(self.dq_warps):
            place = state.dq_dst
            for c in cutlass.range_constexpr(self.dq_chunks):
                quad = cute.make_tensor((place + 128 * c).align(16), cute.make_layout(4))
                cute.autovec_copy(part(acc_dQ, 4 * c, 4), quad)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(state.bars + self.STAGED + warp_id // 4)

    def add_dq(self, state: State, acc_dQ: cute.Tensor, block: Any, begin: int, end: int) -> None:
        """Add chunks [begin, end) of dQ^T to block (head, query block) in global memory: [chunk][thread][4]."""
        stride = 128 * sum(self.dq_warps)
        dst = self.dq_slot(state.dq_dst, block[0], state.num_blocks, block[1])
        if self.head_dim == 96:
            self.add_some(acc_dQ, dst, stride, state.dq_wanted, begin, end)
        else:
            self.add_all(acc_dQ, dst, stride, begin, end)

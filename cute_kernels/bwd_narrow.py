"""Attention backward for head dims up to 128: two MMA warp groups, and P and dS feed dV and dK from registers.

Transposed products, so that rows are keys (S^T = K Q^T) or columns of the head dim (dQ^T = K^T dS^T). For S, dP, dV and
dK each warp group has 64 of the 128 keys. dQ needs all keys: dS passes through shared memory, and each warp group has
64 columns of the head dim, or (head dim 64) half of the query rows.
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
    dq_dst: cute.Pointer  # this thread's place in block 0
    dq_wanted: cutlass.Boolean  # this thread holds columns of the head dim
    dq_stride: int  # floats from chunk to chunk
    num_blocks: Int32  # query blocks a head
    scale_log2: Float32
    bars: cute.Pointer
    masks: tuple[Any, ...]
    sQ: cute.Tensor
    sdO: cute.Tensor
    sStat: cute.Tensor


class NarrowBackward(BackwardFrame):
    __doc__ = BackwardFrame.__doc__

    HEAD_DIMS = (64, 96, 128)

    def check_tile(self) -> None:
        if self.tile_n != 128 or self.warp_groups != 2:
            raise ValueError(f"got tile_n {self.tile_n} and {self.warp_groups} warp groups, expected 128 and 2")
        if self.tile_m % 16 or not 16 <= self.tile_m <= 256:
            raise ValueError(f"tile_m is {self.tile_m}, expected a multiple of 16 up to 256")
        if not 0 <= self.late <= self.dq_chunks:
            raise ValueError(f"late is {self.late}, expected 0 to {self.dq_chunks}")

    @property
    def k_columns(self) -> int:
        return -(-self.head_dim // 128) * 128 if self.head_dim > 64 else 64

    @property
    def buffers(self) -> int:
        return 3  # dS alone

    @property
    def dq_rows(self) -> int:
        """Rows of dQ (columns of the product) a warp group."""
        return self.tile_m // 2 if split_rows(self.head_dim) else self.tile_m

    @property
    def dq_chunks(self) -> int:
        """Reductions (of four floats) a thread for one query block."""
        return self.dq_rows // 8

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        K_major, MN_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        dtype, shape = self.dtype, (1, 1, 1)
        mma_S = hopper.make_trivial_tiled_mma(dtype, dtype, K_major, K_major, Float32, shape, (64, self.tile_m))
        mma_dKV = hopper.make_trivial_tiled_mma(
            dtype, dtype, K_major, MN_major, Float32, shape, (64, self.head_dim), warpgroup.OperandSource.RMEM
        )
        mma_dQ = hopper.make_trivial_tiled_mma(dtype, dtype, MN_major, K_major, Float32, shape, (64, self.dq_rows))
        return mma_S, mma_dKV, mma_dQ

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
        # dQ in global memory: [chunk of 8 rows][thread][4]; of head dim 96 the last 64 threads hold no columns.
        dq_threads = 256 if const_expr(split_rows(self.head_dim)) else 2 * D
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
            dq_acc.iterator + (wg * 128 + tid) * 4, wg * 128 + tid < dq_threads, 4 * dq_threads, num_blocks,
            scale * math.log2(math.e), bars, (key, key_visible, clean_begin, clean_end), sQ, sdO, sStat,
        )  # fmt: skip
        total, mb, h = (mb1 - mb0) * heads_per_kv, mb1 - 1, kv_head * heads_per_kv
        acc_S, acc_new = self.scores(state, Int32(0))
        self.probabilities(state, acc_S, acc_new, Int32(0), mb)
        if total == 1:
            self.step(state, Int32(0), (h, mb), mb, True, True)
        else:
            next_mb, next_h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)
            self.step(state, Int32(0), (h, mb), next_mb, True, False)
            for it in cutlass.range(1, total - 1, 1, unroll=1):
                previous = (h, mb)
                mb, h = next_mb, next_h
                next_mb, next_h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)
                self.step(state, it, previous, next_mb, False, False)
            self.step(state, total - 1, (h, mb), next_mb, False, True)
            mb, h = next_mb, next_h
        if const_expr(self.want_dq):
            cute.arch.mbarrier_wait(bars + self.DS, (total - 1) & 1)  # dQ of the last block
            acc_dQ = self.issue_dq(state, total - 1)
            warpgroup.wait_group(0)
            self.await_turn(bars, total - 1)
            self.add_dq(state, acc_dQ, (h, mb), 0, self.dq_chunks)
            self.pass_turn(bars, total - 1)
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

    def probabilities(self, state: State, acc_S: cute.Tensor, acc_new: cute.Tensor, it: Int32, mb: Int32) -> None:
        """S^T and dP^T of block `it` are in flight: P^T while dP^T runs. Leaves nothing in flight."""
        warpgroup.wait_group(1 if self.want_dp else 0)
        self.mask(acc_S, mb * self.tile_m, *state.masks)
        for c in range(self.tile_m // 16):  # 16 query rows at a time
            lse2 = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(state.stat[None, c, 0, it % self.stages], lse2)
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
    def contain(self, state: Any, stage: Int32, m0: Int32) -> None:
        """What is not finite in rows of Q and dO stays with the keys that see them. All MMA warps agree on it."""
        s, (key, key_visible, clean_begin, clean_end) = state, state.masks
        dpsum, threads = self.dpsums(s.sStat, stage), 128 * self.warp_groups
        if self.any_broken(dpsum, m0, clean_begin, clean_end):
            tid, sQ, sdO = cute.arch.thread_idx()[0] - 128, s.sQ[None, None, stage], s.sdO[None, None, stage]
            if const_expr(self.want_dv):
                self.add_not_finite(s.acc_dV, sdO, dpsum, m0, key, key_visible)
            if const_expr(self.want_dp):
                self.settle(s.acc_dP, lambda c: self.dpsum(s, c, stage), m0, key, key_visible, clean_begin)
            cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)
            self.clean(sQ, tid, threads)
            self.clean(sdO, tid, threads)
            if tid < self.tile_m:
                dpsum[tid] = cutlass.select_(dpsum[tid] == dpsum[tid], dpsum[tid], Float32(0.0))
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)

    def dpsum(self, state: Any, c: int, stage: Int32) -> cute.Tensor:
        """(4) this thread's of 16 query rows."""
        values = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(state.stat[None, c, 1, stage], values)
        return values

    def score_gradients(self, state: State, stage: Int32) -> cute.Tensor:
        """dS^T = P^T * (dP^T - dpsum) as the operand of dK. P^T rounded serves: no register holds it in fp32."""
        tdS = cute.make_rmem_tensor(state.tP.shape, self.dtype)
        for c in range(self.tile_m // 16):
            dpsum = self.dpsum(state, c, stage)
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
            self.await_turn(s.bars, it - 1)
            self.add_dq(s, acc_dQ, previous, 0, early)
        warpgroup.wait_group(0)
        self.release(s.bars + self.EMPTY_DO + stage)
        self.release(s.bars + self.EMPTY_Q + stage)
        if not last:
            rest = (lambda: self.add_dq(s, acc_dQ, previous, early, self.dq_chunks)) if add_previous else None
            acc_S, acc_new = self.scores(s, it + 1, rest)
        if add_previous:
            self.pass_turn(s.bars, it - 1)
        if not last:
            self.probabilities(s, acc_S, acc_new, it + 1, next_mb)

    def publish(self, state: State, tdS: cute.Tensor, it: Int32, first: bool) -> None:
        """dS^T of block `it` to shared memory, for dQ.

        Three buffers: the peer has arrived for block it - 1, so it is done with dQ of it - 3.
        """
        if not first:
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

    def add_dq(self, state: State, acc_dQ: cute.Tensor, block: Any, begin: int, end: int) -> None:
        """Add chunks [begin, end) of dQ^T to block (head, query block) in global memory."""
        dst = self.dq_slot(state.dq_dst, block[0], state.num_blocks, block[1])
        if self.head_dim == 96:
            self.add_some(acc_dQ, dst, state.dq_stride, state.dq_wanted, begin, end)
        else:
            self.add_all(acc_dQ, dst, state.dq_stride, begin, end)

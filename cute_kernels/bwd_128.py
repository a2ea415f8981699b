"""Attention backward for head dim 128: as `bwd_narrow` lays products out, in an order of its own.

Sums of dQ cost most here. From registers they hold products up, so every dQ passes through shared memory, where the
copy engine takes it. That leaves no room for a third buffer of dS, nor registers for a block that is begun before the
one before it is done. The warp groups meet once a block instead, and then dV, dQ and dK are issued back to back.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.accumulator import gemm, part, round_to
from cute_kernels.bwd_frame import BackwardFrame
from cute_kernels.bwd_narrow import NarrowBackward, State

BAR_DS = 2  # named barrier: dS of both warp groups is in shared memory


class Backward128(NarrowBackward):
    __doc__ = BackwardFrame.__doc__

    HEAD_DIMS = (128,)

    @property
    def staged(self) -> bool:
        return self.want_dq

    @property
    def buffers(self) -> int:
        return 2  # of dS: a warp group may be a block ahead of the other one's dQ

    @property
    def early(self) -> int:
        """Sixteens of rows whose dpsum is loaded while dP runs: all, or as many as there are registers for."""
        return self.tile_m // 16 - (0 if self.want_dq else 2)

    def own_barriers(self) -> list[tuple[str, int, int]]:
        """A warp group's dQ in shared memory, gone from there."""
        return [("STAGED", 2, 4), ("FREE", 2, 1)] if self.want_dq else []

    @cute.jit
    def walk(self, state: Any, blocks: Any, heads_per_kv: Int32) -> None:
        kv_head, mb0, mb1 = blocks
        mb, h = mb1 - 1, kv_head * heads_per_kv
        for it in cutlass.range(0, (mb1 - mb0) * heads_per_kv, 1, unroll=1):
            self.block(state, it, mb)
            mb, h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)

    def block(self, state: State, it: Int32, mb: Int32) -> None:
        """Every product of block `it`, whose query rows are block `mb`. Nothing is in flight at either end."""
        s, (stage, phase), chunks = state, self.ring(it), self.tile_m // 16
        acc_S, acc_dP = [cute.make_rmem_tensor(s.acc_dP.shape, Float32) for _ in range(2)]
        cute.arch.mbarrier_wait(s.bars + self.FULL_Q + stage, phase)
        gemm(s.mma_S, acc_S, s.frags["K"], s.frags["Q"][None, None, None, stage], True)
        lse2, dpsum = [cute.make_rmem_tensor(self.tile_m // 4, Float32) for _ in range(2)]
        self.load_stats(s, lse2, 0, stage, 0, chunks)  # while S runs: a load later waits behind products
        cute.arch.mbarrier_wait(s.bars + self.FULL_DO + stage, phase)
        if self.want_dp:
            gemm(s.mma_S, acc_dP, s.frags["V"], s.frags["dO"][None, None, None, stage], True)
        warpgroup.wait_group(1 if self.want_dp else 0)
        self.mask_scores(s, acc_S, lse2, stage, mb * self.tile_m)
        for e in range(self.tile_m // 2):
            acc_S[e] = cute.math.exp2(acc_S[e] * s.scale_log2 - lse2[self.stat_of(e)], fastmath=True)
        self.load_stats(s, dpsum, 1, stage, 0, self.early)
        # The compiler moves arithmetic that should run beside dP^T behind the wait for it, but not past a branch.
        cute.arch.mbarrier_wait(s.bars + self.FULL_K, 0)  # open since the start
        warpgroup.wait_group(0)
        if self.want_dp:
            for e in range(self.tile_m // 2):
                s.acc_dP[e] = acc_dP[e]
        self.contain(s, stage, mb * self.tile_m, lambda: self.load_stats(s, dpsum, 1, stage, 0, self.early))
        self.load_stats(s, dpsum, 1, stage, self.early, chunks)
        tP, tdS = [cute.make_rmem_tensor(s.tP.shape, self.dtype) for _ in range(2)]
        round_to(acc_S, tP)
        if self.want_dp:
            for e in range(self.tile_m // 2):
                acc_dP[e] = acc_S[e] * (s.acc_dP[e] - dpsum[self.stat_of(e)])
            round_to(acc_dP, tdS)
        if self.want_dq:
            source = cute.make_tensor(tdS.iterator, cute.make_layout(acc_dP.shape))
            dst = s.dS_dst[None, None, None, it % self.buffers]
            cute.copy(s.copy_dS, s.copy_dS.get_slice(s.tid).retile(source), dst)
        if self.want_dv:
            gemm(s.mma_dKV, s.acc_dV, tP, s.frags["dOt"][None, None, None, stage], False)
        if self.want_dq:
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_DS, number_of_threads=128 * self.warp_groups)
            acc_dQ = self.issue_dq(s, it)
            warpgroup.wait_group(1)  # dV
            self.release(s.bars + self.EMPTY_DO + stage)
        if self.want_dk:
            gemm(s.mma_dKV, s.acc_dK, tdS, s.frags["Qt"][None, None, None, stage], False)
        warpgroup.wait_group(1 if self.want_dk else 0)  # dQ, or dV where there is none
        if self.want_dq:
            self.stage_dq(s, acc_dQ, it)
        else:
            self.release(s.bars + self.EMPTY_DO + stage)
        warpgroup.wait_group(0)
        self.release(s.bars + self.EMPTY_Q + stage)

    def load_stats(self, state: State, values: cute.Tensor, which: int, stage: Int32, begin: int, end: int) -> None:
        """lse2 (0) or dpsum (1) of this thread's columns among rows [16 begin, 16 end): four of each 16 rows."""
        for c in range(begin, end):
            cute.autovec_copy(state.stat[None, c, which, stage], part(values, 4 * c, 4))

    def stat_of(self, e: int) -> int:
        """Which of a thread's statistics belongs to element e of S^T or dP^T."""
        return e // 8 * 4 + e // 4 % 2 * 2 + e % 2

    @cute.jit
    def mask_scores(self, state: Any, acc_S: cute.Tensor, lse2: cute.Tensor, stage: Int32, m0: Int32) -> None:
        """As `mask`. In the blocks that it concerns, the last statistics are loaded again: it needs their registers."""
        key, key_visible, clean_begin, clean_end = state.masks
        if m0 < clean_begin or m0 + self.tile_m > clean_end:
            self.mask(acc_S, m0, key, key_visible, clean_begin, clean_end)
            self.load_stats(state, lse2, 0, stage, self.tile_m // 16 - 1, self.tile_m // 16)

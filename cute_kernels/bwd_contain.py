"""NaN and infinity in the backward stay with the pairs that see them, although the tensor cores multiply all pairs.

A hidden pair has P = 0 and dS = 0, and 0 * NaN is NaN in a product. So what is not finite is taken out of the operands:

- of V and (for dQ) K once, before the loop. The dpsum of a row that sees such a V is not finite, and so is its dS. What
  sees such a K gets a NaN by way of its V, of which the first element becomes one; so does its dV.
- of Q and dO in blocks that need the mask, if dpsum says that there is something: that of such a row is not finite, and
  P is infinite where a row with such a Q sees a key: bwd_stats sees to both. What dO has is added to dV by hand.

In other blocks every pair is visible, and the products do what mathematics says.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.accumulator import column, not_finite
from cute_kernels.bwd_stats import broken_dpsum
from cute_kernels.ptx import any_nonzero

BAR_CONTAIN = 1  # named barrier of MMA warps (0 is __syncthreads)
ALL_MASKED = 2**31 - 1  # clean_begin of a CTA with broken keys: all blocks take the mask, and are contained


class BackwardContainment:
    """Of :class:`cute_kernels.bwd_frame.BackwardFrame`."""

    dtype: type[cutlass.Numeric]
    head_dim: int
    tile_m: int
    tile_n: int
    warp_groups: int
    want_dq: bool
    k_columns: int
    row_atom: Any

    # ---------------------------------------------------------------- keys
    @cute.jit
    def clean_keys(self, sK: cute.Tensor, sV: cute.Tensor, clean_begin: Int32, sKp: Any = None) -> Int32:
        """Before the loop: K (whose product is dQ), of the other CTA too, and V without what is not finite.

        A key that has it in K gets a NaN as the first element of its V. Returns the new clean_begin.
        """
        tid, threads = cute.arch.thread_idx()[0] - 128, 128 * self.warp_groups  # of the MMA warps
        found = self.not_finite(sV, tid, threads)
        if const_expr(self.want_dq):
            found |= self.not_finite(sK, tid, threads)
            if const_expr(sKp is not None):
                found |= self.not_finite(sKp, tid, threads)
        if any_nonzero(Int32(BAR_CONTAIN), found, threads):
            clean_begin = Int32(ALL_MASKED)
            self.clean(sV, tid, threads)
            if const_expr(self.want_dq):
                cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)
                self.clean(sK, tid, threads, sV)
                if const_expr(sKp is not None):
                    self.clean(sKp, tid, threads)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)
        return cute.arch.make_warp_uniform(clean_begin)  # which the compiler cannot know

    @cute.jit
    def mark_keys(self, acc_dV: cute.Tensor, sV: cute.Tensor, row: Int32) -> None:
        """After the loop: dV of keys whose K `clean_keys` has changed is NaN. The thread's keys are row and row + 8."""
        marks = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            marks[r] = Float32(sV[row + 8 * r, 0])
        if cute.arch.vote_any_sync((marks[0] != marks[0]) | (marks[1] != marks[1])):
            for e in cutlass.range_constexpr(cute.size(acc_dV)):
                mark = marks[e // 2 % 2]
                acc_dV[e] = cutlass.select_(mark != mark, mark, acc_dV[e])

    # ---------------------------------------------------------------- query rows of a block
    @cute.jit
    def any_broken(
        self, sStat: cute.Tensor, stage: Int32, m0: Int32, clean_begin: Int32, clean_end: Int32
    ) -> cutlass.Boolean:
        """Whether the block [m0, m0 + tile_m) in a stage needs the mask and rows of it or keys are broken."""
        found = cutlass.Boolean(False)
        if m0 < clean_begin or m0 + self.tile_m > clean_end:
            found = clean_begin == ALL_MASKED
            for j in cutlass.range_constexpr(-(-self.tile_m // 32)):
                row = cutlass.min(32 * j + cute.arch.lane_idx(), self.tile_m - 1)
                found |= broken_dpsum(sStat, row, stage)
            found = cute.arch.vote_any_sync(found)
        return found

    @cute.jit
    def add_not_finite(
        self,
        acc_dV: cute.Tensor,
        sdO: cute.Tensor,  # (M, D) of the block
        sStat: cute.Tensor,
        stage: Int32,
        m0: Int32,
        key: cute.Tensor,
        key_visible: cute.Tensor,
    ) -> None:
        """What is not finite in rows of dO, to dV of the keys that they see, whose P is above 0."""
        first = cute.arch.lane_idx() % 4 * 2
        for m in cutlass.range(0, self.tile_m, 1, unroll=1):
            if broken_dpsum(sStat, m, stage):
                for r in cutlass.range_constexpr(2):
                    if (m + m0 >= key[r] + first) & (m + m0 < key_visible[r] + first):  # as in Results.mask
                        for e in cutlass.range_constexpr(self.head_dim // 4):
                            x = Float32(sdO[m, first + e // 2 * 8 + e % 2])
                            at = e // 2 * 4 + 2 * r + e % 2
                            acc_dV[at] = cutlass.select_(x - x != 0.0, acc_dV[at] + x, acc_dV[at])

    @cute.jit
    def settle(self, acc_dP: cute.Tensor, m0: Int32, key: cute.Tensor, key_visible: cute.Tensor) -> None:
        """dP^T of rows from m0 on: 0 of hidden pairs."""
        for e in cutlass.range_constexpr(cute.size(acc_dP)):
            r = e // 2 % 2
            seen = (column(e) >= key[r] - m0) & (column(e) < key_visible[r] - m0)
            acc_dP[e] = cutlass.select_(seen, acc_dP[e], Float32(0.0))

    # ---------------------------------------------------------------- tiles in shared memory
    def quads(self, tile: cute.Tensor) -> cute.Tensor:
        """(4, 16-byte units) Int32 of a swizzled tile, as it lies in memory."""
        ptr = cute.recast_ptr(tile.iterator, cute.make_swizzle(0, 4, 3), dtype=Int32)
        return cute.make_tensor(ptr, cute.make_layout((4, cute.size(tile) // 8)))

    @cute.jit
    def not_finite(self, tile: cute.Tensor, tid: Int32, threads: cutlass.Constexpr) -> Int32:
        """Not 0 if this thread's part of a tile holds something that is not finite."""
        quads, found = self.quads(tile), Int32(0)
        for i in cutlass.range_constexpr(cute.size(quads) // 4 // threads):
            quad = cute.make_rmem_tensor(8, self.dtype)
            cute.autovec_copy(quads[None, tid + i * threads], cute.recast_tensor(quad, Int32))
            found |= not_finite(quad)
        return found

    @cute.jit
    def clean(self, tile: cute.Tensor, tid: Int32, threads: cutlass.Constexpr, marked: Any = None) -> None:
        """Zeros for what is not finite in a tile; of K, a NaN as the first element of that row of V, `marked`."""
        quads = self.quads(tile)
        exponent, lowest = (0x7F807F80, 0x00800080) if self.dtype is cutlass.BFloat16 else (0x7C007C00, 0x04000400)
        units = cute.size(self.row_atom(self.k_columns, self.head_dim), mode=[1]) // 8  # of a row in a chunk of columns
        for i in cutlass.range(tid, cute.size(quads) // 4, threads, unroll=1):
            quad = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(quads[None, i], quad)
            found = Int32(0)
            for j in cutlass.range_constexpr(4):  # the lowest bit of an exponent of ones carries into the sign's place
                broken = (((quad[j] & exponent) + lowest) >> 15) & 0x00010001
                found |= broken
                quad[j] = quad[j] & ~(broken * 0xFFFF)
            if found != 0:
                cute.autovec_copy(quad, quads[None, i])
                if const_expr(marked is not None):
                    marked[i // units % self.tile_n, 0] = self.dtype(math.nan)

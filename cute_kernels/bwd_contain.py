"""NaN and infinity in the backward stay with the pairs that see them, although the tensor cores multiply all pairs.

A hidden pair has P = 0 and dS = 0, and 0 * NaN is NaN in a product. So the operands lose every element that is not
finite:

- V and (for dQ) K once, before the loop. The dpsum of a row that sees such a V is not finite, and neither is its dS. A
  key with such a K gets a NaN as the first element of its V, which every row that sees the key meets there; its dV
  gets one too.
- Q and dO in blocks that need the mask, if dpsum says that there is something to remove: bwd_stats makes the dpsum of
  such a row not finite, and P infinite where a row with such a Q sees a key. dV gets the elements of dO by hand.

In other blocks every pair is visible, and the products do what mathematics says.
"""

import math
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.accumulator import column, not_finite, remove_not_finite, words
from cute_kernels.bwd_arguments import Mask, Shared
from cute_kernels.bwd_stats import broken_dpsum
from cute_kernels.ptx import any_nonzero

BAR_CONTAIN = 1  # named barrier of all MMA warps (0 is __syncthreads); the next ones are of a warp group each
ALL_MASKED = 2**31 - 1  # unmasked_begin of a CTA with broken keys: all blocks take the mask, and are contained


class BackwardContainment:
    """A mixin of :class:`cute_kernels.bwd_frame.BackwardFrame`: it contains NaN and infinity."""

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    warp_groups: int
    want_dq: bool
    windowed: bool
    k_columns: int
    hide: Callable[..., None]
    row_atom: Callable[..., cute.ComposedLayout]

    # ---------------------------------------------------------------- keys
    @cute.jit
    def contain_keys(self, s: Shared, unmasked_begin: Int32) -> Int32:
        """Remove what is not finite from V and from K (for dQ), of the other CTA too. Runs before the loop.

        Returns the new unmasked_begin.
        """
        tid, threads = cute.arch.thread_idx()[0] - 128, 128 * self.warp_groups  # of the MMA warps
        found = self.not_finite(s.V, tid, threads)
        if const_expr(self.want_dq):
            found |= self.not_finite(s.K, tid, threads)
            if const_expr(s.peer_K is not None):
                found |= self.not_finite(s.peer_K, tid, threads)
        if any_nonzero(Int32(BAR_CONTAIN), found, threads):
            unmasked_begin = Int32(ALL_MASKED)
            self.remove_not_finite(s.V, tid, threads)
            if const_expr(self.want_dq):
                cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)
                self.remove_not_finite(s.K, tid, threads, s.V)
                if const_expr(s.peer_K is not None):
                    self.remove_not_finite(s.peer_K, tid, threads)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)
        return cute.arch.make_warp_uniform(unmasked_begin)  # which the compiler cannot know

    @cute.jit
    def mark_keys(self, acc_dV: cute.Tensor, sV: cute.Tensor, row: Int32) -> None:
        """Set dV of keys whose K was not finite to NaN, after the loop. The thread's keys are row and row + 8."""
        marks = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            marks[r] = Float32(sV[row + 8 * r, 0])
        if cute.arch.vote_any_sync((marks[0] != marks[0]) | (marks[1] != marks[1])):
            for e in cutlass.range_constexpr(cute.size(acc_dV)):
                mark = marks[e // 2 % 2]
                acc_dV[e] = cutlass.select_(mark != mark, mark, acc_dV[e])

    # ---------------------------------------------------------------- query rows of a block
    @cute.jit
    def contain(
        self,
        mask: Mask,
        s: Shared,
        stage: Int32,  # of Q
        do_stage: Int32,
        m0: Int32,
        *,
        acc_dV: cute.Tensor | None = None,
        acc_dP: cute.Tensor | None = None,
        dP_row: cutlass.Constexpr = 0,
        remove_from: cutlass.Constexpr = (),
        wg: cutlass.Constexpr = None,
    ) -> None:
        """Keep what is not finite in the rows of Q and dO of a block with the keys that see them.

        Args:
            acc_dV: takes what is not finite in rows of dO, if given.
            acc_dP: is 0 of hidden pairs after this, if given; its first query row is `dP_row` of the block.
            remove_from: "Q" and "dO", as far as the tile loses what is not finite.
            wg: warp group that does this alone, once it has read the tiles; None: all MMA warps do, and agree on it.
        """
        if self.any_broken(s.stats, stage, m0, mask):
            if const_expr(acc_dV is not None):
                self.add_not_finite(acc_dV, s.dO[None, None, do_stage], s.stats, stage, m0, mask)
            if const_expr(acc_dP is not None):
                self.zero_hidden(acc_dP, m0 + dP_row, mask)
            if const_expr(len(remove_from) > 0):
                if const_expr(wg is not None):
                    barrier, threads, tid = BAR_CONTAIN + 1 + wg, 128, cute.arch.thread_idx()[0] % 128
                else:
                    barrier, threads, tid = BAR_CONTAIN, 128 * self.warp_groups, cute.arch.thread_idx()[0] - 128
                cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
                if const_expr("Q" in remove_from):
                    self.remove_not_finite(s.Q[None, None, stage], tid, threads)
                if const_expr("dO" in remove_from):
                    self.remove_not_finite(s.dO[None, None, do_stage], tid, threads)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)

    @cute.jit
    def any_broken(self, sStat: cute.Tensor, stage: Int32, m0: Int32, mask: Mask) -> cutlass.Boolean:
        """Whether the block [m0, m0 + tile_m) in a stage needs the mask and rows of it or keys are broken."""
        found = cutlass.Boolean(False)
        if m0 < mask.unmasked_begin or m0 + self.tile_m > mask.unmasked_end:
            found = mask.unmasked_begin == ALL_MASKED
            for j in cutlass.range_constexpr(-(-self.tile_m // 32)):
                row = cutlass.min(32 * j + cute.arch.lane_idx(), self.tile_m - 1)
                found |= broken_dpsum(sStat, row, stage)
            found = cute.arch.vote_any_sync(found)
        return found

    @cute.jit
    def add_not_finite(
        self, acc_dV: cute.Tensor, sdO: cute.Tensor, sStat: cute.Tensor, stage: Int32, m0: Int32, mask: Mask
    ) -> None:
        """Add what is not finite in rows of dO to dV of the keys that they see, whose P is above 0."""
        first = cute.arch.lane_idx() % 4 * 2
        for m in cutlass.range(0, self.tile_m, 1, unroll=1):
            if broken_dpsum(sStat, m, stage) & self.row_not_finite(sdO, m):
                for r in cutlass.range_constexpr(2):
                    visible = (m + m0 >= mask.key[r] + first) & (m + m0 < mask.visible_end[r] + first)  # see Mask
                    if const_expr(self.windowed):
                        visible = visible & (mask.position[m + m0] < mask.end_position[r])
                    if visible:
                        for e in cutlass.range_constexpr(self.head_dim_v // 4):
                            x = Float32(sdO[m, first + e // 2 * 8 + e % 2])
                            i = e // 2 * 4 + 2 * r + e % 2
                            acc_dV[i] = cutlass.select_(x - x != 0.0, acc_dV[i] + x, acc_dV[i])

    @cute.jit
    def row_not_finite(self, sdO: cute.Tensor, m: Int32) -> cutlass.Boolean:
        """Whether row m of dO is not finite. Most rows with a broken dpsum are finite and see a broken key."""
        found = Float32(0.0)
        for c in cutlass.range_constexpr(-(-self.head_dim_v // 32)):
            found += Float32(sdO[m, cutlass.min(32 * c + cute.arch.lane_idx(), self.head_dim_v - 1)]) * 0.0
        return cute.arch.vote_any_sync(found != 0.0)

    @cute.jit
    def zero_hidden(self, acc_dP: cute.Tensor, m0: Int32, mask: Mask) -> None:
        """dP^T of query rows from m0 on becomes 0 where the pair is hidden."""
        if const_expr(self.windowed):
            self.hide(acc_dP, m0, mask, 0.0)
        else:
            for e in cutlass.range_constexpr(cute.size(acc_dP)):
                r = e // 2 % 2
                visible = (column(e) >= mask.key[r] - m0) & (column(e) < mask.visible_end[r] - m0)
                acc_dP[e] = cutlass.select_(visible, acc_dP[e], Float32(0.0))

    # ---------------------------------------------------------------- tiles in shared memory
    @cute.jit
    def not_finite(self, tile: cute.Tensor, tid: Int32, threads: cutlass.Constexpr) -> Int32:
        """Return a number that is not 0 if this thread's part of a tile holds something that is not finite."""
        quads, found = words(tile), Int32(0)
        for i in cutlass.range_constexpr(cute.size(quads) // 4 // threads):
            quad = cute.make_rmem_tensor(8, self.dtype)
            cute.autovec_copy(quads[None, tid + i * threads], cute.recast_tensor(quad, Int32))
            found |= not_finite(quad)
        return found

    @cute.jit
    def remove_not_finite(
        self, tile: cute.Tensor, tid: Int32, threads: cutlass.Constexpr, marked: cute.Tensor | None = None
    ) -> None:
        """Write zeros where a tile is not finite. marked: V of a tile of K; a row of K that loses elements leaves a NaN
        as the first element of its row there."""
        quads = words(tile)
        units = cute.size(self.row_atom(self.k_columns, self.head_dim), mode=[1]) // 8  # of a row in a chunk of columns
        for i in cutlass.range(tid, cute.size(quads) // 4, threads, unroll=1):
            quad = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(quads[None, i], quad)
            if remove_not_finite(quad, self.dtype) != 0:
                cute.autovec_copy(quad, quads[None, i])
                if const_expr(marked is not None):
                    marked[i // units % self.tile_n, 0] = self.dtype(math.nan)

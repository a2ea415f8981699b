"""Attention forward on Hopper over packed groups: one launch for a whole micro-batch. Here is what warp groups compute.

A warp group walks the blocks that its rows see (fwd_walk.py), in one stretch or two, and lets the others pass. Softmax
does not care about order: a tile's blocks that need the mask come first, then the unmasked loop.

The unmasked loop takes no maximum: the reference of a row stands where the masked blocks left it, as 16-bit and fp32
probabilities exp2(s - reference) beyond 1 are as exact as others. In fp16 a warp moves it where they come near 2^16.
What outgrows it beyond all that shows at the tile's end, in the row's sum, in O or in the reference itself. Such tiles
are done again in a second turn within the launch, with the maxima of all their blocks: the masked part then goes on to
the last block. So every result is exact.
"""

import math
import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.accumulator import column, gemm, reduce_tree, round_to, row_elements
from cute_kernels.fwd_contain import ForwardContainment
from cute_kernels.fwd_frame import WG_ROWS, Atoms, ForwardFrame, Global, Shared
from cute_kernels.fwd_walk import Walk
from cute_kernels.softmax import (
    FIRST_MAX,
    REFERENCE_LIMIT,
    SUM_LIMIT,
    fixed_softmax,
    half_softmax,
    normalize,
    online_softmax,
    rescale,
)
from cute_kernels.work import Mask, Tile, first_and_step

BAR_WG = 1  # named barriers, one a warp group (0 is __syncthreads)


class Operands(NamedTuple):
    """A warp group's operands of S = Q K^T and O += P V: registers (R a thread), or descriptors of shared memory."""

    tSrQ: cute.Tensor  # (MMA, 1, D/16), D/4 R or shared memory
    tSrK: cute.Tensor  # (MMA, 1, D/16, stages), shared memory
    tOrP: cute.Tensor  # (MMA, 1, N/16), N/4 R
    tOrV: cute.Tensor  # (MMA, 1, N/16, stages), shared memory
    acc_O: cute.Tensor  # (64, D), D/2 R


class Rows(NamedTuple):
    """What a thread keeps of its two query rows."""

    token: cute.Tensor  # (2) packed row
    max: cute.Tensor  # (2) reference of the online softmax
    sum: cute.Tensor  # (2) of probabilities, this thread's part
    scale: cute.Tensor  # (2) of O, as the reference moves


class ForwardKernel(ForwardContainment, ForwardFrame):
    """The forward; arguments and errors as of :class:`ForwardFrame`."""

    @cute.jit
    def mma(self, atoms: Atoms, g: Global, s: Shared, scale: Float32, groups_per_kv: Int32, warp_id: Int32) -> None:
        bars = s.bars
        wg, lane = warp_id // 4, cute.arch.lane_idx()
        scale_log2 = scale * math.log2(math.e)
        rows = Rows(*[cute.make_rmem_tensor(2, t) for t in (Int32, Float32, Float32, Float32)])
        tile_row = warp_id % 4 * 16 + lane // 4  # of this warp group's 64: the thread has tile_row and tile_row + 8
        copy_Q = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        thr_Q = cute.make_tiled_copy_A(copy_Q, self.mma_qk()).get_slice(cute.arch.thread_idx()[0] % 128)
        at = Int32(0)  # place of the block whose probabilities are in x.tOrP
        first, step = first_and_step(self.cluster)
        count, stop = Int32(self.first_count), self.share(g)
        for turn in cutlass.range(2, unroll=1):
            for n in cutlass.range(0, stop, 1, unroll=1):
                if self.wanted(s.again, n, turn):
                    place, phase = self.q_place(count, wg)
                    x = self.operands(s, place)
                    for state, initial in ((x.acc_O, 0.0), (rows.max, FIRST_MAX), (rows.sum, 0.0)):
                        state.fill(initial)
                    if const_expr(self.q_stages == 1):
                        self.release_Q(bars, self.q_place(count - 1, wg)[0], warp_id)
                    cute.arch.mbarrier_wait(bars + self.FULL_Q + place, phase)
                    tile = self.tile(g, s.item[None, place])
                    head_group, *walk = [s.item[j, place] for j in range(self.num_fields, self.item_words)]
                    walk = Walk(*walk) if self.walks else Walk(Int32(0), tile.blocks, tile.blocks, tile.masked)
                    for r in cutlass.range_constexpr(2):  # rows past the warp group's last one count as that
                        rows.token[r] = cutlass.min(self.token(tile, wg, tile_row + 8 * r), self.last_token(tile, wg))
                    if const_expr(self.q_in_registers):
                        cute.copy(thr_Q, thr_Q.partition_S(s.Q[None, None, place]), thr_Q.retile(x.tSrQ))
                    if const_expr(self.q_stages > 1):
                        self.release_Q(bars, self.q_place(count - 1, wg)[0], warp_id)

                    masked = cutlass.select_(turn == 0, walk.masked, tile.blocks)
                    if const_expr(self.walks):
                        done, begin, end = Int32(0), walk.begin, walk.end
                        for _ in cutlass.range(2, unroll=1):
                            for _ in cutlass.range(done, begin, 1, unroll=1):
                                at = self.pass_over(bars, at)
                            if begin < end:
                                at = self.stretch(x, rows, scale_log2, g, s, tile, wg, at, begin, end, masked, done > 0)
                            done, begin, end = end, walk.rest, tile.blocks
                    else:
                        of_all = Int32(0), tile.blocks, masked, cutlass.Boolean(False)
                        at = self.stretch(x, rows, scale_log2, g, s, tile, wg, at, *of_all)

                    normalize(x.acc_O, rows.max, rows.sum, rows.scale, scale)
                    if not self.fits(x.acc_O, rows, scale_log2, tile, wg, tile_row):
                        self.note(s.again, n)
                    if turn == 1 and tile.straddles:
                        fields, kv_head = g.work[g.schedule[first + n * step, 0], None], head_group // groups_per_kv
                        of_tile = fields, wg, tile_row, head_group, kv_head
                        self.contain(x.acc_O, rows.scale, rows.token, g, *of_tile, scale)
                    sO = s.Q[None, None, place]
                    self.store(x.acc_O, rows.scale, atoms.O, g, sO, head_group, tile, tile_row, warp_id)
                    count += 1
            cute.arch.cp_async_bulk_wait_group(0)  # O is out: the next turn may store it again, and the CTA may end
            stop = self.end_turn(s)

    def pass_over(self, bars: cute.Pointer, at: Int32) -> Int32:
        """Leave out the block at place `at`, which no row of the warp group sees; returns the next one's place."""
        stage, phase = self.ring(at)
        for full, empty in ((self.FULL_K, self.EMPTY_K), (self.FULL_V, self.EMPTY_V)):
            cute.arch.mbarrier_wait(bars + full + stage, phase)
            self.arrive(bars + empty + stage)
        return self.after(at)

    def operands(self, s: Shared, place: Int32) -> Operands:
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        thr_qk, thr_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        if self.q_in_registers:
            tSrQ = cute.make_rmem_tensor(mma_qk.partition_shape_A((WG_ROWS, self.head_dim)), self.dtype)
        else:
            tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(s.Q))[None, None, None, place]
        sVt = cute.make_tensor(s.V.iterator, cute.select(s.V.layout, mode=[1, 0, 2]))  # (D, N, stages)
        return Operands(
            tSrQ,
            mma_qk.make_fragment_B(thr_qk.partition_B(s.K)),
            cute.make_rmem_tensor(mma_pv.partition_shape_A((WG_ROWS, self.tile_n)), self.dtype),
            mma_pv.make_fragment_B(thr_pv.partition_B(sVt)),
            cute.make_rmem_tensor(mma_pv.partition_shape_C((WG_ROWS, self.head_dim)), Float32),
        )

    def products(self, acc_S: cute.Tensor, x: Operands, bars: cute.Pointer, at: Int32) -> None:
        """Both products in flight, S of the next block and O += P V of this one; wait for S."""
        (v_stage, v_phase), (k_stage, k_phase) = self.ring(at), self.ring(self.after(at))
        if not self.k_early:
            cute.arch.mbarrier_wait(bars + self.FULL_K + k_stage, k_phase)
        gemm(self.mma_qk(), acc_S, x.tSrQ, x.tSrK[None, None, None, k_stage], True)
        cute.arch.mbarrier_wait(bars + self.FULL_V + v_stage, v_phase)
        gemm(self.mma_pv(), x.acc_O, x.tOrP, x.tOrV[None, None, None, v_stage], False)
        warpgroup.wait_group(1)
        self.arrive(bars + self.EMPTY_K + k_stage)

    @cute.jit
    def finish_products(
        self, acc_S: cute.Tensor, x: Operands, bars: cute.Pointer, at: Int32, more: cutlass.Boolean
    ) -> Int32:
        """Wait for O; the next block's probabilities take the place of this one's. Returns the next one's place.

        more: there is a block behind the next one.
        """
        if more:
            self.await_early(bars, self.after(self.after(at)))
        warpgroup.wait_group(0)
        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])
        round_to(acc_S, x.tOrP)
        return self.after(at)

    @cute.jit
    def await_early(self, bars: cute.Pointer, at: Int32) -> None:
        """Wait for the K block at place `at` a step before it is used.

        It is there by then. The wait is a branch, and ptxas moves no exponential of the step across it, past the wait
        for O: the three warp groups then waste less between their products (two do with some behind that wait).
        """
        if const_expr(self.k_early):
            stage, phase = self.ring(at)
            cute.arch.mbarrier_wait(bars + self.FULL_K + stage, phase)

    @cute.jit
    def stretch(
        self,
        x: Operands,
        rows: Rows,
        scale_log2: Float32,
        g: Global,
        s: Shared,
        tile: Any,
        wg: Int32,
        at: Int32,
        begin: Int32,
        end: Int32,
        masked: Int32,
        others: cutlass.Boolean,
    ) -> Int32:
        """The blocks [begin, end) of a tile, the first one at place `at`; returns the place after the last one.

        masked: from this block on, but for the first one, they need no mask.
        others: O has other blocks in it.
        """
        bars, mask = s.bars, tile.mask(begin)
        self.first_block(x, rows, scale_log2, bars, at, others, g.bounds, mask)
        self.clear_unseen(s.V, bars, at, wg, g.bounds, mask)
        if begin + 1 < end:
            self.await_early(bars, self.after(at))
        for i in cutlass.range(begin + 1, cutlass.min(masked, end), 1, unroll=1):
            mask = tile.mask(i)
            at = self.masked_block(x, rows, scale_log2, bars, at, i + 1 < end, g.bounds, mask)
            self.clear_unseen(s.V, bars, at, wg, g.bounds, mask)
        for i in cutlass.range(cutlass.max(masked, begin + 1), end, 1, unroll=1):
            at = self.whole_block(x, rows, scale_log2, bars, at, i + 1 < end)
        return self.last_block(x, bars, at)

    @cute.jit
    def first_block(
        self,
        x: Operands,
        rows: Rows,
        scale_log2: Float32,
        bars: cute.Pointer,
        at: Int32,
        others: cutlass.Boolean,
        bounds: cute.Tensor,
        mask: Mask,
    ) -> None:
        """A stretch's first block, at place `at`: its probabilities. With `others`, O may have to be rescaled."""
        acc_S = cute.make_rmem_tensor(self.mma_qk().partition_shape_C((WG_ROWS, self.tile_n)), Float32)
        stage, phase = self.ring(at)
        cute.arch.mbarrier_wait(bars + self.FULL_K + stage, phase)
        gemm(self.mma_qk(), acc_S, x.tSrQ, x.tSrK[None, None, None, stage], True)
        warpgroup.wait_group(0)
        self.arrive(bars + self.EMPTY_K + stage)
        mask.apply(acc_S, rows.token, bounds)
        online_softmax(acc_S, rows.max, rows.sum, rows.scale, scale_log2)
        round_to(acc_S, x.tOrP)
        if others:
            rescale(x.acc_O, rows.scale)

    def last_block(self, x: Operands, bars: cute.Pointer, at: Int32) -> Int32:
        """O += P V of a stretch's last block; returns the place after it."""
        stage, phase = self.ring(at)
        cute.arch.mbarrier_wait(bars + self.FULL_V + stage, phase)
        gemm(self.mma_pv(), x.acc_O, x.tOrP, x.tOrV[None, None, None, stage], False)
        warpgroup.wait_group(0)
        self.arrive(bars + self.EMPTY_V + stage)
        return self.after(at)

    @cute.jit
    def masked_block(
        self,
        x: Operands,
        rows: Rows,
        scale_log2: Float32,
        bars: cute.Pointer,
        at: Int32,
        more: cutlass.Boolean,
        bounds: cute.Tensor,
        mask: Mask,
    ) -> Int32:
        """The next block's probabilities, and O of this one; returns the next one's place."""
        acc_S = cute.make_rmem_tensor(self.mma_qk().partition_shape_C((WG_ROWS, self.tile_n)), Float32)  # N/2 registers
        self.products(acc_S, x, bars, at)
        mask.apply(acc_S, rows.token, bounds)
        online_softmax(acc_S, rows.max, rows.sum, rows.scale, scale_log2)
        at = self.finish_products(acc_S, x, bars, at, more)
        rescale(x.acc_O, rows.scale)
        return at

    @cute.jit
    def whole_block(
        self, x: Operands, rows: Rows, scale_log2: Float32, bars: cute.Pointer, at: Int32, more: cutlass.Boolean
    ) -> Int32:
        """As masked_block, of a block without a mask: the references stand."""
        acc_S = cute.make_rmem_tensor(self.mma_qk().partition_shape_C((WG_ROWS, self.tile_n)), Float32)
        self.products(acc_S, x, bars, at)
        if const_expr(self.dtype is cutlass.BFloat16):
            fixed_softmax(acc_S, rows.max, rows.sum, scale_log2)
            return self.finish_products(acc_S, x, bars, at, more)
        half_softmax(acc_S, rows.max, rows.sum, rows.scale, scale_log2)
        at = self.finish_products(acc_S, x, bars, at, more)
        rescale(x.acc_O, rows.scale)
        return at

    @cute.jit
    def clear_unseen(
        self, sV: cute.Tensor, bars: cute.Pointer, at: Int32, wg: Int32, bounds: cute.Tensor, mask: Mask
    ) -> None:
        """Zero the rows of a V block that no row of the tile sees: 0 * NaN would be NaN.

        Every warp group does it for itself; they write the same.
        """
        first = mask.first_hidden()
        if first < self.tile_n:
            stage, phase = self.ring(at)
            cute.arch.mbarrier_wait(bars + self.FULL_V + stage, phase)
            width = cute.size(self.smem_atom(), mode=[1]) // 2  # of a swizzle, in 32-bit words; it keeps to its row
            units, rows = width // 4, self.tile_n  # a thread clears 16 bytes at a time
            chunks = self.head_dim // 2 // width
            layout = cute.make_layout((4, units, rows, chunks), stride=(1, 4, width, rows * width))
            words = cute.make_tensor(cute.recast_ptr(sV[None, None, stage].iterator, dtype=Int32), layout)
            zero = cute.make_rmem_tensor(4, Int32)
            zero.fill(0)
            tid = cute.arch.thread_idx()[0] % 128
            for row in cutlass.range(first + tid // units, rows, 128 // units, unroll=1):
                if mask.hides(mask.key_row + row, bounds):
                    for chunk in cutlass.range_constexpr(chunks):
                        cute.autovec_copy(zero, words[None, tid % units, row, chunk])
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)

    def fits(
        self, acc_O: cute.Tensor, rows: Rows, scale_log2: Float32, tile: Tile, wg: Int32, tile_row: Int32
    ) -> cutlass.Boolean:
        """Whether the warp's rows are right without a recompute pass: no score has outgrown its row's reference, and no
        reference is too large for `fixed_softmax`. rows.sum: of the whole rows."""
        fits = cutlass.Boolean(True)
        for r in range(2):
            nan = reduce_tree(operator.add, [acc_O[e] for e in row_elements(acc_O, r)]) * 0.0  # or 0, if all are finite
            reference = rows.max[r] * scale_log2
            near = cute.arch.fmax(reference, -reference) <= REFERENCE_LIMIT
            fits &= (near & (rows.sum[r] + nan <= SUM_LIMIT)) | ~self.in_use(tile, wg, tile_row + 8 * r)
        return cute.arch.vote_all_sync(fits)

    @cute.jit
    def store(
        self,
        acc_O: cute.Tensor,
        row_lse: cute.Tensor,  # (2)
        tma_O: cute.CopyAtom,
        g: Global,
        sO: cute.Tensor,  # (64, D), in the place of Q
        head_group: Int32,
        tile: Tile,
        tile_row: Int32,
        warp_id: Int32,
    ) -> None:
        """lse, and O by the copy engine, or by hand where the tile ends within the warp group's box."""
        wg, lane = warp_id // 4, cute.arch.lane_idx()
        tOrO = cute.make_rmem_tensor(acc_O.shape, self.dtype)
        round_to(acc_O, tOrO)
        cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)  # all warps are done with Q
        token = self.first_token(tile, wg)
        whole = token + self.tokens_wg <= tile.row_end
        if whole:
            copy_O = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), self.mma_pv()
            )
            thr_O = copy_O.get_slice(cute.arch.thread_idx()[0] % 128)
            cute.copy(copy_O, thr_O.retile(tOrO), thr_O.partition_D(sO))
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)
            if warp_id % 4 == 0:
                tOs, tOg = self.partition(tma_O, sO, self.box(g.O, head_group, token))
                cute.copy(tma_O, tOs, tOg)
                cute.arch.cp_async_bulk_commit_group()
        values = cute.recast_tensor(tOrO, Int32)
        for j in cutlass.range_constexpr(2):
            head = head_group * self.packed_heads + (tile_row + 8 * j) % self.packed_heads
            row = self.token(tile, wg, tile_row + 8 * j)
            if self.in_use(tile, wg, tile_row + 8 * j):
                if lane % 4 == 0:
                    g.lse[head, row] = row_lse[j]
                if not whole:
                    # From the thread's first pair on: places of all its pairs would be kept in registers throughout.
                    pairs = cute.domain_offset((lane % 4,), g.pairs[row, head, None])
                    for e in row_elements(acc_O, j)[::2]:
                        if column(e) // 2 < g.pairs.shape[2] - lane % 4:
                            pairs[column(e) // 2] = values[e // 2]

    @cute.jit
    def release_Q(self, bars: cute.Pointer, place: Int32, warp_id: Int32) -> None:
        """The warp that stored the last tile's O lets Q come to where it was."""
        if warp_id % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + self.EMPTY_Q + place)

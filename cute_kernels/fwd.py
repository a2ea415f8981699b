"""Attention forward on Hopper over packed groups: one launch for a whole micro-batch. Here is what warp groups compute.

Softmax does not care about order: a tile's blocks that need the mask come first, then the unmasked loop.

The unmasked loop takes no maximum: the reference of a row stands where the masked blocks left it, as 16-bit and fp32
probabilities exp2(s - reference) beyond 1 are as exact as others. In fp16 a warp moves it where they come near 2^16.
What outgrows it beyond all that shows at the tile's end, in the row's sum or in O. Such tiles are done again in a
second turn within the launch, with the maxima of all their blocks: the masked part then goes on to the last block. So
every result is exact.
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
from cute_kernels.mask import mask
from cute_kernels.order import Order
from cute_kernels.softmax import FIRST_MAX, SUM_LIMIT, fixed_softmax, half_softmax, normalize, online_softmax, rescale
from cute_kernels.work import Tile, first_and_step

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

    mask = staticmethod(mask)

    @cute.jit
    def mma(
        self, atoms: Atoms, g: Global, s: Shared, scale: Float32, order: Order, groups_per_kv: Int32, warp_id: Int32
    ) -> None:
        bars = s.bars
        wg, lane = warp_id // 4, cute.arch.lane_idx()
        scale_log2 = scale * math.log2(math.e)
        mma_qk = self.mma_qk()
        x = self.operands(s, wg)
        rows = Rows(*[cute.make_rmem_tensor(2, t) for t in (Int32, Float32, Float32, Float32)])
        tile_row = warp_id % 4 * 16 + lane // 4  # of this warp group's 64: the thread has tile_row and tile_row + 8
        copy_Q = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), mma_qk)
        thr_Q = copy_Q.get_slice(cute.arch.thread_idx()[0] % 128)
        at, q_phase = Int32(0), Int32(0)  # at: place of the block whose probabilities are in x.tOrP
        first, step = first_and_step(self.cluster)
        stop = order.items
        for turn in cutlass.range(2, unroll=1):
            for item in cutlass.range(first, stop, step, unroll=1):
                if turn == 0 or self.noted(s.again, item):
                    index, head_group = self.place(order, item)
                    tile = self.tile(g, index)
                    for r in cutlass.range_constexpr(2):  # rows past the tile's end count as its last
                        rows.token[r] = cutlass.min(self.token(tile, wg, tile_row + 8 * r), tile.row_end - 1)
                    for state, initial in ((x.acc_O, 0.0), (rows.max, FIRST_MAX), (rows.sum, 0.0)):
                        state.fill(initial)

                    # first block: S = Q K^T, softmax
                    cute.arch.mbarrier_wait(bars + self.FULL_Q + wg, q_phase)
                    q_phase ^= 1
                    if const_expr(self.q_in_registers):
                        cute.copy(copy_Q, thr_Q.partition_S(s.Q[None, None, wg]), thr_Q.retile(x.tSrQ))
                    stage, phase = self.ring(at)
                    acc_S = cute.make_rmem_tensor(mma_qk.partition_shape_C((WG_ROWS, self.tile_n)), Float32)
                    cute.arch.mbarrier_wait(bars + self.FULL_K + stage, phase)
                    gemm(mma_qk, acc_S, x.tSrQ, x.tSrK[None, None, None, stage], True)
                    warpgroup.wait_group(0)
                    self.arrive(bars + self.EMPTY_K + stage)
                    masking = tile.mask_arguments(Int32(0))
                    self.mask(acc_S, rows.token, g.bounds, *masking)
                    online_softmax(acc_S, rows.max, rows.sum, rows.scale, scale_log2)
                    round_to(acc_S, x.tOrP)
                    self.clear_unseen(s.V, bars, at, wg, g.bounds, masking)

                    masked = cutlass.select_(turn == 0, tile.masked, tile.blocks)
                    if tile.blocks > 1:
                        self.await_early(bars, self.after(at))
                    for i in cutlass.range(1, masked, 1, unroll=1):
                        masking = tile.mask_arguments(i)
                        at = self.masked_block(x, rows, scale_log2, bars, at, i + 1 < tile.blocks, g.bounds, masking)
                        self.clear_unseen(s.V, bars, at, wg, g.bounds, masking)
                    for i in cutlass.range(masked, tile.blocks, 1, unroll=1):
                        at = self.whole_block(x, rows, scale_log2, bars, at, i + 1 < tile.blocks)
                    if const_expr(self.o_apart):
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(bars + self.EMPTY_Q + wg)  # the next tile's Q may come

                    # last block: O += P V
                    stage, phase = self.ring(at)
                    cute.arch.mbarrier_wait(bars + self.FULL_V + stage, phase)
                    gemm(self.mma_pv(), x.acc_O, x.tOrP, x.tOrV[None, None, None, stage], False)
                    warpgroup.wait_group(0)
                    self.arrive(bars + self.EMPTY_V + stage)
                    at = self.after(at)
                    normalize(x.acc_O, rows.max, rows.sum, rows.scale, scale)
                    if not self.fits(x.acc_O, rows.sum, tile, wg, tile_row):
                        self.note(s.again, item)
                    if turn == 1 and tile.straddles:
                        place = index, wg, tile_row, head_group, head_group // groups_per_kv
                        self.contain(x.acc_O, rows.scale, rows.token, g, *place, scale)
                    self.store(x.acc_O, rows.scale, atoms.O, g, s, head_group, tile, tile_row, warp_id)
            cute.arch.cp_async_bulk_wait_group(0)  # O is out: the next turn may store it again, and the CTA may end
            stop = self.end_turn(s)

    def operands(self, s: Shared, wg: Int32) -> Operands:
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        thr_qk, thr_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        if self.q_in_registers:
            tSrQ = cute.make_rmem_tensor(mma_qk.partition_shape_A((WG_ROWS, self.head_dim)), self.dtype)
        else:
            tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(s.Q))[None, None, None, wg]
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
    def masked_block(
        self,
        x: Operands,
        rows: Rows,
        scale_log2: Float32,
        bars: cute.Pointer,
        at: Int32,
        more: cutlass.Boolean,
        bounds: cute.Tensor,
        masking: Any,  # the last arguments of mask()
    ) -> Int32:
        """The next block's probabilities, and O of this one; returns the next one's place."""
        acc_S = cute.make_rmem_tensor(self.mma_qk().partition_shape_C((WG_ROWS, self.tile_n)), Float32)  # N/2 registers
        self.products(acc_S, x, bars, at)
        self.mask(acc_S, rows.token, bounds, *masking)
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
        self, sV: cute.Tensor, bars: cute.Pointer, at: Int32, wg: Int32, bounds: cute.Tensor, masking: Any
    ) -> None:
        """Zero the rows of a V block that no row of the tile sees: 0 * NaN would be NaN.

        Every warp group does it for itself; they write the same.
        """
        key_row, first = masking[0], self.first_unseen(*masking)
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
                if self.unseen(key_row + row, bounds, *masking):
                    for chunk in cutlass.range_constexpr(chunks):
                        cute.autovec_copy(zero, words[None, tid % units, row, chunk])
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)

    def first_unseen(self, key_row: Int32, limit: Int32, straddles: cutlass.Boolean) -> Int32:
        """The first row of a block that may be unseen: from the limit on they are another segment's."""
        return limit - key_row

    def unseen(
        self, key: Int32, bounds: cute.Tensor, key_row: Int32, limit: Int32, straddles: cutlass.Boolean
    ) -> bool | cutlass.Boolean:
        """Whether no row of the tile sees a key from there on."""
        return True

    def sees(
        self, row: Int32, key: Int32, bounds: cute.Tensor, key_row: Int32, limit: Int32, straddles: cutlass.Boolean
    ) -> cutlass.Boolean:
        """What `mask` says of one pair."""
        return (key <= row) & (key < limit) & (~straddles | (key >= bounds[row]))

    def fits(self, acc_O: cute.Tensor, row_sum: cute.Tensor, tile: Tile, wg: Int32, tile_row: Int32) -> cutlass.Boolean:
        """Whether no score of the warp's rows has outgrown its reference; row_sum: (2), of the whole rows."""
        fits = cutlass.Boolean(True)
        for r in range(2):
            nan = reduce_tree(operator.add, [acc_O[e] for e in row_elements(acc_O, r)]) * 0.0  # or 0, if all are finite
            fits &= (row_sum[r] + nan <= SUM_LIMIT) | ~self.in_use(tile, wg, tile_row + 8 * r)
        return cute.arch.vote_all_sync(fits)

    @cute.jit
    def store(
        self,
        acc_O: cute.Tensor,
        row_lse: cute.Tensor,  # (2)
        tma_O: cute.CopyAtom,
        g: Global,
        s: Shared,
        head_group: Int32,
        tile: Tile,
        tile_row: Int32,
        warp_id: Int32,
    ) -> None:
        """lse, and O by the copy engine, or by hand where the tile ends within the warp group's box."""
        wg, lane = warp_id // 4, cute.arch.lane_idx()
        tOrO = cute.make_rmem_tensor(acc_O.shape, self.dtype)
        round_to(acc_O, tOrO)
        if const_expr(self.o_apart):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the previous tile's O has left shared memory
        cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)  # ... or all warps are done with Q
        token = self.first_token(tile, wg)
        whole = token + self.tokens_wg <= tile.row_end
        if whole:
            copy_O = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), self.mma_pv()
            )
            thr_O = copy_O.get_slice(cute.arch.thread_idx()[0] % 128)
            cute.copy(copy_O, thr_O.retile(tOrO), thr_O.partition_D(s.O[None, None, wg]))
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)
            if warp_id % 4 == 0:
                tOs, tOg = self.partition(tma_O, s.O[None, None, wg], self.box(g.O, head_group, token))
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
        if const_expr(not self.o_apart):
            self.release_Q(s.bars + self.EMPTY_Q + wg, warp_id)

    @cute.jit
    def release_Q(self, bar: cute.Pointer, warp_id: Int32) -> None:
        """The warp that stored O from Q's place lets the next tile's Q come."""
        if warp_id % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bar)

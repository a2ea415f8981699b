"""Attention forward on Hopper over packed groups: one launch for a whole micro-batch. Here is what warp groups compute.

A warp group walks the blocks that its rows see (fwd_walk.py), in one stretch or two, and skips the others. Softmax does
not care about order: a tile's blocks that need the mask come first, then the unmasked loop.

The unmasked loop does not update the row maximum. Each row keeps the reference maximum of the blocks up to the block
with its own key; masked blocks before that key keep it too. Probabilities exp2(s - reference) above 1 lose no
precision, neither in 16 bits nor in fp32. In fp16 a warp moves the reference where probabilities come near 2^16. Scores
that outgrow the reference beyond that show at the tile's end: in the row's sum, in O or in the reference itself. Such
tiles are marked for a recompute pass within the launch, which takes the maxima of all their blocks: the masked part
then goes on to the last block. So every result is exact.
"""

import math
import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.abi import WG_ROWS
from cute_kernels.accumulator import column, gemm, reduce_tree, round_to, row_elements
from cute_kernels.fwd_contain import ForwardContainment
from cute_kernels.fwd_frame import Atoms, Global, Part, Pipelines, Rows, Shared, State, Thread
from cute_kernels.fwd_load import ForwardLoads
from cute_kernels.fwd_walk import Walk
from cute_kernels.pipeline import Stage, WrappingPipeline
from cute_kernels.softmax import (
    FIRST_MAX,
    REFERENCE_LIMIT,
    SUM_LIMIT,
    cap,
    fixed_softmax,
    half_softmax,
    normalize,
    online_softmax,
    rescale,
)
from cute_kernels.work import AnyTile, Mask

BAR_WG = 1  # named barriers, one a warp group (0 is __syncthreads)


class Stretch(NamedTuple):
    """Blocks [begin, end) of a tile, in its order."""

    begin: Int32
    end: Int32
    masked: Int32  # blocks from this one on need no mask; the first block of the stretch always has one
    own: Int32  # masked blocks with keys from this one on take maxima: the own key of each row is in one of them


class ForwardKernel(ForwardLoads, ForwardContainment):
    """The forward; arguments and errors as of :class:`ForwardFrame`."""

    source_of_P = warpgroup.OperandSource.RMEM

    # ---------------------------------------------------------------- products
    def mma_qk(self, keys: int | None = None) -> cute.TiledMma:
        """S (64, N) = Q (64, D) K^T; keys: N, those of a block by default"""
        K_major, source = warpgroup.OperandMajorMode.K, warpgroup.OperandSource.SMEM
        shape = (WG_ROWS, keys or self.tile_n)
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, K_major, K_major, Float32, (1, 1, 1), shape, source
        )

    def mma_pv(self) -> cute.TiledMma:
        """O (64, Dv) += P (64, N) V"""
        P_major, V_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        source, shape = self.source_of_P, (WG_ROWS, self.v_columns)
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, P_major, V_major, Float32, (1, 1, 1), shape, source
        )

    def state(self, g: Global, s: Shared, place: Int32, wg: Int32) -> State:
        """The state before the first block of a tile, whose Q is in `place`."""
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        thr_pv = mma_pv.get_slice(0)
        sVt = cute.make_tensor(s.V.iterator, cute.select(s.V.layout, mode=[1, 0, 2]))  # (Dv, N, stages)
        rows = Rows(*[cute.make_rmem_tensor(2, t) for t in (Int32, Float32, Float32, Float32)])
        tSrQ = self.operand_Q(mma_qk, s.Q, place)
        tSrK = self.operand_K(mma_qk, s.K, wg)
        tOrP = self.operand_P(mma_pv, s)
        tOrV = mma_pv.make_fragment_B(thr_pv.partition_B(sVt))
        acc_O = cute.make_rmem_tensor(mma_pv.partition_shape_C((WG_ROWS, self.v_columns)), Float32)
        for registers, initial in ((acc_O, 0.0), (rows.max, FIRST_MAX), (rows.sum, 0.0)):
            registers.fill(initial)
        scale_log2, cap_factor = self.scale(g) * math.log2(math.e), self.cap_factor(g)
        operands, of_scores = (tSrQ, tSrK, tOrP, tOrV), (g.bounds, scale_log2, cap_factor)
        return State(*operands, acc_O, rows, s.V, s.pipes, *of_scores, wg, s.handed)

    def operand_Q(self, mma_qk: cute.TiledMma, sQ: cute.Tensor, place: Int32) -> cute.Tensor:
        """`State.tSrQ`"""
        return mma_qk.make_fragment_A(mma_qk.get_slice(0).partition_A(sQ))[None, None, None, place]

    def operand_K(self, mma_qk: cute.TiledMma, sK: cute.Tensor, wg: Int32) -> cute.Tensor:
        """`State.tSrK`"""
        return mma_qk.make_fragment_B(mma_qk.get_slice(0).partition_B(sK))

    def operand_P(self, mma_pv: cute.TiledMma, s: Shared) -> cute.Tensor:
        """`State.tOrP`"""
        return cute.make_rmem_tensor(mma_pv.partition_shape_A((WG_ROWS, self.tile_n)), self.dtype)

    # ---------------------------------------------------------------- a warp group's tiles
    def thread(self, warp_id: Int32) -> Thread:
        """The calling thread, of MMA warp `warp_id`."""
        return Thread(warp_id, warp_id // 4, warp_id % 4 * 16 + cute.arch.lane_idx() // 4)

    @cute.jit
    def mma(self, atoms: Atoms, g: Global, s: Shared, warp_id: Int32) -> None:
        thread = self.thread(warp_id)
        it = Int32(0)  # use of K and V: the block whose probabilities are in tOrP
        count, num_items = Int32(0), self.num_items(g)
        for recompute in cutlass.range(2, unroll=1):
            for n in cutlass.range(0, num_items, 1, unroll=1):
                if self.is_due(s.recompute, n, recompute):
                    it = self.compute_item(atoms, g, s, thread, n, recompute, it, count)
                    count += 1
            cute.arch.cp_async_bulk_wait_group(0)  # O is out: the recompute pass may store it, and the CTA may end
            num_items = self.end_pass(s)

    @cute.jit
    def compute_item(
        self,
        atoms: Atoms,
        g: Global,
        s: Shared,
        thread: Thread,
        n: Int32,
        recompute: Int32,
        it: Int32,
        count: Int32,
    ) -> Int32:
        """The cluster's n-th item, whose first block is use `it` of K and V and whose Q is use `count`; returns the use
        after the last block."""
        place = s.pipes.Q.place(count, thread.wg)
        state = self.state(g, s, place, self.group(thread))
        if const_expr(self.q_places == self.warp_groups):
            self.release_previous_Q(s, count, thread)
        s.pipes.Q.consumer_wait(s.pipes.Q.stage(count, thread.wg))
        part, walk = self.read_part(g, s, place, thread)
        tile = part.tile
        for r in cutlass.range_constexpr(2):  # rows past the warp group's last token are masked like it
            state.rows.token[r] = cutlass.min(self.token(part, r), self.last_token(tile, thread.wg))
        state = state._replace(bounds=tile.bounds_of(state.rows.token, state.bounds))
        if const_expr(self.q_places > self.warp_groups):
            self.release_previous_Q(s, count, thread)

        # Before the blocks, so that nothing waits for them at the tile's end.
        sinks = [g.sinks[self.head(part, r)] for r in range(2)] if const_expr(self.has.sinks) else None

        masked, own = walk.masked, self.first_token(tile, thread.wg)
        if recompute != 0:
            masked, own = tile.blocks, Int32(-1)
        it = self.walk_blocks(g, part, state, walk, Stretch(Int32(0), tile.blocks, masked, own), it)

        self.join_sums(state)
        normalize(state.acc_O, state.rows.max, state.rows.sum, state.rows.scale, self.scale(g), sinks)
        if not self.fits(state, part):
            self.request_recompute(s.recompute, n)
        self.store(state.acc_O, state.rows.scale, atoms.O, g, self.output_tile(s.Q[None, None, place]), part)
        return it

    def read_part(self, g: Global, s: Shared, place: Int32, thread: Thread) -> tuple[Part, Walk]:
        """Read what the producer stored beside Q: the warp group's part of a tile, and the blocks that it walks."""
        item = s.item[None, place]
        tile, first_head = self.tile(g, item), item[self.num_fields]
        return Part(tile, first_head, thread), self.part_walk(tile, item, thread)

    def part_walk(self, tile: AnyTile, item: cute.Tensor, thread: Thread) -> Walk:
        """The blocks that the warp group walks, of an item in shared memory."""
        return Walk(*[item[j] for j in range(self.num_fields + 1, self.item_fields)])

    @cute.jit
    def release_previous_Q(self, s: Shared, count: Int32, thread: Thread) -> None:
        """The warp that stored O of the tile before releases its stage of Q, once the copy engine has read it."""
        Q = s.pipes.Q
        if self.stores_O(thread):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            with cute.arch.elect_one():
                Q.release_previous(count, thread.wg)

    # ---------------------------------------------------------------- the blocks of a tile
    @cute.jit
    def walk_blocks(self, g: Global, part: Part, state: State, walk: Walk, blocks: Stretch, it: Int32) -> Int32:
        """All blocks of a tile, the first one being use `it`; returns the use after the last one."""
        done, begin, end = blocks.begin, walk.begin, walk.end
        for _ in cutlass.range(2, unroll=1):
            for _ in cutlass.range(done, begin, 1, unroll=1):
                it = self.skip_block(state.pipes, it)
            if begin < end:
                it = self.stretch(g, part, state, blocks._replace(begin=begin, end=end), done > 0, it)
            done, begin, end = end, walk.rest, blocks.end
        return it

    def skip_block(self, pipes: Pipelines, it: Int32) -> Int32:
        """Skip a block that no row of the warp group sees; returns the next use."""
        for pipeline in (pipes.K, pipes.V):
            stage = pipeline.stage(it)
            pipeline.consumer_wait(stage)
            pipeline.consumer_release(stage, sync_warp=False)
        return pipes.K.next(it)

    @cute.jit
    def stretch(self, g: Global, part: Part, state: State, blocks: Stretch, rescale_O: Boolean, it: Int32) -> Int32:
        """The blocks of a stretch, the first one being use `it`; returns the use after the last one.

        rescale_O: O already has other blocks in it.
        """
        begin, end, K, tile = blocks.begin, blocks.end, state.pipes.K, part.tile
        mask = tile.mask(begin)
        self.first_block(state, mask, rescale_O, it)
        self.clear_hidden(state, mask, it)
        self.contain(g, part, state, mask, blocks.own < 0, it)
        if begin + 1 < end:
            self.compiler_fence(K, K.next(it))
        for i in cutlass.range(begin + 1, cutlass.min(blocks.masked, end), 1, unroll=1):
            mask = tile.mask(i)
            takes_max = cutlass.min(mask.key_row + self.tile_n, mask.limit) > blocks.own
            it = self.masked_block(state, mask, takes_max, i + 1 < end, it)
            self.clear_hidden(state, mask, it)
            self.contain(g, part, state, mask, (blocks.own < 0) & (i < tile.masked), it)
        for i in cutlass.range(cutlass.max(blocks.masked, begin + 1), end, 1, unroll=1):
            it = self.whole_block(state, i + 1 < end, it)
        return self.last_block(state, it)

    @cute.jit
    def first_block(self, state: State, mask: Mask, rescale_O: Boolean, it: Int32) -> None:
        """A stretch's first block: its probabilities."""
        rows, K = state.rows, state.pipes.K
        acc_S, stage = self.accumulator_S(), K.stage(it)
        K.consumer_wait(stage)
        gemm(self.mma_qk(), acc_S, state.tSrQ, state.tSrK[None, None, None, stage.index], True)
        warpgroup.wait_group(0)
        K.consumer_release(stage, sync_warp=False)
        self.cap(acc_S, state)
        self.hide(acc_S, state, mask)
        self.online_softmax(acc_S, state)
        round_to(acc_S, state.tOrP)
        if rescale_O:
            rescale(state.acc_O, rows.scale)

    @cute.jit
    def masked_block(self, state: State, mask: Mask, takes_max: Boolean, continues: Boolean, it: Int32) -> Int32:
        """O += P V of block `it`, and the probabilities of the next block, whose use is returned.

        takes_max: the rows' reference maximum may move.
        continues: the stretch goes on after the next block.
        """
        rows, acc_S = state.rows, self.accumulator_S()
        self.issue_products(acc_S, state, it)
        self.cap(acc_S, state)
        self.hide(acc_S, state, mask)
        if const_expr(self.dtype is cutlass.Float16):  # one softmax here, as two of them spill at head dims 64 and 96
            self.online_softmax(acc_S, state)
        elif takes_max:
            self.online_softmax(acc_S, state)
        else:
            self.softmax(acc_S, state)
        it = self.finish_products(acc_S, state, continues, it)
        rescale(state.acc_O, rows.scale)
        return it

    def hide(self, acc_S: cute.Tensor, state: State, mask: Mask) -> None:
        """-inf for the scores that rows do not keep."""
        mask.apply(acc_S, state.rows.token, state.bounds)

    def online_softmax(self, acc_S: cute.Tensor, state: State) -> None:
        """Run the softmax of a block that may move the reference maximum of its rows."""
        rows = state.rows
        online_softmax(acc_S, rows.max, rows.sum, rows.scale, state.scale_log2)

    def join_sums(self, state: State) -> None:
        """Add what other warp groups have of the rows' sums."""

    def softmax(self, acc_S: cute.Tensor, state: State) -> None:
        """Run the softmax of a block whose rows keep their reference maximum; rows.scale as in `online_softmax`."""
        rows = state.rows
        if const_expr(self.dtype is cutlass.BFloat16):
            fixed_softmax(acc_S, rows.max, rows.sum, state.scale_log2)
            rows.scale.fill(1.0)
        else:
            half_softmax(acc_S, rows.max, rows.sum, rows.scale, state.scale_log2)

    @cute.jit
    def whole_block(self, state: State, continues: Boolean, it: Int32) -> Int32:
        """Run `masked_block` where the next block needs no mask and takes no maximum."""
        rows, acc_S = state.rows, self.accumulator_S()
        self.issue_products(acc_S, state, it)
        self.cap(acc_S, state)
        self.softmax(acc_S, state)
        it = self.finish_products(acc_S, state, continues, it)
        if const_expr(self.dtype is cutlass.Float16):
            rescale(state.acc_O, rows.scale)
        return it

    def last_block(self, state: State, it: Int32) -> Int32:
        """O += P V of a stretch's last block; returns the use after it."""
        V = state.pipes.V
        stage = V.stage(it)
        V.consumer_wait(stage)
        gemm(self.mma_pv(), state.acc_O, state.tOrP, state.tOrV[None, None, None, stage.index], False)
        warpgroup.wait_group(0)
        V.consumer_release(stage, sync_warp=False)
        return V.next(it)

    def accumulator_S(self) -> cute.Tensor:
        """S of a block: (64, N), N/2 registers a thread."""
        return cute.make_rmem_tensor(self.mma_qk().partition_shape_C((WG_ROWS, self.tile_n)), Float32)

    def issue_products(self, acc_S: cute.Tensor, state: State, it: Int32) -> None:
        """Both products in flight, O += P V of block `it` and S of the next block; wait for S."""
        K, V = state.pipes.K, state.pipes.V
        v_stage, k_stage = V.stage(it), K.stage(K.next(it))
        if not self.fence_softmax:  # else compiler_fence has waited
            K.consumer_wait(k_stage)
        gemm(self.mma_qk(), acc_S, state.tSrQ, state.tSrK[None, None, None, k_stage.index], True)
        V.consumer_wait(v_stage)
        gemm(self.mma_pv(), state.acc_O, state.tOrP, state.tOrV[None, None, None, v_stage.index], False)
        warpgroup.wait_group(1)
        K.consumer_release(k_stage, sync_warp=False)

    def cap(self, acc_S: cute.Tensor, state: State) -> None:
        """Softcapping, of scores that are not masked yet."""
        if const_expr(self.has.softcap):
            cap(acc_S, state.cap_factor)

    @cute.jit
    def finish_products(self, acc_S: cute.Tensor, state: State, continues: Boolean, it: Int32) -> Int32:
        """Wait for O; the next block's probabilities replace those of block `it`. Returns the next block's use."""
        K, V = state.pipes.K, state.pipes.V
        if continues:
            self.compiler_fence(K, K.next(K.next(it)))
        warpgroup.wait_group(0)
        V.consumer_release(V.stage(it), sync_warp=False)
        round_to(acc_S, state.tOrP)
        return K.next(it)

    @cute.jit
    def compiler_fence(self, K: WrappingPipeline, it: Int32) -> None:
        """A compiler workaround, for three warp groups: wait for K of block `it` one step before it is used.

        K is there by then. What counts is that the wait is a branch. ptxas moves no exponential of the step across it,
        and so none past the wait for O; three warp groups lose less time between their products that way. Two warp
        groups are faster with some exponentials after the wait for O. They wait for K where they use it.
        """
        if const_expr(self.fence_softmax):
            K.consumer_wait(K.stage(it))

    @cute.jit
    def clear_hidden(self, state: State, mask: Mask, it: Int32) -> None:
        """Zero the keys of a V block that no row of the tile sees: 0 * NaN would be NaN.

        Each warp group writes the same zeros, so none waits for another.
        """
        first, V = mask.first_hidden(), state.pipes.V
        if first < self.tile_n:
            stage = self.stage_of_V(V, it, state.wg)
            V.consumer_wait(stage)
            width = cute.size(self.smem_atom(), mode=[1]) // 2  # of a swizzle, in 32-bit words; it keeps to its row
            units, rows = width // 4, self.tile_n  # a thread clears 16 bytes at a time
            chunks = self.v_columns // 2 // width
            layout = cute.make_layout((4, units, rows, chunks), stride=(1, 4, width, rows * width))
            tile = cute.make_tensor(cute.recast_ptr(state.sV[None, None, stage.index].iterator, dtype=Int32), layout)
            zero = cute.make_rmem_tensor(4, Int32)
            zero.fill(0)
            tid = cute.arch.thread_idx()[0] % 128
            for row in cutlass.range(first + tid // units, rows, 128 // units, unroll=1):
                if mask.hides(mask.key_row + row, state.bounds):
                    for chunk in cutlass.range_constexpr(chunks):
                        cute.autovec_copy(zero, tile[None, tid % units, row, chunk])
            cute.arch.fence_view_async_shared()
            self.sync_warp_group(state.wg)

    def sync_warp_group(self, wg: Int32) -> None:
        """Wait for all warps of a warp group."""
        cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)

    def stage_of_V(self, V: WrappingPipeline, it: Int32, wg: Int32) -> Stage:
        """The stage with the columns of V of block `it` that a warp group takes."""
        return V.stage(it)

    # ---------------------------------------------------------------- the end of a tile
    def fits(self, state: State, part: Part) -> Boolean:
        """Whether the warp's rows need no recompute pass: no score has outgrown its row's reference maximum, and no
        reference is too large for `fixed_softmax`. state.rows.sum: of the whole rows."""
        fits, rows, acc_O = Boolean(True), state.rows, state.acc_O
        chains = 1 if self.v_columns > 128 and self.cluster == 1 else 4  # four spill there with blocks of 64 keys
        for r in range(2):
            total = reduce_tree(operator.add, [acc_O[e] for e in row_elements(acc_O, r)], chains)
            nan = total * 0.0  # or 0, if all are finite
            reference = rows.max[r] * state.scale_log2
            near = cute.arch.fmax(reference, -reference) <= REFERENCE_LIMIT
            fits &= (near & (rows.sum[r] + nan <= SUM_LIMIT)) | ~self.in_use(part, r)
        return cute.arch.vote_all_sync(fits)

    @cute.jit
    def store(
        self,
        acc_O: cute.Tensor,
        row_lse: cute.Tensor,  # (2)
        tma_O: cute.CopyAtom,
        g: Global,
        sO: cute.Tensor,  # (64, Dv), where Q was
        part: Part,
    ) -> None:
        """lse, and O by the copy engine, or by the threads where the tile ends within the warp group's box."""
        wg, lane, columns = self.group(part.thread), cute.arch.lane_idx(), self.column_part(part.thread)
        tOrO = cute.make_rmem_tensor(acc_O.shape, self.dtype)
        round_to(acc_O, tOrO)
        self.sync_rows(wg)  # no warp reads Q any more
        token = self.first_token(part.tile, part.thread.wg)
        whole = token + self.tokens_wg <= part.tile.row_end
        if whole:
            copy_O = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), self.mma_pv()
            )
            thr_O = copy_O.get_slice(cute.arch.thread_idx()[0] % 128)
            cute.copy(copy_O, thr_O.retile(tOrO), thr_O.partition_D(self.own_columns(sO, columns)))
            cute.arch.fence_view_async_shared()
            self.sync_rows(wg)
            if self.stores_O(part.thread):
                box = self.box(g.O, self.head_dim_v, part.first_head, token)
                tOs, tOg = self.partition(tma_O, sO, self.head_dim_v, box)
                cute.copy(tma_O, tOs, tOg)
                cute.arch.cp_async_bulk_commit_group()
        values = cute.recast_tensor(tOrO, Int32)
        for r in cutlass.range_constexpr(2):
            head, row = self.head(part, r), self.token(part, r)
            if self.in_use(part, r):
                if self.writes_lse(part.thread, lane):
                    g.lse[head, row] = row_lse[r]
                if not whole:
                    # From the thread's first pair on: addresses of all its pairs would stay in registers throughout.
                    first = columns * (self.v_columns // 2) + lane % 4
                    pairs = cute.domain_offset((first,), g.pairs[row, head, None])
                    for e in row_elements(acc_O, r)[::2]:
                        if column(e) // 2 < g.pairs.shape[2] - first:
                            pairs[column(e) // 2] = values[e // 2]

    def sync_rows(self, wg: Int32) -> None:
        """Wait for all warps with the same rows."""
        self.sync_warp_group(wg)

    def own_columns(self, sO: cute.Tensor, columns: Int32 | int) -> cute.Tensor:
        """The part of O's columns that a warp group makes, of a (64, Dv) tile."""
        return sO

    def stores_O(self, thread: Thread) -> Boolean:
        """Whether the thread's warp has the copy engine store O."""
        return thread.warp_id % 4 == 0

    def writes_lse(self, thread: Thread, lane: Int32) -> Boolean:
        """Whether the thread writes the log-sum-exp of its rows."""
        return lane % 4 == 0

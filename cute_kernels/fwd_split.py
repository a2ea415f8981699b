"""Attention forward on Hopper beyond head dim 256: two warp groups share 64 query rows.

Each makes the part of S that half of the columns of Q and K give, of all keys of a block. The groups exchange what
they have of each other's half of the keys. So each takes the softmax of its half, and hands its probabilities over.
Then each multiplies them with its half of the columns of V. Where a block may move the reference maximum of its rows,
the groups exchange their maxima first, so both keep one reference; sums of a row stay apart until the tile's end. All
of it goes through shared memory, and every exchange ends in a barrier of both groups:

- P of block `it` is written where P of block `it - 2` was. Both groups have waited for the product of that one before
  the barrier of block `it - 1`, which is before its product. Behind a skipped block it may be where P of the block
  before the skipped one was: then the first block of the stretch has exchanged parts of S, behind both groups' waits
  for that block's product.
- Parts of S and numbers are written again behind another barrier, that of P or that before O is written.

K comes in quarters of its columns, of which each warp group reads two, V in halves. A group issues S of the next block
before it waits for the other group's P, so the tensor cores have work meanwhile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.utils import SmemAllocator

from cute_kernels.abi import WG_ROWS
from cute_kernels.accumulator import gemm, round_to
from cute_kernels.fwd import BAR_WG, ForwardKernel
from cute_kernels.fwd_frame import (
    RECOMPUTE_WORDS,
    Atoms,
    Global,
    Handed,
    Part,
    Pipelines,
    QueryPipeline,
    Shared,
    State,
    Thread,
)
from cute_kernels.fwd_paths import PathForwardKernel
from cute_kernels.pipeline import MbarrierAllocator, Pipeline, Stage
from cute_kernels.ptx import thread_here
from cute_kernels.softmax import fixed_softmax, online_softmax, rescale, row_maxima
from cute_kernels.work import Mask, first_and_step

HALVES = 2  # of V and O: one a warp group
QUARTERS = 4  # of K


class Pieces(Pipeline):
    """A pipeline of blocks, counted over all tiles, in pieces: columns of K or V. A block has a stage for each."""

    def piece(self, it: Int32, number: Int32 | int) -> Stage:
        """A piece of block `it`."""
        return Stage(number, it % 2)

    def next(self, it: Int32) -> Int32:
        """The block after."""
        return it + 1


class SplitForwardKernel(ForwardKernel):
    """The forward of head dim 512; arguments and errors as of :class:`ForwardFrame`, but that `warp_groups` are pairs
    of warp groups, 64 query rows each, and `stages` the quarters of a block of K."""

    max_head_dim = 512
    allowed_warp_groups = (1,)
    allowed_stages = (QUARTERS,)
    column_groups = HALVES
    source_of_P = warpgroup.OperandSource.SMEM

    # ---------------------------------------------------------------- shared memory and pipelines
    def smem_bytes(self, q_places: int) -> int:
        """Q and O, quarters of K, a block of V, `handed`, mbarriers, `item` and `recompute`, alignment."""
        barriers = MbarrierAllocator()
        self.pipelines(barriers, q_places)
        elements = q_places * WG_ROWS * self.head_dim + self.tile_n * (self.head_dim + self.head_dim_v + 2 * WG_ROWS)
        numbers = q_places * self.item_fields + 1 + RECOMPUTE_WORDS + WG_ROWS * HALVES + WG_ROWS * self.tile_n
        return elements * 2 + barriers.num_bars * 8 + numbers * 4 + 1024

    def allocate_tiles(self, allocator: SmemAllocator) -> list[cute.Tensor]:
        V = cute.tile_to_shape(self.smem_atom(), (self.tile_n, self.v_columns, HALVES), (0, 1, 2))
        layouts = self.q_layout(), self.kv_layout(self.k_columns), V
        return [allocator.allocate_tensor(self.dtype, x.outer, 1024, x.inner) for x in layouts]

    def allocate_handed(self, allocator: SmemAllocator) -> Handed:
        layout = cute.tile_to_shape(self.smem_atom(), (WG_ROWS, self.tile_n, 2), (0, 1, 2))
        P = allocator.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner)
        numbers = allocator.allocate_tensor(Float32, cute.make_layout((2, WG_ROWS // 2, HALVES)), 8)
        parts = cute.make_layout((4, 128, WG_ROWS * self.own_keys // 512, HALVES))
        return Handed(P, allocator.allocate_tensor(Float32, parts, 16), numbers)

    def pipelines(self, barriers: MbarrierAllocator, q_places: int) -> Pipelines:
        Q = QueryPipeline(barriers.take(2, 1), barriers.take(q_places, 1), warp_groups=1)
        K = Pieces.make(barriers, self.stages, producers=1, consumers=4, cluster=self.cluster)
        V = Pieces.make(barriers, HALVES, producers=1, consumers=4, cluster=self.cluster)
        return Pipelines(Q, K, V)

    @property
    def k_columns(self) -> int:
        return self.head_dim // QUARTERS

    # ---------------------------------------------------------------- rows and columns of warp groups
    def thread(self, warp_id: Int32) -> Thread:
        tid = thread_here() % 128  # of the warp group; read for each tile, as no register is free between them
        return Thread(warp_id, Int32(0), tid // 32 * 16 + tid % 32 // 4)

    def group(self, thread: Thread) -> Int32:
        return thread.warp_id // 4

    def column_part(self, thread: Thread) -> Int32:
        return thread.warp_id // 4

    def sync_rows(self, wg: Int32) -> None:
        cute.arch.barrier(barrier_id=BAR_WG + HALVES, number_of_threads=128 * HALVES)

    def own_columns(self, sO: cute.Tensor, columns: Int32) -> cute.Tensor:
        return cute.local_tile(sO, (WG_ROWS, self.v_columns), (0, columns))

    def stores_O(self, thread: Thread) -> Boolean:
        return thread.warp_id == 0

    def writes_lse(self, thread: Thread, lane: Int32) -> Boolean:
        return (lane % 4 == 0) & (thread.warp_id < 4)

    # ---------------------------------------------------------------- the producer
    @cute.jit
    def load(self, atoms: Atoms, g: Global, s: Shared, warp_idx: Int32) -> None:
        """Warp 0 is the producer; the other warps only take part at the end of a pass."""
        it, count, num_items = Int32(0), Int32(0), self.num_items(g)
        first, step = first_and_step(self.cluster)
        V = s.pipes.V
        for recompute in cutlass.range(2, unroll=1):
            if warp_idx == 0:
                row, kv_head = Int32(-1), Int32(0)  # of the block whose V is to come
                for n in cutlass.range(0, num_items, 1, unroll=1):
                    if self.is_due(s.recompute, n, recompute):
                        item = first + n * step
                        it, row, kv_head = self.load_split_item(atoms, g, s, item, it, count, row, kv_head)
                        count += 1
                if row >= 0:
                    self.load_pieces(atoms.V, g.V[None, None, kv_head], s.V, V, row, it - 1)
            num_items = self.end_pass(s)

    @cute.jit
    def load_split_item(
        self,
        atoms: Atoms,
        g: Global,
        s: Shared,
        item: Int32,
        it: Int32,
        count: Int32,
        row: Int32,
        kv_head: Int32,
    ) -> tuple[Int32, Int32, Int32]:
        """Q and key blocks of an item, but for V of its last block.

        it: the item's first block.
        count: use of Q.
        row, kv_head: the block whose V comes after K of the item's first one; -1: none.

        Returns the next item's first block, and the block whose V is to come.
        """
        field, of_K, of_V = self.read_item(g, item), s.pipes.K, s.pipes.V
        *fields, first_head = [cute.arch.shuffle_sync(field, j) for j in (*range(self.tile_fields), self.num_fields)]
        tile, own_head = self.tile(g, fields), first_head // g.heads_per_kv
        K, V = g.K[None, None, own_head], g.V[None, None, own_head]
        first = tile.key_row(Int32(0))
        self.load_pieces(atoms.K, K, s.K, of_K, first, it)
        if row >= 0:
            self.load_pieces(atoms.V, g.V[None, None, kv_head], s.V, of_V, row, it - 1)
        row = first
        self.load_queries(atoms, g, s, tile, first_head, field, 0, count)
        for i in cutlass.range(1, tile.blocks, 1, unroll=1):
            following = tile.key_row(i)
            self.load_pieces(atoms.K, K, s.K, of_K, following, it + 1)
            self.load_pieces(atoms.V, V, s.V, of_V, row, it)
            row = following
            it += 1
        return it + 1, row, own_head

    @cute.jit
    def load_pieces(
        self,
        atom: cute.CopyAtom,
        x: cute.Tensor,  # (T, D or Dv)
        shared: cute.Tensor,  # (N, columns, stages)
        pipeline: Pieces,
        row: Int32,
        it: Int32,
    ) -> None:
        """Rows [row, row + N) of K or V of one head, as block `it`."""
        columns = cute.size(shared, mode=[1])
        for number in cutlass.range(pipeline.stages, unroll=1):  # unrolled, the copies would take too many registers
            stage = pipeline.piece(it, number)
            pipeline.producer_acquire(stage)
            pipeline.producer_expect(stage, self.tile_n * columns * 2)
            block = cute.local_tile(cute.domain_offset((row, 0), x), (self.tile_n, columns), (0, number))
            self.multicast(atom, block, shared, pipeline, stage)

    # ---------------------------------------------------------------- the MMA warps
    @cute.jit
    def mma(self, atoms: Atoms, g: Global, s: Shared, warp_id: Int32) -> None:
        it = Int32(0)  # block whose probabilities are handed over
        count, num_items = Int32(0), cute.arch.make_warp_uniform(self.num_items(g))
        for recompute in cutlass.range(2, unroll=1):
            for n in cutlass.range(0, num_items, 1, unroll=1):
                if self.is_due(s.recompute, n, recompute):
                    it = self.compute_item(atoms, g, s, self.thread(warp_id), n, recompute, it, count)
                    count += 1
            cute.arch.cp_async_bulk_wait_group(0)  # O is out: the recompute pass may store it, and the CTA may end
            num_items = cute.arch.make_warp_uniform(self.end_pass(s))

    def store(
        self, acc_O: cute.Tensor, lse: cute.Tensor, atom: cute.CopyAtom, g: Global, sO: cute.Tensor, part: Part
    ) -> None:
        super().store(acc_O, lse, atom, g, sO, self.part_here(part))

    def part_here(self, part: Part) -> Part:
        """`part`, without a register for the thread until here."""
        return part._replace(thread=self.thread(part.thread.warp_id))

    @property
    def own_keys(self) -> int:
        """Keys of a block that a warp group takes the softmax of."""
        return self.tile_n // HALVES

    def mma_scores(self) -> cute.TiledMma:
        """The product whose accumulator holds scores of the warp group's half of the keys: (64, N/2)."""
        return self.mma_qk(self.own_keys)

    def accumulator_S(self) -> cute.Tensor:
        return cute.make_rmem_tensor(self.mma_scores().partition_shape_C((WG_ROWS, self.own_keys)), Float32)

    def partial_S(self) -> cute.Tensor:
        """The warp group's part of S: (64, N), N/2 registers a thread."""
        return super().accumulator_S()

    def operand_Q(self, mma_qk: cute.TiledMma, sQ: cute.Tensor, place: Int32) -> cute.Tensor:
        """(MMA, 1, D/64, quarters)"""
        quarters = cute.local_tile(sQ, (WG_ROWS, self.k_columns), (0, None, None))  # (64, D/4, quarters, places)
        return mma_qk.make_fragment_A(mma_qk.get_slice(0).partition_A(quarters))[None, None, None, None, place]

    def operand_P(self, mma_pv: cute.TiledMma, s: Shared) -> cute.Tensor:
        """(MMA, 1, N/16, 2)"""
        return mma_pv.make_fragment_A(mma_pv.get_slice(0).partition_A(s.handed.P))

    def stage_of_V(self, V: Pieces, it: Int32, wg: Int32) -> Stage:
        return V.piece(it, wg)

    def skip_block(self, pipes: Pipelines, it: Int32) -> Int32:
        K, V, wg = pipes.K, pipes.V, cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        for pipeline, stage in (*((K, K.piece(it, number)) for number in self.own_quarters(wg)), (V, V.piece(it, wg))):
            pipeline.consumer_wait(stage)
            pipeline.consumer_release(stage, sync_warp=False)
        return K.next(it)

    def own_quarters(self, wg: Int32) -> list[Int32]:
        """The quarters of K and Q whose products a warp group makes."""
        return [wg, wg + HALVES]

    def issue_S(self, partial: cute.Tensor, state: State, it: Int32) -> None:
        """Issue the warp group's part of S of block `it`, as a group of products for each quarter of the columns."""
        pipeline = state.pipes.K
        for number in range(QUARTERS // HALVES):
            quarter = self.own_quarters(state.wg)[number]
            pipeline.consumer_wait(pipeline.piece(it, quarter))
            Q, K = state.tSrQ[None, None, None, quarter], state.tSrK[None, None, None, quarter]
            gemm(self.mma_qk(), partial, Q, K, number == 0)

    def finish_S(self, state: State, it: Int32, number: int, pending: int) -> None:
        """Wait for a quarter of S of block `it`, and release its K. pending: groups of products behind it."""
        K = state.pipes.K
        warpgroup.wait_group(pending)
        K.consumer_release(K.piece(it, self.own_quarters(state.wg)[number]), sync_warp=False)

    def combine(self, acc_S: cute.Tensor, partial: cute.Tensor, state: State) -> None:
        """Give the other group its keys' part of S, and add its part of the own keys."""
        count, tid, first = cute.size(acc_S), thread_here() % 128, state.wg == 0
        parts = state.handed.parts
        for j in range(count // 4):
            given = cute.make_rmem_tensor(4, Float32)
            for i in range(4):
                low, high = partial[4 * j + i], partial[count + 4 * j + i]
                acc_S[4 * j + i] = cutlass.select_(first, low, high)
                given[i] = cutlass.select_(first, high, low)
            cute.autovec_copy(given, parts[None, tid, j, state.wg])
        self.sync_rows(state.wg)
        for j in range(count // 4):
            taken = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(parts[None, tid, j, 1 - state.wg], taken)
            for i in range(4):
                acc_S[4 * j + i] = acc_S[4 * j + i] + taken[i]

    def issue_O(self, state: State, it: Int32) -> None:
        """Issue O += P V of block `it`, of the warp group's columns, when both groups have stored their P."""
        self.sync_rows(state.wg)
        V = state.pipes.V
        stage = V.piece(it, state.wg)
        V.consumer_wait(stage)
        P = state.tOrP[None, None, None, it % 2]
        gemm(self.mma_pv(), state.acc_O, P, state.tOrV[None, None, None, stage.index], False)

    def finish_O(self, state: State, it: Int32) -> None:
        """Wait for all products, and release V of block `it`."""
        V = state.pipes.V
        warpgroup.wait_group(0)
        V.consumer_release(V.piece(it, state.wg), sync_warp=False)

    @cute.jit
    def first_block(self, state: State, mask: Mask, rescale_O: Boolean, it: Int32) -> None:
        acc_S, partial = self.accumulator_S(), self.partial_S()
        self.issue_S(partial, state, it)
        self.finish_S(state, it, 0, 1)
        self.finish_S(state, it, 1, 0)
        self.combine(acc_S, partial, state)
        self.cap(acc_S, state)
        self.hide(acc_S, state, mask)
        self.online_softmax(acc_S, state)
        self.store_P(acc_S, state, it)
        if rescale_O:
            rescale(state.acc_O, state.rows.scale)

    def last_block(self, state: State, it: Int32) -> Int32:
        self.issue_O(state, it)
        self.finish_O(state, it)
        return state.pipes.K.next(it)

    def issue_products(self, acc_S: cute.Tensor, state: State, it: Int32) -> None:
        """Issue S before the groups meet, and O behind; K of S's first quarter is free before O is issued."""
        following, partial = state.pipes.K.next(it), self.partial_S()
        self.issue_S(partial, state, following)
        self.finish_S(state, following, 0, 1)
        self.issue_O(state, it)
        self.finish_S(state, following, 1, 1)
        self.combine(acc_S, partial, state)

    @cute.jit
    def finish_products(self, acc_S: cute.Tensor, state: State, continues: Boolean, it: Int32) -> Int32:
        following = state.pipes.K.next(it)
        self.store_P(acc_S, state, following)
        self.finish_O(state, it)
        return following

    # ---------------------------------------------------------------- the softmax of two warp groups
    def hide(self, acc_S: cute.Tensor, state: State, mask: Mask) -> None:
        super().hide(acc_S, state, mask._replace(key_row=mask.key_row + state.wg * self.own_keys))

    def online_softmax(self, acc_S: cute.Tensor, state: State) -> None:
        rows = state.rows
        others = self.exchange(state, row_maxima(acc_S))
        online_softmax(acc_S, rows.max, rows.sum, rows.scale, state.scale_log2, others)

    def softmax(self, acc_S: cute.Tensor, state: State) -> None:
        """fp16 moves the reference of both groups together."""
        if const_expr(self.dtype is cutlass.BFloat16):
            fixed_softmax(acc_S, state.rows.max, state.rows.sum, state.scale_log2)
            state.rows.scale.fill(1.0)
        else:
            self.online_softmax(acc_S, state)

    def join_sums(self, state: State) -> None:
        total = state.rows.sum
        others = self.exchange(state, [cute.arch.warp_reduction_sum(total[r], threads_in_group=4) for r in range(2)])
        for r in range(2):  # four threads hold a row
            total[r] = total[r] + cutlass.select_(thread_here() % 4 == 0, others[r], Float32(0.0))

    def exchange(self, state: State, own: list[Float32]) -> list[Float32]:
        """Numbers of the thread's rows, the same in the four threads of a row, for those of the other warp group's."""
        numbers, quad, wg = state.handed.numbers, thread_here() % 128 // 4, state.wg
        for r in range(2):
            numbers[r, quad, wg] = own[r]
        self.sync_rows(wg)
        return [numbers[r, quad, 1 - wg] for r in range(2)]

    def store_P(self, acc_S: cute.Tensor, state: State, it: Int32) -> None:
        """Store P of block `it`, of the warp group's keys, as the products of both groups take it."""
        rounded = cute.make_rmem_tensor(acc_S.shape, self.dtype)
        round_to(acc_S, rounded)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.mma_scores())
        thr = copy.get_slice(thread_here() % 128)
        own = cute.local_tile(state.handed.P, (WG_ROWS, self.own_keys), (0, state.wg, None))
        cute.copy(copy, thr.retile(rounded), thr.partition_D(own)[None, None, None, it % 2])
        cute.arch.fence_view_async_shared()


class SplitPathForwardKernel(SplitForwardKernel, PathForwardKernel):
    """The forward of head dim 512 over trees and with windows; arguments as of :class:`PathForwardKernel`."""

"""Attention forward on Hopper beyond head dim 256: two warp groups share 64 query rows, and divide the columns of O.

Both make S of all columns, the same numbers twice: two thirds of the products are of use. So each has the probabilities
in its own registers, and neither waits for the other but for shared memory.

K and V come in pieces, which are halves of a block's columns, and share one ring. A block of K goes ahead of V of the
block before, across tiles too, so uses of the ring have a fixed order. K of block `it`, counted over all tiles of a
pass, has the uses 4 it and 4 it + 1, and V of it 4 it + 6 and 4 it + 7:

    K 0, (none), K 1, V 0, K 2, V 1, ...

A pass begins with V of no block and ends with K of no block, which the producer marks as full without data. The pass
after goes on from there.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import SmemAllocator

from cute_kernels.abi import WG_ROWS
from cute_kernels.accumulator import gemm, round_to
from cute_kernels.fwd import BAR_WG, ForwardKernel
from cute_kernels.fwd_frame import RECOMPUTE_WORDS, Atoms, Global, Part, Pipelines, QueryPipeline, Shared, State, Thread
from cute_kernels.fwd_paths import PathForwardKernel
from cute_kernels.pipeline import MbarrierAllocator, Pipeline, Stage
from cute_kernels.ptx import thread_here
from cute_kernels.softmax import online_softmax, rescale
from cute_kernels.work import Mask, first_and_step

HALVES = 2


class PieceRing(Pipeline):
    """K and V of blocks in pieces; see the top of this file."""

    def use_of_K(self, it: Int32) -> Int32:
        """The first of K's two uses, of block `it`."""
        return 4 * it

    def use_of_V(self, it: Int32) -> Int32:
        """The first of V's two uses, of block -1 or more."""
        return 4 * it + 6

    def K(self, it: Int32, half: int) -> Stage:
        """Half of K of block `it`."""
        return self.stage(self.use_of_K(it) + half)

    def V(self, it: Int32, half: Int32 | int) -> Stage:
        """Half of V of block `it`, -1 or more."""
        return self.stage(self.use_of_V(it) + half)

    def next(self, it: Int32) -> Int32:
        """The block after."""
        return it + 1


class SplitForwardKernel(ForwardKernel):
    """The forward of head dim 512; arguments and errors as of :class:`ForwardFrame`, but that `warp_groups` are pairs
    of warp groups, 64 query rows each, and `stages` the pieces (halves of a block of K or V) in flight."""

    max_head_dim = 512
    allowed_warp_groups = (1,)
    column_groups = HALVES

    # ---------------------------------------------------------------- shared memory and pipelines
    def smem_bytes(self, q_places: int) -> int:
        """Q and O, pieces of K and V, mbarriers, `item` and `recompute`, alignment."""
        barriers = MbarrierAllocator()
        self.pipelines(barriers, q_places)
        elements = q_places * WG_ROWS * self.head_dim + self.stages * self.tile_n * self.k_columns
        numbers = q_places * self.item_fields + 1 + RECOMPUTE_WORDS
        return elements * 2 + barriers.num_bars * 8 + numbers * 4 + 1024

    def allocate_tiles(self, allocator: SmemAllocator) -> list[cute.Tensor]:
        layouts = self.q_layout(), self.kv_layout(self.k_columns)
        sQ, ring = [allocator.allocate_tensor(self.dtype, x.outer, 1024, x.inner) for x in layouts]
        return [sQ, ring, ring]

    def pipelines(self, barriers: MbarrierAllocator, q_places: int) -> Pipelines:
        Q = QueryPipeline(barriers.take(2, 1), barriers.take(q_places, 1), warp_groups=1)
        readers = 4 * self.mma_groups
        ring = PieceRing.make(barriers, self.stages, producers=1, consumers=readers, cluster=self.cluster)
        return Pipelines(Q, ring, ring)

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
        ring = s.pipes.K
        for recompute in cutlass.range(2, unroll=1):
            if warp_idx == 0:
                self.mark_full(ring, ring.V(it - 1, 0), ring.V(it - 1, 1))
                row, kv_head = Int32(-1), Int32(0)  # of the block whose V is to come
                for n in cutlass.range(0, num_items, 1, unroll=1):
                    if self.is_due(s.recompute, n, recompute):
                        item = first + n * step
                        it, row, kv_head = self.load_split_item(atoms, g, s, item, it, count, row, kv_head)
                        count += 1
                self.mark_full(ring, ring.K(it, 0), ring.K(it, 1))
                if row >= 0:
                    self.load_pieces(atoms.V, g.V[None, None, kv_head], s.V, ring, row, ring.use_of_V(it - 1))
                it += 1
            num_items = self.end_pass(s)

    def mark_full(self, ring: PieceRing, *stages: Stage) -> None:
        """Uses of the ring without data."""
        for stage in stages:
            ring.producer_acquire(stage)
            ring.producer_commit(stage)

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
        ring, field = s.pipes.K, self.read_item(g, item)
        *fields, head_group = [cute.arch.shuffle_sync(field, j) for j in (*range(self.tile_fields), self.num_fields)]
        tile, own_head = self.tile(g, fields), head_group // g.groups_per_kv
        K, V = g.K[None, None, own_head], g.V[None, None, own_head]
        first = tile.key_row(Int32(0))
        self.load_pieces(atoms.K, K, s.K, ring, first, ring.use_of_K(it))
        if row >= 0:
            self.load_pieces(atoms.V, g.V[None, None, kv_head], s.V, ring, row, ring.use_of_V(it - 1))
        row = first
        self.load_queries(atoms, g, s, tile, head_group, field, 0, count)
        for i in cutlass.range(1, tile.blocks, 1, unroll=1):
            following = tile.key_row(i)
            self.load_pieces(atoms.K, K, s.K, ring, following, ring.use_of_K(it + 1))
            self.load_pieces(atoms.V, V, s.V, ring, row, ring.use_of_V(it))
            row = following
            it += 1
        return it + 1, row, own_head

    @cute.jit
    def load_pieces(
        self,
        atom: cute.CopyAtom,
        x: cute.Tensor,  # (T, D or Dv)
        shared: cute.Tensor,  # (N, columns, stages)
        ring: PieceRing,
        row: Int32,
        use: Int32,
    ) -> None:
        """Rows [row, row + N) of K or V of one head: its halves, as uses `use` and `use` + 1 of the ring."""
        columns = cute.size(shared, mode=[1])
        for half in cutlass.range(HALVES, unroll=1):  # unrolled, the copies would take too many registers
            stage = ring.stage(use + half)
            ring.producer_acquire(stage)
            ring.producer_expect(stage, self.tile_n * columns * 2)
            block = cute.local_tile(cute.domain_offset((row, 0), x), (self.tile_n, columns), (0, half))
            self.multicast(atom, block, shared, ring, stage)

    # ---------------------------------------------------------------- the MMA warps
    @cute.jit
    def mma(self, atoms: Atoms, g: Global, s: Shared, warp_id: Int32) -> None:
        ring = s.pipes.K
        it = Int32(0)  # block of the pass whose probabilities are in tOrP
        count, num_items = Int32(0), cute.arch.make_warp_uniform(self.num_items(g))
        for recompute in cutlass.range(2, unroll=1):
            self.drop(ring, ring.V(it - 1, 0), ring.V(it - 1, 1))
            for n in cutlass.range(0, num_items, 1, unroll=1):
                if self.is_due(s.recompute, n, recompute):
                    it = self.compute_item(atoms, g, s, self.thread(warp_id), n, recompute, it, count)
                    count += 1
            self.drop(ring, ring.K(it, 0), ring.K(it, 1))
            it += 1
            cute.arch.cp_async_bulk_wait_group(0)  # O is out: the recompute pass may store it, and the CTA may end
            num_items = cute.arch.make_warp_uniform(self.end_pass(s))

    def store(
        self, acc_O: cute.Tensor, lse: cute.Tensor, atom: cute.CopyAtom, g: Global, sO: cute.Tensor, part: Part
    ) -> None:
        super().store(acc_O, lse, atom, g, sO, self.part_here(part))

    def part_here(self, part: Part) -> Part:
        """`part`, without a register for the thread until here."""
        return part._replace(thread=self.thread(part.thread.warp_id))

    def drop(self, ring: PieceRing, *stages: Stage) -> None:
        """Pieces that the warp does not need."""
        for stage in stages:
            ring.consumer_wait(stage)
            ring.consumer_release(stage, sync_warp=False)

    def operand_Q(self, mma_qk: cute.TiledMma, sQ: cute.Tensor, place: Int32) -> cute.Tensor:
        """(MMA, 1, D/32, halves)"""
        halves = cute.local_tile(sQ, (WG_ROWS, self.k_columns), (0, None, None))  # (64, D/2, halves, places)
        return mma_qk.make_fragment_A(mma_qk.get_slice(0).partition_A(halves))[None, None, None, None, place]

    def stage_of_V(self, V: PieceRing, it: Int32, wg: Int32) -> Stage:
        return V.V(it, wg)

    def skip_block(self, pipes: Pipelines, it: Int32) -> Int32:
        ring = pipes.K
        self.drop(ring, *(ring.K(it, half) for half in range(HALVES)), *(ring.V(it, half) for half in range(HALVES)))
        return ring.next(it)

    def issue_S(self, acc_S: cute.Tensor, state: State, it: Int32) -> None:
        """Issue S of block `it`, half by half of the columns, as two groups of products."""
        ring = state.pipes.K
        for half in range(HALVES):
            stage = ring.K(it, half)
            ring.consumer_wait(stage)
            K = state.tSrK[None, None, None, stage.index]
            gemm(self.mma_qk(), acc_S, state.tSrQ[None, None, None, half], K, half == 0)

    def issue_O(self, state: State, it: Int32) -> None:
        """Issue O += P V of block `it`, of the warp group's columns."""
        ring = state.pipes.V
        stage = ring.V(it, state.wg)
        ring.consumer_wait(stage)
        gemm(self.mma_pv(), state.acc_O, state.tOrP, state.tOrV[None, None, None, stage.index], False)

    def finish_O(self, state: State, it: Int32) -> None:
        """Wait for all products, and release V of block `it`."""
        ring = state.pipes.V
        warpgroup.wait_group(0)
        ring.consumer_release(ring.V(it, state.wg), sync_warp=False)

    @cute.jit
    def first_block(self, state: State, mask: Mask, rescale_O: Boolean, it: Int32) -> None:
        rows, ring = state.rows, state.pipes.K
        acc_S = self.accumulator_S()
        self.issue_S(acc_S, state, it)
        for half in cutlass.range_constexpr(HALVES):
            warpgroup.wait_group(HALVES - 1 - half)
            ring.consumer_release(ring.K(it, half), sync_warp=False)
        self.cap(acc_S, state)
        mask.apply(acc_S, rows.token, state.bounds)
        online_softmax(acc_S, rows.max, rows.sum, rows.scale, state.scale_log2)
        round_to(acc_S, state.tOrP)
        if rescale_O:
            rescale(state.acc_O, rows.scale)

    def last_block(self, state: State, it: Int32) -> Int32:
        ring = state.pipes.V
        self.issue_O(state, it)
        self.drop(ring, ring.V(it, 1 - state.wg))
        self.finish_O(state, it)
        return ring.next(it)

    def issue_products(self, acc_S: cute.Tensor, state: State, it: Int32) -> None:
        ring = state.pipes.K
        following = ring.next(it)
        self.issue_S(acc_S, state, following)
        self.issue_O(state, it)
        for half in range(HALVES):
            warpgroup.wait_group(HALVES - half)
            ring.consumer_release(ring.K(following, half), sync_warp=False)
        self.drop(ring, ring.V(it, 1 - state.wg))

    @cute.jit
    def finish_products(self, acc_S: cute.Tensor, state: State, continues: Boolean, it: Int32) -> Int32:
        self.finish_O(state, it)
        round_to(acc_S, state.tOrP)
        return state.pipes.K.next(it)


class SplitPathForwardKernel(SplitForwardKernel, PathForwardKernel):
    """The forward of head dim 512 over trees and with windows; arguments as of :class:`PathForwardKernel`."""

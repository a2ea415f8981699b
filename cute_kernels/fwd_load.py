"""The producer warp of the forward: Q of a tile with its work item, then K and V block by block."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels import fwd_walk
from cute_kernels.fwd_frame import Atoms, ForwardFrame, Global, Shared
from cute_kernels.fwd_walk import Walk
from cute_kernels.pipeline import WrappingPipeline
from cute_kernels.work import AnyTile, first_and_step

EVICT_FIRST = 0x12F0000000000000  # cache policy of a TMA copy, as CUTLASS's TMA::CacheHintSm90 has it


class ForwardLoads(ForwardFrame):
    """A mixin of :class:`cute_kernels.fwd.ForwardKernel`: the producer warp."""

    @cute.jit
    def load(self, atoms: Atoms, g: Global, s: Shared, warp_idx: Int32) -> None:
        """Warp 0 is the producer; the other warps only take part at the end of a pass."""
        it, count, num_items = Int32(0), Int32(0), self.num_items(g)
        first, step = first_and_step(self.cluster)
        field = self.read_item(g, first)
        for recompute in cutlass.range(2, unroll=1):
            if warp_idx == 0:
                for n in cutlass.range(0, num_items, 1, unroll=1):
                    if self.is_due(s.recompute, n, recompute):
                        if recompute != 0:
                            field = self.read_item(g, first + n * step)
                        following = cutlass.min(first + (n + 1) * step, g.schedule.shape[0] - 1)
                        it, field = self.load_item(atoms, g, s, field, following, it, count)
                        count += 1
            num_items = self.end_pass(s)

    @cute.jit
    def read_item(self, g: Global, item: Int32) -> Int32:
        """An item, one field a lane: its tile's fields, then its first head. Two loads, one after the other."""
        lane, field = cute.arch.lane_idx(), g.schedule[item, 1]
        if lane < self.num_fields:
            field = g.work[g.schedule[item, 0], lane]
        return field

    @cute.jit
    def load_item(
        self, atoms: Atoms, g: Global, s: Shared, field: Int32, following: Int32, it: Int32, count: Int32
    ) -> tuple[Int32, Int32]:
        """Q and key blocks of an item.

        field: of the item, from `read_item`.
        following: number of the item to read meanwhile.
        it: use of K and V of the item's first block.
        count: use of Q.

        Returns the use of the next item's first block, and the field of `following`.
        """
        *fields, first_head = [cute.arch.shuffle_sync(field, j) for j in (*range(self.tile_fields), self.num_fields)]
        tile, kv_head = self.tile(g, fields), first_head // g.heads_per_kv
        K = atoms.K, g.K[None, None, kv_head], s.K, s.pipes.K
        V = atoms.V, g.V[None, None, kv_head], s.V, s.pipes.V
        keys, previous = s.pipes.K, tile.key_row(Int32(0))
        self.load_block(*K, previous, it)
        # The last warp groups' places, if they are not two a warp group, are free only when the first ones begin this
        # tile, which then find their first blocks there.
        early = self.q_places - self.warp_groups
        for wg in cutlass.range_constexpr(early):
            self.load_queries(atoms, g, s, tile, first_head, field, wg, count)
        begin = Int32(1)
        if const_expr(early < self.warp_groups):
            if tile.blocks > 1:
                row = tile.key_row(Int32(1))
                self.load_block(*K, row, keys.next(it))
                self.load_block(*V, previous, it)
                previous = row
                it = keys.next(it)
            begin = Int32(2)
            for wg in cutlass.range_constexpr(early, self.warp_groups):
                self.load_queries(atoms, g, s, tile, first_head, field, wg, count)
        field = self.read_item(g, following)
        for i in cutlass.range(begin, tile.blocks, 1, unroll=1):  # K is a block ahead of V, as the MMA warps use them
            row = tile.key_row(i)
            self.load_block(*K, row, keys.next(it))
            self.load_block(*V, previous, it)
            previous = row
            it = keys.next(it)
        self.load_block(*V, previous, it)
        return keys.next(it), field

    @cute.jit
    def load_queries(
        self,
        atoms: Atoms,
        g: Global,
        s: Shared,
        tile: AnyTile,
        first_head: Int32,
        field: Int32,
        wg: cutlass.Constexpr,
        count: Int32,
    ) -> None:
        """A warp group's Q, and the item with the blocks that it walks."""
        lane, item = cute.arch.lane_idx(), s.item
        stage, place = s.pipes.Q.producer_acquire(count, wg)
        first, last = self.first_token(tile, wg), self.last_token(tile, wg)
        box = self.box(g.Q, self.head_dim, first_head, first)
        tQs, tQg = self.partition(atoms.Q, s.Q[None, None, place], self.head_dim, box)
        read_once = cutlass.Int64(EVICT_FIRST)  # keys, which other CTAs read too, stay in L2
        cute.copy(atoms.Q, tQg, tQs, tma_bar_ptr=s.pipes.Q.full[stage.index], cache_policy=read_once)
        if lane <= self.num_fields:
            item[lane, place] = field
        if const_expr(self.finds_walks):
            with cute.arch.elect_one():
                for j, value in enumerate(self.walk(g, tile, first, last)):
                    item[self.num_fields + 1 + j, place] = value
        cute.arch.sync_warp()
        s.pipes.Q.producer_expect(stage, self.rows_wg * self.head_dim * 2)

    @cute.jit
    def walk(self, g: Global, tile: AnyTile, first: Int32, last: Int32) -> Walk:
        """The blocks of a tile that a warp group walks, whose rows these are; none if it has no rows."""
        first_begin, last_begin = tile.own_begin, tile.own_begin
        if tile.straddles:
            first_begin, last_begin = g.bounds[cutlass.min(first, last)], g.bounds[last]
        return fwd_walk.walk(tile, first, last, first_begin, last_begin)

    def load_block(
        self,
        atom: cute.CopyAtom,
        x: cute.Tensor,  # (T, D or Dv)
        shared: cute.Tensor,  # (N, D or Dv, stages)
        pipeline: WrappingPipeline,
        row: Int32,
        it: Int32,
    ) -> None:
        """Rows [row, row + N) of K or V of one head."""
        stage = pipeline.stage(it)
        pipeline.producer_acquire(stage)
        columns = cute.size(shared, mode=[1])
        pipeline.producer_expect(stage, self.tile_n * columns * 2)
        block = cute.local_tile(cute.domain_offset((row, 0), x), (self.tile_n, columns), (0, 0))
        self.multicast(atom, block, shared, pipeline, stage)

"""The producer warp of the backward's main kernels: keys once, then Q with its statistics and dO, block by block."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.abi import STAT_COLUMNS
from cute_kernels.bwd_arguments import BackwardPipelines, Global, Item, Load, Loads, Shared, TableRow
from cute_kernels.bwd_stats import stats_of
from cute_kernels.cluster import Clustered
from cute_kernels.pipeline import Pipeline, Signal, Stage


class Producer(Clustered):
    """A mixin of :class:`cute_kernels.bwd_frame.BackwardFrame`: the producer warp."""

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    k_columns: int
    peer_columns: int
    want_dq: bool
    want_dp: bool
    flags_ahead: bool
    windowed: bool
    table_row: Callable[..., TableRow]
    store_row: Callable[..., Int32]

    @cute.jit
    def load_keys(self, loads: Loads, s: Shared, p: BackwardPipelines, item: Item) -> None:
        """tile_n rows of K and V, and the columns of the other CTA's K for this CTA's part of dQ."""
        if const_expr(self.peer_columns and self.want_dq):  # it comes with this CTA's K, on one barrier
            rank = self.rank()
            first = item.key + (1 - 2 * rank) * self.tile_n, rank * (self.head_dim - self.peer_columns)
            self.load_tile(loads.peer_K, item.kv_head, first, s.peer_K, self.peer_columns, p.K, arrive=False)
        self.load_tile(loads.K, item.kv_head, (item.key, 0), s.K, self.k_columns, p.K)
        if const_expr(self.want_dp):
            self.load_tile(loads.V, item.kv_head, (item.key, 0), s.V, self.head_dim_v, p.V)

    @cute.jit
    def load_queries(
        self, loads: Loads, g: Global, s: Shared, p: BackwardPipelines, item: Item, heads_per_kv: Int32
    ) -> None:
        """Block by block Q, its statistics and dO, of all query heads before the next block.

        From the last block down, where all key blocks of a prompt meet: then their sums of dQ meet in L2.
        """
        stat_bytes = 2 * self.tile_m * STAT_COLUMNS
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16)
        it, own = Int32(0), Int32(0)
        for block in cutlass.range(0, item.block_end - item.block_begin, 1, unroll=1):
            for head in cutlass.range(0, heads_per_kv, 1, unroll=1):
                h = item.kv_head * heads_per_kv + head
                m_block = item.block_end - 1 - block
                stage, do_stage = p.Q.stage(it), p.dO.stage(it)
                if const_expr(self.windowed):
                    row = self.table_row(g, m_block)  # before the wait, which hides the latency
                    following = row.flags
                    if const_expr(self.flags_ahead):
                        last = cutlass.select_(head + 1 == heads_per_kv, m_block - 1, m_block)
                        following = self.table_row(g, cutlass.max(last, item.block_begin)).flags
                    m_block = row.m_block
                    p.Q.producer_acquire(stage)
                    own = self.store_row(s, row, following, own, stage)
                self.load_rows(loads.Q, h, m_block, s.Q, p.Q, stage, stat_bytes)
                row = stats_of(g.stats, h, m_block)  # lse and dpsum come with Q
                with cute.arch.elect_one():
                    target = cute.group_modes(s.stats, 0, 2)[None, stage.index]
                    cute.copy(bulk, row, target, mbar_ptr=p.Q.full[stage.index])
                self.load_rows(loads.dO, h, m_block, s.dO, p.dO, do_stage, 0)
                it += 1

    def load_tile(
        self,
        load: Load,
        kv_head: Int32,
        first: tuple[Int32, Int32 | int],  # row and column
        target: cute.Tensor,
        columns: int,
        signal: Signal,
        arrive: bool = True,  # or else more bytes follow with the same signal
    ) -> None:
        """tile_n rows of one head of K or V."""
        shape, num_bytes = (self.tile_n, columns), 2 * self.tile_n * columns
        tile = cute.local_tile(cute.domain_offset(first, load.tensor[None, None, kv_head]), shape, (0, 0))
        shared, tensor = cpasync.tma_partition(
            load.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(tile, 0, 2)
        )
        bar = signal.full[0]
        with cute.arch.elect_one():
            if arrive:
                cute.arch.mbarrier_arrive_and_expect_tx(bar, num_bytes)
            else:
                cute.arch.mbarrier_expect_tx(bar, num_bytes)
        cute.copy(load.atom, tensor, shared, tma_bar_ptr=bar)

    def load_rows(
        self,
        load: Load,
        h: Int32,
        m_block: Int32,
        target: cute.Tensor,  # (M, D or Dv, stages)
        pipeline: Pipeline,
        stage: Stage,
        extra_bytes: int,  # that come on the same barrier
    ) -> None:
        """A block of Q or dO of one head; each CTA of the cluster brings its part to all."""
        pipeline.producer_acquire(stage)
        columns = cute.size(target, mode=[1])
        pipeline.producer_expect(stage, self.tile_m * columns * 2 + extra_bytes)
        block = cute.local_tile(load.tensor[None, None, h], (self.tile_m, columns), (m_block, 0))
        self.multicast(load.atom, block, target, pipeline, stage)

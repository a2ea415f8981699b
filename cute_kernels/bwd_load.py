"""What the loader warp of the backward's main kernels does: keys once, then Q, its statistics and dO block by block."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels import bwd_items as items
from cute_kernels.abi import STAT_COLUMNS
from cute_kernels.bwd_stats import stats_of
from cute_kernels.cluster import Clustered


@dataclass
class Item:
    """A CTA's part of a work item."""

    kv_head: Any
    key: Any  # the CTA's first one
    key_end: Any  # one past the item's last one
    block_begin: Any  # query blocks [block_begin, block_end)
    block_end: Any
    clean_begin: Any  # rows [clean_begin, clean_end) need no mask
    clean_end: Any
    slab: Any
    place: Any  # in a fixed order: its own among those that add to a block, and who comes before it
    previous_end: Any
    previous: Any

    @classmethod
    def load(cls, work: cute.Tensor, index: Int32, rank: Int32, tile_n: int) -> "Item":
        """The part of CTA `rank` of a cluster in item `index` of `work` (fields: bwd_items.py)."""
        field = [work[index, f] for f in range(items.NUM_FIELDS)]
        key = field[items.KEY] + rank * tile_n
        clean_end = cutlass.select_(rank == 0, field[items.CLEAN_END], field[items.CLEAN_END + 1])
        blocks = field[items.BLOCK_BEGIN], field[items.BLOCK_END]
        order = field[items.ORDER], field[items.PREVIOUS_END], field[items.PREVIOUS]
        clean = key + tile_n - 1, clean_end
        return cls(field[items.KV_HEAD], key, field[items.KEY_END], *blocks, *clean, field[items.SLAB], *order)

    def turn(self, block: Int32) -> Int32:
        """How many items add to a query block before this one."""
        return cutlass.select_(block < self.previous_end, self.place, self.previous + 1)


class Loads(Clustered):
    """Of :class:`cute_kernels.bwd_frame.BackwardFrame`."""

    tile_m: int
    tile_n: int
    head_dim: int
    stages: int
    do_stages: int
    k_columns: int
    want_dp: bool
    heads_inside: bool
    FULL_K: int
    FULL_V: int
    FULL_Q: int
    EMPTY_Q: int
    FULL_DO: int
    EMPTY_DO: int

    def ring(self, it: Int32, stages: int = 0) -> tuple[Int32, Int32]:
        """Block counter -> (stage, phase), of Q unless `stages` says otherwise."""
        stages = stages or self.stages
        return it % stages, (it // stages) & 1

    @cute.jit
    def load_keys(
        self, tma_K: cute.CopyAtom, gK: cute.Tensor, tma_V: cute.CopyAtom, gV: cute.Tensor, sK: cute.Tensor,
        sV: cute.Tensor, bars: cute.Pointer, item: Any,
    ) -> None:  # fmt: skip
        """tile_n rows of K and V."""
        self.load_tile(tma_K, gK[None, None, item.kv_head], sK, item.key, bars + self.FULL_K, self.k_columns)
        if const_expr(self.want_dp):
            self.load_tile(tma_V, gV[None, None, item.kv_head], sV, item.key, bars + self.FULL_V, self.head_dim)

    @cute.jit
    def load_queries(
        self, tma_Q: cute.CopyAtom, gQ: cute.Tensor, tma_dO: cute.CopyAtom, gdO: cute.Tensor, stats: cute.Tensor,
        sQ: cute.Tensor, sdO: cute.Tensor, sStat: cute.Tensor, bars: cute.Pointer, item: Any, heads_per_kv: Int32,
    ) -> None:  # fmt: skip
        """Block by block Q, its statistics and dO."""
        kv_head, mb0, mb1 = item.kv_head, item.block_begin, item.block_end
        size = 2 * self.tile_m * STAT_COLUMNS
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16)
        it = Int32(0)
        outer, inner = heads_per_kv, mb1 - mb0
        if const_expr(self.heads_inside):
            outer, inner = inner, outer
        for i in cutlass.range(0, outer, 1, unroll=1):
            for j in cutlass.range(0, inner, 1, unroll=1):
                head, block = (j, i) if const_expr(self.heads_inside) else (i, j)
                h = kv_head * heads_per_kv + head
                mb = mb1 - 1 - block  # from the far end, where all key blocks of a prompt meet: their dQ meets in L2
                stage, phase = self.ring(it)
                do_stage, do_phase = self.ring(it, self.do_stages)
                full_q, full_do, empty_do = bars + self.FULL_Q, bars + self.FULL_DO, bars + self.EMPTY_DO
                self.load_rows(tma_Q, gQ[None, None, h], sQ, mb, stage, phase, full_q, bars + self.EMPTY_Q, size)
                row = stats_of(stats, h, mb)  # lse and dpsum, with Q
                with cute.arch.elect_one():
                    cute.copy(bulk, row, cute.group_modes(sStat, 0, 2)[None, stage], mbar_ptr=full_q + stage)
                self.load_rows(tma_dO, gdO[None, None, h], sdO, mb, do_stage, do_phase, full_do, empty_do, 0)
                it += 1

    def load_tile(
        self, tma: cute.CopyAtom, g: cute.Tensor, s: cute.Tensor, n0: Int32, bar: cute.Pointer, columns: int
    ) -> None:
        """tile_n rows of K or V of one head."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.tile_n * columns * 2)
        tile = cute.local_tile(cute.domain_offset((n0, 0), g), (self.tile_n, columns), (0, 0))
        ts, tg = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(tma, tg, ts, tma_bar_ptr=bar)

    def load_rows(
        self,
        tma: cute.CopyAtom,
        g: cute.Tensor,
        s: cute.Tensor,
        mb: Int32,
        stage: Int32,
        phase: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        extra: int,  # bytes that come on the same barrier
    ) -> None:
        """Block mb of Q or dO of one head -> stage; each CTA of the cluster brings its part to all."""
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile_m * self.head_dim * 2 + extra)
        tile = cute.local_tile(g, (self.tile_m, self.head_dim), (mb, 0))
        ts, tg = cpasync.tma_partition(
            tma, self.rank(), cute.make_layout(self.cluster), cute.group_modes(s, 0, 2), cute.group_modes(tile, 0, 2)
        )
        multicast = {} if self.cluster == 1 else {"mcast_mask": cutlass.Int16((1 << self.cluster) - 1)}
        cute.copy(tma, tg, ts[None, stage], tma_bar_ptr=full + stage, **multicast)

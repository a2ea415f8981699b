"""NaN and infinity in V stay with the rows that see them, although the tensor cores multiply all pairs.

A hidden pair has P = 0, and 0 * NaN is NaN: where rows of several segments share a tile, NaN or infinity in the V of
one segment reaches the O of all. That shows at the tile's end, and the tile goes through the recompute pass. If it
shows there too, the rows whose log-sum-exp is finite are summed up here, key by key. Healthy inputs do not come here,
so it may be slow.
"""

import math
import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.accumulator import reduce_tree, row_elements
from cute_kernels.fwd_frame import ForwardFrame, Global, Part
from cute_kernels.softmax import capped


class Query(NamedTuple):
    """One query row."""

    token: Int32
    head: Int32
    lse: Float32
    first_chunk: Int32 | int  # of 8 columns of V: the warp group makes O from there on


class ForwardContainment(ForwardFrame):
    """Of :class:`cute_kernels.fwd.ForwardKernel`."""

    @cute.jit
    def contain(
        self,
        acc_O: cute.Tensor,  # (64, v_columns) of one warp group, normalized
        lse: cute.Tensor,  # (2)
        token: cute.Tensor,  # (2) packed row of each of the thread's query rows
        g: Global,
        fields: cute.Tensor,  # of the tile
        part: Part,
    ) -> None:
        """Rows of O that are not finite though their log-sum-exp is, a warp at a time: sums over the keys they see."""
        kv_head, broken = part.head_group // g.groups_per_kv, cute.make_rmem_tensor(2, Int32)
        part = part._replace(tile=self.tile(g, fields))
        for r in cutlass.range_constexpr(2):
            total = reduce_tree(operator.add, [acc_O[e] for e in row_elements(acc_O, r)])  # of this thread's columns
            total = cute.arch.warp_reduction_sum(total, threads_in_group=4) * 0.0  # NaN if any part is not finite
            broken[r] = ((total != 0.0) & (lse[r] * 0.0 == 0.0) & self.in_use(part, r)).to(Int32)
        if cute.arch.vote_any_sync(broken[0] + broken[1] != 0):
            for r in cutlass.range_constexpr(2):
                for e in row_elements(acc_O, r):
                    acc_O[e] = cutlass.select_(broken[r] != 0, Float32(0.0), acc_O[e])
            for r in cutlass.range_constexpr(2):  # one after the other: there are not the registers for both
                tile, first_chunk = self.tile(g, fields), self.column_part(part.thread) * (self.v_columns // 8)
                query = Query(token[r], self.head(part, r), lse[r], first_chunk)
                for i in cutlass.range(0, tile.blocks, 1, unroll=1):
                    first, mask = tile.key_row(i), tile.mask(i)
                    for key in cutlass.range(first, first + self.tile_n, 1, unroll=1):
                        visible = (broken[r] != 0) & ((i >= tile.masked) | mask.sees(token[r], key, g.bounds))
                        row = cutlass.min(key, g.k.shape[0] - 1)  # a block may reach past the last one
                        self.add_key(acc_O, r, visible, g, query, row, kv_head)

    @cute.jit
    def add_key(
        self,
        acc_O: cute.Tensor,
        r: cutlass.Constexpr,
        visible: Boolean,
        g: Global,
        query: Query,
        key: Int32,
        kv_head: Int32,
    ) -> None:
        """Row r of O += p * V of one key, if the row sees it. The four threads of a row share the score."""
        score, lane = Float32(0.0), self.lane_of_key()
        for c in cutlass.range(0, self.head_dim // 8, 1, unroll=1):
            q, k = self.columns(g.q, query.token, query.head, c, lane), self.columns(g.k, key, kv_head, c, lane)
            score += q[0] * k[0] + q[1] * k[1]
        score = cute.arch.warp_reduction_sum(score, threads_in_group=4)
        if const_expr(self.has.softcap):
            score = capped(score, self.cap_factor(g))
        if visible:
            p = cute.math.exp2((score * self.scale(g) - query.lse) * math.log2(math.e), fastmath=True)
            for c in cutlass.range_constexpr(cute.size(acc_O) // 4):
                value = self.columns(g.v, key, kv_head, query.first_chunk + c, lane)
                for j in cutlass.range_constexpr(2):
                    acc_O[4 * c + 2 * r + j] = acc_O[4 * c + 2 * r + j] + p * value[j]

    def lane_of_key(self) -> Int32:
        """The thread's lane, asked for at every key."""
        return cute.arch.lane_idx()

    @cute.jit
    def columns(self, x: cute.Tensor, row: Int32, head: Int32, chunk: Int32, lane: Int32) -> cute.Tensor:
        """(2) fp32: of a row of x (T, heads, D), the columns that this thread has of a chunk of 8; 0 past D."""
        pair = 4 * chunk + lane % 4
        loaded, values = cute.make_rmem_tensor(2, x.element_type), cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(cute.local_tile(x[row, head, None], (2,), (cutlass.min(pair, x.shape[2] // 2 - 1),)), loaded)
        for j in cutlass.range_constexpr(2):
            values[j] = cutlass.select_(2 * pair < x.shape[2], Float32(loaded[j]), Float32(0.0))
        return values

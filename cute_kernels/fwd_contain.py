"""NaN and infinity in V stay with the rows that see them, although the tensor cores multiply all pairs.

A hidden pair has P = 0, and 0 * NaN is NaN: where rows of several segments share a tile, NaN or infinity in the V of
one segment reaches the O of all. That shows at the tile's end, and the tile goes through the recompute pass. There a
block that needs the mask loses every element of V that is not finite, and the rows that see one get it by an addition.
In other blocks every pair is visible, and the products do what mathematics says.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.accumulator import not_finite, remove_not_finite, words
from cute_kernels.fwd_frame import ForwardFrame, Global, Part, State
from cute_kernels.ptx import thread_here
from cute_kernels.work import Mask

LANES = 32


class ForwardContainment(ForwardFrame):
    """The steps of :class:`cute_kernels.fwd.ForwardKernel` that keep NaN and infinity apart."""

    @cute.jit
    def contain(self, g: Global, part: Part, state: State, mask: Mask, due: Boolean, it: Int32) -> None:
        """Remove what is not finite from V of block `it`, and add it to the rows of O that see it.

        All warp groups write the same zeros, in any order. So the values to add come from global memory: another warp
        group may have removed them from the stage.

        due: the recompute pass is under way, and the mask of the block may hide some pairs.
        """
        if due & part.tile.straddles:
            self.remove_from_stage(state, it)
            first_chunk = self.column_part(part.thread) * (self.v_columns // 8)
            for first in cutlass.range(0, self.tile_n, LANES, unroll=1):
                broken = cute.arch.vote_ballot_sync(self.is_broken(g, part, mask, first, first_chunk))
                if broken != 0:
                    for j in cutlass.range(0, LANES, 1, unroll=1):
                        if (broken >> j) & 1 != 0:
                            self.add_not_finite(g, part, state, mask, mask.key_row + first + j, first_chunk)

    @cute.jit
    def remove_from_stage(self, state: State, it: Int32) -> None:
        """Write zeros where V of block `it` is not finite."""
        V = state.pipes.V
        stage = self.stage_of_V(V, it, state.wg)
        V.consumer_wait(stage)
        tile = words(state.sV[None, None, stage.index])
        for i in cutlass.range(thread_here() % 128, cute.size(tile) // 4, 128, unroll=1):
            quad = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(tile[None, i], quad)
            if remove_not_finite(quad, self.dtype) != 0:
                cute.autovec_copy(quad, tile[None, i])
        cute.arch.fence_view_async_shared()
        self.sync_warp_group(state.wg)

    @cute.jit
    def is_broken(self, g: Global, part: Part, mask: Mask, first: Int32, first_chunk: Int32 | int) -> Boolean:
        """Whether V of the lane's key, of LANES keys from the block's `first` on, is not finite."""
        n, found = first + thread_here() % LANES, Int32(0)
        key = cutlass.min(mask.key_row + n, g.v.shape[0] - 1)  # a block may reach past the last one
        row = g.v[key, self.kv_head(g, part), None]
        for c in cutlass.range(0, self.v_columns // 8, 1, unroll=1):
            chunk = cutlass.min(first_chunk + c, row.shape[0] // 8 - 1)  # columns past Dv are zeros
            values = cute.make_rmem_tensor(8, self.dtype)
            cute.autovec_copy(cute.local_tile(row, (8,), (chunk,)), values)
            found |= not_finite(values)
        return found != 0 if const_expr(self.tile_n % LANES == 0) else (found != 0) & (n < self.tile_n)

    @cute.jit
    def add_not_finite(
        self, g: Global, part: Part, state: State, mask: Mask, key: Int32, first_chunk: Int32 | int
    ) -> None:
        """Add what is not finite in V of a key to the thread's rows of O that see the key."""
        lane, row = thread_here() % LANES, g.v[cutlass.min(key, g.v.shape[0] - 1), self.kv_head(g, part), None]
        for r in cutlass.range_constexpr(2):
            if mask.sees(r, state.rows.token[r], key, state.bounds):
                for c in cutlass.range_constexpr(self.v_columns // 8):
                    pair = 4 * (first_chunk + c) + lane % 4
                    values = cute.make_rmem_tensor(2, self.dtype)
                    cute.autovec_copy(cute.local_tile(row, (2,), (cutlass.min(pair, row.shape[0] // 2 - 1),)), values)
                    for j in cutlass.range_constexpr(2):
                        i, x = 4 * c + 2 * r + j, Float32(values[j])
                        broken = (x - x != 0.0) & (2 * pair < row.shape[0])
                        state.acc_O[i] = cutlass.select_(broken, state.acc_O[i] + x, state.acc_O[i])

    def kv_head(self, g: Global, part: Part) -> Int32:
        """The head of K and V that the tile's query heads read."""
        return part.first_head // g.heads_per_kv

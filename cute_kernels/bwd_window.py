"""The backward with a sliding window or chunks: walks along a table of query blocks, and one more limit of the mask.

The rows that see a prompt's key are then some of the prompt and the first ones of each response. So a work item has a
list of query blocks, rows of a table that the host writes (abi.BlockFields), in place of an interval of blocks. All
warps of a cluster go through the same rows. The producer puts the row of a step beside the step's Q, from where the MMA
warps read it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_kernels.abi import BlockFields as fields
from cute_kernels.accumulator import column
from cute_kernels.bwd_arguments import Global, Mask, Shared, TableRow
from cute_kernels.cluster import Clustered
from cute_kernels.pipeline import Stage

M_BLOCK, FLAGS, SHIFT, OWN_STEP = range(4)  # words beside Q; see `Windows.store_row`
NO_LIMIT = 2**31 - 1  # unmasked_end of a block that needs no mask


class Windows(Clustered):
    """A mixin of :class:`cute_kernels.bwd_frame.BackwardFrame`: walks and masks with a window or chunks."""

    tile_m: int
    windowed: bool

    def key_rank(self) -> Int32:
        """The number of this CTA's key block in its work item."""
        return self.rank()

    # ---------------------------------------------------------------- rows of the table
    def table_row(self, g: Global, index: Int32) -> TableRow:
        """A row of the table."""
        return TableRow(*[g.blocks[index, f] for f in (fields.M_BLOCK, fields.FLAGS, fields.SHIFT)])

    def store_row(self, s: Shared, row: TableRow, following: Int32, own: Int32, stage: Stage) -> Int32:
        """Write a row of the table to a stage that the producer has acquired, before the producer arrives.

        following: with `flags_ahead` the flags of the next step, else `row`'s.
        own: steps so far in which this CTA makes dQ. Returns `own` of the next step.
        """
        with cute.arch.elect_one():
            for f, x in ((M_BLOCK, row.m_block), (FLAGS, following), (SHIFT, row.shift), (OWN_STEP, own)):
                s.blocks[f, stage.index] = x
        cute.arch.sync_warp()
        return own + cutlass.select_(self.is_own(row.flags, self.key_rank()), Int32(1), Int32(0))

    def uniform(self, flags: Int32) -> Int32:
        """`flags`, of which all lanes have the same, as a reduction of the warp.

        So the compiler knows that they are the same. Else it takes every branch on them for one that divides the warp,
        and does not keep the addresses of products in uniform registers.
        """
        return cute.arch.warp_redux_sync(flags, "max")

    def block_of_stage(self, s: Shared, mask: Mask, stage: Stage, flags: Int32 | None = None) -> tuple[Int32, Mask]:
        """Number of the query block in a full stage, and its mask. flags: FLAGS of the block, if they are known."""
        if flags is None:
            flags = self.uniform(s.blocks[FLAGS, stage.index])
        m_block, shift = s.blocks[M_BLOCK, stage.index], s.blocks[SHIFT, stage.index]
        masked = (flags >> (fields.MASKED + self.key_rank())) & 1
        return m_block, mask._replace(
            unmasked_end=cutlass.select_(masked != 0, Int32(0), Int32(NO_LIMIT)),
            shift=shift,
            several=(flags >> fields.SEVERAL) & 1,
        )

    def is_own(self, flags: Int32, rank: Int32) -> Boolean:
        """Whether rows of a block see keys of a CTA."""
        return (flags >> (fields.OWN + rank)) & 1 != 0

    def turn(self, g: Global, index: Int32) -> Int32:
        """Deterministic, up to head dim 128: how many CTAs add to a block's dQ before this one."""
        first = self.is_own(g.blocks[index, fields.FLAGS], Int32(0)) & (self.rank() == 1)
        return g.blocks[index, fields.BEFORE] + cutlass.select_(first, Int32(1), Int32(0))

    # ---------------------------------------------------------------- the mask
    @cute.jit
    def hide(self, acc: cute.Tensor, m0: Int32, mask: Mask, value: cutlass.Constexpr) -> None:
        """`value` for hidden pairs in an accumulator whose columns are query rows from m0 on."""
        first = cute.arch.lane_idx() % 4 * 2
        if mask.several != 0:
            for e in cutlass.range_constexpr(cute.size(acc)):
                r = e // 2 % 2
                seen = mask.position[m0 + column(e) + first] < mask.end_position[r]
                visible = (column(e) >= mask.key[r] - m0) & (column(e) < mask.visible_end[r] - m0) & seen
                acc[e] = cutlass.select_(visible, acc[e], Float32(value))
        else:
            for e in cutlass.range_constexpr(cute.size(acc)):
                r = e // 2 % 2
                end = cutlass.min(mask.visible_end[r] - m0, mask.end_position[r] - (m0 + mask.shift) - first)
                visible = (column(e) >= mask.key[r] - m0) & (column(e) < end)
                acc[e] = cutlass.select_(visible, acc[e], Float32(value))

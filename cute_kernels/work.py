"""Work items on the device: which tiles a cluster takes, and which key blocks a tile walks (abi.ForwardFields)."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.abi import ForwardFields as items


def first_and_step(cluster_size: int) -> tuple[Int32, Int32]:
    """This cluster's first work number and the step to its next: those of neighbours in the list run side by side."""
    return cute.arch.block_idx()[0] // cluster_size, cute.arch.grid_dim()[0] // cluster_size


@dataclass
class Tile:
    """One work item. The blocks it walks: own ones that need the mask from the last one down, context ones that do, the
    context's whole blocks, the own whole blocks. tests/test_plan.py has the same walk in numpy (`key_blocks`)."""

    row: Any
    row_end: Any
    context_begin: Any
    context_end: Any
    own_begin: Any
    own_masked: Any
    masked: Any  # masked blocks of both regions, at least 1
    straddles: Any
    context_blocks: Any
    own_blocks: Any
    context_whole: Any
    tile_n: int

    @classmethod
    def load(cls, fields: cute.Tensor | list[Int32], tile_n: int) -> "Tile":
        field = [fields[f] for f in range(items.NUM_FIELDS)]
        row, row_end, own_begin = field[items.ROW], field[items.ROW_END], field[items.OWN_BEGIN]
        context_begin, context_end = field[items.CONTEXT_BEGIN], field[items.CONTEXT_END]
        context_blocks = (context_end - context_begin + tile_n - 1) // tile_n
        own_blocks = (row_end - own_begin + tile_n - 1) // tile_n
        context_masked, own_masked = field[items.CONTEXT_MASKED], field[items.OWN_MASKED]
        return cls(
            row,
            row_end,
            context_begin,
            context_end,
            own_begin,
            own_masked,
            own_masked + context_masked,
            field[items.STRADDLES] != 0,
            context_blocks,
            own_blocks,
            context_blocks - context_masked,
            tile_n,
        )

    @property
    def blocks(self) -> Int32:
        return self.context_blocks + self.own_blocks

    def key_row(self, i: Int32) -> Int32:
        """Packed row of the first key of the i-th block."""
        n, j = self.tile_n, i - self.masked
        whole = cutlass.select_(
            j < self.context_whole, self.context_begin + j * n, self.own_begin + (j - self.context_whole) * n
        )
        context = self.context_begin + (self.context_blocks - 1 - i + self.own_masked) * n
        own = self.own_begin + (self.own_blocks - 1 - i) * n
        return cutlass.select_(i < self.own_masked, own, cutlass.select_(j < 0, context, whole))

    def mask_arguments(self, i: Int32) -> tuple[Int32, Int32, cutlass.Boolean]:
        """(key_row, limit, straddles) of the i-th block, for mask.mask (which keeps all of a whole one)."""
        own = (i < self.own_masked) | (i >= self.masked + self.context_whole)
        return self.key_row(i), cutlass.select_(own, self.row_end, self.context_end), own & self.straddles

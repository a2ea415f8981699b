"""lse and dpsum of query rows in the backward: columns of an operand, which the tensor cores add to S and dP.

What P and dS are made of is S - lse / softmax_scale and dP - dpsum. Both come out of the products themselves if the rows
of Q and dO go on with a few columns that hold the statistics, and those of K and V with ones there: a number of fp32 is
three of bf16. So no thread loads statistics, holds them in registers or adds them.

A row's columns are 16 bytes. A product takes twice as many, and is shown them twice: they hold halves. The keys' columns
are the same for all keys, so that one matrix of eight rows stands for all.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from codegen.tiles import STAT_COLUMNS
from cute_kernels.ptx import store_volatile

ONES = 0x3F803F80  # two of bf16, the first one in the low half
KEY_COLUMNS = (ONES, ONES & 0xFFFF, 0, 0), (0, ONES & 0x7FFF0000, ONES, 0)  # of S and dP: ones where lse or dpsum is
KEYS_BYTES = 256  # of shared memory


def fill_keys(sKeys: cute.Pointer) -> None:
    """Write the keys' columns, by one warp: two matrices of eight equal rows."""
    lane = cute.arch.lane_idx()
    for which, row in enumerate(KEY_COLUMNS):
        pair = Int32(0)
        for j, ones in enumerate(row):
            pair = cutlass.select_(lane % 4 == j, Int32(ones), pair)
        store_volatile(sKeys + 64 * which + 2 * lane, pair)


def stat_product(rows: int) -> cute.TiledMma:
    """Statistics of so many query rows, to an accumulator of S^T or dP^T (64 keys)."""
    K_major = warpgroup.OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(BFloat16, BFloat16, K_major, K_major, Float32, (1, 1, 1), (64, rows))


def stat_keys(mma: cute.TiledMma, keys: cute.Pointer, which: int) -> cute.Tensor:
    """The keys' operand in the product of S (0) or dP (1)."""
    layout = cute.make_layout(((8, 8), (8, 2)), stride=((8, 0), (1, 0)))
    tile = cute.make_tensor(keys + 64 * which, layout)
    return mma.make_fragment_A(mma.get_slice(0).partition_A(tile))


def stat_rows(mma: cute.TiledMma, sStat: cute.Tensor, begin: int, rows: int) -> cute.Tensor:
    """The other operand: rows [begin, begin + rows) of a block's statistics (STAT_COLUMNS, M, stages)."""
    _, tile_m, stages = sStat.shape
    strides = (STAT_COLUMNS, 8 * STAT_COLUMNS), (1, 0), tile_m * STAT_COLUMNS
    tile = cute.make_tensor(
        sStat.iterator + begin * STAT_COLUMNS, cute.make_layout(((8, rows // 8), (8, 2), stages), stride=strides)
    )
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))


def broken_dpsum(sStat: cute.Tensor, row: Any, stage: Int32) -> Any:
    """Whether a row's dpsum is not finite: see the preprocess."""
    return Float32(sStat[3, row, stage]) > Float32(2.0**127)

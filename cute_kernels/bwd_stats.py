"""lse and dpsum of query rows in the backward: a few more columns of operands, so that the tensor cores add them.

P and dS are made of S - lse / softmax_scale and dP - dpsum. Both come out of the products themselves if the rows of Q
and dO go on with columns that hold the statistics, and those of K and V with ones there; a number of fp32 is three of
bf16. So no thread loads statistics, which took a twelfth of what shared memory carries, holds them in registers or adds
them (docs/tuning.md, "Statistics by the tensor cores").

A row's columns are 16 bytes. A product takes twice as many, and is shown them twice: they hold halves. The keys'
columns are the same for all keys, so one matrix of eight rows stands for all.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.abi import STAT_COLUMNS
from cute_kernels.ptx import store_volatile

LARGEST = float.fromhex("0x1.fep127")  # of bf16
KEYS_BYTES = 256  # of shared memory
KEYS = (0x3F803F80, 0x00003F80, 0, 0), (0, 0x3F800000, 0x3F803F80, 0)  # ones where lse is, and dpsum; pairs, first low


def fake_stats(heads: cute.SymInt, tile_m: int) -> cute.Tensor:
    """[H, nm * tile_m * STAT_COLUMNS] when preprocess and main kernel are compiled; 32 bits would end at 2^28 rows."""
    width = cute.sym_int64(divisibility=STAT_COLUMNS * tile_m)
    strides = cute.sym_int64(divisibility=STAT_COLUMNS), 1
    return make_fake_tensor(BFloat16, (heads, width), strides, assumed_align=16)


def by_block(stats: cute.Tensor, num_rows: Int32, tile_m: int) -> cute.Tensor:
    """[H, nm * tile_m * STAT_COLUMNS] of so many rows -> (H, nm, tile_m * STAT_COLUMNS)

    nm comes from the rows: the DSL hands out the lower 32 bits of a width.
    """
    num_blocks, size = (num_rows + tile_m - 1) // tile_m, tile_m * STAT_COLUMNS
    shape, strides = (stats.shape[0], num_blocks, size), (stats.stride[0], size, 1)
    return cute.make_tensor(stats.iterator, cute.make_layout(shape, stride=strides))


def stats_of(stats: cute.Tensor, h: Int32, mb: Int32) -> cute.Tensor:
    """(H, nm, n) -> (n) of query block mb of head h, whose place takes 64 bits."""
    size = stats.shape[2]
    return cute.make_tensor((stats[h, None, None].iterator + Int64(mb) * size).align(16), cute.make_layout(size))


# ---------------------------------------------------------------- the preprocess
def stat_columns(lse: Float32, dpsum: Float32, softmax_scale: Float32) -> list[BFloat16]:
    """The STAT_COLUMNS numbers of a row: three that add up to half of -lse / softmax_scale, three to half of -dpsum.

    lse NaN or -inf: the first is LARGEST / 2, which makes P infinite; inf: its negative, which makes P 0. dpsum not
    finite: the fourth is LARGEST, and twice that is too large for fp32, while 0 times it is 0. See bwd_contain.
    """
    half_lse = lse / (-2.0 * softmax_scale)
    half_lse = cute.arch.fmax(cute.arch.fmin(half_lse, Float32(LARGEST / 2)), Float32(-LARGEST / 2))  # NaN: the former
    half = dpsum * -0.5
    known = (half >= -LARGEST / 2) & (half <= LARGEST / 2)
    half = Float32(cutlass.select_(known, half, Float32(LARGEST)))
    return [*_in_three(half_lse), *_in_three(half), BFloat16(0.0), BFloat16(0.0)]


def _in_three(x: Float32) -> list[BFloat16]:
    """Numbers that add up to x: each has 8 of its 24 bits."""
    parts = []
    for _ in range(3):
        parts.append(BFloat16(x))
        x = x - Float32(parts[-1])
    return parts


# ---------------------------------------------------------------- the main kernel
def fill_keys(keys: cute.Pointer) -> None:
    """Write the keys' columns, by one warp: of S and of dP, eight equal rows each."""
    lane = cute.arch.lane_idx()
    for which, row in enumerate(KEYS):
        pair = Int32(0)
        for j, ones in enumerate(row):
            pair = cutlass.select_(lane % 4 == j, Int32(ones), pair)
        store_volatile(keys + 64 * which + 2 * lane, pair)


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
    """Whether a row's dpsum is not finite."""
    return Float32(sStat[3, row, stage]) > Float32(LARGEST / 2)

"""lse and dpsum of query rows in the backward: a few more columns of operands, so that the tensor cores add them.

P and dS are made of S - lse / softmax_scale and dP - dpsum. Both come out of the products themselves if the rows of Q
and dO go on with columns that hold the statistics, and the rows of K and V with ones there; a number of fp32 is three
of bf16. So no thread loads statistics, holds them in registers or adds them; to load them took a twelfth of the traffic
of shared memory (docs/tuning.md, "Statistics by the tensor cores").

A row's columns are 16 bytes. A product takes twice as many, so its descriptor shows it the same bytes twice, and they
hold halves. The keys' columns are the same for all keys, so one matrix of eight rows stands for all.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.abi import STAT_COLUMNS
from cute_kernels.ptx import store_volatile

LARGEST = float.fromhex("0x1.fep127")  # of bf16
KEYS_BYTES = 256  # of shared memory
KEYS = (
    (0x3F803F80, 0x00003F80, 0, 0),
    (0, 0x3F800000, 0x3F803F80, 0),
)  # ones where lse is, and where dpsum is: pairs, the first one low


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


def stats_of(stats: cute.Tensor, h: Int32, m_block: Int32) -> cute.Tensor:
    """(H, nm, n) -> (n) of query block m_block of head h, whose offset takes 64 bits."""
    size = stats.shape[2]
    return cute.make_tensor((stats[h, None, None].iterator + Int64(m_block) * size).align(16), cute.make_layout(size))


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
def fill_keys(keys: cute.Pointer, used: Boolean | None = None) -> None:
    """Write the keys' columns, by one warp: of S and of dP, eight equal rows each. used: whether statistics are added;
    None: they are."""
    lane = cute.arch.lane_idx()
    for which, row in enumerate(KEYS):
        pair = Int32(0)
        for j, ones in enumerate(row):
            pair = cutlass.select_(lane % 4 == j, Int32(ones), pair)
        if used is not None:
            pair = cutlass.select_(used, pair, Int32(0))
        store_volatile(keys + 64 * which + 2 * lane, pair)


class Statistics(NamedTuple):
    """The products that add statistics of some query rows of a block to an accumulator of S^T or dP^T (64 keys)."""

    mma: cute.TiledMma
    lse_keys: cute.Tensor  # the keys' operand: ones where lse is
    dpsum_keys: cute.Tensor  # and where dpsum is
    rows: cute.Tensor  # the other operand, of each stage

    @classmethod
    def of(cls, sStat: cute.Tensor, keys: cute.Pointer, begin: int, rows: int) -> "Statistics":
        """Make the products of rows [begin, begin + rows) of sStat (STAT_COLUMNS, M, stages)."""
        K_major = warpgroup.OperandMajorMode.K
        mma = hopper.make_trivial_tiled_mma(BFloat16, BFloat16, K_major, K_major, Float32, (1, 1, 1), (64, rows))
        rows_operand = _rows_operand(mma, sStat, begin, rows)
        lse_keys, dpsum_keys = (_keys_operand(mma, keys + 64 * which) for which in (0, 1))
        return cls(mma, lse_keys, dpsum_keys, rows_operand)

    def lse(self, stage: Int32) -> tuple[cute.TiledMma, cute.Tensor, cute.Tensor]:
        """Add lse to S^T: an addend of `accumulator.gemm`."""
        return self.mma, self.lse_keys, self.rows[None, None, None, stage]

    def dpsum(self, stage: Int32) -> tuple[cute.TiledMma, cute.Tensor, cute.Tensor]:
        """Add dpsum to dP^T: an addend of `accumulator.gemm`."""
        return self.mma, self.dpsum_keys, self.rows[None, None, None, stage]


def _keys_operand(mma: cute.TiledMma, keys: cute.Pointer) -> cute.Tensor:
    tile = cute.make_tensor(keys, cute.make_layout(((8, 8), (8, 2)), stride=((8, 0), (1, 0))))
    return mma.make_fragment_A(mma.get_slice(0).partition_A(tile))


def _rows_operand(mma: cute.TiledMma, sStat: cute.Tensor, begin: int, rows: int) -> cute.Tensor:
    _, tile_m, stages = sStat.shape
    strides = (STAT_COLUMNS, 8 * STAT_COLUMNS), (1, 0), tile_m * STAT_COLUMNS
    tile = cute.make_tensor(
        sStat.iterator + begin * STAT_COLUMNS, cute.make_layout(((8, rows // 8), (8, 2), stages), stride=strides)
    )
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))


def broken_dpsum(sStat: cute.Tensor, row: Int32 | int, stage: Int32) -> Boolean:
    """Whether a row's dpsum is not finite."""
    return Float32(sStat[3, row, stage]) > Float32(LARGEST / 2)

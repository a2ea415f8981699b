"""Softcapping in the backward: scores are cap * tanh(softmax_scale * S / cap), and dS gets the factor 1 - tanh^2.

The tensor cores cannot subtract lse from S here (bwd_stats), as tanh comes between: threads read lse of their rows from
the statistics in shared memory.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.ptx import round_pair, times_here, unpacked

LARGEST_EXPONENT = 2.0**126  # of a row with P infinite: finite, as the -inf of a hidden pair is added to it


class Softcap(NamedTuple):
    """
    Attributes:
        cap: above 0.
        of_score: exp2(of_score * S) = exp(2 * softmax_scale * S / cap).
    """

    cap: Float32
    of_score: Float32

    @classmethod
    def of(cls, cap: Float32, scale_log2: Float32) -> "Softcap":
        return cls(cap, 2.0 * scale_log2 / cap)


def to_tanh(acc_S: cute.Tensor, cap: Softcap) -> None:
    """S becomes tanh(softmax_scale * S / cap), to 2^-22: tanh.approx, off by 2^-11, times the cap would show in P."""
    for e in range(cute.size(acc_S)):
        half = cute.math.exp2(acc_S[e] * cap.of_score, fastmath=True) * 0.5 + 0.5
        acc_S[e] = 1.0 - cute.arch.rcp_approx(half)


def to_probabilities(
    tanh: cute.Tensor,
    P: cute.Tensor,
    slope: cute.Tensor | None,
    sStat: cute.Tensor,
    first_row: int,
    stage: Int32,
    cap: Softcap,
    dtype: type[cutlass.Numeric],
) -> None:
    """P = exp(score - lse), and P * (1 - tanh^2), rounded to `dtype` in the order of an accumulator.

    Args:
        tanh: of rows of the block from `first_row` on; -inf for hidden pairs.
        P, slope: 16-bit elements; slope None: not asked.
        sStat: (STAT_COLUMNS, M, stages)
    """
    pairs = cute.recast_tensor(P, Int32)
    slope_pairs = cute.recast_tensor(slope, Int32) if slope is not None else None
    lane = cute.arch.lane_idx() % 4 * 2
    of_tanh = times_here(cap.cap, math.log2(math.e))  # exp2(of_tanh * tanh) = exp(score)
    of_lse = times_here(cap.cap, cap.of_score)  # exp2(of_lse * row_lse) = exp(-lse)
    for c in range(cute.size(tanh) // 4):  # 8 query rows, of which the thread has two
        lse = [row_lse(sStat, first_row + 8 * c + lane + i, stage) * of_lse for i in range(2)]
        lse = [cute.arch.fmin(x, Float32(LARGEST_EXPONENT)) for x in lse]
        for r in range(2):
            t = [tanh[4 * c + 2 * r + i] for i in range(2)]
            p = [cute.math.exp2(t[i] * of_tanh + lse[i], fastmath=True) for i in range(2)]
            pairs[2 * c + r] = round_pair(dtype, *p)
            if const_expr(slope is not None):
                t = [cute.arch.fmax(x, Float32(-1.0)) for x in t]  # a hidden pair gets 0 * 0, not 0 * inf
                slope_pairs[2 * c + r] = round_pair(dtype, *(p[i] * (1.0 - t[i] * t[i]) for i in range(2)))


def slope_of(slope: cute.Tensor, e: int) -> Float32:
    """An element of what `to_probabilities` leaves."""
    return unpacked(slope.element_type, cute.recast_tensor(slope, Int32)[e // 2], e % 2 == 1)


def row_lse(sStat: cute.Tensor, row: Int32, stage: Int32) -> Float32:
    """Half of -lse / softmax_scale of a query row."""
    columns = cute.make_rmem_tensor(4, sStat.element_type)
    cute.autovec_copy(cute.local_tile(sStat[None, row, stage], (4,), (0,)), columns)
    return Float32(columns[0]) + Float32(columns[1]) + Float32(columns[2])

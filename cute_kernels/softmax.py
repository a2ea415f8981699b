"""Online softmax of score tiles held as wgmma accumulators (accumulator.py says which element is where)."""

import math
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.accumulator import reduce_tree, row_elements

# Each row has a reference maximum, `row_max`: a number that its scores are reduced by before the exponential. Any
# reference gives the same result as long as nothing overflows, 16-bit and fp32 numbers being floating point.

FIRST_MAX = -float.fromhex("0x1.fffffep127")  # the first reference, the least fp32 number: exp2(-inf - FIRST_MAX) = 0,
# so a row may be empty in any block, and no score is below it
RESCALE_AT = 8.0  # a row's maximum may exceed its reference by 2 to this power
HALF_LIMIT = 2.0**15  # for the sum of a thread's probabilities of a block in fp16: each one fits
SUM_LIMIT = 2.0**64  # for the sum of a row's probabilities; beyond, the row has outgrown its reference
REFERENCE_LIMIT = 2.0**12  # for a reference in powers of two, up to which `_exp2` may subtract its rounded product


def row_maxima(acc_S: cute.Tensor) -> list[Float32]:
    """The largest score of each of the thread's rows."""
    own = [reduce_tree(cute.arch.fmax, [acc_S[e] for e in row_elements(acc_S, r)]) for r in range(2)]
    return [cute.arch.warp_reduction_max(x, threads_in_group=4) for x in own]  # four threads hold a row


def online_softmax(
    acc_S: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    o_scale: cute.Tensor,
    scale_log2: Float32,
    others: list[Float32] | None = None,
) -> None:
    """acc_S becomes exp2((s - reference) * scale_log2); row_sum is this thread's part; O must be multiplied by o_scale.

    The reference moves only when the maximum exceeds it by 2^RESCALE_AT, so that O is rarely rescaled. fp16
    probabilities stay below 2^RESCALE_AT, far from overflow.

    o_scale is 0 where it would be below 2^-126. A sum up to SUM_LIMIT loses less than 2^-62 of the row by that. A
    larger sum becomes inf and stays inf or NaN, so that the tile's end sees that the row has outgrown its reference:
    times 0, the sum would look as if it had not.

    others: the largest of the scores of each row that another warp group has.
    """
    for r in range(2):
        elements = row_elements(acc_S, r)
        new_max = cute.arch.fmax(row_max[r], reduce_tree(cute.arch.fmax, [acc_S[e] for e in elements]))
        if others is not None:
            new_max = cute.arch.fmax(new_max, others[r])
        new_max = cute.arch.warp_reduction_max(new_max, threads_in_group=4)  # four threads hold a row
        grown = (new_max - row_max[r]) * scale_log2 > RESCALE_AT
        new_max = cutlass.select_(grown, new_max, row_max[r])
        o_scale[r] = cute.math.exp2((row_max[r] - new_max) * scale_log2, fastmath=True)
        row_max[r] = new_max
    for r in range(2):
        elements = row_elements(acc_S, r)
        for e in elements:  # the difference first: exact whatever the size, and the product overflows to -inf alone
            acc_S[e] = cute.math.exp2((acc_S[e] - row_max[r]) * scale_log2, fastmath=True)
        earlier = cutlass.select_(row_sum[r] > SUM_LIMIT, Float32(float("inf")), row_sum[r] * o_scale[r])
        row_sum[r] = earlier + reduce_tree(operator.add, [acc_S[e] for e in elements])


def fixed_softmax(acc_S: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, scale_log2: Float32) -> None:
    """acc_S becomes exp2((s - reference) * scale_log2), with the reference unchanged, whatever the scores are."""
    part = _exp2(acc_S, row_max, scale_log2)
    for r in range(2):
        row_sum[r] += part[r]


@cute.jit
def half_softmax(
    acc_S: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, o_scale: cute.Tensor, scale_log2: Float32
) -> None:
    """Run fixed_softmax, but where probabilities come near the limit of fp16, the reference moves and scales them down.

    O must be multiplied by o_scale. Beyond SUM_LIMIT the reference does not move: fp16 rounds such a probability to
    inf, which stays in O. A factor near 2^-126 would be flushed to 0 instead, and leave zeros that look right.
    """
    part = _exp2(acc_S, row_max, scale_log2)
    o_scale.fill(1.0)
    if cute.arch.vote_any_sync((part[0] > HALF_LIMIT) | (part[1] > HALF_LIMIT)):
        for r in cutlass.range_constexpr(2):
            largest = cute.arch.warp_reduction_max(part[r], threads_in_group=4)
            new_max = row_max[r] + cute.math.log2(largest, fastmath=True) / scale_log2
            new_max = cutlass.select_((largest > HALF_LIMIT) & (largest <= SUM_LIMIT), new_max, row_max[r])
            o_scale[r] = cute.math.exp2((row_max[r] - new_max) * scale_log2, fastmath=True)
            row_max[r] = new_max
            for e in row_elements(acc_S, r):
                acc_S[e] = acc_S[e] * o_scale[r]
    for r in cutlass.range_constexpr(2):
        row_sum[r] = (row_sum[r] + part[r]) * o_scale[r]


def _exp2(acc_S: cute.Tensor, row_max: cute.Tensor, scale_log2: Float32) -> list[Float32]:
    """acc_S becomes exp2((s - reference) * scale_log2); returns this thread's sums.

    One multiply-add a score: the scaled reference is rounded, which shifts exponents by up to 2^-24 of it. The tile's
    end checks that references are within REFERENCE_LIMIT, where that is less than 2^-12.
    """
    part = []
    for r in range(2):
        reference, elements = row_max[r] * scale_log2, row_elements(acc_S, r)
        for e in elements:
            acc_S[e] = cute.math.exp2(acc_S[e] * scale_log2 - reference, fastmath=True)
        part.append(reduce_tree(operator.add, [acc_S[e] for e in elements]))
    return part


@cute.jit
def rescale(acc_O: cute.Tensor, o_scale: cute.Tensor) -> None:
    """O *= o_scale, if the reference of any row of the warp has moved."""
    if cute.arch.vote_any_sync((o_scale[0] != 1.0) | (o_scale[1] != 1.0)):
        for r in cutlass.range_constexpr(2):
            for e in row_elements(acc_O, r):
                acc_O[e] = acc_O[e] * o_scale[r]


def cap(acc_S: cute.Tensor, factor: Float32) -> None:
    """acc_S becomes tanh(s * factor / (2 log2(e))), off by less than 2^-21; `tanh.approx` is off by 2^-11.

    tanh(x) is 1 - 2 / (exp(2 x) + 1). The exponential may be 0 or infinite: then tanh is -1 or 1.
    """
    for e in range(cute.size(acc_S)):
        acc_S[e] = capped(acc_S[e], factor)


def capped(score: Float32, factor: Float32) -> Float32:
    """The result of `cap` for a score."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(score * factor, fastmath=True) + 1.0)


def normalize(
    acc_O: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    lse: cute.Tensor,
    scale: Float32,
    sinks: list[Float32] | None,
) -> None:
    """row_sum becomes the whole row's; O /= row_sum; lse[r] = natural log of the row's sum of exp(scale * s).

    sinks: a logit each, in the sum of O and lse and not in row_sum, as of one more key without a value. A sink of -inf
    changes nothing; one of +inf takes all of the row.
    """
    for r in range(2):
        row_sum[r] = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
        total, reference = row_sum[r], row_max[r] * scale
        if sinks is not None:  # relative to the larger one of the reference and the sink
            excess = (sinks[r] - reference) * math.log2(math.e)
            above = excess > 0.0
            kept = cute.math.exp2(cutlass.select_(above, -excess, Float32(0.0)), fastmath=True)
            total = total * kept + cute.math.exp2(cutlass.select_(above, Float32(0.0), excess), fastmath=True)
            reference = cutlass.select_(above, sinks[r], reference)
        lse[r] = reference + cute.math.log(total, fastmath=True)
        inverse = cute.arch.rcp_approx(total)
        if sinks is not None:
            inverse = inverse * kept
        for e in row_elements(acc_O, r):
            acc_O[e] = acc_O[e] * inverse

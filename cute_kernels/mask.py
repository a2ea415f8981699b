"""The visibility rule on the device: which scores of a masked key block a query row keeps.

tests/test_plan.py has the same rule in numpy (`visible`) and proves it together with the plan.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.accumulator import column, row_elements


@cute.jit
def mask(
    acc_S: cute.Tensor,
    q_row: cute.Tensor,  # (2) packed row of each of the thread's query rows
    segment_begin: cute.Tensor,  # (T) where each row's segment begins
    key_row: Int32,  # packed row of the block's first key
    limit: Int32,  # first key row past the region
    straddles: cutlass.Boolean,  # own keys of a tile with rows of several segments
) -> None:
    """Keep keys k <= q below the limit, and where segments straddle, k >= begin; the rest becomes -inf."""
    first = key_row + cute.arch.lane_idx() % 4 * 2
    for r in cutlass.range_constexpr(2):
        end = cutlass.min(q_row[r] + 1, limit) - first
        for e in row_elements(acc_S, r):
            acc_S[e] = acc_S[e] if column(e) < end else -Float32.inf
    if straddles:
        for r in cutlass.range_constexpr(2):
            low = segment_begin[q_row[r]] - first
            for e in row_elements(acc_S, r):
                acc_S[e] = acc_S[e] if column(e) >= low else -Float32.inf

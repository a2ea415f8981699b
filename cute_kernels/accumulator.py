"""wgmma on 64-row tiles: issuing products, and where their elements live in registers.

An accumulator of one warp group (64 x n, fp32) is a linear list: element e = 4*chunk + 2*r + i holds row
16*warp + lane//4 + 8*r, column 8*chunk + 2*(lane%4) + i. The A operand from registers has the same order, so a
probability tile becomes an operand by rounding pairs of neighbours.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.ptx import round_pair, zero_times

Number = TypeVar("Number")


def row_elements(acc: cute.Tensor, r: int) -> list[int]:
    """Indices of a thread's row r (0 or 1): 8 rows apart, every column it holds."""
    return [4 * chunk + 2 * r + i for chunk in range(cute.size(acc) // 4) for i in range(2)]


def column(element: int) -> int:
    """Column of an element, less the thread's own 2 * (lane % 4)."""
    return element // 4 * 8 + element % 2


def gemm(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    zero: bool,
    first: int = 0,
    addends: Sequence[tuple[cute.TiledMma, cute.Tensor, cute.Tensor]] = (),
) -> None:
    """Issue acc = a @ b^T (zero) or acc += a @ b^T as one wgmma group, and do not wait for it.

    first: the sixteen of b's columns that a's first one is multiplied with.
    addends: further products (mma, a, b) that are added to acc.
    """
    warpgroup.fence()
    _issue(mma, acc, a, b, zero, first)
    for added_mma, added_a, added_b in addends:
        _issue(added_mma, acc, added_a, added_b, False, 0)
    warpgroup.commit_group()


def _issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero: bool, first: int) -> None:
    atom = cute.make_mma_atom(mma.op)  # a fresh one: its accumulate flag is mutable
    for k in range(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, not (zero and k == 0))
        cute.gemm(atom, acc, a[None, None, k], b[None, None, first + k], acc)


def part(x: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """Elements [first, first + count) of a register tensor in linear order."""
    return cute.make_tensor(x.iterator + first, cute.make_layout(count))


def reduce_tree(op: Callable[[Number, Number], Number], values: Sequence[Number], chains: int = 4) -> Number:
    """op over all values, in a few independent chains."""
    part = list(values[:chains])
    for j in range(chains, len(values)):
        part[j % chains] = op(part[j % chains], values[j])
    while len(part) > 1:
        part = [op(part[j], part[j + 1]) if j + 1 < len(part) else part[j] for j in range(0, len(part), 2)]
    return part[0]


def round_to(acc: cute.Tensor, frag: cute.Tensor) -> None:
    """fp32 accumulator -> 16-bit fragment of the same order, to nearest, two a register."""
    pairs = cute.recast_tensor(frag, Int32)
    for j in range(cute.size(pairs)):
        pairs[j] = round_pair(frag.element_type, acc[2 * j], acc[2 * j + 1])


def not_finite(frag: cute.Tensor) -> Int32:
    """Return a number that is not 0 if one of a thread's 16-bit elements is not finite: 0 times them adds up to NaN
    then."""
    pairs = cute.recast_tensor(frag, Int32)
    sums = [Int32(0)] * 4
    for j in range(cute.size(pairs)):
        sums[j % 4] = zero_times(pairs[j], sums[j % 4], frag.element_type is cutlass.BFloat16)
    return (sums[0] | sums[1] | sums[2] | sums[3]) & 0x7FFF7FFF


def remove_not_finite(quad: cute.Tensor, dtype: type[cutlass.Numeric]) -> Int32:
    """Zero what is not finite among eight 16-bit elements in four 32-bit words. Return not 0 if there was any."""
    exponent, lowest = (0x7F807F80, 0x00800080) if dtype is cutlass.BFloat16 else (0x7C007C00, 0x04000400)
    found = Int32(0)
    for j in range(4):  # the lowest bit of an exponent of ones carries into the sign's place
        broken = (((quad[j] & exponent) + lowest) >> 15) & 0x00010001
        found |= broken
        quad[j] = quad[j] & ~(broken * 0xFFFF)
    return found


def words(tile: cute.Tensor) -> cute.Tensor:
    """(4, 16-byte units) Int32 of a swizzled tile in shared memory, as it lies there."""
    ptr = cute.recast_ptr(tile.iterator, cute.make_swizzle(0, 4, 3), dtype=Int32)
    return cute.make_tensor(ptr, cute.make_layout((4, cute.size(tile) // 8)))

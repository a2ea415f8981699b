"""The accumulators of the backward's main kernels: the mask of S^T, and how dV and dK are written.

Their rows are keys. `accumulator` says which elements a thread holds.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_kernels.accumulator import column, part, round_to
from cute_kernels.bwd_arguments import Mask, SavedItem, Shared
from cute_kernels.bwd_window import Windows
from cute_kernels.ptx import load_volatile, store_volatile


def as_pairs(x: cute.Tensor) -> cute.Tensor:
    """(T, H, D) of 16-bit elements -> (T, H, D / 2), two of them in 32 bits."""
    shape, stride = (x.shape[0], x.shape[1], x.shape[2] // 2), (x.stride[0] // 2, x.stride[1] // 2, 1)
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Int32), cute.make_layout(shape, stride=stride))


def transpose_4x4(values: list[Int32], lane: Int32) -> list[Int32]:
    """Transpose values among four neighbouring threads: thread `lane` (0 to 3) gets element `lane` of each of them."""
    x = list(values)
    for bit in (1, 2):
        high = (lane & bit) != 0
        for i in (j for j in range(4) if not j & bit):  # elements i and i + bit
            got = cute.arch.shuffle_sync_bfly(cutlass.select_(high, x[i], x[i + bit]), bit)
            x[i], x[i + bit] = cutlass.select_(high, got, x[i]), cutlass.select_(high, x[i + bit], got)
    return x


Rows = list[tuple[cute.Pointer, Boolean]]


def rows_of(out: cute.Tensor, kv_head: Int32, n: Int32, key_end: Int32) -> Rows:
    """Rows n and n + 8 of out (T, Hk, D/2 pairs): where each begins, and whether it is below key_end."""
    return [(out[cutlass.min(n + i, key_end - 1), kv_head, None].iterator, n + i < key_end) for i in (0, 8)]


@cute.jit
def store_chunks(acc: cute.Tensor, dtype: cutlass.Constexpr, rows: Rows, first: Int32, num_pairs: Int32) -> None:
    """Four chunks (of eight columns) from `first` on of an accumulator -> rows of 32-bit pairs, see `rows_of`.

    The four threads of a row each hold a pair of every chunk. They exchange them so that each one writes all of one
    chunk: single pairs take four times as many passes through the store unit.
    """
    rounded = cute.make_rmem_tensor(16, dtype)
    round_to(acc, rounded)
    pairs, lane = cute.recast_tensor(rounded, Int32), cute.arch.lane_idx() % 4
    for r in cutlass.range_constexpr(2):
        row, valid = rows[r]
        chunk = cute.make_rmem_tensor(4, Int32)
        for j, x in enumerate(transpose_4x4([pairs[2 * i + r] for i in range(4)], lane)):
            chunk[j] = x
        if valid & (4 * (first + lane) < num_pairs):
            dst = (row + 4 * (first + lane)).align(16)
            cute.autovec_copy(chunk, cute.make_tensor(dst, cute.make_layout(4)))


class Destination(NamedTuple):
    """The destination of a CTA's dK and dV."""

    kv_head: Int32
    key: Int32
    key_end: Int32
    partial: Int32  # -1: to dk and dv, else to these partial sums


class Results(Windows):
    """A mixin of :class:`cute_kernels.bwd_frame.BackwardFrame`: it masks S^T, and writes dK and dV."""

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int

    @cute.jit
    def mask(self, acc_S: cute.Tensor, m0: Int32, mask: Mask) -> None:
        """S^T of query rows from m0 on: hidden pairs become -inf. Most blocks need no mask and skip this."""
        if m0 < mask.unmasked_begin or m0 + cute.size(acc_S) * 2 > mask.unmasked_end:
            if const_expr(self.windowed):
                self.hide(acc_S, m0, mask, -math.inf)
            else:
                for e in cutlass.range_constexpr(cute.size(acc_S)):
                    r = e // 2 % 2
                    visible = (column(e) >= mask.key[r] - m0) & (column(e) < mask.visible_end[r] - m0)
                    acc_S[e] = acc_S[e] if visible else -Float32.inf

    # ---------------------------------------------------------------- the item, after the loop
    def save_item(self, s: Shared, saved: SavedItem) -> None:
        """Save the item, by one warp, before the loops of the other warps."""
        with cute.arch.elect_one():
            for j, field in enumerate(saved):
                store_volatile(s.item + j, field)

    def saved(self, s: Shared, *names: str) -> tuple[Int32, ...]:
        """Fields of the saved item."""
        return tuple(load_volatile(s.item + SavedItem._fields.index(name)) for name in names)

    # ---------------------------------------------------------------- dK and dV
    @cute.jit
    def store_keys(
        self,
        results: tuple[tuple[cute.Tensor, cute.Tensor, int], ...],
        partials: cute.Tensor,
        end: Destination,
        row: Int32,
        first_partial: Int64 | None = None,
    ) -> None:
        """Write dK and dV, or their partial sums where the item is split.

        Args:
            results: accumulators (64 keys x D or Dv), the tensors that they belong to, and 0 (dK) or 1 (dV).
            row: the thread's keys are `row` and `row` + 8 of the CTA's.
            first_partial: the result of :meth:`first_partial`; where it is not given, split items alone compute it.
        """
        size = self.tile_n * self.head_dim  # dV's sums lie behind those of dK
        if end.partial < 0:
            for acc, out, _ in results:
                self.store_rows(acc, out, end.kv_head, end.key + row, end.key_end)
        else:
            first = self.first_partial(end.partial) if const_expr(first_partial is None) else first_partial
            for acc, _, which in results:
                self.store_partial(acc, partials.iterator + (first + which * size), row)

    def destination(self, s: Shared) -> Destination:
        """Read the destination of this CTA's results from the saved item."""
        return Destination(*self.saved(s, "kv_head", "key", "key_end", "partial"))

    def first_partial(self, partial: Int32) -> Int64:
        """The offset of this CTA's partial sums."""
        return Int64(partial) * self.partial_floats() + self.rank() * (self.tile_n * (self.head_dim + self.head_dim_v))

    def partial_floats(self) -> int:
        """Floats of the partial sums of an item."""
        raise NotImplementedError

    def store_rows(self, acc: cute.Tensor, out: cute.Tensor, kv_head: Int32, n: Int32, key_end: Int32) -> None:
        """acc (64 keys x D or Dv) of one warp group -> out, in pairs: this thread's keys are n and n + 8."""
        rows = rows_of(out, kv_head, n, key_end)
        for c in range(0, cute.size(acc) // 4, 4):
            store_chunks(part(acc, 4 * c, 16), self.dtype, rows, Int32(c), out.shape[2])

    def store_partial(self, acc: cute.Tensor, partial: cute.Pointer, row: Int32) -> None:
        """acc (64 keys x D or Dv) of one warp group -> partial sums, as it lies in registers.

        In fp32: [16 keys][chunk][lane][4]. This thread's first key is `row`.
        """
        chunks = cute.size(acc) // 4
        own = (partial + (row // 16 * (chunks * 128) + cute.arch.lane_idx() * 4)).align(16)
        dst = cute.make_tensor(own, cute.make_layout((4, chunks), stride=(1, 128)))
        for c in range(chunks):
            cute.autovec_copy(part(acc, 4 * c, 4), dst[None, c])

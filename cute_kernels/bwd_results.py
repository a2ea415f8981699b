"""What the backward's main kernels do with accumulators whose rows are keys (S^T, dV, dK) or columns of dQ (dQ^T)."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.accumulator import column, part, round_to
from cute_kernels.ptx import add_to_global


def as_pairs(x: cute.Tensor) -> cute.Tensor:
    """(T, H, D) of 16-bit elements -> (T, H, D / 2), two of them in 32 bits."""
    shape, stride = (x.shape[0], x.shape[1], x.shape[2] // 2), (x.stride[0] // 2, x.stride[1] // 2, 1)
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Int32), cute.make_layout(shape, stride=stride))


def exchange(values: list[Any], lane: Int32) -> list[Any]:
    """Of four threads in a row: thread `lane` (0 to 3) gets what each of them has in place `lane` of its four."""
    x = list(values)
    for bit in (1, 2):
        high = (lane & bit) != 0
        for i in (j for j in range(4) if not j & bit):  # places i and i + bit
            got = cute.arch.shuffle_sync_bfly(cutlass.select_(high, x[i], x[i + bit]), bit)
            x[i], x[i + bit] = cutlass.select_(high, got, x[i]), cutlass.select_(high, x[i + bit], got)
    return x


def rows_of(out: cute.Tensor, kv_head: Int32, n: Int32, key_end: Int32) -> list[tuple[cute.Pointer, cutlass.Boolean]]:
    """Rows n and n + 8 of out (T, Hk, D/2 pairs): where each begins, and whether it is below key_end."""
    return [(out[cutlass.min(n + i, key_end - 1), kv_head, None].iterator, n + i < key_end) for i in (0, 8)]


@cute.jit
def store_chunks(acc: cute.Tensor, dtype: cutlass.Constexpr, rows: Any, first: Int32, num_pairs: Int32) -> None:
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
        for j, x in enumerate(exchange([pairs[2 * i + r] for i in range(4)], lane)):
            chunk[j] = x
        if valid & (4 * (first + lane) < num_pairs):
            dst = (row + 4 * (first + lane)).align(16)
            cute.autovec_copy(chunk, cute.make_tensor(dst, cute.make_layout(4)))


class Results:
    """Mask S^T, write dK and dV, add dQ up. Of :class:`cute_kernels.bwd_frame.BackwardFrame`."""

    dtype: type[cutlass.Numeric]
    head_dim: int
    tile_m: int

    def add_all(self, acc_dQ: cute.Tensor, dst: cute.Pointer, stride: int, begin: int, end: int) -> None:
        """Chunks [begin, end) of dQ^T, each four floats a thread, to `dst` and every `stride` floats from there."""
        for c in range(begin, end):
            add_to_global(dst + c * stride, *[acc_dQ[4 * c + j] for j in range(4)])

    @cute.jit
    def mask(
        self,
        acc_S: cute.Tensor,
        m0: Int32,
        key: cute.Tensor,
        key_visible: cute.Tensor,
        clean_begin: Int32,
        clean_end: Int32,
    ) -> None:
        """S^T of query rows from m0 on: keep key <= q < key_visible. Most blocks skip it."""
        if m0 < clean_begin or m0 + cute.size(acc_S) * 2 > clean_end:
            for e in cutlass.range_constexpr(cute.size(acc_S)):
                r = e // 2 % 2
                seen = (column(e) >= key[r] - m0) & (column(e) < key_visible[r] - m0)
                acc_S[e] = acc_S[e] if seen else -Float32.inf

    def store(self, acc: cute.Tensor, out: cute.Tensor, kv_head: Int32, n: Int32, key_end: Int32) -> None:
        """acc (64 keys x D) of one warp group -> out (T, Hk, D/2 pairs): this thread's keys are n and n + 8."""
        rows = rows_of(out, kv_head, n, key_end)
        for c in range(0, self.head_dim // 8, 4):
            store_chunks(part(acc, 4 * c, 16), self.dtype, rows, Int32(c), out.shape[2])

    def store_slab(self, acc: cute.Tensor, slab: cute.Pointer, row: Int32) -> None:
        """acc (64 keys x D) of one warp group -> slab, as it lies in registers: [16 keys][chunk][lane][4] fp32.

        This thread's first key is `row`.
        """
        chunks = self.head_dim // 8
        own = (slab + (row // 16 * (chunks * 128) + cute.arch.lane_idx() * 4)).align(16)
        dst = cute.make_tensor(own, cute.make_layout((4, chunks), stride=(1, 128)))
        for c in range(chunks):
            cute.autovec_copy(part(acc, 4 * c, 4), dst[None, c])

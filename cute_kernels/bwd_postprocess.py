"""The kernel after the backward's main kernel: dQ from its fp32 sums."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.utils import SmemAllocator

from cute_kernels import fakes
from cute_kernels.abi import LOCKS, clears_ahead
from cute_kernels.accumulator import round_to
from cute_kernels.bwd_frame import split_rows
from cute_kernels.ptx import transpose_8x8

VECTOR = 8  # elements of a 128-bit store


class BackwardPostprocess:
    """dQ = softmax_scale * dq_acc, rounded, from the order of the main kernel's registers into rows.

    Memory-bound: one CTA a query block and head. At run time any T, H, strides and head dim D <= head_dim.

    Arguments of the compiled kernel, in order (`fake_arguments` builds matching fakes):
        dq_acc: [H * nm * tile_m * head_dim] fp32, nm = ceil(T / tile_m). Of each block: [chunk][thread][4]; value
            2r + i of thread 32 * warp + lane is column 16 * warp + lane // 4 + 8r, row 8 * chunk + 2 * (lane % 4) + i.
            Where split_rows, 128 threads hold columns, and the next 128 the same of the second half of the rows. Up to
            head dim 128, [warp][chunk][lane][4].
        locks: [lock_words(H * nm)] int32, as the main kernel leaves them, read where `clears_ahead`: a block whose
            first lock is 0 has a dQ of 0, whatever is in dq_acc. Else may be empty.
        dq: [T, H, D] fp16 or bf16; last dimension contiguous, address and strides multiples of 16 bytes. Every element
            is written.
        softmax_scale: fp32.
        stream: taken from the environment (torch's current stream), not passed.

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16.
        head_dim: native head dim of the main kernel, 64 or more.
        tile_m: query rows a block.
    """

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int, *, tile_m: int) -> None:
        self.dtype, self.head_dim, self.tile_m = dtype, head_dim, tile_m
        self.threads = 256 if split_rows(head_dim) else 2 * head_dim
        self.rows = tile_m // 2 if split_rows(head_dim) else tile_m  # of a thread's columns

    def fake_arguments(self) -> tuple[object, ...]:
        """Arguments for `cute.compile(kernel, *kernel.fake_arguments(), options=...)`: dynamic shapes and strides."""
        dq = fakes.packed(self.dtype, cute.sym_int32(), cute.sym_int32(), fakes.head_dim())
        dq_acc = fakes.flat(Float32, cute.sym_int64(), fakes.ALIGNMENT)
        return dq_acc, fakes.flat(Int32, cute.sym_int64()), dq, Float32(0.0), fakes.stream()

    @cute.jit
    def __call__(
        self,
        dq_acc: cute.Tensor,  # (H * nm * M * head_dim)
        locks: cute.Tensor,  # (lock_words(H * nm))
        dq: cute.Tensor,  # (T, H, D)
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ) -> None:
        num_blocks = (dq.shape[0] + self.tile_m - 1) // self.tile_m
        self.kernel(dq_acc, locks, dq, softmax_scale, num_blocks).launch(
            grid=[num_blocks * dq.shape[1], 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, dq_acc: cute.Tensor, locks: cute.Tensor, dq: cute.Tensor, scale: Float32, num_blocks: Int32
    ) -> None:
        M, D, tid, lane = self.tile_m, self.head_dim, cute.arch.thread_idx()[0], cute.arch.lane_idx()
        num_rows, num_heads, dim = dq.shape
        h, mb = cute.arch.block_idx()[0] % num_heads, cute.arch.block_idx()[0] // num_heads
        row = D + VECTOR  # elements of a row in shared memory: padding keeps the 8 rows of a store in different banks
        tile = SmemAllocator().allocate_tensor(self.dtype, cute.make_layout((M, D), stride=(row, 1)), 16)
        pairs = cute.make_tensor(
            cute.recast_ptr(tile.iterator, dtype=Int32), cute.make_layout((M, D // 2), stride=(row // 2, 1))
        )
        by_warp = tid // 32 * (16 * self.rows) + lane * 4, 128
        first, stride = by_warp if cutlass.const_expr(D <= 128) else (tid * 4, 4 * self.threads)
        block = Int64(h) * num_blocks + mb
        source = dq_acc.iterator + (block * (M * D) + first)
        quads = cute.make_tensor(source.align(16), cute.make_layout((4, self.rows // 8), stride=(1, stride)))
        values = cute.make_rmem_tensor((4, self.rows // 8), Float32)
        values.fill(0.0)
        if not cutlass.const_expr(clears_ahead(D)) or locks[block * LOCKS] != 0:
            for c in cutlass.range_constexpr(self.rows // 8):
                cute.autovec_copy(quads[None, c], values[None, c])
        first_row = tid // 128 * self.rows if cutlass.const_expr(split_rows(self.head_dim)) else 0
        first_column = (tid % 128 if cutlass.const_expr(split_rows(self.head_dim)) else tid) // 32 * 16
        for c in cutlass.range_constexpr(self.rows // 8):
            quad, rounded = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, self.dtype)
            for j in cutlass.range_constexpr(4):
                quad[j] = values[j, c] * scale
            round_to(quad, rounded)
            two = cute.recast_tensor(rounded, Int32)
            for r in cutlass.range_constexpr(2):  # now lane // 4 is the row, 2 * (lane % 4) + {0, 1} the column
                pairs[first_row + 8 * c + lane // 4, first_column // 2 + 4 * r + lane % 4] = transpose_8x8(two[r])
        cute.arch.sync_threads()
        lanes = D // VECTOR
        for i in cutlass.range(tid, M * lanes, self.threads, unroll=1):
            m, column = i // lanes, i % lanes
            if mb * M + m < num_rows and column * VECTOR < dim:
                vector = cute.make_rmem_tensor(VECTOR, self.dtype)
                cute.autovec_copy(cute.local_tile(tile[m, None], (VECTOR,), (column,)), vector)
                cute.autovec_copy(vector, cute.local_tile(dq[mb * M + m, h, None], (VECTOR,), (column,)))

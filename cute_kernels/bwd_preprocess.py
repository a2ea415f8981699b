"""The kernel before the backward's main kernel: dpsum = rowsum(dO * O), the statistics of every query row, zeros."""

import math
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.utils import SmemAllocator

from cute_kernels import fakes
from cute_kernels.abi import LOCKS, STAT_COLUMNS, clears_ahead
from cute_kernels.bwd_stats import by_block, fake_stats, stat_columns, stats_of

THREADS = 256
VECTOR = 8  # elements of a 128-bit load


class Features(NamedTuple):
    """Arguments of the kernel's features; None without the feature."""

    dlse: cute.Tensor | None  # (H, T)
    sinks: cute.Tensor | None  # (H)
    dsinks: cute.Tensor | None  # (H, nm)


class BackwardPreprocess:
    """-lse / softmax_scale and -dpsum of each query row, as columns of an operand of the main kernel (bwd_stats); its
    locks and counter, and dq_acc unless it clears that itself, set to zero.

    Memory-bound: one CTA a query block and head. At run time any T, H, strides and head dim Dv <= head_dim_v.

    Arguments of the compiled kernel, in order (`fake_arguments` builds matching fakes):
        out, dout: [T, H, Dv] fp16 or bf16; last dimension contiguous, address and strides multiples of 16 bytes.
        lse: [H, T] fp32, natural log, contiguous along T.
        stats: [H, nm * tile_m * STAT_COLUMNS] bf16, nm = ceil(T / tile_m): `bwd_stats.stat_columns` of each row; rows
            past T say that P and dpsum are 0. Every element is written.
        dq_acc: [H * nm * tile_m * head_dim] fp32. Every element is written, or none where `clears_ahead`. May be empty
            where dQ is not asked.
        locks: [lock_words(H * nm)] int32 or empty. Every element is written.
        softmax_scale: fp32.
        stream: taken from the environment (torch's current stream), not passed.
        of the features that the kernel has, in this order:
            sinks: sinks [H] fp32, logits (natural log) that out and lse include; dsinks [H, nm] fp32, contiguous: each
                block's part of their gradients, every element of which is written.
            dlse: [H, T] fp32, contiguous along T, the gradient of lse: dpsum = rowsum(dO * O) - dlse.

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16.
        head_dim: native head dim of the main kernel.
        head_dim_v: native head dim of out and dout, if it is another one.
        tile_m: query rows a block, a multiple of 16.
        gradients: which of dQ, dK and dV are made: a part of "qkv" in that order. dV alone needs no dpsum: it is 0 (or
            NaN, as below).
    """

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        head_dim: int,
        *,
        tile_m: int,
        gradients: str = "qkv",
        features: tuple[str, ...] = (),
        head_dim_v: int | None = None,
    ) -> None:
        if tile_m % 16 or tile_m > THREADS:
            raise ValueError(f"tile_m is {tile_m}, expected a multiple of 16 up to {THREADS}")
        self.dtype, self.head_dim, self.tile_m = dtype, head_dim, tile_m
        self.sinks, self.dlse = "sinks" in features, "dlse" in features
        self.clear = "q" in gradients and not clears_ahead(head_dim)
        self.want_dpsum = gradients != "v" or self.sinks
        threads = 1 << ((head_dim_v or head_dim) // VECTOR - 1).bit_length()
        self.lanes = min(threads, 32)  # threads a row
        self.vectors = threads // self.lanes  # a thread

    def fake_arguments(self) -> tuple[object, ...]:
        """Arguments for `cute.compile(kernel, *kernel.fake_arguments(), options=...)`: dynamic shapes and strides."""
        rows, heads, dim = cute.sym_int32(), cute.sym_int32(), fakes.head_dim()
        out, dout = (fakes.packed(self.dtype, rows, heads, dim) for _ in range(2))
        lse, stats = fakes.by_head(Float32, heads, rows), fake_stats(heads, self.tile_m)
        dq_acc, locks = fakes.flat(Float32, cute.sym_int64(), fakes.ALIGNMENT), fakes.flat(Int32, cute.sym_int64())
        features: list[object] = []
        if self.sinks:
            features += [fakes.flat(Float32, heads), fakes.by_head(Float32, heads, cute.sym_int32())]
        if self.dlse:
            features.append(fakes.by_head(Float32, heads, cute.sym_int32()))
        return out, dout, lse, stats, dq_acc, locks, Float32(0.0), fakes.stream(), *features

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,  # (T, H, Dv)
        dout: cute.Tensor,  # (T, H, Dv)
        lse: cute.Tensor,  # (H, T)
        stats: cute.Tensor,  # (H, nm * M * STAT_COLUMNS)
        dq_acc: cute.Tensor,  # (H * nm * M * head_dim)
        locks: cute.Tensor,  # (lock_words(H * nm))
        softmax_scale: Float32,
        stream: cuda.CUstream,
        *features: object,
    ) -> None:
        left = iter(features)
        sinks, dsinks = [next(left) if self.sinks else None for _ in range(2)]
        given = Features(next(left) if self.dlse else None, sinks, dsinks)
        stats = by_block(stats, out.shape[0], self.tile_m)
        self.kernel(out, dout, lse, stats, dq_acc, locks, softmax_scale, given).launch(
            grid=[stats.shape[1] * out.shape[1], 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        stats: cute.Tensor,
        dq_acc: cute.Tensor,
        locks: cute.Tensor,
        scale: Float32,
        features: Features,
    ) -> None:
        M, lanes, tid = self.tile_m, self.lanes, cute.arch.thread_idx()[0]
        (num_rows, num_heads, dim), num_blocks = out.shape, stats.shape[1]
        h, mb = cute.arch.block_idx()[0] % num_heads, cute.arch.block_idx()[0] // num_heads
        sum_of_row = SmemAllocator().allocate_tensor(Float32, cute.make_layout(M), 16)
        lane, rows_a_pass = tid % lanes, THREADS // lanes
        for p in cutlass.range_constexpr(-(-M // rows_a_pass)):
            m = tid // lanes + p * rows_a_pass
            t, total = mb * M + m, Float32(0.0)
            for vector in [lane, *(lane + j * lanes for j in range(1, self.vectors))]:
                if m < M and t < num_rows and vector * VECTOR < dim:
                    o, do = [cute.make_rmem_tensor(VECTOR, self.dtype) for _ in range(2)]
                    o.fill(0.0)
                    if cutlass.const_expr(self.want_dpsum):
                        cute.autovec_copy(cute.local_tile(out[t, h, None], (VECTOR,), (vector,)), o)
                    cute.autovec_copy(cute.local_tile(dout[t, h, None], (VECTOR,), (vector,)), do)
                    for e in cutlass.range_constexpr(VECTOR):
                        total += Float32(o[e]) * Float32(do[e])
            total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
            if lane == 0 and m < M:
                if cutlass.const_expr(self.dlse):
                    total = total - features.dlse[h, t] if t < num_rows else total
                sum_of_row[m] = total
        if cutlass.const_expr(self.clear):
            zero = cute.make_rmem_tensor(4, Float32)
            zero.fill(0.0)
            block = dq_acc.iterator + (Int64(h) * num_blocks + mb) * (M * self.head_dim)
            quads = cute.make_tensor(block.align(16), cute.make_layout((4, M * self.head_dim // 4)))
            for i in cutlass.range(tid, M * self.head_dim // 4, THREADS, unroll=4):
                cute.autovec_copy(zero, quads[None, i])
        if locks.shape[0] != 0:
            if tid < LOCKS:
                locks[(Int64(h) * num_blocks + mb) * LOCKS + tid] = Int32(0)
            if cute.arch.block_idx()[0] == 0 and tid == LOCKS:
                locks[Int64(num_heads) * num_blocks * LOCKS] = Int32(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.sinks):
            self.add_sinks(lse, sum_of_row, features, h, mb)
        if tid < M:
            t, of_row = mb * M + tid, Float32.inf
            if t < num_rows:
                of_row = lse[h, t]
            columns = cute.make_rmem_tensor(STAT_COLUMNS, BFloat16)
            for j, x in enumerate(stat_columns(of_row, sum_of_row[tid], scale)):
                columns[j] = x
            row = (stats_of(stats, h, mb).iterator + tid * STAT_COLUMNS).align(16)
            cute.autovec_copy(columns, cute.make_tensor(row, cute.make_layout(STAT_COLUMNS)))

    @cute.jit
    def add_sinks(self, lse: cute.Tensor, sum_of_row: cute.Tensor, features: Features, h: Int32, mb: Int32) -> None:
        """The block's part of the gradient of a head's sink: -sum of exp(sink - lse) * dpsum over its rows.

        A row without a query (lse inf) and a sink of -inf add nothing, whatever dpsum is.
        """
        M, tid, warps = self.tile_m, cute.arch.thread_idx()[0], THREADS // 32
        of_warp = SmemAllocator().allocate_tensor(Float32, cute.make_layout(warps), 16)
        t, sink, part = mb * M + tid, features.sinks[h], Float32(0.0)
        if tid < M and t < lse.shape[1]:
            of_row = lse[h, t]
            if of_row != Float32.inf and sink != -Float32.inf:
                share = cute.math.exp2((sink - of_row) * math.log2(math.e), fastmath=True)
                part = -share * sum_of_row[tid]
        part = cute.arch.warp_reduction_sum(part, threads_in_group=32)
        if tid % 32 == 0:
            of_warp[tid // 32] = part
        cute.arch.sync_threads()
        if tid == 0:
            total = Float32(0.0)
            for w in cutlass.range_constexpr(warps):
                total += of_warp[w]
            features.dsinks[h, mb] = total

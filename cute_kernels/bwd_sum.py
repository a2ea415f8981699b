"""The kernel after the backward's main kernel: dK and dV of items that were split along their queries."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels import fakes
from cute_kernels.abi import BackwardFields as items
from cute_kernels.bwd_results import as_pairs, rows_of, store_chunks

THREADS = 256


class PartialSum:
    """dK and dV of split items: their fp32 partial sums added up in order and rounded.

    Arguments of the compiled kernel, in order (`fake_arguments` builds matching fakes):
        partials: [n_partials * abi.partial_floats] fp32: of each item and CTA, dK and dV as `Results.store_partial`
            writes them.
        sums: [n, 5] int32, which partial sums make which keys (fields: abi.BackwardFields). n >= 1.
        dk, dv: [T, Hk, D] and [T, Hk, Dv] fp16 or bf16, or [0] where not asked; last dimension contiguous, address and
            strides multiples of 16 bytes. The keys of `sums` are written.
        stream: taken from the environment (torch's current stream), not passed.

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16.
        head_dim, head_dim_v, tile_n, cluster, gradients: of the main kernel. Of the gradients, dK or dV at least.
    """

    def __init__(
        self, dtype: type[cutlass.Numeric], head_dim: int, *, tile_n: int, cluster: int, gradients: str = "qkv",
        head_dim_v: int | None = None,
    ) -> None:  # fmt: skip
        self.dtype, self.head_dim, self.tile_n, self.cluster = dtype, head_dim, tile_n, cluster
        self.head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.wanted = ["kv".index(name) for name in gradients if name in "kv"]  # 0: dK, 1: dV

    def fake_arguments(self) -> tuple[object, ...]:
        """Arguments for `cute.compile(kernel, *kernel.fake_arguments(), options=...)`: dynamic shapes and strides."""
        rows, kv_heads, dim = cute.sym_int32(), cute.sym_int32(), fakes.head_dim()
        partials = fakes.flat(Float32, cute.sym_int64(), fakes.ALIGNMENT)
        sums = fakes.table(items.NUM_SUM_FIELDS)
        dims = dim, dim if self.head_dim_v == self.head_dim else fakes.head_dim()
        absent = fakes.flat(self.dtype, cute.sym_int32())
        dk, dv = (
            fakes.packed(self.dtype, rows, kv_heads, of) if which in self.wanted else absent
            for which, of in enumerate(dims)
        )
        return partials, sums, dk, dv, fakes.stream()

    @cute.jit
    def __call__(
        self,
        partials: cute.Tensor,  # (n_partials * partial_floats)
        sums: cute.Tensor,  # (n, 5)
        dk: cute.Tensor,  # (T, Hk, D)
        dv: cute.Tensor,  # (T, Hk, Dv)
        stream: cuda.CUstream,
    ) -> None:
        dk, dv = (as_pairs(x) if which in self.wanted else x for which, x in enumerate((dk, dv)))
        warps = sums.shape[0] * self.cluster * len(self.wanted) * (self.tile_n // 16) * (self.head_dim // 32)
        self.kernel(partials, sums, dk, dv).launch(
            grid=[(warps * 32 + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, partials: cute.Tensor, sums: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor) -> None:
        """A warp adds up 16 keys and 32 columns (four chunks) of dK or dV. Of the latter, warps may be left over."""
        D, N, lane = self.head_dim, self.tile_n, cute.arch.lane_idx()
        # The warp's number, of digits (sum, CTA, dK or dV, 16 keys, 32 columns)
        number = cute.arch.block_idx()[0] * (THREADS // 32) + cute.arch.warp_idx()
        number, four = number // (D // 32), number % (D // 32)
        number, sixteen = number // (N // 16), number % (N // 16)
        both = len(self.wanted) == 2
        number, which = number // len(self.wanted), number % len(self.wanted) if both else Int32(self.wanted[0])
        s, rank = number // self.cluster, number % self.cluster
        columns, due = self.columns(which), s < sums.shape[0]
        if cutlass.const_expr(self.head_dim_v != D):
            due &= four * 32 < columns
        if due:
            total, term = [cute.make_rmem_tensor((4, 4), Float32) for _ in range(2)]
            total.fill(0.0)
            first = sums[s, items.SUM_FIRST]
            for i in cutlass.range(first, first + sums[s, items.SUM_COUNT], 1, unroll=2):
                partial = self.partial(Int64(i) * self.cluster + rank, which)
                offset = partial + (sixteen * (columns // 8) + four * 4) * 128 + lane * 4
                chunks = cute.make_layout((4, 4), stride=(1, 128))
                source = cute.make_tensor((partials.iterator + offset).align(16), chunks)
                for c in cutlass.range_constexpr(4):
                    cute.autovec_copy(source[None, c], term[None, c])
                for e in cutlass.range_constexpr(16):
                    total[e] = total[e] + term[e]
            n = sums[s, items.SUM_KEY] + rank * N + sixteen * 16 + lane // 4
            kv_head, key_end = sums[s, items.SUM_KV_HEAD], sums[s, items.SUM_KEY_END]
            for i in self.wanted:
                if which == i:
                    out = (dk, dv)[i]
                    store_chunks(total, self.dtype, rows_of(out, kv_head, n, key_end), four * 4, out.shape[2])

    def columns(self, which: Int32) -> Int32 | int:
        """The columns of dK (0) or dV (1)."""
        if self.head_dim_v == self.head_dim:
            return self.head_dim
        return cutlass.select_(which == 0, Int32(self.head_dim), Int32(self.head_dim_v))

    def partial(self, cta: Int64, which: Int32) -> Int64:
        """The offset of the partial sums of dK (0) or dV (1) of a CTA, whose number counts the CTAs of all items."""
        if self.head_dim_v == self.head_dim:
            return (cta * 2 + which) * (self.tile_n * self.head_dim)
        return cta * (self.tile_n * (self.head_dim + self.head_dim_v)) + which * (self.tile_n * self.head_dim)

"""After the backward's main kernel: dK and dV of items that were split along their queries."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels import bwd_items as items
from cute_kernels.accumulator import round_to

VECTOR = 8  # the unit of head dims
THREADS = 256


class SlabSum:
    """dK and dV of split items: their fp32 slabs added up in order and rounded.

    Arguments of the compiled kernel, in order (`fake_arguments` builds matching fakes):
        slabs: [n_slabs * cluster * 2 * tile_n * head_dim] fp32: per slab and CTA, dK and dV, rows of head_dim.
        sums: [n, 5] int32, which slabs make which keys (fields: bwd_items.py). n >= 1.
        dk, dv: [T, Hk, D] fp16 or bf16, or [0] where not asked; last dimension contiguous, even strides. The keys of
            `sums` are written.
        stream: taken from the environment (torch's current stream), not passed.

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16.
        head_dim, tile_n, cluster, gradients: of the main kernel. Of the gradients, dK or dV at least.
    """

    def __init__(
        self, dtype: type[cutlass.Numeric], head_dim: int, *, tile_n: int, cluster: int, gradients: str = "qkv"
    ) -> None:
        self.dtype, self.head_dim, self.tile_n, self.cluster = dtype, head_dim, tile_n, cluster
        self.wanted = ["kv".index(name) for name in gradients if name in "kv"]  # 0: dK, 1: dV

    def fake_arguments(self) -> tuple[object, ...]:
        """Arguments for `cute.compile(kernel, *kernel.fake_arguments(), options=...)`: dynamic shapes and strides."""
        rows, kv_heads, dim = cute.sym_int32(), cute.sym_int32(), cute.sym_int32(divisibility=VECTOR)

        def packed() -> cute.Tensor:
            strides = (cute.sym_int64(divisibility=2), cute.sym_int64(divisibility=2), 1)
            return make_fake_tensor(self.dtype, (rows, kv_heads, dim), strides, assumed_align=4)

        slabs = make_fake_tensor(Float32, (cute.sym_int64(),), (1,), assumed_align=16)
        shape, strides = (cute.sym_int32(), items.NUM_SUM_FIELDS), (items.NUM_SUM_FIELDS, 1)
        sums = make_fake_tensor(Int32, shape, strides, assumed_align=4)
        absent = make_fake_tensor(self.dtype, (cute.sym_int32(),), (1,), assumed_align=4)
        dk, dv = (packed() if which in self.wanted else absent for which in range(2))
        return slabs, sums, dk, dv, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(
        self,
        slabs: cute.Tensor,  # (n_slabs * cluster * 2 * tile_n * head_dim)
        sums: cute.Tensor,  # (n, 5)
        dk: cute.Tensor,  # (T, Hk, D)
        dv: cute.Tensor,  # (T, Hk, D)
        stream: cuda.CUstream,
    ) -> None:
        keys_a_cta = THREADS * 4 // self.head_dim  # of dK or dV: 4 columns a thread
        parts = self.cluster * len(self.wanted) * -(-self.tile_n // keys_a_cta)
        self.kernel(slabs, sums, dk, dv, keys_a_cta).launch(
            grid=[sums.shape[0] * parts, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, slabs: cute.Tensor, sums: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, keys_a_cta: cutlass.Constexpr
    ) -> None:
        D, N, tid = self.head_dim, self.tile_n, cute.arch.thread_idx()[0]
        runs, count = -(-N // keys_a_cta), len(self.wanted)
        block = cute.arch.block_idx()[0]
        run, which, rank, s = (
            block % runs,
            block // runs % 2 if count == 2 else Int32(self.wanted[0]),
            block // (count * runs) % self.cluster,
            block // (count * runs * self.cluster),
        )
        dim = (dk if 0 in self.wanted else dv).shape[2]
        row, column = run * keys_a_cta + tid // (D // 4), tid % (D // 4) * 4
        n = sums[s, items.SUM_KEY] + rank * N + row
        if tid < keys_a_cta * (D // 4) and row < N and n < sums[s, items.SUM_KEY_END] and column < dim:
            total, part = [cute.make_rmem_tensor(4, Float32) for _ in range(2)]
            total.fill(0.0)
            first = sums[s, items.SUM_FIRST]
            for i in cutlass.range(first, first + sums[s, items.SUM_COUNT], 1, unroll=2):
                place = ((Int64(i) * self.cluster + rank) * 2 + which) * (N * D) + row * D + column
                source = (slabs.iterator + place).align(16)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), part)
                for j in cutlass.range_constexpr(4):
                    total[j] = total[j] + part[j]
            rounded = cute.make_rmem_tensor(4, self.dtype)
            round_to(total, rounded)
            for j in cutlass.range_constexpr(4):
                for i in self.wanted:
                    if which == i:
                        (dk, dv)[i][n, sums[s, items.SUM_KV_HEAD], column + j] = rounded[j]

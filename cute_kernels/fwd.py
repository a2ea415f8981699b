"""Attention forward on Hopper over packed groups: one launch for a whole micro-batch."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels import items


class ForwardKernel:
    """out = softmax(scale Q K^T, masked) V and its log-sum-exp; query q sees key k iff k <= q < visible_end[k].

    Compiled once for a dtype, a native head dim and a number of packed heads; at run time any T, H, Hk, group count,
    strides, and any head dim D <= head_dim that is a multiple of 8 (the copy engine reads columns past D as zeros and
    drops them on the way out).

    Arguments of the compiled kernel, in order (`fake_arguments` builds matching fakes):
        q: [T, H, D] fp16 or bf16. H a multiple of Hk * packed_heads. T >= 1.
        k, v: [T, Hk, D], dtype of q.
        out: [T, H, D], dtype of q. Every element is written.
        lse: [H, T] fp32, natural log, contiguous along T. Every element is written.
        work: [n, 8] int32, the tiles of `dualkv.plan` for this kernel's tile, longest first (fields: items.py).
        segment_begin: [T] int32, the packed row where each row's segment begins.
        softmax_scale: fp32, above 0.
        num_sms: int32, multiprocessors of the device: CTAs launched at most.
        stream: taken from the environment (torch's current stream), not passed.
    q, k, v and out: last dimension contiguous, base address and all strides multiples of 16 bytes (8 elements).

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16.
        head_dim: native head dim, a multiple of 32 up to 256.
        packed_heads: query heads of one KV head in a tile, 1 to 16.
        tile_n, warp_groups, stages, q_in_registers, cluster: see codegen.tiles.ForwardTile.
    """

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        head_dim: int,
        packed_heads: int,
        *,
        tile_n: int,
        warp_groups: int = 2,
        stages: int = 2,
        q_in_registers: bool = True,
        cluster: int = 2,
    ) -> None:
        self.dtype, self.head_dim, self.packed_heads = dtype, head_dim, packed_heads
        self.tile_n, self.warp_groups, self.stages = tile_n, warp_groups, stages
        self.q_in_registers, self.cluster = q_in_registers, cluster
        self.tokens_wg = 64 // packed_heads

    def fake_arguments(self) -> tuple[object, ...]:
        """Arguments for `cute.compile(kernel, *kernel.fake_arguments(), options=...)`: dynamic shapes and strides."""
        rows, heads, kv_heads, dim = [cute.sym_int32() for _ in range(3)] + [cute.sym_int32(divisibility=8)]

        def packed(num_heads: cute.SymInt) -> cute.Tensor:
            strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
            return make_fake_tensor(self.dtype, (rows, num_heads, dim), strides, assumed_align=16)

        lse = make_fake_tensor(Float32, (heads, rows), (cute.sym_int64(), 1), assumed_align=4)
        work = make_fake_tensor(Int32, (cute.sym_int32(), items.NUM_FIELDS), (items.NUM_FIELDS, 1), assumed_align=16)
        segment_begin = make_fake_tensor(Int32, (rows,), (1,), assumed_align=4)
        q, k, v, out = packed(heads), packed(kv_heads), packed(kv_heads), packed(heads)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return q, k, v, out, lse, work, segment_begin, Float32(0.0), Int32(0), stream

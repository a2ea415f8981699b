"""Attention backward on Hopper: the main kernel of each head dim, and its place among the launches.

bwd_preprocess    dpsum and the statistics of each query block; dQ zeroed beyond head dim 128
bwd               dK and dV (of split items: partial sums of them), dQ added up in fp32
bwd_sum           dK and dV of split items
bwd_postprocess   dQ
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels import fakes
from cute_kernels.abi import BlockFields
from cute_kernels.bwd_arguments import Global
from cute_kernels.bwd_frame import BackwardFrame
from cute_kernels.bwd_narrow import NarrowBackward
from cute_kernels.bwd_split import SplitBackward
from cute_kernels.bwd_stats import by_block
from cute_kernels.bwd_wide import WideBackward


class Featured(BackwardFrame):
    """A main kernel with a window or softcapping, which takes more arguments behind those of `BackwardFrame`.

    blocks: [n, 4] int32, rows of abi.BlockFields, of which the items have intervals. None without a window.
    position: [nm * tile_m] int32, of every row on its path; anything past T. None without a window.
    end_position: [T] int32, one past the last position that sees each key. None without a window.
    softcap: fp32, above 0: scores are softcap * tanh(softmax_scale * S / softcap). None without.
    """

    def fake_arguments(self) -> tuple[object, ...]:
        tables: list[object] = [None] * 3
        if self.windowed:
            rows = (cute.sym_int32() for _ in range(2))
            tables = [fakes.table(BlockFields.NUM_FIELDS), *(fakes.flat(Int32, n) for n in rows)]
        return *super().fake_arguments(), *tables, Float32(0.0) if self.softcap else None

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (T, H, D)
        k: cute.Tensor,  # (T, Hk, D)
        v: cute.Tensor,  # (T, Hk, Dv)
        dout: cute.Tensor,  # (T, H, Dv)
        stats: cute.Tensor,  # (H, nm * M * STAT_COLUMNS)
        dk: cute.Tensor,  # (T, Hk, D)
        dv: cute.Tensor,  # (T, Hk, Dv)
        dq_acc: cute.Tensor,  # (H * nm * M * head_dim)
        partials: cute.Tensor,  # (n * partial_floats)
        locks: cute.Tensor,  # (lock_words(H * nm))
        work: cute.Tensor,  # (n, 11)
        visible_end: cute.Tensor,  # (T)
        softmax_scale: Float32,
        stream: cuda.CUstream,
        blocks: cute.Tensor | None,  # (rows of the table, 4)
        position: cute.Tensor | None,  # (nm * M)
        end_position: cute.Tensor | None,  # (T)
        softcap: Float32 | None,
    ) -> None:
        stats = by_block(stats, q.shape[0], self.tile_m)
        tables = visible_end, blocks, position, end_position
        g = Global(stats, dk, dv, dq_acc, partials, locks, work, *tables, softcap)
        self.launch(q, k, v, dout, g, softmax_scale, stream)


class FeaturedNarrow(Featured, NarrowBackward):
    __doc__ = Featured.__doc__


class FeaturedWide(Featured, WideBackward):
    __doc__ = Featured.__doc__


class FeaturedSplit(Featured, SplitBackward):
    __doc__ = Featured.__doc__


def backward_kernel(
    dtype: type[cutlass.Numeric], head_dim: int, *, gradients: str = "qkv", features: tuple[str, ...] = (), **tile: int
) -> BackwardFrame:
    """The main kernel of a native head dim; arguments and errors as of :class:`BackwardFrame`."""
    kinds = (NarrowBackward, FeaturedNarrow), (WideBackward, FeaturedWide), (SplitBackward, FeaturedSplit)
    plain, featured = kinds[(head_dim > 128) + (head_dim > 256)]
    if features:
        return featured(dtype, head_dim, gradients=gradients, features=features, **tile)
    return plain(dtype, head_dim, gradients=gradients, **tile)

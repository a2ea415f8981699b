"""Attention backward on Hopper: the main kernel of each head dim, and its place among the launches.

bwd_preprocess    dpsum and the statistics of each query block; dQ zeroed beyond head dim 128
bwd               dK and dV (of split items: partial sums of them), dQ added up in fp32
bwd_sum           dK and dV of split items
bwd_postprocess   dQ
"""

import cutlass

from cute_kernels.bwd_frame import BackwardFrame
from cute_kernels.bwd_narrow import NarrowBackward
from cute_kernels.bwd_split import SplitBackward
from cute_kernels.bwd_wide import WideBackward


def backward_kernel(
    dtype: type[cutlass.Numeric], head_dim: int, *, gradients: str = "qkv", features: tuple[str, ...] = (), **tile: int
) -> BackwardFrame:
    """The main kernel of a native head dim; arguments and errors as of :class:`BackwardFrame`."""
    kind = NarrowBackward if head_dim <= 128 else WideBackward if head_dim <= 256 else SplitBackward
    return kind(dtype, head_dim, gradients=gradients, features=features, **tile)

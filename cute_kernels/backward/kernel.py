"""Attention backward on Hopper: the main kernel of each head dim, and its place among the launches.

preprocess    dpsum and the statistics of each query block; dQ zeroed beyond head dim 128
kernel        dK and dV (of split items: partial sums of them), dQ added up in fp32
sum           dK and dV of split items
postprocess   dQ
"""

import cutlass

from cute_kernels.backward.frame import BackwardFrame
from cute_kernels.backward.narrow import NarrowBackward
from cute_kernels.backward.split import SplitBackward
from cute_kernels.backward.wide import WideBackward


def backward_kernel(
    dtype: type[cutlass.Numeric], head_dim: int, *, gradients: str = "qkv", features: tuple[str, ...] = (), **tile: int
) -> BackwardFrame:
    """The main kernel of a native head dim; arguments and errors as of :class:`BackwardFrame`."""
    kind = NarrowBackward if head_dim <= 128 else WideBackward if head_dim <= 256 else SplitBackward
    return kind(dtype, head_dim, gradients=gradients, features=features, **tile)

"""Values of another head dim than queries and keys: tensors are padded with zeros for kernels, and results are cut.

Zero columns of q and k add nothing to scores, and zero columns of v make zero columns of out. Their gradients are cut,
so that the other columns have the call's gradients. The scale is the one of the true head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from codegen.tiles import kernel_head_dims


def for_kernel(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head dims (of q and k, of v) with which a call's tensors go to a Hopper kernel.

    A kernel of one native head dim takes one head dim for all its tensors, and reads columns up to its own as zeros.
    One of a native pair takes a head dim for q and k and another one for v.
    """
    if head_dim == head_dim_v:
        return head_dim, head_dim_v
    native, native_v = kernel_head_dims(head_dim, head_dim_v)
    return equal(head_dim, head_dim_v) if native == native_v else (head_dim, head_dim_v)


def equal(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The larger one for all tensors."""
    return (max(head_dim, head_dim_v),) * 2


def padded(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """x [T, H, D] itself, or with zero columns up to `head_dim`."""
    return x if x.shape[2] == head_dim else F.pad(x, (0, head_dim - x.shape[2]))


def cut(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The first `head_dim` columns of x, contiguous; x itself if it has no more, or is an empty gradient [0]."""
    return x if x.dim() == 1 or x.shape[2] == head_dim else x[..., :head_dim].contiguous()

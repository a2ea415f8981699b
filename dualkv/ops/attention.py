"""`dualkv.attention`: exact attention over packed groups, each prompt attended to where it lies."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal, overload

import torch
from torch.autograd import forward_ad

from dualkv.layout import Layout
from dualkv.ops import dispatch


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    *,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    *,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    *,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * softmax_scale) v, each response token over its prompt and its own response up to itself.

    CPU tensors run a chunked reference, CUDA tensors a kernel where there is one for the device, else a composition
    of PyTorch's own attention (said once). Under autocast q, k and v are first cast to its dtype, as PyTorch's own
    attention does.

    Args:
        q: [T, H, D] packed queries; bf16, fp16, fp32 or fp64; last dimension contiguous; D a multiple of 8 up to 256.
        k: [T, Hk, D] packed keys, H a multiple of Hk (grouped-query attention), dtype and device of q.
        v: [T, Hk, D] packed values.
        layout: where prompts and responses lie in the T rows.
        softmax_scale: from 2^-100 to 2^100, 1/sqrt(D) by default.
        deterministic: bitwise equal gradients from run to run. Without it the kernels still give such gradients of k
            and v; that of q is a sum of fp32 parts in any order.
        return_lse: also return the log-sum-exp of each row's scaled scores. It carries no gradient.

    Returns:
        out [T, H, D] in q's dtype, or (out, lse [H, T]): lse natural log, fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes, strides, devices or a layout that do not fit; a scale out of range.
        TypeError: dtypes that differ or are not supported; a layout that is no Layout.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is a {type(layout).__name__}, expected a dualkv.Layout")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_local(name, x)
    if casts(q.device):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(q.shape[-1], 1))
    else:
        dispatch.check_scale(softmax_scale)
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    forward = _Transformed.apply if transformed else torch.ops.dualkv.fwd
    out, lse = forward(q, k, v, layout.offsets, layout.parent, float(softmax_scale), deterministic)
    return (out, lse) if return_lse else out


def check_local(name: str, x: object) -> None:
    """Raises TypeError for what is no tensor, and for a DTensor."""
    distributed = sys.modules.get("torch.distributed.tensor")  # not imported: then x is none
    if not isinstance(x, torch.Tensor) or (distributed is not None and isinstance(x, distributed.DTensor)):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor (of a DTensor its .to_local())")


def casts(device: torch.device) -> bool:
    """Whether autocast is on for tensors of this device."""
    # Dynamo of torch 2.11 does not trace torch.amp.is_autocast_available; of our devices only meta has no autocast.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


class _Transformed(torch.autograd.Function):
    """The op for torch.func, whose transforms ask for `setup_context`. Forward mode raises: the op alone would take it
    for a tangent of zero."""

    generate_vmap_rule = True
    setup_context = staticmethod(dispatch._fwd_setup)

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.dualkv.fwd(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> Any:
        return dispatch._fwd_backward(ctx, dout, dlse, _TransformedBackward.apply)


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.dualkv.bwd(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        dispatch._bwd_backward(ctx, *grads)

"""`dualkv.attention`: exact attention over packed groups. A prompt is stored once, and its responses attend to it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch.autograd import forward_ad

from dualkv.layout import Layout
from dualkv.ops import dispatch
from dualkv.ops.features import Features, check_number


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    batch_invariant: bool = False,
    return_lse: Literal[False] = False,
    backend: str | None = None,
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
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    batch_invariant: bool = False,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * softmax_scale) v. Each response token attends to its prompt and to its own response up to itself.

    CPU tensors run a chunked reference. CUDA tensors run the first backend that serves the call; `dualkv doctor` says
    which. Where Dv is not D, most backends get the narrower tensors padded with zeros. Under autocast q, k and v are
    first cast to its dtype, as by PyTorch's own attention.

    Row q sees the keys of its path (its prompt, then its response up to itself) from a lowest position on: 0, or
    position(q) - window + 1, or floor(position(q) / chunk) * chunk. Positions are `layout.position_ids`, so a response
    sees what it would see behind a prompt of its own. With s = softmax_scale * q . k of the visible keys:

        s'   = s, or softcap * tanh(s / softcap)
        lse  = log(sum(exp(s'))), with a sink log(exp(sinks[h]) + sum(exp(s')))
        out  = sum(exp(s' - lse) * v)

    Args:
        q: [T, H, D] packed queries; bf16, fp16, fp32 or fp64; last dimension contiguous; D a multiple of 8 up to 512.
        k: [T, Hk, D] packed keys, H a multiple of Hk (grouped-query attention), dtype and device of q.
        v: [T, Hk, Dv] packed values; Dv a multiple of 8 up to 512, mostly D (in latent attention another one).
        layout: which of the T rows belong to which prompt and response.
        softmax_scale: from 2^-100 to 2^100, 1/sqrt(D) by default.
        deterministic: bitwise equal gradients from run to run. Without it the kernels' gradients of k and v are bitwise
            equal too, and the gradient of q is an fp32 sum whose order differs from run to run.
        window: keys that a row sees, itself included, 1 or more; transformers' `sliding_window`, and FlashAttention's
            `window_size=(window - 1, 0)`. All by default.
        chunk: positions a chunk, 1 or more: a row sees the keys of its own chunk, as in Llama 4. In place of a window.
        sinks: [H] a learned logit for each head, natural log, neither scaled nor capped, as in gpt-oss; dtype of q or
            fp32, device of q, below +inf. A sink takes its part of the softmax and has no value.
        softcap: from 2^-20 (in fp16 2^-3) to 2^10, as in Gemma 2; none by default.
        batch_invariant: the bits of a row's out and lse depend on nothing but the row's path and where the path is cut
            into segments: not on other responses, groups, their order, or how many heads a call has. Backends "hopper"
            and "reference" only. Gradients are as ever.
        return_lse: also return lse. Gradients of lse reach q, k and sinks.
        backend: what computes the call, forward and backward: "hopper" (this project's kernels), "cudnn" (cuDNN's
            interval-mask attention), "flash" (PyTorch's FlashAttention calls, merged), "flex" (FlexAttention, compiled;
            before "flash" on compute capability 9 and 10) or "reference" (chunked PyTorch). By default the environment
            variable DUALKV_BACKEND, else the first one of them, in this order, that serves the call; one warning says
            so for the last three on a GPU.

    Returns:
        out [T, H, Dv] in q's dtype, or (out, lse [H, T]): lse natural log, fp32 (fp64 for fp64 inputs).

    Results over disjoint sets of keys merge to the result over all of them: lse = logaddexp(lse_1, lse_2) and
    out = out_1 * exp(lse_1 - lse) + out_2 * exp(lse_2 - lse), each factor transposed to [T, H, 1]. Autograd gives the
    gradients of the merged result. Give sinks to one of the parts only. Of a layout without prompt queries
    (`Layout.without_prompt_queries`) merge the other rows alone: on a GPU the prompts' rows have an infinite lse.

    Raises:
        ValueError: shapes, strides, devices or a layout that do not match; a scale or cap out of range; a window or
            chunk below 1, or both.
        TypeError: dtypes that differ or are not supported; a layout that is not a Layout; a window or chunk that is not
            an integer; a scale or cap that is not a number; a `deterministic` or `batch_invariant` that is not a bool;
            a backend that is not a string.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is a {type(layout).__name__}, expected a dualkv.Layout")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}, expected True or False")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend is a {type(backend).__name__}, expected a string")
    call = checked(q, k, v, softmax_scale, Features.given(window, chunk, sinks, softcap, batch_invariant))
    out, lse = _forward(call)(
        call.q, call.k, call.v, layout.offsets, layout.parent, call.softmax_scale, deterministic, *call.features,
        backend,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _forward(call: Call) -> Callable[..., Any]:
    """Choose the function that runs a call. All of them run the op."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return _Transformed.apply
    if torch.compiler.is_compiling():
        return torch.ops.dualkv.fwd
    given = (x for x in (call.q, call.k, call.v, call.features.sinks) if x is not None)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return _Recorded.apply if recorded else _below_autograd


def _below_autograd(*inputs: Any) -> Any:
    """The op without what `register_autograd` makes of it. Recorded, that looks every argument up in the schema, which
    makes a list of all of them each time: half of the host's time of a call."""
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.dualkv.fwd(*inputs)


class Call(NamedTuple):
    """Arguments of :func:`attention` in the form that the op takes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float
    features: Features


def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None, features: Features) -> Call:
    """Arguments of :func:`attention`: types checked, defaults filled in, cast as autocast says. The op checks shapes.

    Raises:
        ValueError: a scale out of range.
        TypeError: no tensors; a scale that is not a number.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_local(name, x)
    if features.sinks is not None:
        check_local("sinks", features.sinks)
    check_number("softmax_scale", softmax_scale)
    q, k, v, sinks = under_autocast(q, k, v, features.sinks)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(q.shape[-1], 1))
    else:
        dispatch.check_scale(softmax_scale)
    if sinks is not features.sinks:
        features = features._replace(sinks=sinks)
    return Call(q, k, v, float(softmax_scale), features)


def check_local(name: str, x: object) -> None:
    """Raise TypeError for an x that is not a tensor, for a DTensor, and for a sparse or nested tensor."""
    distributed = sys.modules.get("torch.distributed.tensor")  # if it is not imported, x is no DTensor
    if not isinstance(x, torch.Tensor) or (distributed is not None and isinstance(x, distributed.DTensor)):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor (of a DTensor its .to_local())")
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else x.layout
        raise TypeError(f"{name} is {kind}, expected a dense tensor (torch.strided)")


def casts(device: torch.device) -> bool:
    """Whether autocast is on for tensors of this device."""
    # Dynamo of torch 2.11 cannot trace torch.amp.is_autocast_available. Of the devices in use only meta lacks autocast.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def under_autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The inputs in the dtype of autocast, if it is on; fp64 stays, and so do dtypes that the op refuses."""
    if casts(q.device) and all(x.is_floating_point() for x in (q, k, v)):
        wide = [x.dtype == torch.float64 for x in (q, k, v)]
        if not any(wide):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x.to(dtype) for x in (q, k, v))
        if sinks is not None and sinks.dtype != q.dtype:
            sinks = sinks.float()
    return q, k, v, sinks


class _Recorded(torch.autograd.Function):
    """The op, recorded by autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _below_autograd(*inputs)
        dispatch._fwd_setup(ctx, inputs, output)
        ctx.versions = [x._version for x in output]
        ctx.offsets = inputs[3]  # the plans live as long as the graph, even if hooks save copies
        return output

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        grads = dispatch._fwd_backward(ctx, dout, dlse, partial(_unwritten, ctx.versions))
        ctx.offsets = None  # as what was saved
        return grads


def _unwritten(versions: list[int], dout: torch.Tensor, *inputs: Any) -> Any:
    """The backward op; raises RuntimeError if its forward's result has been written. PyTorch raises too, but not under
    gradient checkpointing, where hooks save the result."""
    for name, x, version in zip(("out", "lse"), inputs[3:5], versions, strict=True):
        if x._version > version:
            raise RuntimeError(
                f"{name} of dualkv.attention has been written in place {x._version - version} times after the forward,"
                " expected none: the backward reads it (write into a copy)"
            )
    return torch.ops.dualkv.bwd(dout, *inputs)


class _Transformed(torch.autograd.Function):
    """The op for torch.func, whose transforms need `setup_context`. Forward mode raises an error here; the op itself
    would return a tangent of zero."""

    generate_vmap_rule = True
    setup_context = staticmethod(dispatch._fwd_setup)

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.dualkv.fwd(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
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

"""Schema, checks, dispatch, fake and autograd of `torch.ops.dualkv.fwd` and `bwd`; see `dualkv.ops`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from codegen.tiles import HEAD_DIMS
from dualkv.layout import Segments, segments_of
from dualkv.ops import composition, hopper, reference

HEAD_DIM_STEP, HEAD_DIM_MAX = 8, HEAD_DIMS[-1]
GRADIENTS = ("q", "k", "v", "qk", "qv", "kv", "qkv")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALE_MIN, SCALE_MAX = 2.0**-100, 2.0**100  # fp32 holds such a scale, its inverse and lse / scale

_lib = torch.library.Library("dualkv", "DEF")
_lib.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor parent, float softmax_scale, bool deterministic=False)"
    " -> (Tensor out, Tensor lse)"
)
_lib.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor offsets, Tensor parent,"
    " float softmax_scale, bool deterministic=False, str gradients='qkv') -> (Tensor dq, Tensor dk, Tensor dv)"
)


# ---------------------------------------------------------------- checks: one sentence each, before anything runs
def _check_host(offsets: torch.Tensor, parent: torch.Tensor) -> None:
    for name, x in (("offsets", offsets), ("parent", parent)):
        if not x.is_cpu:
            raise ValueError(f"{name} is on {x.device}, expected a CPU tensor (Layout keeps it on the host)")


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    dtype, device, whole = q.dtype, q.device, q.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        shape = x.shape
        if len(shape) != 3:
            expected = "[T, H, D]" if name == "q" else "[T, Hk, D]"
            raise ValueError(f"{name} has shape {tuple(shape)}, expected {expected}: packed tokens, no batch dimension")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}, expected bfloat16, float16, float32 or float64")
        if x.dtype != dtype:
            raise TypeError(f"{name} is {x.dtype} and q is {dtype}, expected one dtype")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device} and q on {device}, expected one device")
        if shape[0] != whole[0]:
            raise ValueError(f"{name} has {shape[0]} tokens and q {whole[0]}, expected the same")
        if shape[2] != whole[2]:
            raise ValueError(f"{name} has head_dim {shape[2]} and q {whole[2]}, expected the same")
        if x.stride(2) != 1:
            raise ValueError(
                f"{name} has strides {x.stride()}, expected a contiguous last dimension (call .contiguous() on it)"
            )
    (_, heads, head_dim), kv_heads = whole, k.shape[1]
    if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= HEAD_DIM_MAX:
        raise ValueError(f"q has head_dim {head_dim}, expected a multiple of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}")
    if v.shape[1] != kv_heads:
        raise ValueError(f"v has {v.shape[1]} heads and k {kv_heads}, expected the same")
    if kv_heads == 0 or heads % kv_heads or heads == 0:
        raise ValueError(f"q has {heads} heads and k {kv_heads}, expected q's to be a multiple of k's")


def check_scale(softmax_scale: float) -> None:
    """Check that the kernels can take a scale.

    Args:
        softmax_scale: from 2^-100 to 2^100.

    Raises:
        ValueError: a scale outside that range.
    """
    if not SCALE_MIN <= softmax_scale <= SCALE_MAX:
        raise ValueError(f"softmax_scale is {softmax_scale}, expected a number from 2^-100 to 2^100")


def _checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor,
    softmax_scale: float,
) -> Segments:  # fmt: skip
    check_scale(softmax_scale)
    _check_host(offsets, parent)
    segments = segments_of(offsets, parent)

    def check() -> bool:
        _check_tensors(q, k, v)
        if segments.total != q.shape[0]:
            raise ValueError(f"q has {q.shape[0]} tokens, the layout {segments.total}")
        return True

    # Every layer passes tensors of the same form: looking up that a form has been checked is faster than checking.
    form = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype
    segments.cached((form, q.device, k.device, v.device), check)
    return segments


def _check_backward(dout: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, gradients: str) -> None:
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients is {gradients!r}, expected one of {', '.join(GRADIENTS)}")
    for name, x in (("dout", dout), ("out", out)):
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {tuple(x.shape)} {x.dtype} on {x.device},"
                f" expected q's {tuple(q.shape)} {q.dtype} on {q.device}"
            )
    if lse.shape != (q.shape[1], q.shape[0]):
        raise ValueError(f"lse has shape {tuple(lse.shape)}, expected [H, T] = {(q.shape[1], q.shape[0])}")
    if lse.dtype != _lse_dtype(q) or lse.device != q.device:
        raise ValueError(f"lse is {lse.dtype} on {lse.device}, expected {_lse_dtype(q)} on {q.device}")


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------- implementations by device
_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=3)


def _is_composed(q: torch.Tensor, no_kernel: str) -> bool:
    """Whether the composition runs this CUDA call; otherwise the reference does. Warns once which, and why no kernel
    does."""
    reason = composition.unsupported(q)
    if reason:
        _warn_once(f"dualkv: no kernel for {no_kernel}; running the chunked PyTorch reference, which is slow")
    else:
        _warn_once(f"dualkv: no kernel for {no_kernel}; running a composition of PyTorch's FlashAttention calls")
    return reason is None


def _fwd_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor,
    softmax_scale: float, deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return reference.forward(q, k, v, _checked(q, k, v, offsets, parent, softmax_scale), softmax_scale)


def _requested(
    gradients: str, grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) with the gradients that are not requested replaced by empty tensors."""
    dq, dk, dv = (x if name in gradients else x.new_empty(0) for name, x in zip("qkv", grads, strict=True))
    return dq, dk, dv


def _bwd_cpu(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    offsets: torch.Tensor, parent: torch.Tensor, softmax_scale: float, deterministic: bool = False,
    gradients: str = "qkv",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    segments = _checked(q, k, v, offsets, parent, softmax_scale)
    _check_backward(dout, q, out, lse, gradients)
    return _requested(gradients, reference.backward(dout, q, k, v, out, lse, segments, softmax_scale))


def _fwd_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor,
    softmax_scale: float, deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    segments = _checked(q, k, v, offsets, parent, softmax_scale)
    if segments.total == 0:
        return reference.forward(q, k, v, segments, softmax_scale)
    no_kernel = hopper.unsupported(q)
    if no_kernel is None:
        with torch.cuda.device_of(q):
            return hopper.forward(q, k, v, segments, softmax_scale)
    composed = _is_composed(q, no_kernel)
    return (composition if composed else reference).forward(q, k, v, segments, softmax_scale)


def _bwd_cuda(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    offsets: torch.Tensor, parent: torch.Tensor, softmax_scale: float, deterministic: bool = False,
    gradients: str = "qkv",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    segments = _checked(q, k, v, offsets, parent, softmax_scale)
    _check_backward(dout, q, out, lse, gradients)
    if segments.total == 0:
        return _requested(gradients, reference.backward(dout, q, k, v, out, lse, segments, softmax_scale))
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    no_kernel = hopper.unsupported(q)
    if no_kernel is None:
        with torch.cuda.device_of(q):
            return hopper.backward(dout, q, k, v, out, lse, segments, softmax_scale, deterministic, gradients)
    if _is_composed(q, no_kernel):
        grads = composition.backward(dout, q, k, v, out, lse, segments, softmax_scale, deterministic)
    else:
        grads = reference.backward(dout, q, k, v, out, lse, segments, softmax_scale)
    return _requested(gradients, grads)


_lib.impl("fwd", _fwd_cpu, "CPU")
_lib.impl("bwd", _bwd_cpu, "CPU")
_lib.impl("fwd", _fwd_cuda, "CUDA")
_lib.impl("bwd", _bwd_cuda, "CUDA")


# ---------------------------------------------------------------- fake and autograd
@torch.library.register_fake("dualkv::fwd", lib=_lib)
def _fwd_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor,
    softmax_scale: float, deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _check_host(offsets, parent)
    _check_tensors(q, k, v)
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=_lse_dtype(q))


@torch.library.register_fake("dualkv::bwd", lib=_lib)
def _bwd_fake(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    offsets: torch.Tensor, parent: torch.Tensor, softmax_scale: float, deterministic: bool = False,
    gradients: str = "qkv",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    _check_backward(dout, q, out, lse, gradients)
    return _requested(gradients, (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)))


def _fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, offsets, parent, ctx.softmax_scale, ctx.deterministic = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, offsets, parent)


def _fwd_backward(
    ctx: Any, dout: torch.Tensor, _dlse: torch.Tensor, backward: Callable[..., Any] = torch.ops.dualkv.bwd
) -> tuple[torch.Tensor | None, ...]:
    dout = dout if dout.stride(2) == 1 else dout.contiguous()  # the gradient of out.sum() is an expanded tensor
    needed = ctx.needs_input_grad[:3]
    gradients = "".join(name for name, need in zip("qkv", needed, strict=True) if need)
    grads = backward(dout, *ctx.saved_tensors, ctx.softmax_scale, ctx.deterministic, gradients)
    wanted = [grad if need else None for grad, need in zip(grads, needed, strict=True)]
    return (*wanted, None, None, None, None)


def _bwd_backward(_ctx: Any, *_grads: torch.Tensor) -> None:
    raise RuntimeError("dualkv.attention has no second derivative: call backward without create_graph")


torch.library.register_autograd("dualkv::fwd", _fwd_backward, setup_context=_fwd_setup, lib=_lib)
torch.library.register_autograd("dualkv::bwd", _bwd_backward, lib=_lib)

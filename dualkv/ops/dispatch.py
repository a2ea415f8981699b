"""`torch.ops.dualkv.fwd` and `torch.ops.dualkv.bwd`: schema, checks, dispatch, fake and autograd.

    fwd(q, k, v, offsets, parent, softmax_scale, deterministic=False,
        window=None, chunk=None, sinks=None, softcap=None, batch_invariant=False, backend=None) -> (out, lse)
    bwd(dout, q, k, v, out, lse, offsets, parent, softmax_scale, deterministic=False, gradients="qkv",
        window=None, chunk=None, sinks=None, softcap=None, batch_invariant=False, dlse=None, backend=None)
        -> (dq, dk, dv, dsinks)

q [T, H, D]; k [T, Hk, D]; v [T, Hk, Dv]; dout, out [T, H, Dv]; sinks [H] in q's dtype or fp32; lse [H, T] fp32, natural
log, sinks included (fp64 for fp64 inputs). dlse [H, T] is the gradient of lse, None for zero. `gradients` names the
inputs whose gradients are computed, in the order of "qkv"; the other gradients are empty, of shape [0]. dsinks is [H]
in the dtype of lse, or [0] without sinks. `backend` names what computes the call, None for the first one that serves it
(`dualkv.ops.backends`). Nothing in the backward follows from `batch_invariant`. :func:`dualkv.attention` has the
formulas.

`offsets` [S+1] and `parent` [S] are the host tensors of a :class:`dualkv.Layout`, on the CPU for any device of q, k, v.
So nothing is read back from a GPU. And inductor never puts an op with CPU inputs into a CUDA graph of its own, so it
cannot replay one layout's work for another. A layout's plan is made on the device at the layout's first call, and is
kept as long as these two tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from codegen.spec import GRADIENTS
from codegen.tiles import HEAD_DIM_RULE, takes_head_dim
from dualkv.ops import backends, flops
from dualkv.ops.features import Features
from dualkv.ops.tensors import Gradients
from dualkv.segments import OP_TAGS, Segments, segments_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALE_MIN, SCALE_MAX = 2.0**-100, 2.0**100  # fp32 holds such a scale, its inverse and lse / scale

SINKS = 7 + Features._fields.index("sinks")  # among the arguments of fwd, 7 of which are before the features

_lib = torch.library.Library("dualkv", "DEF")
_FEATURES = "int? window=None, int? chunk=None, Tensor? sinks=None, float? softcap=None, bool batch_invariant=False"
_lib.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor parent, float softmax_scale, bool deterministic=False,"
    f" {_FEATURES}, str? backend=None) -> (Tensor out, Tensor lse)",
    tags=OP_TAGS,
)
_lib.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor offsets, Tensor parent,"
    f" float softmax_scale, bool deterministic=False, str gradients='qkv', {_FEATURES}, Tensor? dlse=None,"
    " str? backend=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=OP_TAGS,
)


# ---------------------------------------------------------------- checks: one sentence each, before anything runs
def _check_host(offsets: torch.Tensor, parent: torch.Tensor) -> None:
    for name, x in (("offsets", offsets), ("parent", parent)):
        if not x.is_cpu:
            raise ValueError(f"{name} is on {x.device}, expected a CPU tensor (Layout keeps it on the host)")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises ValueError or TypeError for tensors that `dualkv.attention` does not take, whatever the layout is."""
    dtype, device, whole = q.dtype, q.device, q.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        shape = x.shape
        if len(shape) != 3:
            expected = {"q": "[T, H, D]", "k": "[T, Hk, D]", "v": "[T, Hk, Dv]"}[name]
            raise ValueError(f"{name} has shape {tuple(shape)}, expected {expected}: packed tokens, no batch dimension")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}, expected bfloat16, float16, float32 or float64")
        if x.dtype != dtype:
            raise TypeError(f"{name} is {x.dtype} and q is {dtype}, expected one dtype")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device} and q on {device}, expected one device")
        if shape[0] != whole[0]:
            raise ValueError(f"{name} has {shape[0]} tokens and q {whole[0]}, expected the same")
        if x.stride(2) != 1:
            raise ValueError(
                f"{name} has strides {x.stride()}, expected a contiguous last dimension (call .contiguous() on it)"
            )
    (_, heads, head_dim), kv_heads = whole, k.shape[1]
    if k.shape[2] != head_dim:
        raise ValueError(f"k has head_dim {k.shape[2]} and q {head_dim}, expected the same")
    for name, x in (("q", q), ("v", v)):
        check_head_dim(name, x.shape[2])
    if v.shape[1] != kv_heads:
        raise ValueError(f"v has {v.shape[1]} heads and k {kv_heads}, expected the same")
    if kv_heads == 0 or heads % kv_heads or heads == 0:
        raise ValueError(f"q has {heads} heads and k {kv_heads}, expected q's to be a multiple of k's")


def check_head_dim(name: str, head_dim: int) -> None:
    """Raises ValueError for a head dim that `dualkv.attention` does not take; `name` is the tensor's."""
    if not takes_head_dim(head_dim):
        raise ValueError(f"{name} has head_dim {head_dim}, expected {HEAD_DIM_RULE}")


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
    softmax_scale: float, features: Features,
) -> tuple[Segments, Features]:  # fmt: skip
    """The layout, and the features as backends take them."""
    check_scale(softmax_scale)
    _check_host(offsets, parent)
    segments = segments_of(offsets, parent)

    def check() -> bool:
        check_tensors(q, k, v)
        if segments.total != q.shape[0]:
            raise ValueError(f"q has {q.shape[0]} tokens, the layout {segments.total}")
        return True

    # Every layer passes tensors of the same form: looking up that a form has been checked is faster than checking.
    form = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype
    segments.cached((form, q.device, k.device, v.device), check)
    features.check(q)
    return segments, features.of_call(segments.longest_path, _lse_dtype(q))


def _check_backward(
    dout: torch.Tensor, q: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, gradients: str,
    dlse: torch.Tensor | None,
) -> None:  # fmt: skip
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients is {gradients!r}, expected one of {', '.join(GRADIENTS)}")
    shape = (*q.shape[:2], v.shape[2])
    for name, x in (("dout", dout), ("out", out)):
        if x.shape != shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {tuple(x.shape)} {x.dtype} on {x.device}, expected [T, H, Dv] = {tuple(shape)}"
                f" and q's {q.dtype} on {q.device}"
            )
    for name, y in (("lse", lse), ("dlse", dlse)):
        if y is None:
            continue
        if y.shape != (q.shape[1], q.shape[0]):
            raise ValueError(f"{name} has shape {tuple(y.shape)}, expected [H, T] = {(q.shape[1], q.shape[0])}")
        if y.dtype != _lse_dtype(q) or y.device != q.device:
            raise ValueError(f"{name} is {y.dtype} on {y.device}, expected {_lse_dtype(q)} on {q.device}")


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------- implementations
def _requested(gradients: str, grads: Gradients) -> Gradients:
    """The gradients, with an empty tensor for each of q, k and v whose gradient is not requested."""
    dq, dk, dv = (x if name in gradients else x.new_empty(0) for name, x in zip("qkv", grads, strict=False))
    return dq, dk, dv, grads[3]


def _fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor,
    softmax_scale: float, deterministic: bool = False, window: int | None = None, chunk: int | None = None,
    sinks: torch.Tensor | None = None, softcap: float | None = None, batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    asked = Features(window, chunk, sinks, softcap, batch_invariant)
    segments, features = _checked(q, k, v, offsets, parent, softmax_scale, asked)
    segments.use.seen = True

    def run(chosen: backends.Backend) -> tuple[torch.Tensor, torch.Tensor]:
        return chosen.forward(q=q, k=k, v=v, segments=segments, softmax_scale=softmax_scale, features=features)

    return backends.computed(run, q, v, features, None, backend)


def _bwd(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    offsets: torch.Tensor, parent: torch.Tensor, softmax_scale: float, deterministic: bool = False,
    gradients: str = "qkv", window: int | None = None, chunk: int | None = None, sinks: torch.Tensor | None = None,
    softcap: float | None = None, batch_invariant: bool = False, dlse: torch.Tensor | None = None,
    backend: str | None = None,
) -> Gradients:  # fmt: skip
    asked = Features(window, chunk, sinks, softcap)
    segments, features = _checked(q, k, v, offsets, parent, softmax_scale, asked)
    _check_backward(dout, q, v, out, lse, gradients, dlse)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()

    def run(chosen: backends.Backend) -> Gradients:
        return chosen.backward(
            dout=dout, q=q, k=k, v=v, out=out, lse=lse, segments=segments, softmax_scale=softmax_scale,
            features=features, dlse=dlse, deterministic=deterministic, gradients=gradients,
        )  # fmt: skip

    return _requested(gradients, backends.computed(run, q, v, features, dlse, backend))


def _fwd_cuda(q: torch.Tensor, *others: Any, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.cuda.device_of(q):
        return _fwd(q, *others, **settings)


def _bwd_cuda(dout: torch.Tensor, *others: Any, **settings: Any) -> Gradients:
    with torch.cuda.device_of(dout):
        return _bwd(dout, *others, **settings)


_lib.impl("fwd", _fwd, "CPU")
_lib.impl("bwd", _bwd, "CPU")
_lib.impl("fwd", _fwd_cuda, "CUDA")
_lib.impl("bwd", _bwd_cuda, "CUDA")


# ---------------------------------------------------------------- fake and autograd
@torch.library.register_fake("dualkv::fwd", lib=_lib)
def _fwd_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor,
    softmax_scale: float, deterministic: bool = False, window: int | None = None, chunk: int | None = None,
    sinks: torch.Tensor | None = None, softcap: float | None = None, batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _check_host(offsets, parent)
    check_tensors(q, k, v)
    Features(window, chunk, sinks, softcap).check(q)
    backends.check_name(backend)
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=_lse_dtype(q))


@torch.library.register_fake("dualkv::bwd", lib=_lib)
def _bwd_fake(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    offsets: torch.Tensor, parent: torch.Tensor, softmax_scale: float, deterministic: bool = False,
    gradients: str = "qkv", window: int | None = None, chunk: int | None = None, sinks: torch.Tensor | None = None,
    softcap: float | None = None, batch_invariant: bool = False, dlse: torch.Tensor | None = None,
    backend: str | None = None,
) -> Gradients:  # fmt: skip
    Features(window, chunk, sinks, softcap).check(q)
    backends.check_name(backend)
    _check_backward(dout, q, v, out, lse, gradients, dlse)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsinks = q.new_empty(0 if sinks is None else q.shape[1], dtype=_lse_dtype(q))
    return _requested(gradients, (dq, dk, dv, dsinks))


def _fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, offsets, parent, ctx.softmax_scale, ctx.deterministic, ctx.window, ctx.chunk, sinks, *rest = inputs
    ctx.softcap, ctx.batch_invariant, ctx.backend = rest
    ctx.set_materialize_grads(False)  # without a gradient of lse the backward does nothing for it
    ctx.save_for_backward(q, k, v, *output, offsets, parent, sinks)


def _fwd_backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None,
    backward: Callable[..., Any] = torch.ops.dualkv.bwd,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    q, k, v, out, lse, offsets, parent, sinks = ctx.saved_tensors
    needed = (*ctx.needs_input_grad[:3], sinks is not None and ctx.needs_input_grad[SINKS])
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(2) != 1:  # the gradient of out.sum() is an expanded tensor
        dout = dout.contiguous()
    if dlse is not None and dlse.stride(1) != 1:
        dlse = dlse.clone(memory_format=torch.contiguous_format)  # an expanded [1, 1] is contiguous by its strides of 0
    # The op computes one of the three at least: dq, if sinks alone need a gradient.
    gradients = "".join(name for name, need in zip("qkv", needed, strict=False) if need) or "q"
    dq, dk, dv, dsinks = backward(
        dout, q, k, v, out, lse, offsets, parent, ctx.softmax_scale, ctx.deterministic, gradients,
        ctx.window, ctx.chunk, sinks, ctx.softcap, ctx.batch_invariant, dlse, ctx.backend,
    )  # fmt: skip
    grads = dq, dk, dv, dsinks if sinks is None else dsinks.to(sinks.dtype)
    dq, dk, dv, dsinks = (grad if need else None for grad, need in zip(grads, needed, strict=True))
    return dq, dk, dv, *[None] * (SINKS - 3), dsinks, None, None, None


def _bwd_backward(_ctx: Any, *_grads: torch.Tensor) -> None:
    raise RuntimeError("dualkv.attention has no second derivative: call backward without create_graph")


torch.library.register_autograd("dualkv::fwd", _fwd_backward, setup_context=_fwd_setup, lib=_lib)
torch.library.register_autograd("dualkv::bwd", _bwd_backward, lib=_lib)
flops.install()

"""Choose the backend that computes a call of the ops: by the device and the call, or by hand."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from dualkv.ops import composition, cudnn, flex, hopper, padding, reference
from dualkv.ops.compiling import NotCompiled
from dualkv.segments import Segments

VARIABLE = "DUALKV_BACKEND"
# Major compute capabilities on which Triton has instructions for matrix products that FlashAttention 2 does not use.
# With them FlexAttention is faster than the merged calls, without them slower: measured on 9, and presumed of 10
# (docs/performance.md#other-gpus).
FLEX_FIRST = 9, 10
T = TypeVar("T")
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Backend(NamedTuple):
    """One way to compute attention.

    Attributes:
        what: a description in words.
        module: forward(q, k, v, segments, softmax_scale, window, sinks, softcap) -> (out, lse), and backward(dout, q,
            k, v, out, lse, segments, softmax_scale, [deterministic, [gradients,]] window, sinks, softcap, dlse) -> (dq,
            dk, dv, dsinks). Gradients that are not requested may be computed.
        unsupported: (q, v, softcap, dlse) -> why it cannot serve a call, or None.
        head_dims: of q and k, and of v, with which it takes tensors of some head dims.
        takes: how many of deterministic and gradients its backward takes.
        warning: what is said once where it runs on a GPU without being asked for.
    """

    what: str
    module: ModuleType
    unsupported: Callable[[torch.Tensor, torch.Tensor, float | None, torch.Tensor | None], str | None]
    head_dims: Callable[[int, int], tuple[int, int]]
    takes: int
    warning: str | None = None


# By name, in the order in which they are tried where nothing is chosen by hand; but see `order`.
BACKENDS = {
    "hopper": Backend(
        "the dualkv kernel",
        hopper,
        lambda q, v, softcap, dlse: hopper.unsupported(q),
        padding.for_kernel,
        2,
    ),
    "cudnn": Backend(
        "cuDNN's interval-mask attention",
        cudnn,
        lambda q, v, softcap, dlse: cudnn.unsupported(q, v, softcap, dlse),
        cudnn.head_dims,
        1,
    ),
    "flash": Backend(
        "a composition of PyTorch's FlashAttention calls",
        composition,
        lambda q, v, softcap, dlse: composition.unsupported(q, softcap, max(q.shape[2], v.shape[2])),
        padding.equal,
        1,
        "a composition of PyTorch's FlashAttention calls",
    ),
    "flex": Backend(
        "PyTorch's FlexAttention, compiled",
        flex,
        lambda q, v, softcap, dlse: flex.unsupported(q, v),
        flex.head_dims,
        1,
        "PyTorch's FlexAttention, compiled",
    ),
    "reference": Backend(
        "the chunked reference",
        reference,
        lambda q, v, softcap, dlse: None,
        lambda head_dim, head_dim_v: (head_dim, head_dim_v),
        0,
        "the chunked PyTorch reference, which is slow",
    ),
}


def check_name(backend: str | None, origin: str = "backend") -> None:
    """Raises ValueError for a name that no backend has; None is no choice."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"{origin} is {backend!r}, expected one of {', '.join(BACKENDS)}")


@cache
def order(device: torch.device) -> tuple[str, ...]:
    """The names in the order in which they are tried on a device."""
    names = list(BACKENDS)
    if device.type != "cuda" or torch.version.hip:
        return tuple(names)
    if torch.cuda.get_device_capability(device)[0] in FLEX_FIRST:
        names.remove("flex")
        names.insert(names.index("flash"), "flex")
    return tuple(names)


_BY_DEFAULT = ContextVar("by default", default=False)


@contextmanager
def by_default() -> Iterator[None]:
    """Ignore DUALKV_BACKEND in this context, for calls that are not the user's own."""
    token = _BY_DEFAULT.set(True)
    try:
        yield
    finally:
        _BY_DEFAULT.reset(token)


def of_variable() -> str | None:
    """The value of DUALKV_BACKEND; None if it is not set or empty."""
    return None if _BY_DEFAULT.get() else os.environ.get(VARIABLE) or None


def choose(
    q: torch.Tensor,
    v: torch.Tensor,
    softcap: float | None,
    dlse: torch.Tensor | None,
    backend: str | None,
) -> Backend:
    """The backend of a call: the one asked for, by `backend` or by the variable DUALKV_BACKEND, else the first one that
    serves it.

    Raises:
        ValueError: the one asked for cannot serve the call, or there is none of the name.
    """
    origin = "backend"
    if backend is None:
        origin, backend = VARIABLE, of_variable()
    if backend is not None:
        check_name(backend, origin)
        reason = BACKENDS[backend].unsupported(q, v, softcap, dlse)
        if reason:
            raise ValueError(f"{origin} is {backend!r}, which does not serve {reason}: expected another one, or none")
        return BACKENDS[backend]
    name, refused = first(q, v, softcap, dlse)
    found = BACKENDS[name]
    if found.warning and q.is_cuda:
        warn_once(f"dualkv: no kernel for {refused['hopper']}; running {found.warning}")
    return found


def computed(
    run: Callable[[Backend], T],
    q: torch.Tensor,
    v: torch.Tensor,
    softcap: float | None,
    dlse: torch.Tensor | None,
    backend: str | None,
) -> T:
    """Call `run` with the backend of a call and return its result (see `choose`, also for errors). Where nobody asked
    for a backend and the first that serves the call cannot be compiled, the next one takes its place."""
    found = choose(q, v, softcap, dlse, backend)
    while True:
        try:
            return run(found)
        except NotCompiled as e:
            if backend is not None or of_variable() is not None:
                raise
            why = str(e)
        # Out here, where the error holds no tensor of the call that failed.
        names = order(q.device)
        failed = next(name for name in names if BACKENDS[name] is found)
        after = names[names.index(failed) + 1 :]
        found = next(BACKENDS[n] for n in after if BACKENDS[n].unsupported(q, v, softcap, dlse) is None)
        warn_once(f"dualkv: the backend {failed!r} was not compiled ({why}); running {found.what}")


def first(
    q: torch.Tensor,
    v: torch.Tensor,
    softcap: float | None = None,
    dlse: torch.Tensor | None = None,
) -> tuple[str, dict[str, str]]:
    """The name of the first backend that serves a call, and why those before it do not."""
    refused: dict[str, str] = {}
    for name in order(q.device):
        reason = BACKENDS[name].unsupported(q, v, softcap, dlse)
        if reason is None:
            return name, refused
        refused[name] = reason
    raise AssertionError("the reference serves every call")


_warned: set[str] = set()


def warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)


def forward(
    found: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, Dv], lse [H, T]); `others` as for a module's forward."""
    if segments.total == 0:
        return reference.forward(q, k, v, segments, *others)
    dims = found.head_dims(q.shape[2], v.shape[2])
    return padding.forward(found.module.forward, dims, q, k, v, segments, *others)


def backward(
    found: Backend, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, segments: Segments, softmax_scale: float, deterministic: bool, gradients: str, *others: Any,
) -> Gradients:  # fmt: skip
    """(dq, dk, dv, dsinks); `others` as for a module's backward, behind gradients."""
    call = dout, q, k, v, out, lse, segments, softmax_scale
    if segments.total == 0:
        return reference.backward(*call, *others)
    dims, taken = found.head_dims(q.shape[2], v.shape[2]), (deterministic, gradients)[: found.takes]
    return padding.backward(found.module.backward, dims, *call, *taken, *others)

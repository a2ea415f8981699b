"""Choose the backend that computes a call of the ops: by the device and the call, or by hand."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar

import torch

from dualkv.ops import composition, cudnn, flex, hopper, padding, reference
from dualkv.ops.compiling import NotCompiled
from dualkv.ops.features import NONE, Features
from dualkv.ops.padding import cut, padded
from dualkv.ops.tensors import Gradients
from dualkv.segments import Segments

VARIABLE = "DUALKV_BACKEND"
# Major compute capabilities on which Triton has instructions for matrix products that FlashAttention 2 does not use.
# With them FlexAttention is faster than the merged calls, without them slower: measured on 9, and presumed of 10
# (docs/performance.md#other-gpus).
FLEX_FIRST = 9, 10
T = TypeVar("T")


class Implementation(Protocol):
    """The two functions of a backend, called by keywords."""

    def forward(
        self,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        softmax_scale: float,
        features: Features,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute out [T, H, Dv] in q's dtype, and lse [H, T] fp32 (fp64 for fp64 inputs)."""

    def backward(
        self,
        *,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        softmax_scale: float,
        features: Features,
        dlse: torch.Tensor | None,
        deterministic: bool,
        gradients: str,
    ) -> Gradients:
        """Compute dq, dk, dv and dsinks ([0] without sinks). Gradients that are not requested may be computed."""


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        what: a description in words.
        module: what computes it.
        refuses: (q, v, dlse) -> why it cannot serve a call, or None.
        head_dims: of q and k, and of v, with which it takes tensors of some head dims.
        serves: names of the features that it computes; any other one is refused.
        warning: what is said once where it runs on a GPU without being asked for.
    """

    what: str
    module: Implementation
    refuses: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], str | None]
    head_dims: Callable[[int, int], tuple[int, int]]
    serves: tuple[str, ...]
    warning: str | None = None

    def unsupported(
        self, q: torch.Tensor, v: torch.Tensor, features: Features = NONE, dlse: torch.Tensor | None = None
    ) -> str | None:
        """Say why it cannot serve a call, with tensors as the op takes them; None if it can."""
        for name in features.asked:
            if name not in self.serves:
                return name
        return self.refuses(q, v, dlse)

    def forward(
        self, *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, softmax_scale: float,
        features: Features,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute (out [T, H, Dv], lse [H, T]) for any head dims."""
        module = self.module if segments.total else reference
        wide, wide_v = self.head_dims(q.shape[2], v.shape[2])
        out, lse = module.forward(
            q=padded(q, wide), k=padded(k, wide), v=padded(v, wide_v), segments=segments, softmax_scale=softmax_scale,
            features=features,
        )  # fmt: skip
        return cut(out, v.shape[2]), lse

    def backward(
        self, *, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, segments: Segments, softmax_scale: float, features: Features, dlse: torch.Tensor | None,
        deterministic: bool, gradients: str,
    ) -> Gradients:  # fmt: skip
        """Compute (dq, dk, dv, dsinks) for any head dims."""
        module = self.module if segments.total else reference
        wide, wide_v = self.head_dims(q.shape[2], v.shape[2])
        dq, dk, dv, dsinks = module.backward(
            dout=padded(dout, wide_v), q=padded(q, wide), k=padded(k, wide), v=padded(v, wide_v),
            out=padded(out, wide_v), lse=lse, segments=segments, softmax_scale=softmax_scale, features=features,
            dlse=dlse, deterministic=deterministic, gradients=gradients,
        )  # fmt: skip
        return cut(dq, q.shape[2]), cut(dk, k.shape[2]), cut(dv, v.shape[2]), dsinks


# By name, in the order in which they are tried where nothing is chosen by hand; but see `order`.
BACKENDS = {
    "hopper": Backend(
        "the dualkv kernel",
        hopper,
        lambda q, v, dlse: hopper.unsupported(q),
        padding.for_kernel,
        ("window", "sinks", "softcap", "batch_invariant"),
    ),
    "cudnn": Backend(
        "cuDNN's interval-mask attention",
        cudnn,
        lambda q, v, dlse: cudnn.unsupported(q, v, dlse),
        cudnn.head_dims,
        ("window", "sinks"),
    ),
    "flash": Backend(
        "a composition of PyTorch's FlashAttention calls",
        composition,
        lambda q, v, dlse: composition.unsupported(q, max(q.shape[2], v.shape[2])),
        padding.equal,
        ("window", "sinks"),
        warning="a composition of PyTorch's FlashAttention calls",
    ),
    "flex": Backend(
        "PyTorch's FlexAttention, compiled",
        flex,
        lambda q, v, dlse: flex.unsupported(q, v),
        flex.head_dims,
        ("window", "sinks", "softcap"),
        warning="PyTorch's FlexAttention, compiled",
    ),
    "reference": Backend(
        "the chunked reference",
        reference,
        lambda q, v, dlse: None,
        lambda head_dim, head_dim_v: (head_dim, head_dim_v),
        ("window", "sinks", "softcap", "batch_invariant"),
        warning="the chunked PyTorch reference, which is slow",
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
    features: Features,
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
        reason = BACKENDS[backend].unsupported(q, v, features, dlse)
        if reason:
            raise ValueError(f"{origin} is {backend!r}, which does not serve {reason}: expected another one, or none")
        return BACKENDS[backend]
    name, refused = first(q, v, features, dlse)
    found = BACKENDS[name]
    if found.warning and q.is_cuda:
        warn_once(f"dualkv: no kernel for {refused['hopper']}; running {found.warning}")
    return found


def computed(
    run: Callable[[Backend], T],
    q: torch.Tensor,
    v: torch.Tensor,
    features: Features,
    dlse: torch.Tensor | None,
    backend: str | None,
) -> T:
    """Call `run` with the backend of a call and return its result (see `choose`, also for errors). Where nobody asked
    for a backend and the first that serves the call cannot be compiled, the next one takes its place."""
    found = choose(q, v, features, dlse, backend)
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
        found = next(BACKENDS[n] for n in after if BACKENDS[n].unsupported(q, v, features, dlse) is None)
        warn_once(f"dualkv: the backend {failed!r} was not compiled ({why}); running {found.what}")


def first(
    q: torch.Tensor,
    v: torch.Tensor,
    features: Features = NONE,
    dlse: torch.Tensor | None = None,
) -> tuple[str, dict[str, str]]:
    """The name of the first backend that serves a call, and why those before it do not."""
    refused: dict[str, str] = {}
    for name in order(q.device):
        reason = BACKENDS[name].unsupported(q, v, features, dlse)
        if reason is None:
            return name, refused
        refused[name] = reason
    raise AssertionError("the reference serves every call")


_warned: set[str] = set()


def warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)

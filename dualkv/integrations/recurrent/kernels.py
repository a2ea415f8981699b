"""flash-linear-attention's kernels, where they are installed and tensors lie on a GPU."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, cast

import torch
from packaging.version import Version

# By the names of the functions: the modules of flash-linear-attention 0.6 that have them.
MODULES = {
    "causal_conv1d": "fla.modules.causal_conv1d",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "chunk_simple_gla": "fla.ops.simple_gla",
}

INSTALL = 'pip install "flash-linear-attention>=0.6,<0.7" "triton>=3.7.1"'


def library(name: str, device: torch.device) -> Callable[..., Any] | None:
    """A function of flash-linear-attention for tensors of a device; None where it does not run.

    On a GPU without the library a warning says once that transformers' functions run instead.
    """
    if device.type != "cuda":
        return None
    if not installed():
        _warn_of_slow_functions()
        return None
    return _function(name)


def convolution(activation: str | None, device: torch.device) -> Callable[..., Any] | None:
    """The library's convolution, as :func:`.ops.convolve_at_once` takes one; None where it does not run.

    Without it transformers' function runs, which is causal-conv1d's where that is installed.
    """
    if device.type != "cuda" or activation not in (None, "silu", "swish") or not installed():
        return None
    return _convolve


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None, **varlen: Any
) -> torch.Tensor:
    out, _ = _function("causal_conv1d")(x.transpose(1, 2), weight, bias, activation=activation, **varlen)
    return cast(torch.Tensor, out).transpose(1, 2)


def _function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(MODULES[name]), name)
    return found


@functools.cache
def installed() -> bool:
    """Whether flash-linear-attention of a version with the interface that is called here is installed."""
    try:
        return Version("0.6") <= Version(version("flash-linear-attention")) < Version("0.7")
    except PackageNotFoundError:
        return False


@functools.cache
def _warn_of_slow_functions() -> None:
    warnings.warn(
        "recurrent layers run transformers' PyTorch functions, which are slow on a GPU, because"
        f" flash-linear-attention 0.6 is not installed: {INSTALL}",
        stacklevel=2,
    )


def refusal() -> str | None:
    """Why flash-linear-attention cannot train gated delta nets on this machine, in one sentence; None if it can.

    The library raises in their backward on Hopper with Triton 3.4.0 to 3.7.0, which compute wrong gradients there (its
    issue 640), unless tilelang is installed.
    """
    if not installed() or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    if find_spec("tilelang") is not None:
        return None
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return None
    if not Version("3.4.0") <= Version(triton) < Version("3.7.1"):
        return None
    return (
        f"flash-linear-attention's gated delta rule has no backward on Hopper with Triton {triton}: install Triton"
        ' 3.7.1 or newer (pip install "triton>=3.7.1") or tilelang (pip install tilelang)'
    )

"""flash-linear-attention's kernels, where they are installed and tensors lie on a GPU."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch

from dualkv.integrations import flash_linear_attention as fla

# By the names of the functions: the modules of flash-linear-attention that have them.
MODULES = {
    "causal_conv1d": "fla.modules.causal_conv1d",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "chunk_simple_gla": "fla.ops.simple_gla",
}


def library(name: str, device: torch.device) -> Callable[..., Any] | None:
    """A function of flash-linear-attention for tensors of a device; None where it does not run.

    On a GPU without the library a warning says once that transformers' functions run instead.
    """
    if device.type != "cuda":
        return None
    if fla.lacking():
        _warn_of_slow_functions()
        return None
    return _function(name)


def convolution(activation: str | None, device: torch.device) -> Callable[..., Any] | None:
    """The library's convolution, as :func:`.ops.convolve_at_once` takes one; None where it does not run.

    Without it transformers' function runs, which is causal-conv1d's where that is installed.
    """
    if device.type != "cuda" or activation not in (None, "silu", "swish") or fla.lacking():
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
def _warn_of_slow_functions() -> None:
    warnings.warn(
        "recurrent layers run transformers' PyTorch functions, which are slow on a GPU: the fast ones need"
        f" {fla.lacking()}",
        stacklevel=2,
    )

"""flash-linear-attention's kernels, where they are installed and tensors lie on a GPU."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch

from codegen import surface
from dualkv.integrations import flash_linear_attention as fla
from dualkv.integrations.recurrent import waves

VARLEN = "initial_state output_final_state cu_seqlens cu_seqlens_cpu"
# By the names of the functions: the modules of flash-linear-attention that have them, and what calls give by position
# and by name.
FUNCTIONS = {
    "causal_conv1d": (
        "fla.modules.causal_conv1d",
        "x weight bias",
        "activation initial_state cu_seqlens cu_seqlens_cpu",
    ),
    "chunk_gated_delta_rule": (
        "fla.ops.gated_delta_rule",
        "q k v",
        f"g beta use_qk_l2norm_in_kernel {VARLEN} chunk_indices",
    ),
    "chunk_kda": ("fla.ops.kda", "q k v", f"g beta use_qk_l2norm_in_kernel {VARLEN}"),
    "chunk_simple_gla": ("fla.ops.simple_gla", "q k v", f"g_gamma scale {VARLEN}"),
}


def library(name: str, device: torch.device) -> Callable[..., Any] | None:
    """A function of flash-linear-attention for tensors of a device; None where it does not run.

    On a GPU without the library, or with one whose function does not take the call, a warning says once that
    PyTorch functions run instead.
    """
    if device.type != "cuda":
        return None
    if said := unfit(name):
        _warn_of_slow_functions(said)
        return None
    return _function(name)


def chunks(name: str, wave: waves.Wave) -> dict[str, Any]:
    """Make the arguments that tell a function of the library a wave's chunks; all but one find them themselves."""
    return {"chunk_indices": wave.chunks, "chunk_size": waves.CHUNK} if name == "chunk_gated_delta_rule" else {}


def convolution(activation: str | None, device: torch.device) -> Callable[..., Any] | None:
    """The library's convolution, as :func:`.ops.convolve_at_once` takes one; None where it does not run.

    Without it the layer's own function runs, in transformers causal-conv1d's where that is installed.
    """
    if device.type != "cuda" or activation not in (None, "silu", "swish") or unfit("causal_conv1d"):
        return None
    return _convolve


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None, **varlen: Any
) -> torch.Tensor:
    out, _ = _function("causal_conv1d")(x.transpose(1, 2), weight, bias, activation=activation, **varlen)
    return cast(torch.Tensor, out).transpose(1, 2)


def unfit(name: str) -> str | None:
    """Say why a function of the library does not serve; None if it does."""
    if lacking := fla.lacking():
        return f"the fast ones need {lacking}"
    return _changed(name)


@functools.cache
def _changed(name: str) -> str | None:
    module, *call = FUNCTIONS[name]
    try:
        said = surface.uncallable(importlib.import_module(module), name, *call)
    except ImportError as error:
        said = " ".join(str(error).split())
    return said and surface.unfit(fla.NAME, said)


def _function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(FUNCTIONS[name][0]), name)
    return found


@functools.cache
def _warn_of_slow_functions(said: str) -> None:
    warnings.warn(f"recurrent layers run PyTorch functions, which are slow on a GPU: {said}", stacklevel=2)

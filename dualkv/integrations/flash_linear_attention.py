"""Decide which flash-linear-attention versions run recurrent layers, and whether this machine's can train them.

Nothing but PyTorch is imported here, so that `dualkv doctor` can ask without transformers.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

from codegen import packages

NAME = "flash-linear-attention"
# Triton from 3.4.0 up to this version computes wrong gradients of gated delta nets on Hopper (the library's issue 640).
TRITON = "3.7.1"


@functools.cache
def lacking() -> str | None:
    """Say what is lacking of the library; see :func:`codegen.packages.lacking`."""
    return packages.lacking(NAME)


def refusal() -> str | None:
    """Say in one sentence why the library cannot train gated delta nets on this machine; None if it can.

    It raises in their backward on Hopper with a Triton of wrong gradients, unless tilelang is installed.
    """
    if lacking() or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    triton = packages.found("triton")
    if find_spec("tilelang") is not None or triton is None:
        return None
    if not packages.release("3.4.0") <= packages.release(triton) < packages.release(TRITON):
        return None
    return (
        f"{NAME}'s gated delta rule has no backward on Hopper with Triton {triton}: install Triton {TRITON} or newer"
        f' (pip install "triton>={TRITON}") or tilelang (pip install tilelang)'
    )

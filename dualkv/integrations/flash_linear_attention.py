"""Decide which flash-linear-attention versions run recurrent layers, and whether this machine's can train them.

Nothing but PyTorch is imported here, so that `dualkv doctor` can ask without transformers.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

NAME = "flash-linear-attention"
# As the extra `hybrid` asks for them. The functions that are called have the interface of these versions.
VERSIONS = ">=0.6,<0.7"
# Triton from 3.4.0 up to this version computes wrong gradients of gated delta nets on Hopper (the library's issue 640).
TRITON = "3.7.1"
INSTALL = f'pip install "{NAME}{VERSIONS}" "triton>={TRITON}"'


@functools.cache
def installed() -> bool:
    """Whether a version of the library with the interface that is called is installed."""
    found = _version(NAME)
    if found is None:
        return False
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(VERSIONS).contains(found, prereleases=True)


def refusal() -> str | None:
    """Say in one sentence why the library cannot train gated delta nets on this machine; None if it can.

    It raises in their backward on Hopper with a Triton of wrong gradients, unless tilelang is installed.
    """
    if not installed() or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    triton = _version("triton")
    if find_spec("tilelang") is not None or triton is None:
        return None
    from packaging.version import Version

    if not Version("3.4.0") <= Version(triton) < Version(TRITON):
        return None
    return (
        f"{NAME}'s gated delta rule has no backward on Hopper with Triton {triton}: install Triton {TRITON} or newer"
        f' (pip install "triton>={TRITON}") or tilelang (pip install tilelang)'
    )


def advice() -> str | None:
    """Say in one sentence what to do about the library on this machine; None where it runs, or is not installed."""
    found = _version(NAME)
    if found is not None and not installed():
        return f"{NAME} is {found}, recurrent layers on a GPU run {NAME}{VERSIONS}: {INSTALL}"
    return refusal()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

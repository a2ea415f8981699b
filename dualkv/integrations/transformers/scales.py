"""FP8 products in linear layers: what their scales mean for packed rows is said once.

A scale of a single row gives a packed row what the same row of a separate sequence gets. A scale of a whole tensor
covers all rows of a call, so results depend on which rows a call holds, in padded batches too. In the backward the
gradients of a row that several sequences share are added up before they are rounded.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter

from torch import nn

PACKAGES = ("torchao.", "transformer_engine.")
OF_ROWS = "the forward is that of separate sequences"
OF_CALLS = "a scale may cover all rows of a call, so results depend on which rows a call holds, packed or not"


def say(decoder: nn.Module) -> None:
    """Warns once in a process of the layers of a decoder that may compute products of 8 bits."""
    found = Counter((type(m).__name__, _by_row(m)) for m in decoder.modules() if _is_narrow(m))
    for (name, by_row), number in sorted(found.items()):
        _warn(type(decoder).__name__, name, number, OF_ROWS if by_row else OF_CALLS)


def _is_narrow(module: nn.Module) -> bool:
    name = type(module).__name__
    return type(module).__module__.startswith(PACKAGES) and ("Linear" in name or "MLP" in name)


def _by_row(module: nn.Module) -> bool:
    """Whether torchao's layer scales each row of its input by itself."""
    cast = getattr(getattr(module, "config", None), "cast_config_input", None)
    return getattr(getattr(cast, "scaling_granularity", None), "name", None) == "AXISWISE"


@functools.cache
def _warn(decoder: str, name: str, number: int, forward: str) -> None:
    warnings.warn(
        f"dualkv: {decoder} has {number} layers of the class {name}. In FP8 {forward}; gradients of rows that sequences"
        " share are rounded once, where separate sequences round theirs apart"
        " (docs/transformers.md has measured differences)",
        stacklevel=3,
    )

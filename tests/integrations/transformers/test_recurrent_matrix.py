"""Recurrent layers on packed rows with everything that may surround them: dtypes, depths, checkpointing, fused pieces.

The default run has a family of each kind of recurrent layer; all families are marked slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import dualkv

pytest.importorskip("transformers")

from dualkv.integrations.transformers import recompute_layers
from tests.integrations.doubled import double_throughout
from tests.integrations.tiny import TREE
from tests.integrations.transformers.test_recurrent import BOUND, FAMILIES, OFTEN, make, there, worst

# A long, an empty and a short response, a prompt of one token.
TWO_LEVELS = dualkv.Layout.from_lengths([5, 1], [[67, 0, 2], [2, 6]])
LAYOUTS = {"two levels": TWO_LEVELS, "tree": TREE}

KINDS = there(*OFTEN)
WAYS: dict[str, Callable[[Any], Any]] = {
    "keeping all": lambda model: model,
    "keeping nothing": recompute_layers,
    "keeping attention": lambda model: recompute_layers(model, "attention"),
    "keeping products": lambda model: recompute_layers(model, "products"),
}


def cases() -> list[Any]:
    """List the cases; by default each combination runs with one of the kinds."""
    found = []
    combinations = list(itertools.product(WAYS, ("float32", "float64"), LAYOUTS))
    for family in FAMILIES:
        for at, combination in enumerate(combinations):
            runs = family in KINDS and at % len(KINDS) == KINDS.index(family)
            found.append(pytest.param(family, *combination, marks=() if runs else (pytest.mark.slow,)))
    return found


@pytest.mark.parametrize(("family", "way", "dtype", "layout"), cases())
def test_packed_equals_replicated(family: str, way: str, dtype: str, layout: str) -> None:
    precision = getattr(torch, dtype)
    with double_throughout() if dtype == "float64" else nullcontext():
        assert worst(WAYS[way](make(family, precision)), LAYOUTS[layout]) < BOUND[precision]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "minimax" else (pytest.mark.slow,)) for name in FAMILIES]
)
def test_fast(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts around attention and recurrences are traced in pieces, and checkpointing keeps attention. The GPU suite
    has the compiler's kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = make(family)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert worst(model, TREE, fast=True) < BOUND[torch.float32]
    assert all(layer.gradient_checkpointing for layer in model.get_decoder().layers)

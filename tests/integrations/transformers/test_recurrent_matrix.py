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
from tests.integrations.transformers.test_recurrent import FAMILIES, make, worst

# A long, an empty and a short response, a prompt of one token.
TWO_LEVELS = dualkv.Layout.from_lengths([5, 1], [[67, 0, 2], [2, 6]])
LAYOUTS = {"two levels": TWO_LEVELS, "tree": TREE}

KINDS = [name for name in ("qwen3_5_text", "kimi_linear", "bamba", "lfm2", "minimax") if name in FAMILIES]
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
    wide = dtype == "float64"
    with double_throughout() if wide else nullcontext():
        model = WAYS[way](make(family, torch.float64 if wide else torch.float32))
        # In fp32 a gradient of Olmo's decays, 3e-5 of the largest, is 1e-5 off also where sequences are replicated.
        least = 1e-6 if wide else 1e-3
        hidden, logp, grads = worst(model, LAYOUTS[layout], torch.float64 if wide else torch.float32, least)
    assert max(hidden, logp) < (1e-10 if wide else 1e-5)
    # Zaya's temperatures of keys are 1.3e-5 (replicated) and 1.6e-5 (packed) off the gradients of float64.
    assert grads < (1e-9 if wide else 4e-5 if family == "zaya" else 1e-5)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "minimax" else (pytest.mark.slow,)) for name in FAMILIES]
)
def test_fast(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts around attention and recurrences are traced in pieces, and checkpointing keeps attention. The GPU suite
    has the compiler's kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = make(family)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert max(worst(model, TREE, fast=True)) < 1e-5
    assert all(layer.gradient_checkpointing for layer in model.get_decoder().layers)

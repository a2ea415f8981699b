"""Formulas of the ops for `torch.utils.flop_counter.FlopCounterMode`.

A product of two matrices is a multiply and an add for each visible pair of a query and a key, head, and element of a
head. So the forward has 2 (D + Dv) a pair and head, and the backward 2 (3 D + 2 Dv), 2.5 times as much if Dv is D:
q k^T again, dout v^T, p^T dout, ds k, ds^T q. Products of gradients that are not requested are left out. Pairs are
counted by the host tensors of the layout: exactly, with its window or chunks, and nothing waits for a GPU. Where these
tensors have no values (fake tensors, while a graph is made), every row counts as if it saw all rows before it, which is
the most that a layout of so many rows can have.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import torch

from dualkv.ops.features import Features, Window
from dualkv.segments import Segments, segments_of

COUNTER = "torch.utils.flop_counter"


def visible_pairs(segments: Segments, window: Window | None = None) -> int:
    """(query, key) pairs of one head: the row at position p sees p + 1 keys, less what a window hides. Rows without
    queries count as none."""
    seen = segments.position + 1
    if window is not None:
        seen -= window.lowest(segments.position)
    if segments.silent is not None:
        seen = seen[np.arange(segments.total) >= np.repeat(segments.first_query, segments.group_rows)]
    return int(seen.sum())


def _pairs(q: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor, window: int | None, chunk: int | None) -> int:
    """Visible pairs over all heads."""
    rows, heads = q.shape[:2]
    if type(offsets) is not torch.Tensor or type(parent) is not torch.Tensor:
        return heads * (rows * (rows + 1) // 2)
    hiding = Features(window, chunk).reach
    segments = segments_of(offsets, parent)
    return heads * segments.cached(("visible pairs", hiding), lambda: visible_pairs(segments, hiding))


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor,
    softmax_scale: float, deterministic: bool = False, window: int | None = None, chunk: int | None = None,
    *_others: Any, **_settings: Any,
) -> int:  # fmt: skip
    """FLOP of `torch.ops.dualkv.fwd`."""
    return 2 * (q.shape[2] + v.shape[2]) * _pairs(q, offsets, parent, window, chunk)


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    offsets: torch.Tensor, parent: torch.Tensor, softmax_scale: float, deterministic: bool = False,
    gradients: str = "qkv", window: int | None = None, chunk: int | None = None, *_others: Any, **_settings: Any,
) -> int:  # fmt: skip
    """FLOP of `torch.ops.dualkv.bwd`."""
    of_scores = "q" in gradients or "k" in gradients
    of_qk, of_v = 1 + ("q" in gradients) + ("k" in gradients), of_scores + ("v" in gradients)
    return 2 * (of_qk * q.shape[2] + of_v * v.shape[2]) * _pairs(q, offsets, parent, window, chunk)


def _register(counter: Any) -> None:
    counter.register_flop_formula(torch.ops.dualkv.fwd, get_raw=True)(forward)
    counter.register_flop_formula(torch.ops.dualkv.bwd, get_raw=True)(backward)


class _AtImport(MetaPathFinder):
    """Registers the formulas when the counter is imported. Importing it here would import triton."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != COUNTER:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            run: Any = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Let every counter of this process know the ops, whether its module is imported already or later."""
    if (counter := sys.modules.get(COUNTER)) is not None:
        _register(counter)
    else:
        sys.meta_path.insert(0, _AtImport())

"""FLOP of the ops, as PyTorch's counter has them: those of the visible pairs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import dualkv
from dualkv import Layout
from dualkv.ops import flops

TREE = Layout.from_segments([0, 3, 7, 9, 14, 14, 20, 22], [-1, 0, 1, 1, 0, -1, 5])
HEADS, D, DV = 4, 16, 8
FWD, BWD = torch.ops.dualkv.fwd, torch.ops.dualkv.bwd


def qkv(layout, dv=DV, device="cpu"):
    return [torch.randn(layout.num_tokens, h, d, device=device) for h, d in ((HEADS, D), (2, D), (2, dv))]


def pairs(layout, window=None, chunk=None):
    """One pair after another."""
    ends, position = layout.visible_end.tolist(), layout.position_ids.tolist()
    first = np.repeat(layout._segments.first_query, layout._segments.group_rows)
    found = 0
    for q in range(layout.num_tokens):
        for k in range(q + 1):
            inside = window is None or position[q] - position[k] < window
            inside &= chunk is None or position[q] // chunk == position[k] // chunk
            found += q < ends[k] and inside and q >= first[q]
    return found


@pytest.mark.parametrize("features", [{}, {"window": 3}, {"chunk": 4}, {"window": 100}], ids=str)
@pytest.mark.parametrize("layout", [TREE, Layout.from_lengths([5, 3], [[2, 4], []])], ids=["tree", "groups"])
def test_flops_of_a_call_and_its_backward(layout, features):
    for of_rows in (layout, layout.without_prompt_queries()):
        q, k, v = (x.requires_grad_() for x in qkv(of_rows))
        with FlopCounterMode(display=False) as counter:
            out = dualkv.attention(q, k, v, of_rows, **features)
            out[-1].sum().backward()
        found, a_pair = counter.get_flop_counts()["Global"], 2 * HEADS * pairs(of_rows, **features)
        assert found == {FWD: a_pair * (D + DV), BWD: a_pair * (3 * D + 2 * DV)}


def test_only_requested_gradients_count():
    for wants, of_qk, of_v in (("q", 2, 1), ("k", 2, 1), ("v", 1, 1), ("qk", 3, 1), ("kv", 2, 2), ("qkv", 3, 2)):
        tensors = [x.requires_grad_(name in wants) for name, x in zip("qkv", qkv(TREE), strict=True)]
        out = dualkv.attention(*tensors, TREE)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == 2 * HEADS * pairs(TREE) * (of_qk * D + of_v * DV), wants


def test_tensors_without_values():
    """Shapes alone are enough with the layout's own tensors; without their values all rows before count."""
    with FlopCounterMode(display=False) as counter:
        dualkv.attention(*qkv(TREE, device="meta"), TREE)
    assert counter.get_total_flops() == 2 * HEADS * pairs(TREE) * (D + DV)
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        FWD(*qkv(TREE), *(mode.from_tensor(x) for x in (TREE.offsets, TREE.parent)), 1.0)
    assert counter.get_total_flops() == 2 * HEADS * (22 * 23 // 2) * (D + DV)


def test_whichever_is_imported_first(monkeypatch):
    """The counter imports triton, so that importing dualkv leaves it alone."""
    program = """
import importlib.util, sys
import dualkv, torch
assert "torch.utils.flop_counter" not in sys.modules
importlib.util.find_spec("torch.utils.flop_counter")  # looking for it is no import
from torch.utils.flop_counter import flop_registry
print(torch.ops.dualkv.fwd in flop_registry, torch.ops.dualkv.bwd in flop_registry)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr
    monkeypatch.setattr(flop_counter, "flop_registry", {})
    flops.install()
    assert set(flop_counter.flop_registry) == {FWD, BWD}

"""What PyTorch does to functions of tensors: vmap, export, fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dualkv
from dualkv import Layout

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.torch.jit.script. is deprecated")

LAYOUT = Layout.from_lengths([5], [[3, 2]])


def qkv(layout=LAYOUT):
    torch.manual_seed(0)
    return [torch.randn(layout.num_tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]


# ---------------------------------------------------------------- vmap
def test_vmap_computes_each_of_a_batch():
    first, second = qkv(), [2 * x for x in qkv()]
    batch = [torch.stack(pair) for pair in zip(first, second, strict=True)]
    out = torch.func.vmap(lambda *x: dualkv.attention(*x, LAYOUT))(*batch)
    for got, one in zip(out, (first, second), strict=True):
        assert torch.equal(got, dualkv.attention(*one, LAYOUT))


# ---------------------------------------------------------------- export and fake tensors
class Projected(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, q, k, v, offsets, parent):
        return torch.ops.dualkv.fwd(self.projection(q), k, v, offsets, parent, 0.3)[0]


def test_one_exported_program_serves_other_layouts():
    module, auto, rows = Projected(), torch.export.Dim.AUTO, torch.export.Dim("T", min=2)
    shapes = [{0: rows}] * 3 + [{0: auto}] * 2
    program = torch.export.export(module, (*qkv(), LAYOUT.offsets, LAYOUT.parent), dynamic_shapes=tuple(shapes))
    other = Layout.from_lengths([7, 3], [[3, 2, 4], [1]])
    arguments = (*qkv(other), other.offsets, other.parent)
    assert torch.equal(program.module()(*arguments), module(*arguments))


def test_fake_tensors():
    with FakeTensorMode():
        layout = Layout.from_lengths([5], [[3, 2]])
        q, k, v = (torch.empty(10, h, 8, requires_grad=True) for h in (4, 2, 2))
        out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        there = dualkv.attention(*(torch.empty(10, h, 8, device="cuda") for h in (4, 2, 2)), layout)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 10), torch.float32)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    assert there.device == torch.device("cuda", 0)

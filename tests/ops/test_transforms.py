"""Tests of PyTorch's transforms of functions: export, fake and meta tensors, torch.func, forward mode, DTensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import dualkv
from dualkv import Layout
from tests.ops.test_compat import EDGES, call, inputs

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.torch.jit.script. is deprecated")

LAYOUT = Layout.from_lengths([5], [[3, 2]])


def qkv(layout=LAYOUT):
    torch.manual_seed(0)
    return [torch.randn(layout.num_tokens, *shape, dtype=torch.float64) for shape in ((4, 8), (2, 8), (2, 16))]


def loss(q, k, v):
    return dualkv.attention(q, k, v, LAYOUT).square().sum()


def gradients(q, k, v):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(loss(*leaves), leaves)


# ---------------------------------------------------------------- torch.func
def test_gradients_by_torch_func():
    want = gradients(*qkv())
    for got in (
        torch.func.grad(loss, (0, 1, 2))(*qkv()),
        torch.func.vjp(loss, *qkv())[1](torch.ones((), dtype=torch.float64)),
        torch.func.jacrev(loss, (0, 1, 2))(*qkv()),
    ):
        assert all(map(torch.equal, got, want))


def test_vmap_computes_each_of_a_batch():
    first, second = qkv(), [2 * x for x in qkv()]
    batch = [torch.stack(pair) for pair in zip(first, second, strict=True)]
    out = torch.func.vmap(lambda *x: dualkv.attention(*x, LAYOUT))(*batch)
    for got, one in zip(out, (first, second), strict=True):
        assert torch.equal(got, dualkv.attention(*one, LAYOUT))
    each = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*batch)
    for i, one in enumerate((first, second)):
        assert all(torch.equal(got[i], want) for got, want in zip(each, gradients(*one), strict=True))


def test_second_derivatives_and_forward_mode_raise():
    """The op by itself would give tangents of zero, which are wrong."""
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x, k, v).sum())(q)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(loss, (q, k, v), (q, k, v))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        loss(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.hessian(loss)(q, k, v)


# ---------------------------------------------------------------- export, fake and meta tensors
class Projected(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.sinks = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, q, k, v, offsets, parent):
        return torch.ops.dualkv.fwd(self.projection(q), k, v, offsets, parent, 0.3, False, None, 4, self.sinks)[0]


def test_one_exported_program_serves_other_layouts():
    module, auto, rows = Projected(), torch.export.Dim.AUTO, torch.export.Dim("T", min=2)
    shapes = [{0: rows}] * 3 + [{0: auto}] * 2
    program = torch.export.export(module, (*qkv(), LAYOUT.offsets, LAYOUT.parent), dynamic_shapes=tuple(shapes))
    other = Layout.from_lengths([7, 3], [[3, 2, 4], [1]])
    arguments = (*qkv(other), other.offsets, other.parent)
    assert torch.equal(program.module()(*arguments), module(*arguments))


class Gradients(torch.nn.Module):
    def forward(self, dout, q, k, v, out, lse, offsets, parent):
        return torch.ops.dualkv.bwd(dout, q, k, v, out, lse, offsets, parent, 0.3, True, "qv")


def test_the_backward_is_exported_too():
    def arguments(layout):
        q, k, v = qkv(layout)
        out, lse = torch.ops.dualkv.fwd(q, k, v, layout.offsets, layout.parent, 0.3)
        return torch.ones_like(out), q, k, v, out, lse, layout.offsets, layout.parent

    auto, rows = torch.export.Dim.AUTO, torch.export.Dim("T", min=2)
    shapes = [{0: rows}] * 5 + [{1: rows}] + [{0: auto}] * 2
    program = torch.export.export(Gradients(), arguments(LAYOUT), dynamic_shapes=tuple(shapes))
    other = arguments(Layout.from_lengths([7, 3], [[3, 2, 4], [1]]))
    for got, want in zip(program.module()(*other), Gradients()(*other), strict=True):
        assert torch.equal(got, want)


def test_fake_tensors():
    with FakeTensorMode():
        layout = Layout.from_lengths([5], [[3, 2]])
        q, k, v = (torch.empty(10, *shape, requires_grad=True) for shape in ((4, 8), (2, 8), (2, 16)))
        out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        there = dualkv.attention(*(torch.empty(10, h, 8, device="cuda") for h in (4, 2, 2)), layout)
    assert (out.shape, lse.shape, lse.dtype) == ((10, 4, 16), (4, 10), torch.float32)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    assert there.device == torch.device("cuda", 0)


def test_meta_tensors():
    q, k, v = (x.to("meta").requires_grad_() for x in qkv())
    out = dualkv.attention(q, k, v, LAYOUT)
    assert out.device.type == "meta"
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]


# ---------------------------------------------------------------- DTensor
@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_dtensors_are_refused_and_their_local_part_is_not(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    q, k, v = qkv()
    for placement in (Replicate(), Shard(0), Shard(1)):
        there = [distribute_tensor(x, mesh, [placement], src_data_rank=None) for x in (q, k, v)]
        with pytest.raises(TypeError, match=r"q is a DTensor, expected a torch.Tensor \(of a DTensor its .to_local"):
            dualkv.attention(*there, LAYOUT)
        with pytest.raises(TypeError, match="k is a DTensor"):
            dualkv.attention(q, there[1], v, LAYOUT)
    heads = [x.to_local() for x in there]  # rank 0's
    assert torch.equal(dualkv.attention(*heads, LAYOUT), dualkv.attention(q, k, v, LAYOUT)[:, :2])
    tensors = inputs(*EDGES["packed"])
    tensors[3] = distribute_tensor(tensors[3].detach(), mesh, [Replicate()], src_data_rank=None)
    for causal in (True, False):
        with pytest.raises(TypeError, match="k_decoded is a DTensor"):
            call(tensors, *EDGES["packed"], causal=causal)


def test_what_is_no_tensor_is_named():
    q, k, _ = qkv()
    with pytest.raises(TypeError, match=r"v is a list, expected a torch.Tensor"):
        dualkv.attention(q, k, [1.0], LAYOUT)

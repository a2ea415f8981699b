"""Gradients are made for the inputs that ask for them, and for no others."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dualkv
from codegen.spec import GRADIENTS
from dualkv import Layout

LAYOUT = Layout.from_lengths([7], [[3, 0, 5]])


def inputs():
    torch.manual_seed(0)
    return [torch.randn(LAYOUT.num_tokens, *shape, dtype=torch.float64) for shape in ((4, 16), (2, 16), (2, 24))]


def asked_of_backward(step):
    """The `gradients` of every dualkv.bwd that `step` runs."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.dualkv.bwd.default:
                seen.append(args[10] if len(args) > 10 else "qkv")
            return func(*args, **(kwargs or {}))

    with Watch():
        step()
    return seen


def test_every_subset_has_a_name():
    assert set(GRADIENTS) == {"".join(s) for n in (1, 2, 3) for s in itertools.combinations("qkv", n)}


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_the_op_returns_what_is_asked(gradients):
    q, k, v = inputs()
    out, lse = torch.ops.dualkv.fwd(q, k, v, LAYOUT.offsets, LAYOUT.parent, 0.25)
    arguments = torch.randn_like(out), q, k, v, out, lse, LAYOUT.offsets, LAYOUT.parent, 0.25, False
    every = torch.ops.dualkv.bwd(*arguments)
    *some, dsinks = torch.ops.dualkv.bwd(*arguments, gradients)
    assert dsinks.shape == (0,)
    for name, got, full in zip("qkv", some, every[:3], strict=True):
        assert torch.equal(got, full) if name in gradients else got.shape == (0,)
    torch.library.opcheck(torch.ops.dualkv.bwd, (*arguments, gradients))


@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_autograd_asks_for_what_is_needed(gradients, checkpointed):
    leaves = [x.requires_grad_(name in gradients) for name, x in zip("qkv", inputs(), strict=True)]

    def attend(*qkv):
        return dualkv.attention(*qkv, LAYOUT)

    def step():
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=False)
        else:
            out = attend(*leaves)
        out.square().sum().backward()

    assert asked_of_backward(step) == [gradients]
    every = [x.requires_grad_() for x in inputs()]
    attend(*every).square().sum().backward()
    for name, x, full in zip("qkv", leaves, every, strict=True):
        assert torch.equal(x.grad, full.grad) if name in gradients else x.grad is None


def test_a_frozen_projection_under_compile():
    q, k, v = inputs()
    weight = torch.eye(16, dtype=torch.float64).requires_grad_()

    def loss(weight):
        return dualkv.attention(q, k @ weight, v, LAYOUT).square().sum()

    (want,) = torch.autograd.grad(loss(weight), weight)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(weight), weight)
    torch.testing.assert_close(got, want)

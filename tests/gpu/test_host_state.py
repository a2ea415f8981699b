"""Tests of the memory that layouts keep on a GPU: freed with the last reference, found again by copies of their
tensors."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.autograd.graph import save_on_cpu

import dualkv
from dualkv import Layout
from dualkv.ops import backends, hopper

pytestmark = pytest.mark.any_gpu


def inputs(layout: Layout) -> list[torch.Tensor]:
    return [torch.randn(layout.num_tokens, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2)]


def skip_unless_served(name: str) -> None:
    probe = torch.empty(1, 1, 128, device="cuda", dtype=torch.bfloat16)
    if (reason := backends.BACKENDS[name].unsupported(probe, probe)) is not None:
        pytest.skip(f"{name} does not serve {reason}")


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("name", ["hopper", "cudnn", "flex", "flash"])
def test_a_dropped_layout_frees_its_memory_at_once(name, window):
    skip_unless_served(name)
    layout = Layout.from_lengths([900], [[200] * 4])
    q, k, v = (x.requires_grad_() for x in inputs(layout))
    dout = torch.randn_like(q)

    def held(layout: Layout) -> int:
        """Bytes that a call and its backward leave."""
        grads = torch.autograd.grad(dualkv.attention(q, k, v, layout, window=window, backend=name), (q, k, v), dout)
        del grads
        # The thread that ran the backward may hold its results until it takes up another one.
        nothing = torch.empty(0, device="cuda", requires_grad=True)
        torch.autograd.grad(nothing * 1, nothing, nothing.detach())
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    for lengths in ([900], [[200] * 4]), ([800], [[225] * 4]):
        held(Layout.from_lengths(*lengths))  # kernels are loaded, workspaces that live for ever are there
    gc.collect()  # of the tests before
    before = held(layout)
    gc.disable()
    try:
        other = Layout.from_lengths([700], [[250] * 4])
        assert held(other) > before, "the call keeps nothing: this test cannot tell"
        del other
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("name", ["hopper", "cudnn", "flex", "flash"])
def test_a_dropped_layout_leaves_its_memory_to_the_stream_that_reads_it(name, window):
    skip_unless_served(name)
    layout, other = (Layout.from_lengths([900], [[200] * 4]) for _ in range(2))
    q, k, v = inputs(layout)
    want = dualkv.attention(q, k, v, layout, window=window, backend=name)
    dualkv.attention(q, k, v, other, window=window, backend=name)  # this stream makes what the other one reads
    torch.cuda.synchronize()
    sizes = sorted({x.numel() for x in (q, k)} | {2**n for n in range(4, 20)})
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # over a second, in which a busy host must get through what follows
        out = dualkv.attention(q, k, v, other, window=window, backend=name)
    del other
    gc.collect()
    garbage = [torch.full((n,), 7, dtype=torch.int32, device="cuda") for n in sizes for _ in range(8)]
    torch.cuda.current_stream().synchronize()
    assert not side.query(), "the sleep is too short to tell"
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    del garbage


@pytest.mark.parametrize("kept", [True, False])
def test_saved_tensors_on_the_cpu_make_one_plan(monkeypatch, kept):
    skip_unless_served("hopper")
    layout = Layout.from_lengths([900], [[200] * 4])
    q, k, v = (x.requires_grad_() for x in inputs(layout))
    made = []
    plan = hopper.BackwardPlan

    def counted(*arguments):
        made.append(1)
        return plan(*arguments)

    monkeypatch.setattr(hopper, "BackwardPlan", counted)

    def loss() -> torch.Tensor:
        return sum(dualkv.attention(q * n, k, v, layout, deterministic=True).float().square().sum() for n in (1, 2, 3))

    want = torch.autograd.grad(loss(), (q, k, v))
    layout = Layout.from_lengths([900], [[200] * 4])
    made.clear()
    with save_on_cpu():
        value = loss()
    if not kept:
        del layout
    got = torch.autograd.grad(value, (q, k, v))
    assert all(map(torch.equal, got, want))
    assert len(made) == 1

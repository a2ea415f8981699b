"""`flash_attn_dualkv_varlen_func` on a Hopper GPU: every alignment and head dim, graphs, and no waiting for the GPU."""

from __future__ import annotations

import gc

import pytest
import torch

import dualkv
from dualkv.ops import compat, composition, reference
from tests.fuzz.case import Case, run
from tests.ops.test_compat import call, inputs

ALIGNMENTS = {  # q_lens of P = 300 and these own lengths
    "packed": (377, 128, 1, 0, 200),
    "responses": (77, 128, 1, 0, 200),
    "the prompt's last token in front of each": (78, 129, 2, 1, 201),
    "all positions of all": (377, 428, 301, 300, 500),
    "some of each": (5, 400, 0, 17, 200),
}
LENGTHS = (300, 77, 128, 1, 0, 200)
PACKED = list(ALIGNMENTS["packed"]), 300, list(LENGTHS[1:])


def case(name, dtype="bf16", causal=True, head_dim=128, heads=8, kv_heads=2):
    return Case("compat", "cuda", dtype, heads, kv_heads, head_dim, LENGTHS, q_lens=ALIGNMENTS[name], causal=causal)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_alignments(name, causal, dtype):
    run(case(name, dtype, causal))


@pytest.mark.parametrize("head_dim", range(64, 257, 8))
def test_head_dims(head_dim):
    run(case("packed", head_dim=head_dim))
    run(case("responses", "fp16", head_dim=head_dim))


@pytest.mark.parametrize("heads", [(2, 2), (12, 2), (16, 1)], ids=str)
def test_gqa_ratios(heads):
    for causal in (True, False):
        run(case("packed", causal=causal, heads=heads[0], kv_heads=heads[1]))


@pytest.mark.parametrize("name", ["packed", "responses", "all positions of all"])
def test_causal_calls_run_the_kernel(name, monkeypatch):
    for module in (composition, reference):
        for function in ("forward", "backward"):
            monkeypatch.setattr(module, function, lambda **call: pytest.fail("not the kernel"))
    run(case(name))


def test_packed_rollouts_get_the_bits_of_attention():
    q_lens, context, k_lens = PACKED
    q, kc, vc, kd, vd = inputs(*PACKED, 8, 2, 128, torch.bfloat16, "cuda")
    layout = dualkv.Layout.from_lengths([context], [k_lens], "cuda")
    want = dualkv.attention(q, torch.cat([kc, kd]), torch.cat([vc, vd]), layout)
    assert torch.equal(call((q, kc, vc, kd, vd), q_lens, context, k_lens), want)


def arguments(alignment, causal=True):
    k_lens = list(LENGTHS[1:])
    tensors = inputs(list(alignment), LENGTHS[0], k_lens, 8, 2, 128, torch.bfloat16, "cuda")
    cu = [torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device="cuda") for x in (alignment, k_lens)]
    return tensors, (*cu, max(alignment), LENGTHS[0], max(k_lens), None, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_later_layers_do_not_wait_for_the_gpu(name, causal):
    tensors, lengths = arguments(ALIGNMENTS[name], causal)
    dout = torch.randn_like(tensors[0])
    function = dualkv.flash_attn_dualkv_varlen_func
    torch.autograd.grad(function(*tensors, *lengths), tensors, dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(function(*tensors, *lengths), tensors, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["packed", "responses", "some of each"])
def test_graph_capture_after_one_call(name):
    tensors, lengths = arguments(ALIGNMENTS[name])
    function = dualkv.flash_attn_dualkv_varlen_func
    with torch.no_grad():
        function(*tensors, *lengths)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = function(*tensors, *lengths)
        for x in tensors:
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, function(*tensors, *lengths))


def test_a_backward_that_does_not_know_that_prompt_rows_were_left_out():
    """The backward may get copies of the layout's tensors, for example when saved tensors are offloaded to the CPU."""
    tensors, lengths = arguments(ALIGNMENTS["responses"])
    dout = torch.randn_like(tensors[0])

    def gradients():
        return torch.autograd.grad(dualkv.flash_attn_dualkv_varlen_func(*tensors, *lengths), tensors, dout)

    want = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        got = gradients()
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


# ---------------------------------------------------------------- lengths that are written to
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_lengths_that_data_copy_writes_make_nan_without_a_wait(name, causal):
    tensors, lengths = arguments(ALIGNMENTS[name], causal)
    function = dualkv.flash_attn_dualkv_varlen_func
    want = function(*tensors, *lengths)
    torch.autograd.grad(want, tensors, torch.ones_like(want))  # the plans of both directions are uploaded once
    for cu in lengths[:2]:
        before = cu.clone()
        after = before.clone()
        after[1] += 1
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            cu.data.copy_(after)
            stale = function(*tensors, *lengths)
            grads = torch.autograd.grad(stale, tensors, torch.ones_like(stale))
            cu.data.copy_(before)
            again = function(*tensors, *lengths)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert stale.isnan().all()
        assert not causal or all(grads[i].isnan().any() for i in (0, 1))  # on an H200 not in every element
        assert torch.equal(again, want)


def test_lengths_that_a_replayed_graph_writes_make_nan():
    tensors, lengths = arguments(ALIGNMENTS["responses"])
    function, cu = dualkv.flash_attn_dualkv_varlen_func, lengths[0]
    after = cu.clone()
    after[1] += 1
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cu.copy_(after)
    want = function(*tensors, *lengths)  # reads the lengths: the capture has written nothing
    assert not want.isnan().any()
    graph.replay()
    assert function(*tensors, *lengths).isnan().all()
    new = (cu.clone(), *lengths[1:])
    assert not function(*tensors, *new).isnan().any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_a_replayed_graph_compares_lengths_and_keeps_what_it_reads(name, causal):
    """The graph keeps what it reads even after calls with so many other lengths that nothing else keeps the plan of the
    capture."""
    tensors, lengths = arguments(ALIGNMENTS[name], causal)
    function = dualkv.flash_attn_dualkv_varlen_func
    with torch.no_grad():
        want = function(*tensors, *lengths)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = function(*tensors, *lengths)
        for n in range(compat.LAYOUTS_KEPT + 1):
            other = arguments([1] * n + [0] * (5 - n) if n < 5 else [n, 0, 0, 0, 0], causal)
            function(*other[0], *other[1])
        gc.collect()
        torch.cuda.empty_cache()
        held = [torch.full((2**18,), 7, device="cuda") for _ in range(64)]  # memory that is free holds other data
        graph.replay()
        assert torch.equal(out, want)
        before = lengths[1].clone()
        lengths[1][1] += 1
        graph.replay()
        assert out.isnan().all()
        lengths[1].copy_(before)
        graph.replay()
        assert torch.equal(out, want)
    del held

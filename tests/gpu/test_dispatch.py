"""The op on a Hopper GPU: the kernel runs, nothing recompiles or synchronises, streams and graphs are respected."""

from __future__ import annotations

import gc
import time

import pytest
import torch

import dualkv
from codegen import store
from dualkv import Layout, composition, hopper, reference
from tests import oracle

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == hopper.CAPABILITY
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]


def inputs(layout, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16):
    shapes = [(layout.num_tokens, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def expected(q, k, v, layout):
    wide = (x.double() for x in (q, k, v))
    return oracle.attention(*wide, layout.offsets, layout.parent, q.shape[2] ** -0.5)


def check(out, lse, q, k, v, layout):
    want, want_lse = expected(q, k, v, layout)
    assert (out.double() - want).abs().max() < 0.03
    assert (lse - want_lse).abs().max() < 1e-3


def random_layout(generator):
    def draw(high, n):
        return torch.randint(0, high, (n,), generator=generator).tolist()

    groups = int(torch.randint(1, 6, (), generator=generator))
    return Layout.from_lengths(draw(400, groups), [[1, *draw(300, 3)] for _ in range(groups)])


@pytest.fixture
def only_the_kernel(monkeypatch):
    """The composition and the reference raise."""

    def refuse(*arguments):
        raise AssertionError("not the kernel")

    monkeypatch.setattr(composition, "forward", refuse)
    monkeypatch.setattr(reference, "forward", refuse)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_runs_the_kernel(only_the_kernel, head_dim, dtype):
    layout = Layout.from_lengths([300, 1], [[77, 128, 1, 200], [5]])
    q, k, v = inputs(layout, head_dim=head_dim, dtype=dtype)
    out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
    check(out, lse, q, k, v, layout)


def test_nothing_compiles_or_loads_when_the_batch_changes(only_the_kernel):
    warm = Layout.from_lengths([10], [[3]])
    dualkv.attention(*inputs(warm), warm)
    before, loaded = dict(store.counts), dict(store._loaded)
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        layout = random_layout(generator)
        q, k, v = inputs(layout)
        out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
        check(out, lse, q, k, v, layout)
    for heads, kv_heads in ((4, 1), (12, 3), (32, 8)):
        q, k, v = inputs(layout, heads, kv_heads)
        out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
        check(out, lse, q, k, v, layout)
    assert dict(store.counts) == before
    assert store._loaded == loaded


def test_slices_of_a_fused_projection_are_not_copied(only_the_kernel):
    layout = Layout.from_lengths([500], [[100, 300]])
    fused = torch.randn(layout.num_tokens, 12 * 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.view(layout.num_tokens, -1, 128) for x in fused.split([8 * 128, 2 * 128, 2 * 128], 1))
    dualkv.attention(q, k, v, layout)  # the plan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
    held = torch.cuda.memory_allocated() - begin
    assert torch.cuda.max_memory_allocated() - begin == held, "no workspace"
    assert held < out.nbytes + lse.nbytes + 2048, "out and lse alone, rounded up by the allocator"
    check(out, lse, q, k, v, layout)


def test_strided_inputs_give_the_same(only_the_kernel):
    layout = Layout.from_lengths([130, 40], [[77, 60], [9]])
    q, k, v = inputs(layout)
    want = dualkv.attention(q, k, v, layout)
    swapped = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    shifted = [torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in (q, k, v)]
    for strided in (swapped, shifted):
        assert torch.equal(dualkv.attention(*strided, layout), want)
    one = [x[:, :1].expand_as(x) for x in (k, v)]
    assert torch.equal(dualkv.attention(q, *one, layout), dualkv.attention(q, *(x.contiguous() for x in one), layout))


def test_a_first_call_does_not_wait_for_the_gpu(only_the_kernel):
    warm = Layout.from_lengths([10], [[3]])
    q, k, v = inputs(warm)
    dualkv.attention(q, k, v, warm)
    layout = Layout.from_lengths([3000], [[500] * 8])
    q, k, v = inputs(layout)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # over a second of this stream's time
    begin = time.perf_counter()
    out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
    again = dualkv.attention(q, k, v, layout)
    seconds = time.perf_counter() - begin
    busy = not torch.cuda.current_stream().query()
    assert busy, f"the stream was done after {seconds:.3f} s: the sleep is too short to tell"
    assert torch.equal(out, again)
    check(out, lse, q, k, v, layout)


def test_it_follows_the_current_stream(only_the_kernel):
    layout = Layout.from_lengths([700], [[200, 300]])
    q, k, v = inputs(layout)
    want = dualkv.attention(q, k, v, layout)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    held = q.clone()
    q.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        q.copy_(held)
        out = dualkv.attention(q, k, v, layout)  # right only behind the copy
    side.synchronize()
    assert torch.equal(out, want)


def test_a_dropped_layout_leaves_its_plan_to_the_kernel(only_the_kernel):
    layout = Layout.from_lengths([700], [[200, 300]])
    q, k, v = inputs(layout)
    want = dualkv.attention(q, k, v, layout)
    other = Layout.from_lengths([700], [[200, 300]])
    torch.cuda._sleep(500_000_000)
    out = dualkv.attention(q, k, v, other)
    del other
    gc.collect()
    # What a freed plan's memory would be given to, while the kernel still waits behind the sleep.
    garbage = [Layout.from_lengths([64 * i + 5], [[64 * i] * 4]) for i in range(1, 30)]
    for layout_ in garbage:
        hopper.forward_plan(layout_._segments, q.device, *_tile())
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def _tile():
    spec, _ = hopper._kernel(torch.bfloat16, 128, 4, torch.device("cuda", torch.cuda.current_device()))
    return spec.tile, spec.packed_heads


def test_graph_capture(only_the_kernel):
    layout, other = Layout.from_lengths([300], [[77, 128]]), Layout.from_lengths([200], [[50]])
    dualkv.attention(*inputs(other), other)  # the kernel is loaded, this layout's plan is not made
    q, k, v = inputs(layout)
    missing = "no work plan on cuda:0 yet: run the same call once before the capture"
    with pytest.raises(RuntimeError, match=missing), torch.cuda.graph(torch.cuda.CUDAGraph()):
        dualkv.attention(q, k, v, layout)
    torch.cuda.synchronize()
    dualkv.attention(q, k, v, layout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
    for _ in range(2):
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(out, lse, q, k, v, layout)


def test_second_device(only_the_kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layout = Layout.from_lengths([300], [[77, 128]])
    q, k, v = inputs(layout)
    want = dualkv.attention(q, k, v, layout)
    there = [x.to("cuda:1") for x in (q, k, v)]
    out = dualkv.attention(*there, layout)  # cuda:0 is current
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.to("cuda:0"), want)


def test_opcheck_and_compile(only_the_kernel):
    layout = Layout.from_lengths([130], [[77, 60]])
    q, k, v = inputs(layout)
    arguments = q, k, v, layout.offsets, layout.parent, 0.1, False
    torch.library.opcheck(torch.ops.dualkv.fwd.default, arguments, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda a, b, c: dualkv.attention(a * 1.0, b, c, layout) + 1.0, fullgraph=True)
    assert torch.equal(compiled(q, k, v), dualkv.attention(q, k, v, layout) + 1.0)


def test_two_runs_are_bitwise_equal(only_the_kernel):
    layout = Layout.from_lengths([1000, 30], [[333, 129, 700], [64]])
    q, k, v = inputs(layout, 16, 2)
    first = dualkv.attention(q, k, v, layout, return_lse=True)
    for _ in range(5):
        for a, b in zip(dualkv.attention(q, k, v, layout, return_lse=True), first, strict=True):
            assert torch.equal(a, b)

"""The ops on a Hopper GPU: the kernels run, nothing recompiles or synchronises, streams and graphs are respected."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.utils.checkpoint

import dualkv
from codegen import store
from codegen.spec import backward_specs
from codegen.tiles import HEAD_DIMS
from dualkv import Layout
from dualkv.ops import composition, hopper, reference
from tests import oracle
from tests.fuzz import dense
from tests.fuzz.case import segment_mask


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    kinds = [(t, d, fixed) for t in ("bf16", "fp16") for d in HEAD_DIMS for fixed in (False, True)]
    compile_all(s for kind in kinds for few in (False, True) for s in backward_specs(*kind, few_keys=few))


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


def grads(q, k, v, dout, layout, deterministic=False):
    """(dq, dk, dv) through autograd."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(dualkv.attention(*leaves, layout, deterministic=deterministic), leaves, dout)


def check_grads(got, q, k, v, dout, layout):
    """Each element is as near to float64 as its roundings allow, all together at most twice as far as plain PyTorch.

    The largest of few elements is a matter of luck in both, too much so for a factor of two on one draw of inputs:
    test_backward.py compares those over several draws.
    """
    mask = torch.from_numpy(segment_mask(layout.offsets.diff().tolist(), layout.parent.tolist())).to(q.device)
    want = dense.attention(q, k, v, mask, q.shape[2] ** -0.5, dout)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    computed = oracle.attention(*leaves, layout.offsets, layout.parent, q.shape[2] ** -0.5)[0]
    plain = torch.autograd.grad(computed, leaves, dout)
    for name, x, p in zip(("dq", "dk", "dv"), got, plain, strict=True):
        assert x.dtype == q.dtype
        assert want[name].ratio(x) <= 1.0, name
        value = want[name].value
        floor = 1e-5 * (value.norm() + 1)
        assert (x.double() - value).norm() <= 2 * (p.double() - value).norm() + floor, name


def random_layout(generator):
    def draw(high, n):
        return torch.randint(0, high, (n,), generator=generator).tolist()

    groups = int(torch.randint(1, 6, (), generator=generator))
    return Layout.from_lengths(draw(400, groups), [[1, *draw(300, 3)] for _ in range(groups)])


@pytest.fixture(autouse=True)
def seeded():
    """Seed the inputs, so that they are equal in every run."""
    torch.manual_seed(0)


@pytest.fixture
def only_the_kernel(monkeypatch):
    """The composition and the reference raise."""

    def refuse(**call):
        raise AssertionError("not the kernel")

    for module in (composition, reference):
        monkeypatch.setattr(module, "forward", refuse)
        monkeypatch.setattr(module, "backward", refuse)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_runs_the_kernel(only_the_kernel, head_dim, dtype):
    layout = Layout.from_lengths([300, 1], [[77, 128, 1, 200], [5]])
    q, k, v = inputs(layout, head_dim=head_dim, dtype=dtype)
    out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
    check(out, lse, q, k, v, layout)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1), (34, 2)])
@pytest.mark.parametrize("head_dim", [40, *HEAD_DIMS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients(only_the_kernel, head_dim, heads, kv_heads, dtype, deterministic):
    layout = Layout.from_lengths([300, 1, 0], [[77, 128, 1, 200], [5], [40, 3]])
    q, k, v = inputs(layout, heads, kv_heads, head_dim, dtype)
    dout = torch.randn_like(q)
    check_grads(grads(q, k, v, dout, layout, deterministic), q, k, v, dout, layout)


def test_nothing_compiles_or_loads_when_the_batch_changes(only_the_kernel):
    warm = Layout.from_lengths([10], [[3]])
    q, k, v = inputs(warm)
    grads(q, k, v, torch.randn_like(q), warm)
    before, loaded = dict(store.counts), dict(store._loaded)
    generator = torch.Generator().manual_seed(1)
    for i in range(30):
        layout = random_layout(generator)
        q, k, v = inputs(layout)
        out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
        check(out, lse, q, k, v, layout)
        dout = torch.randn_like(q)
        got = grads(q, k, v, dout, layout)
        if i % 5 == 0:
            check_grads(got, q, k, v, dout, layout)
    for heads, kv_heads in ((4, 1), (12, 3), (32, 8)):
        q, k, v = inputs(layout, heads, kv_heads)
        out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
        check(out, lse, q, k, v, layout)
        grads(q, k, v, torch.randn_like(q), layout)
    assert dict(store.counts) == before
    assert store._loaded == loaded


def test_nothing_compiles_or_loads_when_batches_of_few_and_many_keys_take_turns(only_the_kernel, monkeypatch):
    monkeypatch.setattr(hopper, "FEW_KEYS_WALK", 1.3)
    monkeypatch.setattr(hopper, "FEW_KEYS_ROWS", 2)
    seen, forwards = [], []
    for prompt, response in ((300, 20), (500, 77), (30, 20), (400, 1), (600, 30), (50, 77)):
        layout = Layout.from_lengths([prompt, 5], [[response] * 3, [7]])
        q, k, v = inputs(layout)
        dout = torch.randn_like(q)
        check_grads(grads(q, k, v, dout, layout), q, k, v, dout, layout)
        seen.append((hopper.few_keys_backward(layout._segments, 2, None), dict(store.counts), dict(store._loaded)))
        forwards.append(hopper.few_keys_forward(layout._segments, 128, 4, 2))
    assert [few for few, *_ in seen] == [True, False] * 2 + [False, True]
    assert forwards == [True, False] + [True] * 4
    assert all(after[1:] == seen[1][1:] for after in seen[2:])


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


def test_gradients_of_strided_inputs(only_the_kernel):
    """Slices of a fused projection, heads before tokens, unaligned, an expanded gradient: the same bits."""
    layout = Layout.from_lengths([130, 40], [[77, 60], [9]])
    fused = torch.randn(layout.num_tokens, 12 * 128, device="cuda", dtype=torch.bfloat16)
    parts = [x.view(layout.num_tokens, -1, 128) for x in fused.split([8 * 128, 2 * 128, 2 * 128], 1)]
    plain = [x.contiguous() for x in parts]
    dout = torch.randn_like(plain[0])
    want = grads(*plain, dout, layout, deterministic=True)

    def same(q, k, v, dout, want):
        return all(map(torch.equal, grads(q, k, v, dout, layout, deterministic=True), want))

    swapped = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (*plain, dout)]
    raw = [torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype) for x in (*plain, dout)]
    shifted = [a[1:].view(x.shape).copy_(x) for a, x in zip(raw, (*plain, dout), strict=True)]
    assert same(*parts, dout, want)
    assert same(*swapped, want)
    assert same(*shifted, want)
    for expanded in (dout[:1].expand_as(dout), dout[:, :1].expand_as(dout), dout[:1, :1, :1].expand_as(dout)):
        assert same(*plain, expanded, grads(*plain, expanded.contiguous(), layout, deterministic=True))
    leaf = fused.requires_grad_()
    of_slices = [x.view(layout.num_tokens, -1, 128) for x in leaf.split([8 * 128, 2 * 128, 2 * 128], 1)]
    (got,) = torch.autograd.grad(dualkv.attention(*of_slices, layout, deterministic=True), leaf, dout)
    assert torch.equal(got, torch.cat([x.flatten(1) for x in want], 1))


def test_gradients_of_some_inputs(only_the_kernel):
    """Each choice is a kernel of its own, which may walk the queries in another order: equal up to rounding."""
    layout = Layout.from_lengths([300], [[77, 128]])
    qkv = inputs(layout)
    dout = torch.randn_like(qkv[0])
    want = grads(*qkv, dout, layout, deterministic=True)
    for needed in ((0,), (1,), (2,), (0, 2)):
        some = [x.detach().requires_grad_(i in needed) for i, x in enumerate(qkv)]
        out = dualkv.attention(*some, layout, deterministic=True)
        got = torch.autograd.grad(out, [some[i] for i in needed], dout)
        merged = [got[needed.index(i)] if i in needed else want[i] for i in range(3)]
        check_grads(merged, *qkv, dout, layout)


def test_a_first_call_does_not_wait_for_the_gpu(only_the_kernel):
    warm = Layout.from_lengths([10], [[3]])
    q, k, v = inputs(warm)
    grads(q, k, v, torch.randn_like(q), warm)
    layout = Layout.from_lengths([3000], [[500] * 8])
    q, k, v = inputs(layout)
    dout = torch.randn_like(q)
    torch.cuda.synchronize()
    torch.cuda._sleep(6_000_000_000)  # three seconds of this stream's time
    begin = time.perf_counter()
    out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
    again = dualkv.attention(q, k, v, layout)
    _, *dkv = grads(q, k, v, dout, layout)
    seconds = time.perf_counter() - begin
    busy = not torch.cuda.current_stream().query()
    assert busy, f"the stream was done after {seconds:.3f} s: the sleep is too short to tell"
    assert torch.equal(out, again)
    check(out, lse, q, k, v, layout)
    assert all(map(torch.equal, dkv, grads(q, k, v, dout, layout)[1:]))


def test_it_follows_the_current_stream(only_the_kernel):
    layout = Layout.from_lengths([700], [[200, 300]])
    q, k, v = inputs(layout)
    dout = torch.randn_like(q)
    want = dualkv.attention(q, k, v, layout)
    want_grads = grads(q, k, v, dout, layout, deterministic=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    held = q.clone()
    q.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        q.copy_(held)
        out = dualkv.attention(q, k, v, layout)  # right only behind the copy
        got_grads = grads(q, k, v, dout, layout, deterministic=True)
    side.synchronize()
    assert torch.equal(out, want)
    assert all(map(torch.equal, got_grads, want_grads))


def test_a_dropped_layout_leaves_its_plan_to_the_kernel(only_the_kernel):
    layout = Layout.from_lengths([700], [[200, 300]])
    q, k, v = inputs(layout)
    dout = torch.randn_like(q)
    want = dualkv.attention(q, k, v, layout)
    want_grads = grads(q, k, v, dout, layout, deterministic=True)
    other = Layout.from_lengths([700], [[200, 300]])
    torch.cuda._sleep(2_000_000_000)  # over a second, in which a busy host must get through what follows
    out = dualkv.attention(q, k, v, other)
    got_grads = grads(q, k, v, dout, other, deterministic=True)
    del other
    gc.collect()
    # What a freed plan's memory would be given to, while the kernel still waits behind the sleep.
    garbage = [Layout.from_lengths([64 * i + 5], [[64 * i] * 4]) for i in range(1, 30)]
    for layout_ in garbage:
        spec, _ = hopper._kernel(q.dtype, 128, 4, q.device)
        hopper.forward_plan(layout_._segments, q.device, spec, 8, 2)
        hopper.backward_plan(layout_._segments, q.device, backward_specs("bf16", 128, True).main.tile, 8, 2)
    assert not torch.cuda.current_stream().query(), "the sleep is too short to tell"
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    assert all(map(torch.equal, got_grads, want_grads))


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


@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_capture_of_forward_and_backward(only_the_kernel, deterministic):
    layout, other = Layout.from_lengths([300], [[77, 128]]), Layout.from_lengths([200], [[50]])
    q, k, v = inputs(other)
    grads(q, k, v, torch.randn_like(q), other, deterministic)  # the kernels are loaded
    q, k, v = inputs(layout)
    dout = torch.randn_like(q)
    dualkv.attention(q, k, v, layout)  # the forward's plan is made, the backward's is not
    missing = "no work plan on cuda:0 yet: run the same call once before the capture"
    with pytest.raises(RuntimeError, match=missing), torch.cuda.graph(torch.cuda.CUDAGraph()):
        grads(q, k, v, dout, layout, deterministic)
    torch.cuda.synchronize()
    grads(q, k, v, dout, layout, deterministic)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = grads(q, k, v, dout, layout, deterministic)
    for _ in range(3):
        for x in (q, k, v, dout):
            x.copy_(torch.randn_like(x))
        for x in got:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check_grads(got, q, k, v, dout, layout)
        exact = 0 if deterministic else 1
        assert all(map(torch.equal, got[exact:], grads(q, k, v, dout, layout, deterministic)[exact:]))


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
    dout = torch.randn_like(q)
    got = grads(*there, dout.to("cuda:1"), layout, deterministic=True)
    for a, b in zip(got, grads(q, k, v, dout, layout, deterministic=True), strict=True):
        assert torch.equal(a.to("cuda:0"), b)


def test_opcheck_and_compile(only_the_kernel):
    layout = Layout.from_lengths([130], [[77, 60]])
    q, k, v = inputs(layout)
    arguments = q, k, v, layout.offsets, layout.parent, 0.1, False
    torch.library.opcheck(torch.ops.dualkv.fwd.default, arguments, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda a, b, c: dualkv.attention(a * 1.0, b, c, layout) + 1.0, fullgraph=True)
    assert torch.equal(compiled(q, k, v), dualkv.attention(q, k, v, layout) + 1.0)
    out, lse = torch.ops.dualkv.fwd(*arguments)
    dout = torch.randn_like(q)
    backward = dout, q, k, v, out, lse, *arguments[3:-1], True
    torch.library.opcheck(torch.ops.dualkv.bwd.default, backward, test_utils=("test_schema", "test_faketensor"))

    def step(a, b, c):
        return dualkv.attention(a * 1.0, b, c, layout, deterministic=True)

    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(torch.compile(step, fullgraph=True)(*leaves), leaves, dout)
    assert all(map(torch.equal, got, torch.autograd.grad(step(*leaves), leaves, dout)))


def test_two_runs_are_bitwise_equal(only_the_kernel):
    layout = Layout.from_lengths([1000, 30], [[333, 129, 700], [64]])
    q, k, v = inputs(layout, 16, 2)
    first = dualkv.attention(q, k, v, layout, return_lse=True)
    for _ in range(5):
        for a, b in zip(dualkv.attention(q, k, v, layout, return_lse=True), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients_of_keys_and_values_are_bitwise_equal(only_the_kernel, head_dim):
    layout = Layout.from_lengths([1000, 30], [[333, 129, 700], [64]])
    q, k, v = inputs(layout, 16, 1, head_dim)
    dout = torch.randn_like(q)
    first, ordered = grads(q, k, v, dout, layout), grads(q, k, v, dout, layout, deterministic=True)
    for _ in range(5):
        assert all(map(torch.equal, grads(q, k, v, dout, layout)[1:], first[1:]))
        assert all(map(torch.equal, grads(q, k, v, dout, layout, deterministic=True), ordered))


def test_pytorchs_switch_orders_the_sums_too(only_the_kernel):
    layout = Layout.from_lengths([1000, 30], [[333, 129, 700], [64]])
    q, k, v = inputs(layout, 16, 2)
    dout = torch.randn_like(q)
    want = grads(q, k, v, dout, layout, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            assert all(map(torch.equal, grads(q, k, v, dout, layout), want))
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradient_checkpointing_and_autocast(only_the_kernel):
    layout = Layout.from_lengths([300], [[77, 128]])
    q, k, v = (x.float().requires_grad_() for x in inputs(layout))
    dout = torch.randn_like(q)

    def step(*qkv):
        with torch.autocast("cuda", torch.bfloat16):
            return dualkv.attention(*qkv, layout, deterministic=True).float()

    want = torch.autograd.grad(step(q, k, v), (q, k, v), dout)
    assert all(x.dtype == torch.float32 for x in want)
    out = torch.utils.checkpoint.checkpoint(step, q, k, v, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(out, (q, k, v), dout), want))
    check_grads([x.bfloat16() for x in want], *(x.detach().bfloat16() for x in (q, k, v)), dout.bfloat16(), layout)

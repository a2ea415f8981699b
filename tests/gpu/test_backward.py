"""The Hopper backward kernels against float64: layouts, head dims, ratios, dtypes, splits, sizes, fixed order."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from codegen.spec import GRADIENTS, backward_specs
from codegen.tiles import HEAD_DIMS
from dualkv import Layout
from dualkv.ops import hopper
from tests import oracle
from tests.fuzz.case import poisoned
from tests.gpu.test_forward import LAYOUTS as FORWARDS
from tests.gpu.test_forward import many_groups, more_than_2_to_the_31

BF16, FP16 = torch.bfloat16, torch.float16
LAYOUTS = {
    **{name: FORWARDS[name] for name in ("one group", "ragged groups", "one token", "aligned", "many groups")},
    "two tokens": Layout.from_lengths([1], [[1]]),
    "short responses share key blocks": Layout.from_lengths([200], [[9] * 40]),
    "no responses": Layout.from_lengths([700, 3, 260], [[], [0, 0], []]),
}
SPLIT = Layout.from_lengths([600], [[500, 433, 477]])  # at 8 heads and 1 KV head: few key blocks for the device


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    kinds = [(t, d, fixed) for t in ("bf16", "fp16") for d in HEAD_DIMS for fixed in (False, True)]
    kinds += [("bf16", d, fixed, part) for d in HEAD_DIMS for fixed in (False, True) for part in GRADIENTS[1:]]
    compile_all(spec for kind in kinds for spec in backward_specs(*kind).present)
    compile_all(s for fixed in (False, True) for s in backward_specs("bf16", 128, fixed, few_keys=True).present)


def inputs(layout, heads=8, kv_heads=2, head_dim=128, dtype=BF16, seed=0):
    """q, k, v, dout"""
    generator = torch.Generator("cuda").manual_seed((layout.num_tokens * 1000 + heads * head_dim) * 100 + seed)
    shapes = [(layout.num_tokens, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for shape in shapes]


def run(q, k, v, dout, out, lse, layout, deterministic=False, gradients="qkv", scale=None):
    """(dq, dk, dv) of the kernels; outputs and workspace start as NaN and large integers."""
    with poisoned():
        assert torch.empty(1, device="cuda").isnan()
        scale = scale or q.shape[2] ** -0.5
        return hopper.backward(
            dout, q, k, v, out, lse, layout._segments, scale, deterministic=deterministic, gradients=gradients
        )[:3]


def check(q, k, v, dout, layout, deterministic=False):
    check_draws([(q, k, v, dout)], layout, deterministic)


def check_draws(draws, layout, deterministic=False, scale=None):
    """The bound: twice plain PyTorch's error in the same dtype, over all draws of inputs; and the same bits twice."""
    errors, plain_errors, wanted = ([[], [], []] for _ in range(3))
    for q, k, v, dout in draws:
        arguments = layout.offsets, layout.parent, scale or q.shape[2] ** -0.5, dout
        out, lse, *wants = oracle.attention_and_grads(q, k, v, *arguments)
        saved = out.to(q.dtype), lse.float()
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        plain = torch.autograd.grad(oracle.attention(*leaves, *arguments[:3])[0], leaves, dout)
        got = run(q, k, v, dout, *saved, layout, deterministic, scale=scale)
        for i, (x, p, want) in enumerate(zip(got, plain, wants, strict=True)):
            errors[i].append(x.double() - want)
            plain_errors[i].append(p.double() - want)
            wanted[i].append(want)
        again = run(q, k, v, dout, *saved, layout, deterministic, scale=scale)
        for a, b in zip(got[0 if deterministic else 1 :], again[0 if deterministic else 1 :], strict=True):
            assert torch.equal(a, b)
    for name, *found in zip(("dq", "dk", "dv"), errors, plain_errors, wanted, strict=True):
        error, plain_error, want = map(torch.cat, found)
        assert error.abs().max() <= 2 * plain_error.abs().max() + 1e-5, name
        # A gradient that is 0 (one key: dS = dP - rowsum(dO O)) keeps the rounding of its two equal terms.
        floor = 1e-5 * (want.norm() + want.numel() ** 0.5)
        assert error.norm() <= 2 * plain_error.norm() + floor, name


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, head_dim, dtype):
    layout = LAYOUTS[name]
    draws = 16 if layout.num_tokens < 16 else 1  # the largest of so few errors is luck
    for ratio in (1, 4):
        check_draws([inputs(layout, 2 * ratio, 2, head_dim, dtype, seed) for seed in range(draws)], layout)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_deterministic(name, head_dim):
    layout = LAYOUTS[name]
    draws = 16 if layout.num_tokens < 16 else 1
    check_draws([inputs(layout, head_dim=head_dim, seed=seed) for seed in range(draws)], layout, deterministic=True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("scale", [1e-37, 1e-3, 0.5])
def test_scales(scale, head_dim, dtype):
    """lse / scale is a part of a product: it is as exact where it is as large as fp32 gets, or hardly more than 0."""
    layout = LAYOUTS["ragged groups"]
    draws = [inputs(layout, head_dim=head_dim, dtype=dtype)]
    check_draws(draws, layout, scale=scale)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("size", [2.0**-40, 2.0**40])
def test_gradients_follow_the_size_of_dout(size, head_dim):
    """Gradients scale to the last bit with a power of two: dpsum, which goes through products in parts, loses none."""
    layout = LAYOUTS["ragged groups"]
    q, k, v, dout = inputs(layout, head_dim=head_dim)
    out, lse = oracle.attention(q, k, v, layout.offsets, layout.parent, head_dim**-0.5)
    for x, y in zip(
        *(run(q, k, v, dout * by, out.to(q.dtype), lse.float(), layout, deterministic=True) for by in (size, 1.0)),
        strict=True,
    ):
        assert torch.equal(x.float(), y.float() * size)


@pytest.mark.parametrize("ratio", [*range(1, 17), 17, 40])
def test_gqa_ratios(ratio):
    check(*inputs(LAYOUTS["ragged groups"], 2 * ratio, 2), LAYOUTS["ragged groups"])
    if ratio in (2, 3, 16):
        check(*inputs(LAYOUTS["ragged groups"], ratio, 1, 512), LAYOUTS["ragged groups"])


@pytest.mark.parametrize("head_dim", [*range(8, 257, 8), 264, 392, 504])
def test_head_dims(head_dim):
    check(*inputs(LAYOUTS["ragged groups"], head_dim=head_dim), LAYOUTS["ragged groups"])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_split_key_blocks(head_dim, deterministic):
    q, k, v, dout = inputs(SPLIT, 8, 1, head_dim)
    tile = backward_specs("bf16", head_dim, deterministic).main.tile
    assert hopper.backward_plan(SPLIT._segments, q.device, tile, 8, 1).num_partials
    check(q, k, v, dout, SPLIT, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prompts_that_ask_nothing_get_zeros(head_dim, deterministic):
    """No item adds to most of their blocks, whose dq is not what the workspace held."""
    layout = Layout.from_lengths([700, 300, 5], [[50, 60], [100], [400]])
    asked = layout.without_prompt_queries()
    q, k, v, dout = inputs(layout, head_dim=head_dim)
    prompts = torch.ones(layout.num_tokens, dtype=torch.bool, device="cuda")
    for begin, end in ((700, 810), (1110, 1210), (1215, 1615)):
        prompts[begin:end] = False
    out, lse, *_ = oracle.attention_and_grads(q, k, v, layout.offsets, layout.parent, head_dim**-0.5, dout)
    out[prompts], lse[:, prompts] = 0, torch.inf
    dq, dk, dv = run(q, k, v, dout, out.to(BF16), lse.float(), asked, deterministic)
    assert (dq[prompts] == 0).all()
    dout[prompts] = 0
    wanted = oracle.attention_and_grads(q, k, v, layout.offsets, layout.parent, head_dim**-0.5, dout)[2:]
    for got, want in zip((dq, dk, dv), wanted, strict=True):
        assert (got.double() - want).norm() <= 0.01 * want.norm()


def assert_parts(part, whole, gradients, deterministic):
    """The gradients asked for are, bit for bit, what all three together give; dQ where its sums have an order."""
    for which, a, b in zip("qkv", part, whole, strict=False):  # a fourth one is of sinks
        if which not in gradients:
            assert a.shape == (0,), which
        elif which == "q" and not deterministic:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-4 * b.abs().max().item())
        else:
            assert not a.isnan().any(), which
            assert torch.equal(a, b), which


@pytest.mark.parametrize("gradients", GRADIENTS[1:])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ["ragged groups", "split"])
def test_parts_of_the_gradients(name, head_dim, gradients):
    """The parts equal the gradients of all three together bit for bit; dQ does where its sums have an order."""
    layout = LAYOUTS.get(name, SPLIT)
    q, k, v, dout = inputs(layout, 8, 1, head_dim)
    out, lse = oracle.attention(q.double(), k.double(), v.double(), layout.offsets, layout.parent, head_dim**-0.5)
    saved = out.to(BF16), lse.float()
    for deterministic in (False, True):
        whole = run(q, k, v, dout, *saved, layout, deterministic and "q" in gradients)
        part = run(q, k, v, dout, *saved, layout, deterministic, gradients)
        assert_parts(part, whole, gradients, deterministic)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tails(head_dim):
    """Every remainder of a group's last key block."""
    lengths = range(1, 2 * 128 + 2, 3)
    layout = Layout.from_lengths(lengths, [[(37 * n) % 131, (11 * n) % 67] for n in lengths])
    check(*inputs(layout, 2, 1, head_dim), layout)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_many_groups_whose_rows_see_few_keys(seed, deterministic):
    layout = many_groups(seed)
    assert hopper.few_keys_backward(layout._segments, 8, None)
    check(*inputs(layout, 16, 8, seed=seed), layout, deterministic)


def test_slices_and_strides():
    layout = LAYOUTS["ragged groups"]
    fused = torch.randn(layout.num_tokens, 12 * 136, device="cuda", dtype=BF16).view(layout.num_tokens, 12, 136)
    dout = torch.randn(8, layout.num_tokens, 136, device="cuda", dtype=BF16).transpose(0, 1)
    for head_dim in (128, 72):
        check(*(x[:, :, :head_dim] for x in (*fused.split([8, 2, 2], 1), dout)), layout)


def test_more_than_2_to_the_31_elements():
    """The last of many equal groups gives what it gives alone: every offset is right past 2^31."""
    many, alone, last = more_than_2_to_the_31(128 * 128)
    q, k, v, dout = inputs(many, 128, 8)
    out, lse = torch.randn_like(q), torch.full((128, many.num_tokens), 9.0, device="cuda")
    got = run(q, k, v, dout, out, lse, many)
    want = run(*(x[last] for x in (q, k, v, dout, out)), lse[:, last], alone)
    for a, b in zip(got, want, strict=True):
        assert not a.isnan().any()
        # Alone, key blocks are split along their queries: other partial sums of the same numbers.
        assert (a[last].float() - b.float()).norm() < 1e-3 * b.float().norm()


def test_more_than_2_to_the_28_rows():
    """The statistics of so many rows take more than 2^31 numbers a head."""
    group, head_dim = ([3000], [[600, 496]]), 8
    count = 2**28 // 4096 + 1
    many, alone = Layout.from_lengths(group[0] * count, group[1] * count), Layout.from_lengths(*group)
    assert many.num_tokens > 2**28
    q, k, v, dout = inputs(many, 1, 1, head_dim)
    out, lse = torch.randn_like(q), torch.full((1, many.num_tokens), 9.0, device="cuda")
    scale = head_dim**-0.5
    got = hopper.backward(dout, q, k, v, out, lse, many._segments, scale, gradients="kv")
    last = slice(many.num_tokens - alone.num_tokens, None)
    ends = [x[last] for x in (dout, q, k, v, out)]
    want = hopper.backward(*ends, lse[:, last], alone._segments, scale, gradients="kv")
    for a, b in zip(got[1:3], want[1:3], strict=True):
        assert (a[last].float() - b.float()).norm() < 1e-3 * b.float().norm()


@pytest.fixture
def another_process_loads_the_gpu():
    code = "import torch\na = torch.randn(4096, 4096, device='cuda')\nprint(flush=True)\nwhile True: a = (a @ a).tanh()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield
    process.kill()
    process.wait()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_items_of_a_fixed_order_come_from_a_counter(head_dim, monkeypatch):
    """The order in which the device starts clusters does not matter. Each launch counts items anew, from 0 on."""
    layout, counts, made = Layout.from_lengths([3000, 100], [[400] * 9, [700] * 2]), [], hopper._backward_kernels

    def counting(*arguments):
        specs, kernels = made(*arguments)

        def main(*handed):
            locks, work = handed[9:11]
            assert locks[-1] == 0, "the preprocess sets it"
            kernels["bwd"](*handed)
            counts.append((int(locks[-1]), len(work)))

        return specs, kernels | {"bwd": main}

    monkeypatch.setattr(hopper, "_backward_kernels", counting)
    q, k, v, dout = inputs(layout, head_dim=head_dim)
    out, lse = hopper.forward(q, k, v, layout._segments, head_dim**-0.5)
    for _ in range(3):
        run(q, k, v, dout, out, lse, layout, deterministic=True)
    assert len(counts) == 3
    assert all(count == items > 50 for count, items in counts), counts


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_fixed_order_while_other_work_holds_the_device(head_dim):
    """Eager and from a graph, on a side stream, where clusters begin as products of matrices leave multiprocessors."""
    layout = Layout.from_lengths([3000, 100], [[400] * 9, [700] * 2])
    q, k, v, dout = inputs(layout, head_dim=head_dim)
    out, lse = hopper.forward(q, k, v, layout._segments, head_dim**-0.5)

    def backward():
        return hopper.backward(dout, q, k, v, out, lse, layout._segments, head_dim**-0.5, deterministic=True)

    want = backward()
    a = torch.randn(8192, 8192, device="cuda")  # a product in fp32 takes some 20 ms
    product, other, side = torch.mm(a, a), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        replayed = backward()
    for eager in (True, False, True, False, False, False):
        for x in replayed:
            x.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(20):
                torch.mm(a, a, out=product)
            done = other.record_event()
        with torch.cuda.stream(side):
            if eager:
                got = backward()
            else:
                graph.replay()
                got = replayed
        side.synchronize()
        assert not done.query(), "the device was not busy"
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("name", "head_dim"), [("one group", 128), ("ragged groups", 128), ("split", 128), ("split", 512)]
)
def test_a_hundred_deterministic_runs(name, head_dim, another_process_loads_the_gpu):
    layout = LAYOUTS.get(name, SPLIT)
    q, k, v, dout = inputs(layout, kv_heads=1, head_dim=head_dim)
    out, lse = oracle.attention(q.double(), k.double(), v.double(), layout.offsets, layout.parent, head_dim**-0.5)
    saved = out.to(BF16), lse.float()
    first = run(q, k, v, dout, *saved, layout, deterministic=True)
    for _ in range(99):
        for a, b in zip(run(q, k, v, dout, *saved, layout, deterministic=True), first, strict=True):
            assert torch.equal(a, b)

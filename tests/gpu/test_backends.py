"""cuDNN's interval-mask attention, FlexAttention and the merged FlashAttention calls behind `dualkv.attention`, against
float64, row by row. Each skips, saying why, where it does not run."""

from __future__ import annotations

import pytest
import torch

import dualkv
from dualkv import Layout
from dualkv.cli import check as doctor
from dualkv.ops import backends, composition
from tests import oracle, strategies
from tests.fuzz.case import segment_mask
from tests.gpu import test_forward, test_trees

pytestmark = pytest.mark.any_gpu

LAYOUTS = {
    "one group": Layout.from_lengths([1500], [[40, 300, 1, 0, 129]]),
    "ragged": Layout.from_lengths([130, 1, 0, 77], [[64, 0, 129, 1], [5], [], [3, 3, 200]]),
    "no shared part": Layout.from_lengths([0, 0], [[100, 30], [1]]),
    "prompts alone": Layout.from_lengths([90, 33], [[], []]),
    "one row": Layout.from_lengths([1], [[]]),
    "whole blocks": Layout.from_lengths([512, 256], [[128, 256], [384]]),
    "tree": Layout.from_segments([0, 50, 90, 100, 164, 165, 230], [-1, 0, 1, 1, 0, -1]),
    "deep tree": Layout.from_segments(*strategies.random_tree(3, 40, 7, 90)),
}
# Those of the kernels' own tests, for the backend that Blackwell runs.
KERNELS = [
    pytest.param(layout, id=f"{module.__name__.rpartition('_')[2]}: {name}")
    for module in (test_forward, test_trees)
    for name, layout in module.LAYOUTS.items()
]
MAIN = (8, 2, 128, 128)
HEADS = [
    (4, 4, 64, 64),
    (6, 1, 80, 80),
    (2, 1, 256, 256),
    (2, 2, 256, 256),
    (4, 2, 192, 128),
    (4, 4, 192, 128),
    (4, 2, 40, 24),
    (4, 4, 40, 24),
    (3, 3, 8, 8),
]
FEATURES = [
    {"window": 37}, {"window": 1}, {"chunk": 50}, {"sinks": True}, {"dlse": True},
    {"window": 200, "sinks": True, "dlse": True}, {"softcap": 5.0}, {"softcap": 5.0, "window": 64, "dlse": True},
]  # fmt: skip
NAMES = "cudnn", "flex", "flash"
# Rounding to nearest is off by half of u or so: rows that are right stay below 0.4 of their bounds in a model of the
# roundings on a CPU. Some round more often: before they add a sink, a KV head's query heads or levels of a tree.
SLACK = 3.0


def served(name: str) -> str:
    """The backend's name; skips where it does not run."""
    q = torch.empty(1, 1, 8, device="cuda", dtype=torch.bfloat16)
    reason = backends.BACKENDS[name].unsupported(q, q)
    if reason:
        pytest.skip(f"{name} does not serve {reason}")
    return name


@pytest.fixture(params=NAMES)
def backend(request) -> str:
    return served(request.param)


def drawn(layout, heads, dtype, seed=0):
    h, kv, d, dv = heads
    generator = torch.Generator("cuda").manual_seed(layout.num_tokens * 1000 + d + seed)
    shapes = (h, d), (kv, d), (kv, dv), (h, dv)
    return [torch.randn(layout.num_tokens, *s, device="cuda", generator=generator).to(dtype) for s in shapes]


def row_bounds(layout, tensors, scale, dlse=None, sinks=None, softcap=None, window=None, chunk=None):
    """{out, dq, dk, dv}: [T, heads], the norm by which a row of one head may be off.

    SLACK times the root of a sum of squares, as of errors that know nothing of each other: each number that is rounded
    to q's dtype is off by its unit roundoff u. These are P, out, dS (from a P that is rounded) and the results. An
    error of out is one of delta = rowsum(dout * out), and so of all of its row's dS. With bf16 a bound is about 2 % of
    the row's own norm, and more where dS cancels: of rows that see few keys.
    """
    u, lengths, parent = torch.finfo(tensors[0].dtype).eps / 2, layout._segments.lengths, layout.parent.tolist()
    mask = torch.from_numpy(segment_mask(lengths, parent, window, chunk)).to(tensors[0].device)
    q, k, v, dout = (x.double().transpose(0, 1) for x in tensors)  # [heads, rows, D]
    ratio = len(q) // len(k)
    k, v = (x.repeat_interleave(ratio, 0) for x in (k, v))
    scores, slope = q @ k.mT * scale, 1.0
    if softcap is not None:
        tanh = (scores / softcap).tanh()
        scores, slope = softcap * tanh, 1 - tanh.square()
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None, None])
    p = (scores - lse).exp() * mask
    out = p @ v
    delta = (dout * out).sum(-1, keepdim=True) - (0.0 if dlse is None else dlse.double()[..., None])
    ds = p * (dout @ v.mT - delta) * slope
    dq, dk, dv = scale * ds @ k, scale * ds.mT @ q, p.mT @ dout
    # Squares of errors; those of the rounded results come last.
    of_out = (u * p).square() @ v.square() + (u * out).square()
    of_delta = (dout.square() * of_out).sum(-1, keepdim=True)
    of_ds = 2 * (u * ds).square()
    of_dq = scale**2 * (of_ds @ k.square() + of_delta * ((p * slope) @ k).square()) + (u * dq).square()
    of_dk = scale**2 * (of_ds + (p * slope).square() * of_delta).mT @ q.square() + (u * dk).square()
    of_dv = (u * p).square().mT @ dout.square() + (u * dv).square()

    def bound(squares, heads_each):
        return SLACK * squares.sum(-1).unflatten(0, (-1, heads_each)).sum(1).sqrt().T

    return {"out": bound(of_out, 1), "dq": bound(of_dq, 1), "dk": bound(of_dk, ratio), "dv": bound(of_dv, ratio)}


def check(backend, layout, heads, dtype=torch.bfloat16, deterministic=False, **features):
    """Results and gradients of `dualkv.attention` against the oracle; twice, bit for bit, if deterministic."""
    q, k, v, dout = drawn(layout, heads, dtype)
    of_lse = torch.randn(heads[0], layout.num_tokens, device="cuda") if features.pop("dlse", False) else None
    sinks = torch.randn(heads[0], device="cuda") if features.pop("sinks", False) else None
    scale, results = heads[2] ** -0.5, []
    for _ in range(1 + deterministic):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
        given = {} if sinks is None else {"sinks": leaves[3]}
        out, lse = dualkv.attention(
            *leaves[:3], layout, scale, deterministic, return_lse=True, backend=backend, **given, **features
        )  # fmt: skip
        outputs = ((out, dout), *([] if of_lse is None else [(lse, of_lse)]))
        torch.autograd.backward([x for x, _ in outputs], [g for _, g in outputs])
        results.append([out.detach(), lse.detach(), *(x.grad for x in leaves)])
    assert not deterministic or all(map(torch.equal, *results))
    got = results[0]
    want = oracle.attention_and_grads(
        q, k, v, layout.offsets, layout.parent, scale, dout, of_lse, sinks, **features
    )  # fmt: skip
    assert (got[1] - want[1]).abs().max() < 2e-4 * max(1.0, features.get("softcap", 1.0))
    bounds = row_bounds(layout, (q, k, v, dout), scale, of_lse, sinks, **features)
    for name, a, b in zip(bounds, (got[0], *got[2:5]), (want[0], *want[2:5]), strict=True):
        assert a.shape == b.shape, name
        assert a.isfinite().all(), name
        worst = ((a.double() - b).norm(dim=-1) / bounds[name]).max()
        assert worst <= 1, f"a row of {name} is off by {worst:.3g} times what it may be"
    if sinks is not None:
        of_row = 2**-9 * (dout.double() * want[0]).norm(dim=-1).T * (sinks[:, None] - want[1]).exp()
        assert ((got[5] - want[5]).abs() <= 8 * of_row.norm(dim=1) + 1e-3).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(backend, name):
    check(backend, LAYOUTS[name], MAIN)


@pytest.mark.parametrize("layout", KERNELS)
def test_layouts_of_the_kernels(layout):
    check(served("cudnn"), layout, MAIN)


@pytest.mark.parametrize("name", ["one group", "ragged", "deep tree"])
def test_deterministic(backend, name):
    check(backend, LAYOUTS[name], MAIN, deterministic=True)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("name", ["one group", "ragged", "deep tree"])
def test_features(backend, name, features):
    if "softcap" in features and backend != "flex":
        q, k, v, _ = drawn(LAYOUTS[name], MAIN, torch.bfloat16)
        with pytest.raises(ValueError, match=f"'{backend}', which does not serve softcap"):
            dualkv.attention(q, k, v, LAYOUTS[name], softcap=features["softcap"], backend=backend)
        return
    check(backend, LAYOUTS[name], MAIN, **features)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_head_dims(backend, heads):
    of_hopper = torch.cuda.get_device_capability() == (9, 0)
    if backend == "cudnn" and of_hopper and heads[0] != heads[1] and heads[2] != heads[3]:
        with pytest.raises(ValueError, match="'cudnn', which does not serve grouped queries with values of another"):
            check(backend, LAYOUTS["ragged"], heads)
        return
    check(backend, LAYOUTS["ragged"], heads, deterministic=heads[2] == 256)


@pytest.mark.parametrize("heads", [heads for heads in HEADS if heads[0] == heads[1] and heads[2] != heads[3]], ids=str)
@pytest.mark.parametrize("name", ["ragged", "deep tree"])
def test_features_with_values_of_another_head_dim(backend, name, heads):
    check(backend, LAYOUTS[name], heads, window=37, sinks=True, dlse=True)


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_more_than_2_to_the_31_elements(name):
    """The last of many equal groups gets the results that it gets alone. PyTorch's own FlashAttention backward would
    add dq past 2^31 elements to other memory."""
    backend, (many, alone, last) = served(name), test_forward.more_than_2_to_the_31(64 * 128)
    tensors = drawn(many, (64, 16, 128, 128), torch.bfloat16)

    def run(layout, q, k, v, dout):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = dualkv.attention(*leaves, layout, 0.1, backend=backend)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    for a, b in zip(run(many, *tensors), run(alone, *(x[last] for x in tensors)), strict=True):
        assert a.isfinite().all()
        assert (a[last].float() - b.float()).norm() <= 4e-3 * b.float().norm()


def test_half_precision(backend):
    check(backend, LAYOUTS["ragged"], MAIN, torch.float16)


@pytest.mark.parametrize("name", ["ragged", "whole blocks"])
def test_tensors_that_lie_anyhow(backend, name):
    """Tensors may start at no multiple of 16 bytes, have heads first or wider rows, and gradients may be expanded."""
    layout = LAYOUTS[name]
    q, k, v, dout = drawn(layout, MAIN, torch.bfloat16)

    def run(q, k, v, dout):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = dualkv.attention(*leaves, layout, deterministic=True, backend=backend)
        return out, *torch.autograd.grad(out, leaves, dout)

    want = run(q, k, v, dout)
    shifted = [
        torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in (q, k, v, dout)
    ]
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, dout)]
    wider = [torch.cat([x, x[..., :4]], -1)[..., :128] for x in (q, k, v, dout)]
    for laid_out in (shifted, heads_first, wider):
        assert all(map(torch.equal, run(*laid_out), want))
    one = torch.ones(1, 1, 1, device="cuda", dtype=dout.dtype)
    assert all(map(torch.equal, run(q, k, v, one.expand_as(dout)), run(q, k, v, one.expand_as(dout).contiguous())))


def test_plans_are_made_once(backend, monkeypatch):
    """The second call of a layout makes no plan, and nothing waits for the device."""
    layout = Layout.from_lengths([200, 60], [[50, 80], [30]])
    q, k, v, dout = drawn(layout, MAIN, torch.bfloat16)

    def step():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = dualkv.attention(*leaves, layout, backend=backend)
        return out, *torch.autograd.grad(out, leaves, dout)

    want = step()
    kept = len(layout._segments._cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(layout._segments._cache) == kept
    torch.testing.assert_close(step(), want, rtol=0.02, atol=0.02)


def test_inside_torch_compile_and_on_another_stream(backend):
    layout = Layout.from_lengths([200], [[50, 80]])
    q, k, v, dout = drawn(layout, MAIN, torch.bfloat16)

    def step(q, k, v):
        return dualkv.attention(q * 1, k, v, layout, deterministic=True, backend=backend) * 1

    def run(function):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    want = run(step)
    assert all(map(torch.equal, run(torch.compile(step, fullgraph=True)), want))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run(step)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [8, 80, 256])
def test_the_merge_is_the_formula(dtype, head_dim):
    """The kernel against the expression, rows in one piece and anywhere; infinities and NaN stay in their rows."""
    for rows in (slice(13, 83), torch.randperm(100, device="cuda")[:70]):
        out, part = (torch.randn(n, 4, head_dim, device="cuda").to(dtype) for n in (100, 70))
        lse, part_lse = (5 * torch.randn(4, n, device="cuda") for n in (100, 70))
        part_lse[0, 3], part_lse[1, 4], lse[2, :50] = float("nan"), -float("inf"), -float("inf")
        results = []
        for has in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(composition, "_has_triton", lambda has=has: has)
                results.append([out.clone(), lse.clone()])
                composition.merge(*results[-1], part, part_lse, rows)
        bound = 2**-7 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(*(r[1] for r in results), rtol=1e-6, atol=2e-6, equal_nan=True)
        torch.testing.assert_close(*(r[0] for r in results), rtol=bound, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("case", [pytest.param(case, id=case[0]) for case in doctor.cases()])
def test_the_doctor_finds_every_backend_right(case):
    """`dualkv doctor --check`; Hopper's kernels among them."""
    lines = list(doctor.run(torch.device("cuda"), every=iter([case])))
    assert not [line for line in lines if line.wrong]
    assert any(line.worst is not None for line in lines)

"""The PyTorch composition and the reference on a CUDA device, against float64."""

from __future__ import annotations

import warnings

import pytest
import torch

import dualkv
from dualkv import Layout
from dualkv.ops import backends, composition, reference
from dualkv.ops.features import Features
from tests import oracle

pytestmark = pytest.mark.any_gpu

LAYOUTS = {
    "ragged": Layout.from_lengths([130, 1, 77], [[64, 0, 129, 1], [5], [3, 3, 200]]),
    "long prompt": Layout.from_lengths([1500], [[40] * 8]),
    "no shared part": Layout.from_lengths([0, 0], [[100, 30], [1]]),
    "prompts alone": Layout.from_lengths([90, 33], [[], []]),
    "tree": Layout.from_segments([0, 50, 90, 100, 164, 165, 230], [-1, 0, 1, 1, 0, -1]),
    "copied levels": Layout.from_segments([0, 20, 150, 180, 310, 311, 450, 500], [-1, 0, 1, 2, 2, 1, 0]),
}


def inputs(layout, heads, kv_heads, head_dim, dtype):
    generator = torch.Generator("cuda").manual_seed(layout.num_tokens * 1000 + heads * head_dim)
    shapes = [(layout.num_tokens, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]


def errors(got, want):
    """max |x - ref| and |x - ref| / |ref| for each of out, dq, dk, dv."""
    pairs = [(a.double() - b, b) for a, b in zip(got, want, strict=True)]
    return [(d.abs().max().item(), (d.norm() / b.norm()).item()) for d, b in pairs]


def plain(q, k, v, dout, layout, scale):
    """Compute one dense masked softmax by PyTorch in the same dtype: the measure of the dtype's own error."""
    ratio = q.shape[1] // k.shape[1]
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    row = torch.arange(layout.num_tokens, device="cuda")
    end = layout.to("cuda").visible_end
    hidden = (row[None] > row[:, None]) | (row[:, None] >= end[None])
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(ratio, 1)) * scale
    probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", probs, v.repeat_interleave(ratio, 1))
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 128), (6, 1, 80), (2, 1, 256)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_composition(name, heads, dtype, deterministic):
    layout, scale = LAYOUTS[name], heads[2] ** -0.5
    q, k, v, dout = inputs(layout, *heads, dtype)
    out, lse = composition.forward(q, k, v, layout._segments, scale)
    grads, again = [
        composition.backward(dout, q, k, v, out, lse, layout._segments, scale, deterministic=deterministic)[:3]
        for _ in range(2)
    ]
    assert not deterministic or all(map(torch.equal, grads, again))
    want_out, want_lse, *want_grads = oracle.attention_and_grads(q, k, v, layout.offsets, layout.parent, scale, dout)
    assert (lse - want_lse).abs().max() < 1e-4
    wants = [want_out, *want_grads]
    for (worst, rel), (plain_worst, plain_rel), what in zip(
        errors([out, *grads], wants),
        errors(plain(q, k, v, dout, layout, scale), wants),
        ("out", "dq", "dk", "dv"),
        strict=True,
    ):
        # Each part comes rounded to the dtype, and their sum is rounded again: up to three roundings for plain's one.
        assert worst <= 3 * plain_worst + 1e-5, (what, worst, plain_worst)
        assert rel <= 3 * plain_rel + 1e-5, (what, rel, plain_rel)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("features", [{"window": 2}, {"window": 37}, {"window": 200}, {"chunk": 50}, {}], ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 64), (6, 1, 80), (2, 1, 256)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_features(name, heads, features, with_dlse):
    check_features(LAYOUTS[name], heads, features, with_dlse)


@pytest.mark.parametrize("features", [{"window": 37}, {"chunk": 50}, {}], ids=str)
def test_copies_in_several_calls(features, monkeypatch):
    monkeypatch.setattr(composition, "COPIED_ROWS", 300)
    offsets, parent = LAYOUTS["copied levels"].offsets, LAYOUTS["copied levels"].parent
    layout = Layout.from_segments(offsets, parent)  # anew, as calls are kept with a layout
    device = torch.device("cuda", torch.cuda.current_device())
    assert sum(part.causal for part in composition.parts(layout._segments, device)) > 1
    check_features(layout, (8, 2, 128), features, with_dlse=True)


def check_features(layout, heads, features, with_dlse):
    scale = heads[2] ** -0.5
    q, k, v, dout = inputs(layout, *heads, torch.bfloat16)
    sinks = torch.randn(heads[0], device="cuda")
    dlse = torch.randn(heads[0], layout.num_tokens, device="cuda") if with_dlse else None
    call = layout._segments, scale, Features(sinks=sinks, **features)
    out, lse = composition.forward(q, k, v, *call)
    grads = composition.backward(dout, q, k, v, out, lse, *call, dlse, deterministic=True)
    want_out, want_lse, *want_grads = oracle.attention_and_grads(
        q, k, v, layout.offsets, layout.parent, scale, dout, dlse, sinks, **features
    )  # fmt: skip
    assert (lse - want_lse).abs().max() < 1e-4
    *grads, dsinks = grads
    *want_grads, want_dsinks = want_grads
    for got, want, what in zip((out, *grads), (want_out, *want_grads), ("out", "dq", "dk", "dv"), strict=True):
        assert (got.double() - want).norm() <= 0.02 * want.norm(), what
    # Of a sink's gradient, terms of all rows cancel. What remains has the rounding of out in bf16, row by row.
    of_row = 2**-9 * (dout.double() * want_out).norm(dim=-1).T * (sinks[:, None] - want_lse).exp()
    assert ((dsinks - want_dsinks).abs() <= 8 * of_row.norm(dim=1) + 1e-5).all()


@pytest.mark.parametrize("name", ["ragged", "tree"])
def test_tensors_that_lie_anyhow(name):
    """Tensors may start at no multiple of 16 bytes (PyTorch's kernels would read where they must not), have heads first
    or wider rows."""
    layout = LAYOUTS[name]
    tensors = inputs(layout, 4, 2, 64, torch.bfloat16)

    def run(q, k, v, dout):
        out, lse = composition.forward(q, k, v, layout._segments, 0.125)
        return out, lse, *composition.backward(dout, q, k, v, out, lse, layout._segments, 0.125, deterministic=True)

    want = run(*tensors)
    shifted = [torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in tensors]
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    wider = [torch.cat([x, x[..., :4]], -1)[..., :64] for x in tensors]
    for laid_out in (shifted, heads_first, wider):
        assert all(map(torch.equal, run(*laid_out), want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_serves_wide_dtypes(dtype):
    layout = LAYOUTS["ragged"]
    q, k, v, dout = inputs(layout, 4, 2, 32, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dualkv.attention(*leaves, layout, return_lse=True)
    got = [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]
    bound = 1e-12 if dtype == torch.float64 else 2e-5
    for a, b in zip(
        got, oracle.attention_and_grads(q, k, v, layout.offsets, layout.parent, 32**-0.5, dout), strict=True
    ):
        assert (a - b).abs().max() < bound * max(1.0, b.abs().max().item())


def test_it_says_once_what_runs():
    backends._warned.clear()
    layout = LAYOUTS["ragged"]
    q, k, v, _ = inputs(layout, 4, 2, 32, torch.float32)
    with pytest.warns(UserWarning, match="chunked PyTorch reference"):
        dualkv.attention(q, k, v, layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dualkv.attention(q, k, v, layout)


def test_cpu_and_gpu_agree():
    layout = LAYOUTS["tree"]
    q, k, v, _ = inputs(layout, 4, 2, 64, torch.bfloat16)
    there, _ = composition.forward(q, k, v, layout._segments, 0.125)
    here, _ = reference.forward(q.cpu(), k.cpu(), v.cpu(), layout._segments, 0.125)
    assert (there.cpu().float() - here.float()).abs().max() < 0.03

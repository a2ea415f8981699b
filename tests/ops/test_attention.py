"""The ops and `dualkv.attention` on the CPU: exactness against the oracle, bad input, autograd, compile."""

from __future__ import annotations

import warnings

import pytest
import torch

import dualkv
from dualkv import Layout
from dualkv.ops import reference
from tests import oracle
from tests.dispatched import Dispatched

# What the chunked reference may differ from float64 by, for inputs of unit variance.
BOUND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def qkv(layout, heads=6, kv_heads=2, head_dim=16, dtype=torch.float64, seed=0, head_dim_v=None):
    generator = torch.Generator().manual_seed(seed)

    def draw(h, dim=head_dim):
        x = torch.randn(layout.num_tokens, h, dim, dtype=torch.float64, generator=generator)
        return x.to(dtype).requires_grad_()

    return draw(heads), draw(kv_heads), draw(kv_heads, head_dim_v or head_dim)


def check(layout, dtype=torch.float64, scale=None, features=None, with_dlse=False, **shape):
    """`features`: arguments of attention; `sinks` is a number, about which they are drawn."""
    leaves, features = list(qkv(layout, dtype=dtype, **shape)), dict(features or {})
    generator = torch.Generator().manual_seed(1)
    if "sinks" in features:
        sinks = torch.randn(leaves[0].shape[1], dtype=torch.float64, generator=generator) + features["sinks"]
        features["sinks"] = sinks.to(dtype).requires_grad_()
        leaves.append(features["sinks"])
    out, lse = dualkv.attention(*leaves[:3], layout, softmax_scale=scale, return_lse=True, **features)
    dout = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(dtype)
    dlse = torch.randn(lse.shape, dtype=torch.float64, generator=generator).to(lse.dtype) if with_dlse else None
    outputs, grads = ((out, lse), (dout, dlse)) if with_dlse else ((out,), (dout,))
    got = (out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, grads))
    scale = leaves[0].shape[-1] ** -0.5 if scale is None else scale
    expected = oracle.attention_and_grads(
        *leaves[:3], layout.offsets, layout.parent, scale, dout, dlse, **features
    )  # fmt: skip
    assert len(got) == len(expected)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, expected, strict=False):
        # gradients of keys and sinks sum over queries: their size, and so their rounding, grows with the number of them
        size = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        error = (a.double() - b).abs().max().item() if b.numel() else 0.0
        bound = 1e-6 * size if name == "lse" and dtype != torch.float64 else BOUND[dtype] * size
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e} at {layout}"
    assert {x.dtype for x in (got[0], *got[2:])} == {dtype}
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize(
    "groups",
    [
        ([0], [[0]]),
        ([1], [[1]]),
        ([1, 1], [[1, 1, 1], []]),
        ([0], [[5, 1]]),
        ([reference.CHUNK], [[reference.CHUNK - 1, 1, 1]]),
        ([reference.CHUNK + 1], [[1, 2 * reference.CHUNK, reference.CHUNK - 1]]),
        ([20, 3], [[1] * 150, [300]]),
    ],
    ids=str,
)
def test_edges(groups, dtype):
    check(Layout.from_lengths(*groups), dtype)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (64, 64), (80, 256), (256, 8), (192, 128)])
def test_head_dims_and_scale(head_dim, head_dim_v):
    for scale in (0.3, None):  # by default that of q's and k's
        check(Layout.from_lengths([9], [[4, 7]]), head_dim=head_dim, head_dim_v=head_dim_v, scale=scale)


def test_large_scores_stay_finite_and_right():
    layout = Layout.from_lengths([40], [[20, 20]])
    q, k, v = qkv(layout, dtype=torch.float32)
    with torch.no_grad():
        k[:40] *= 100.0
        k[50] *= 1000.0
    out, lse = dualkv.attention(q, k, v, layout, return_lse=True)
    expected, expected_lse = oracle.attention(
        *(x.detach().double() for x in (q, k, v)), layout.offsets, layout.parent, 0.25
    )
    assert (out - expected).abs().max() < 1e-2  # scores of 1e4 in fp32 carry an absolute error near 1e-3
    assert ((lse - expected_lse) / expected_lse.abs().clamp(min=1)).abs().max() < 1e-6


def test_memory_is_a_chunk_of_scores():
    layout = Layout.from_lengths([1500], [[250] * 6])
    total, heads = layout.num_tokens, 2
    q, k, v = (x.detach() for x in qkv(layout, heads=heads, kv_heads=1, head_dim=8, dtype=torch.float32))
    with Dispatched() as seen:
        out, lse = reference.forward(q, k, v, layout._segments, 0.3)
        reference.backward(torch.ones_like(out), q, k, v, out, lse, layout._segments, 0.3)
    assert seen.largest <= heads * reference.CHUNK * total < total * total / 8


# ---------------------------------------------------------------- views, autograd, compile, autocast
def test_slices_of_a_fused_projection():
    layout = Layout.from_lengths([11], [[3, 5]])
    fused = torch.randn(layout.num_tokens, 8, 16, dtype=torch.float64, requires_grad=True)
    q, k, v = fused.split([4, 2, 2], dim=1)
    v = v[..., :8]
    out = dualkv.attention(q, k, v, layout)
    plain = dualkv.attention(q.contiguous(), k.contiguous(), v.contiguous(), layout)
    assert torch.equal(out, plain)
    out.sum().backward()  # the gradient of a sum is expanded, its last stride 0
    assert torch.isfinite(fused.grad).all()


def test_there_is_no_second_derivative():
    layout = Layout.from_lengths([5], [[3, 2]])
    q, k, v = qkv(layout)
    out = dualkv.attention(q, k, v, layout)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_a_recorded_call_asks_the_schema_for_nothing(monkeypatch):
    def walk(*args):
        raise AssertionError("walks the schema")

    monkeypatch.setattr("torch._library.utils.fill_defaults", walk)
    layout = Layout.from_lengths([5], [[3, 2]])
    q, k, v = qkv(layout)
    dualkv.attention(q, k, v, layout).sum().backward()
    with pytest.raises(AssertionError, match="walks the schema"):  # the op itself does: so the name is still PyTorch's
        torch.ops.dualkv.fwd(q, k, v, layout.offsets, layout.parent, 1.0)


def test_one_graph_serves_every_layout():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()

    def step(q, k, v, layout):
        return dualkv.attention(q * 2, k, v, layout).relu()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (4, 5, 7, 9):  # no n for which the number of offsets equals another size: sizes alike are taken for one
        layout = Layout.from_lengths([n, 4], [[3] * n, [1]])
        eager, fast = qkv(layout, seed=n), qkv(layout, seed=n)
        expected, got = step(*eager, layout), compiled(*fast, layout)
        assert torch.equal(expected, got)
        expected.sum().backward()
        got.sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(eager, fast, strict=True))
    assert counters["stats"]["unique_graphs"] == 1


def test_autocast_casts_the_inputs_and_not_the_sums():
    layout = Layout.from_lengths([30], [[20, 9]])
    q, k, v = qkv(layout, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = dualkv.attention(q, k.bfloat16(), v.bfloat16(), layout, return_lse=True)
    assert out.dtype == torch.bfloat16
    plain, plain_lse = dualkv.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), layout, return_lse=True)
    assert torch.equal(out, plain)
    assert torch.equal(lse, plain_lse)
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_under_autocast_errors_name_the_dtypes_that_came():
    layout = Layout.from_lengths([3], [[2]])
    q, k, v = qkv(layout, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for tensors, names in (
            ((q.double(), k, v), "k is torch.float32 and q is torch.float64"),
            ((q, k.double(), v), "k is torch.float64 and q is torch.float32"),
            ((q, k, v.double()), "v is torch.float64 and q is torch.float32"),
            ((q, k, v.long()), "v is torch.int64"),
        ):
            with pytest.raises(TypeError, match=names):
                dualkv.attention(*tensors, layout)


def test_the_graph_outlives_the_layout():
    layout = Layout.from_lengths([6], [[3, 4]])
    q, k, v = qkv(layout)
    out = dualkv.attention(q, k, v, layout)
    expected = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    del layout
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], expected)


def test_nothing_is_said_on_the_cpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(Layout.from_lengths([3], [[2]]))

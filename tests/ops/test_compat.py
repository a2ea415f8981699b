"""`flash_attn_dualkv_varlen_func` on the CPU: every alignment of queries, gradients of all five tensors, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkv
from dualkv.ops import compat
from dualkv.ops.compat import flash_attn_dualkv_varlen_func
from tests.ops.test_attention import BOUND
from tests.strategies import LENGTH


def cumulative(lens, device="cpu"):
    return torch.tensor([0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32).to(device)


def dense(q, kc, vc, kd, vd, q_lens, k_lens, scale, causal):
    """The meaning, one sequence at a time, written apart from the library; differentiable."""
    ratio, context, outs = q.shape[1] // kc.shape[1], kc.shape[0], [q[:0, :, :1].expand(-1, -1, vc.shape[2])]
    for qs, ks, vs in zip(q.split(q_lens), kd.split(k_lens), vd.split(k_lens), strict=True):
        k, v = (torch.cat(pair).repeat_interleave(ratio, 1) for pair in ((kc, ks), (vc, vs)))
        scores = torch.einsum("qhd,khd->hqk", qs, k) * scale
        if causal:
            position = context + len(ks) - len(qs) + torch.arange(len(qs), device=q.device)
            hidden = torch.arange(len(k), device=q.device)[None] > position[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outs)


def inputs(
    q_lens, context, k_lens, heads=4, kv_heads=2, head_dim=16, dtype=torch.float64, device="cpu", seed=0, dv=None
):
    generator = torch.Generator().manual_seed(seed)
    rows = [(sum(q_lens), heads), *[(n, kv_heads) for n in (context, context, sum(k_lens), sum(k_lens))]]
    dims = [head_dim, head_dim, dv or head_dim, head_dim, dv or head_dim]
    drawn = [torch.randn(*r, d, dtype=torch.float64, generator=generator) for r, d in zip(rows, dims, strict=True)]
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def call(tensors, q_lens, context, k_lens, scale=None, causal=True):
    cu = cumulative(q_lens, tensors[0].device), cumulative(k_lens, tensors[0].device)
    longest = max(q_lens, default=0), context, max(k_lens, default=0)
    return flash_attn_dualkv_varlen_func(*tensors, *cu, *longest, softmax_scale=scale, causal=causal)


def placement(q_lens, context, k_lens):
    q_bytes, k_bytes = (np.array(x, np.int64).tobytes() for x in (q_lens, k_lens))
    return compat._placement(context, q_bytes, k_bytes, torch.device("cpu"))


def check(q_lens, context, k_lens, causal, dtype=torch.float64, scale=None, **shape):
    tensors = inputs(q_lens, context, k_lens, dtype=dtype, **shape)
    out = call(tensors, q_lens, context, k_lens, scale, causal)
    assert out.shape == (*tensors[0].shape[:2], tensors[2].shape[2])
    assert out.dtype == dtype
    wide = [x.detach().double().requires_grad_() for x in tensors]
    want = dense(*wide, q_lens, k_lens, scale or tensors[0].shape[2] ** -0.5, causal)
    dout = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = [out.detach(), *torch.autograd.grad(out, tensors, dout, materialize_grads=True)]
    wants = [want.detach(), *torch.autograd.grad(want, wide, dout.double(), materialize_grads=True)]
    for name, a, b in zip(
        ("out", "dq", "dk_context", "dv_context", "dk_decoded", "dv_decoded"), got, wants, strict=True
    ):
        if b.numel():
            error, size = (a.double() - b).abs().max().item(), max(1.0, b.abs().max().item())
            assert error <= BOUND[dtype] * size, f"{name}: {error:.2e} {(q_lens, context, k_lens, causal)}"


@st.composite
def calls(draw):
    """q_lens, context, k_lens: any alignment, and often the two that packed rollouts give."""
    context, k_lens = draw(LENGTH), draw(st.lists(LENGTH, min_size=1, max_size=5))
    kind = draw(st.sampled_from(["first has the context", "responses", "any"]))
    if kind == "any":
        return [draw(st.integers(0, context + r)) for r in k_lens], context, k_lens
    return [(context if kind != "responses" and i == 0 else 0) + r for i, r in enumerate(k_lens)], context, k_lens


@settings(max_examples=80, deadline=None)
@given(calls(), st.booleans(), st.sampled_from(list(BOUND)), st.sampled_from([(1, 1), (4, 4), (6, 2)]))
def test_any_alignment(lens, causal, dtype, heads):
    check(*lens, causal, dtype, heads=heads[0], kv_heads=heads[1], head_dim=8, dv=16)


EDGES = {
    "packed": ([12, 4, 5], 9, [3, 4, 5]),
    "responses": ([3, 4, 5], 9, [3, 4, 5]),
    "the prompt's last token in front of each": ([4, 5, 6], 9, [3, 4, 5]),
    "all positions of all": ([12, 13, 14], 9, [3, 4, 5]),
    "the last token of each": ([1, 1, 1], 9, [3, 4, 5]),
    "none of some": ([0, 13, 0], 9, [3, 4, 5]),
    "none": ([0, 0], 9, [3, 4]),
    "no own tokens": ([9, 0, 5], 9, [0, 0, 0]),
    "no context": ([3, 4], 0, [3, 5]),
    "nothing at all": ([0], 0, [0]),
    "no sequences": ([], 5, []),
    "more than a chunk of queries": ([150, 130, 140], 140, [20, 0, 140]),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", EDGES)
def test_edges(name, causal):
    check(*EDGES[name], causal)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 256])
def test_head_dims_and_scale(head_dim):
    for causal in (True, False):
        check(*EDGES["responses"], causal, head_dim=head_dim, scale=0.3)


def test_packed_rollouts_are_one_call_and_no_more():
    """No padding and no gathering: the answer is dualkv.attention's, bit for bit."""
    q_lens, context, k_lens = EDGES["packed"]
    q, kc, vc, kd, vd = inputs(q_lens, context, k_lens, dtype=torch.float32)
    place = placement(q_lens, context, k_lens)
    assert place.query_rows is None
    assert place.key_rows is None
    layout = dualkv.Layout.from_lengths([context], [k_lens])
    assert place.layout == layout
    plain = dualkv.attention(q, torch.cat([kc, kd]), torch.cat([vc, vd]), layout)
    assert torch.equal(call((q, kc, vc, kd, vd), q_lens, context, k_lens), plain)


def test_rows_nobody_asks_for_are_few():
    """A call computes few rows of the packed group besides its answer."""

    def unasked(name):
        return placement(*EDGES[name]).layout.num_tokens - sum(EDGES[name][0])

    assert unasked("packed") == 0
    assert unasked("responses") == 9
    assert unasked("the prompt's last token in front of each") == 8
    assert unasked("all positions of all") == 0
    asks = {name: placement(*EDGES[name]).layout._segments.silent is None for name in EDGES}
    assert asks["packed"]
    assert not asks["responses"], "the prompt's rows are there, and kernels leave them out"
    assert not asks["the prompt's last token in front of each"]


def test_keys_that_many_sequences_copy_get_their_gradient_in_fp32():
    """300 copies of one context token: sums in bf16 would stop growing after 256."""
    n = 300
    q, kc, vc, kd, vd = inputs([1] * n, 1, [0] * n, heads=1, kv_heads=1, head_dim=8, dtype=torch.bfloat16)
    call((q, kc, vc, kd, vd), [1] * n, 1, [0] * n).sum().backward()
    assert torch.equal(vc.grad, torch.full_like(vc, n))


def test_autocast():
    lens = EDGES["responses"]
    for causal in (True, False):
        tensors = inputs(*lens, dtype=torch.float32)
        tensors[0] = tensors[0].detach().bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = call(tensors, *lens, causal=causal)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert [x.grad.dtype for x in tensors] == [torch.bfloat16, *[torch.float32] * 4]
        tensors[1] = tensors[1].detach().double()
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(TypeError, match=r"k_context is torch\.float64 and q is"),
        ):
            call(tensors, *lens, causal=causal)


def test_it_can_be_part_of_a_compiled_function():
    lens = EDGES["packed"]
    tensors = inputs(*lens, dtype=torch.float32)
    compiled = torch.compile(lambda *x: call(x, *lens) * 2, backend="aot_eager")
    assert torch.equal(compiled(*tensors), call(tensors, *lens) * 2)


# ---------------------------------------------------------------- lengths that are written to
@pytest.fixture
def as_on_a_device(monkeypatch):
    """Length tensors are taken for tensors on a GPU: read once, and compared in every call."""
    monkeypatch.setattr(compat, "_on_device", lambda x: isinstance(x, torch.Tensor))


def test_lengths_on_a_device_are_read_again_after_a_write(as_on_a_device, monkeypatch):
    reads = []
    read = compat.cumulative_array
    monkeypatch.setattr(compat, "cumulative_array", lambda name, x: reads.append(name) or read(name, x))

    def lengths(cu):
        return compat._lengths("cu", cu, torch.device("cpu")).tolist()

    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    for _ in range(3):
        assert lengths(cu) == [3, 2]
    assert len(reads) == 1
    cu[1] = 4
    assert lengths(cu) == [4, 1]
    assert len(reads) == 2
    with torch.inference_mode():
        frozen = torch.tensor([0, 3, 5], dtype=torch.int32)
        for _ in range(2):
            assert lengths(frozen) == [3, 2]
    assert len(reads) == 4


STALE = [name for name, (q_lens, _, _) in EDGES.items() if len(q_lens) > 1 and sum(q_lens)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("written", ["q", "k"])
@pytest.mark.parametrize("name", STALE)
def test_lengths_that_are_written_behind_pytorchs_back_make_nan(as_on_a_device, name, written, causal):
    """Lengths may be written by `.data`, gloo's collectives and replayed graphs: no row and no gradient is then of the
    lengths before."""
    q_lens, context, k_lens = EDGES[name]
    tensors = inputs(q_lens, context, k_lens)
    cu = {"q": cumulative(q_lens), "k": cumulative(k_lens).long()}
    longest = sum(q_lens), context, sum(k_lens)

    def run():
        return flash_attn_dualkv_varlen_func(*tensors, *cu.values(), *longest, causal=causal)

    want = call(tensors, q_lens, context, k_lens, causal=causal)
    for _ in range(2):
        assert torch.equal(run(), want)
    before = cu[written].clone()
    cu[written].data[1] += 1 if before[1] < before[-1] else -1
    out = run()
    assert out.isnan().all()
    (grad,) = torch.autograd.grad(out, tensors[0], torch.ones_like(out))
    assert grad.isnan().all() or not causal  # PyTorch's attention knows nothing of it
    cu[written].data.copy_(before)
    assert torch.equal(run(), want)
    assert not tensors[2].isnan().any()
    assert not tensors[4].isnan().any()


def test_a_write_that_pytorch_counts_and_a_new_tensor_bring_new_lengths(as_on_a_device):
    (q_lens, context, k_lens), other = EDGES["all positions of all"], [13, 12, 14]
    tensors = inputs(q_lens, context, k_lens)
    cu, cu_k = cumulative(q_lens), cumulative(k_lens)

    def run(cu):
        return flash_attn_dualkv_varlen_func(*tensors, cu, cu_k, 14, context, 5, causal=True)

    run(cu)
    with pytest.raises(ValueError, match="sequence 0 13 queries, it has 12 positions"):
        run(cumulative(other))
    fewer = [11, 14, 14]
    cu.data.copy_(cumulative(fewer))
    assert run(cu).isnan().all()
    with pytest.raises(ValueError, match="sequence 1 14 queries, it has 13 positions"):
        run(cu.clone())
    cu.copy_(cumulative(q_lens))
    assert torch.equal(run(cu), call(tensors, q_lens, context, k_lens))


@pytest.mark.parametrize("causal", [True, False])
def test_lengths_on_the_cpu_are_read_in_every_call(causal):
    (q_lens, context, k_lens), other = EDGES["responses"], ([4, 3, 5], 9, [4, 3, 5])
    tensors, (cu, cu_k) = inputs(q_lens, context, k_lens), map(cumulative, (q_lens, k_lens))
    for lens in ((q_lens, context, k_lens), other):
        cu.data.copy_(cumulative(lens[0]))
        cu_k.data.copy_(cumulative(lens[2]))
        out = flash_attn_dualkv_varlen_func(*tensors, cu, cu_k, 5, context, 5, causal=causal)
        assert torch.equal(out, call(tensors, *lens, causal=causal))


def test_lengths_on_another_device_are_refused(as_on_a_device):
    with pytest.raises(ValueError, match=r"cu is on cpu and q on cuda:1, expected one device, or the CPU"):
        compat._lengths("cu", cumulative([3]), torch.device("cuda:1"))


@pytest.mark.parametrize(("q_lens", "k_lens"), [([2, 3], [2, 3]), ([1, 1], [2, 3]), ([3, 5], [2, 3])])
def test_a_call_in_inference_mode_leaves_what_training_can_use(q_lens, k_lens):
    """The placement of queries and keys is kept for the next call with the same lengths."""
    compat._placement.cache_clear()
    for inference in (True, False):
        tensors = inputs(q_lens, 4, k_lens)
        with torch.inference_mode(inference):
            out = call(tensors, q_lens, 4, k_lens)
    out.sum().backward()
    assert all(x.grad is not None for x in tensors)

"""The sides of the benchmark compute the same, their peers as plain PyTorch."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch
import torch.utils.flop_counter  # before aten ops are replaced below: it looks them up
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import dualkv
from dualkv.bench import inputs, run, sides
from dualkv.bench.workloads import DIRECTIONS, Workload, parse
from dualkv.ops import backends
from tests.bench.fake import Fp32Inputs


def _hide(scores, causal, left):
    """-inf behind the diagonal that ends with the last key, if causal, and more than `left` keys before it."""
    n, m = scores.shape[1:]
    behind = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    if causal:
        scores = scores.masked_fill((behind > 0) | (behind < -(m if left is None else left)), float("-inf"))
    return scores


def _dense(q, k, v, scale, causal, left=None):
    """Attention of one sequence, the last query on the last key if causal; out [n, H, D], lse [H, n]."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    scores = _hide(torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale, causal, left)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(q.dtype), scores.logsumexp(-1)


def _spans(cu_q, cu_k):
    spans = [zip(c[:-1].tolist(), c[1:].tolist(), strict=True) for c in (cu_q, cu_k)]
    return [(slice(*a), slice(*b)) for a, b in zip(*spans, strict=True)]


def _varlen(q, k, v, cu_q, cu_k, scale, causal, left=None):
    parts = [_dense(q[a], k[b], v[b], scale, causal, left) for a, b in _spans(cu_q, cu_k)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def _varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, scale, causal, left=None):
    """Compute gradients as FlashAttention does: p from the given lse, and rowsum(dout * out) from the given out."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    ratio, (rows, heads, _) = q.shape[1] // k.shape[1], q.shape
    assert dout.shape == out.shape == (*q.shape[:2], v.shape[2])
    assert lse.shape == (heads, rows)
    for a, b in _spans(cu_q, cu_k):
        ks, vs = (x[b].repeat_interleave(ratio, 1) for x in (k, v))
        scores = _hide(torch.einsum("qhd,khd->hqk", q[a], ks) * scale, causal, left)
        p = (scores - lse[:, a, None]).exp()
        ds = p * (torch.einsum("qhd,khd->hqk", dout[a], vs) - (dout[a] * out[a]).sum(-1).T[:, :, None]) * scale
        dq[a] = torch.einsum("hqk,khd->qhd", ds, ks)
        for grad, full in (
            (dk, torch.einsum("hqk,qhd->khd", ds, q[a])),
            (dv, torch.einsum("hqk,qhd->khd", p, dout[a])),
        ):
            grad[b] = full.unflatten(1, (-1, ratio)).sum(2)
    return dq, dk, dv


@pytest.fixture
def fake_peers(monkeypatch):
    """FlashAttention-4, cuDNN's and PyTorch's attention as plain PyTorch; nothing is compiled."""

    def check(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        return cu_seqlens_q, cu_seqlens_k

    def fwd(q, k, v, *, softmax_scale, causal, return_lse, window_size_left=None, **lengths):
        assert return_lse
        result = _varlen(q, k, v, *check(**lengths), softmax_scale, causal, window_size_left)
        return (*result, None, None, None)

    def bwd(q, k, v, out, dout, lse, *, softmax_scale, causal, deterministic, window_size_left=None, **lengths):
        calls.append(deterministic)
        spans = check(**lengths)
        return _varlen_backward(dout, q, k, v, out, lse, *spans, softmax_scale, causal, window_size_left)

    calls: list[bool] = []
    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = fwd, bwd
    cute = types.ModuleType("flash_attn.cute")
    cute.interface = interface
    for name, module in (("flash_attn", types.ModuleType("flash_attn")), ("flash_attn.cute", cute)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    random = torch.zeros(1), torch.ones(1)

    def aten(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
        return (*_varlen(q, k, v, cu_q, cu_k, scale, causal), *random, None)

    def aten_backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, offset, *, scale):
        assert (seed, offset) == random
        return _varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, scale, causal)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)

    def flex(q, k, v, *, score_mod, block_mask, scale, enable_gqa, kernel_options):
        i = torch.arange(q.shape[2])
        seen = block_mask.mask_mod(0, 0, i[:, None], i)
        if score_mod is None:
            return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = score_mod(q @ k.transpose(-1, -2) * scale, 0, 0, i[:, None], i)
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v

    def create_mask_plan(ends, q, k, v, *, build_backward, cu_seqlens_q=None, cu_seqlens_k=None, **longest):
        """[total_q, total_k] bool"""
        cu = [0, ends.shape[2]] if cu_seqlens_q is None else cu_seqlens_q.tolist()
        row, key = torch.arange(ends.shape[2])[:, None], torch.arange(ends.shape[2])
        first = torch.tensor(cu)[torch.searchsorted(torch.tensor(cu), row, right=True) - 1]
        seen = [torch.zeros_like(first), *(end[:, None] for end in ends[0])]
        return sum((key >= first + a) & (key < first + b) for a, b in zip(seen[::2], seen[1::2], strict=True)).bool()

    def flex_attn_func(q, k, v, *, mask_plan, softmax_scale):
        batch = q.dim() == 4
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask_plan, scale=softmax_scale, enable_gqa=True)
        assert batch == (out.dim() == 4)
        return out.transpose(-2, -3)

    cudnn = types.ModuleType("cudnn.flex_attention")
    cudnn.create_mask_plan, cudnn.flex_attn_func = create_mask_plan, flex_attn_func
    package = types.ModuleType("cudnn")
    package.flex_attention = cudnn
    monkeypatch.setitem(sys.modules, "cudnn", package)
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", cudnn)

    def flex_flash_attn_func(q, k, v, q_ranges, k_ranges, attn_type_map, *, softmax_scale, **options):
        assert options == {"auto_range_merge": True, "disable_fwd_atomic_reduction": True}
        seen = torch.zeros(len(q), len(k), dtype=torch.bool)
        for (a, b), (c, d), causal in zip(q_ranges.tolist(), k_ranges.tolist(), attn_type_map.tolist(), strict=True):
            own = torch.ones(b - a, d - c, dtype=torch.bool)
            assert not seen[a:b, c:d].any()
            seen[a:b, c:d] = own.tril(d - c - (b - a)) if causal else own
        return flex_attn_func(q, k, v, mask_plan=seen, softmax_scale=softmax_scale), None

    for name in ("magi_attention", "magi_attention.functional"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["magi_attention.functional"].flex_flash_attn_func = flex_flash_attn_func
    monkeypatch.setattr(flex_attention, "flex_attention", flex)  # which has no backward on the CPU
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(sides, "hopper", types.SimpleNamespace(unsupported=lambda q: None))
    for name in ("cudnn", "flash", "flex"):  # tests/ops has them on the CPU
        monkeypatch.setitem(backends.BACKENDS, name, backends.BACKENDS["reference"])
    return calls


SIDE_WORKLOADS = ["40:7,1,33", "30:5,0,9;0:11,4;21:;1:6", "16:", "0:12"]
WINDOWED = {
    "dualkv", "dualkv-deterministic", "dualkv-cudnn", "dualkv-flash", "dualkv-flex", "fa4-prompt-copied",
    "cudnn-intervals", "flex",
}  # fmt: skip


def results_of(made, direction, **features):
    """Compute the output, or the gradients, as DualKV does."""
    leaves = [x.clone().requires_grad_() for x in (made.q, made.k, made.v)]
    out = dualkv.attention(*leaves, made.layout, **features)
    return (out.detach(),) if direction == "fwd" else torch.autograd.grad(out, leaves, made.dout)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", sides.SIDES)
@pytest.mark.parametrize("reach", [{}, {"window": 9}, {"chunk": 16}], ids=str)
@pytest.mark.parametrize("text", SIDE_WORKLOADS)
def test_every_side_computes_the_same(fake_peers, text, reach, name, direction):
    if not sides.of_direction([name], direction) or (reach and name not in WINDOWED):
        return
    head_dim_v = 24 if reach else None  # with windows, for no other reason than that fewer sides take both
    made = Fp32Inputs(replace(parse(text).with_shape(heads=4, kv_heads=2, head_dim=16, head_dim_v=head_dim_v), **reach))
    expected = results_of(made, direction, **reach)
    with torch.no_grad():
        side = sides.SIDES[name](made, direction)
        assert run.run_checked(side, expected) < 1e-5
        first = [x.clone() for x in side.results()]
        for part in side.parts.values():
            part()
        side.call()  # again, over what the first call left
        assert run.difference(side.results(), tuple(first)) == 0
    assert set(side.extra) <= set(side.parts)
    if name.startswith("fa4") and direction != "fwd":
        assert set(fake_peers) == {name.endswith("deterministic")}


def test_a_backward_that_is_too_large_is_left_out(monkeypatch):
    """PyTorch's would end in an illegal access, and with it every other side."""
    made = Fp32Inputs(parse("40:7,1,33").with_shape(heads=4, kv_heads=2, head_dim=16))
    floats = ((40 + 7) + (40 + 1) + (40 + 33) + 3 * 128) * 64 * 4
    monkeypatch.setattr(sides.composition, "ELEMENTS", floats)
    for direction in ("bwd", "both"):
        with pytest.raises(ValueError, match=f"counts dq with 32 bits, .* has {floats} floats"):
            sides.SIDES["torch-flash-replicated"](made, direction)
    sides.SIDES["torch-flash-replicated"](made, "fwd")
    monkeypatch.setattr(sides.composition, "ELEMENTS", floats + 1)
    with pytest.raises(NotImplementedError):  # as there is no GPU
        sides.SIDES["torch-flash-replicated"](made, "bwd")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("name", "features"), [("cudnn-intervals", {}), ("magi-ranges", {}), ("flex", {}), ("flex", {"softcap": 2.0})]
)
def test_trees_and_caps(fake_peers, name, features, direction):
    """Peers with one call for a whole layout compute trees and caps as DualKV does."""
    tree = Workload(
        "tree", (20,), ((7, 3, 0, 9),), heads=4, kv_heads=2, head_dim=16, parent=(-1, 0, 1, 2, 0), **features
    )
    made = Fp32Inputs(tree)
    expected = results_of(made, direction, **features)
    with torch.no_grad():
        assert run.run_checked(sides.SIDES[name](made, direction), expected) < 1e-5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_flex_beyond_head_dim_256_takes_blocks_that_fit(fake_peers, monkeypatch, direction):
    tried, computes = [], flex_attention.flex_attention

    def flex(*qkv, **given):
        tried.append(given["kernel_options"])
        if given["kernel_options"] == sides.FLEX_WIDE[0]:
            raise RuntimeError(f"{sides.TOO_LARGE}. OutOfMemoryError: out of resource")
        return computes(*qkv, **given)

    monkeypatch.setattr(flex_attention, "flex_attention", flex)
    made = Fp32Inputs(parse("9:3,2").with_shape(heads=2, kv_heads=1, head_dim=264))
    expected = results_of(made, direction)
    with torch.no_grad():
        assert run.run_checked(sides.SIDES["flex"](made, direction), expected) < 1e-5
    assert tried[0] == sides.FLEX_WIDE[0]
    assert tried[1:]
    assert all(options == sides.FLEX_WIDE[1] for options in tried[1:])


@pytest.mark.parametrize("direction", ["bwd", "both"])
def test_deterministic_is_passed_on(fake_peers, monkeypatch, direction):
    asked = []

    def attention(q, k, v, layout, softmax_scale, deterministic=None, return_lse=False, **features):
        if not return_lse:  # else it makes what a backward reads
            asked.append(deterministic)
        return (q, None) if return_lse else q * k.mean() * v.mean()

    def bwd(dout, q, k, v, out, lse, offsets, parent, softmax_scale, deterministic, **features):
        asked.append(deterministic)
        return q, k, v, q.new_empty(0)

    monkeypatch.setattr(sides, "dualkv", types.SimpleNamespace(attention=attention))
    monkeypatch.setattr(torch.ops.dualkv, "bwd", bwd)
    made = Fp32Inputs(parse("9:3").with_shape(heads=2, kv_heads=2, head_dim=8))
    for name in ("dualkv", "dualkv-deterministic"):
        with torch.no_grad():
            sides.SIDES[name](made, direction).call()
    assert asked == [False, True]


@pytest.mark.parametrize("name", sorted(set(sides.SIDES) - WINDOWED - {"fa4-3-calls-deterministic"}))
def test_sides_without_windows_say_so(fake_peers, name):
    made = Fp32Inputs(replace(parse("9:3").with_shape(heads=2, kv_heads=2, head_dim=8), window=4))
    with pytest.raises(ValueError, match=r"computes plain full attention, .* has window"):
        sides.SIDES[name](made, "fwd")


def of(*results):
    return inputs.Side(lambda: None, lambda: tuple(torch.tensor(x) for x in results))


def test_a_backend_for_a_whole_program_is_not_measured_as_our_kernels(fake_peers, monkeypatch):
    made = Fp32Inputs(parse("30:5,9").with_shape(heads=4, kv_heads=2, head_dim=16))
    monkeypatch.setenv("DUALKV_BACKEND", "reference")
    with pytest.raises(RuntimeError, match="DUALKV_BACKEND is 'reference', expected none"):
        sides.SIDES["dualkv"](made, "fwd")


def test_results_are_checked():
    with pytest.raises(RuntimeError, match="not written"):
        run.run_checked(of([1.0], [1.0, float("nan")]), None)
    assert run.run_checked(of([3.0, 4.0], [1.0]), (torch.tensor([3.0, 4.05]), torch.tensor([1.0]))) < 0.011
    with pytest.raises(RuntimeError, match=r"computes something else: its results are 0\.5 from"):
        run.run_checked(of([3.0, 4.0], [1.0]), (torch.tensor([3.0, 4.0]), torch.tensor([2.0])))

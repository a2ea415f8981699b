"""Both directions over trees of any depth against float64: their shapes, head dims, ratios, dtypes, hostile values."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import dualkv
from codegen.spec import backward_specs, forward_spec
from codegen.tiles import HEAD_DIMS
from dualkv import Layout
from dualkv.bench.workloads import parse
from dualkv.context_plan import part_of, shares
from dualkv.ops import hopper
from dualkv.ops.plan import backward as plan_backward
from tests import oracle
from tests.gpu import test_backward as bwd
from tests.gpu import test_forward as fwd
from tests.strategies import binary_tree, random_tree

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = [("bf16", 1), ("bf16", 4), ("fp16", 4)]  # dtypes and ratios at every head dim


def tree(lengths, parent):
    return Layout.from_segments([0, *np.cumsum(lengths).tolist()], parent)


LAYOUTS = {
    "binary": Layout.from_segments(*binary_tree(3, 300, 77)),
    "aligned": Layout.from_segments(*binary_tree(3, 256, 128)),
    "chain": tree([130, 1, 64, 0, 200, 3], [-1, 0, 1, 2, 3, 4]),
    "last children branch": tree([70, 40] + [13, 90] * 8, [-1, 0, *np.repeat(range(1, 17, 2), 2).tolist()]),
    "tiny segments": Layout.from_segments(*random_tree(1, 120, 64, 9)),
    "one token each": tree([1] * 90, [-1, *(s - 1 - s % 5 if s % 5 else s - 1 for s in range(1, 90))]),
    "random": Layout.from_segments(*random_tree(2, 40, 12, 90)),
    "turns": tree([300, 90, 500, 40, 300, 900, 100, 100], [-1, 0, 1, 1, 0, 4, 4, 0]),
    "groups too": tree(
        [0, 5, 70, 1, 33, 129, 0, 300, 17, 9, 64, 64, 1, 200], [-1, 0, 1, 1, -1, 4, 5, 5, 7, 4, -1, 10, 11, 11]
    ),
}


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    specs = [forward_spec(dtype, d, h, trees=True) for d in HEAD_DIMS for dtype, h in KINDS]
    specs += [forward_spec("bf16", 128, h, trees=True) for h in (3, 5, 7, 8, 11, 16)]
    kinds = [(t, d, fixed) for t in ("bf16", "fp16") for d in HEAD_DIMS for fixed in (False, True)]
    compile_all(specs + [spec for kind in kinds for spec in backward_specs(*kind).present])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_forward(name, head_dim, dtype):
    for ratio in (1, 4) if dtype == BF16 else (4,):
        fwd.check(*fwd.inputs(LAYOUTS[name], 2 * ratio, 2, head_dim, dtype), LAYOUTS[name])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_backward(name, head_dim, deterministic):
    for kv_heads in (1, 2):
        bwd.check(*bwd.inputs(LAYOUTS[name], 4, kv_heads, head_dim), LAYOUTS[name], deterministic)


@pytest.mark.parametrize("ratio", [3, 5, 7, 8, 11, 16, 24])
def test_gqa_ratios(ratio):
    for name in ("binary", "tiny segments"):
        fwd.check(*fwd.inputs(LAYOUTS[name], 2 * ratio, 2), LAYOUTS[name])


@pytest.mark.parametrize("head_dim", [8, 40, 72, 104, 136, 200, 248, 264, 504])
def test_head_dims(head_dim):
    for name in ("binary", "random"):
        fwd.check(*fwd.inputs(LAYOUTS[name], head_dim=head_dim), LAYOUTS[name])
        bwd.check(*bwd.inputs(LAYOUTS[name], head_dim=head_dim), LAYOUTS[name])


def test_a_few_ctas_take_all_the_work():
    for head_dim, num_sms in ((64, 1), (128, 2), (128, 6), (256, 2), (512, 2)):
        for name in ("binary", "tiny segments"):
            fwd.check(*fwd.inputs(LAYOUTS[name], head_dim=head_dim), LAYOUTS[name], num_sms)


@pytest.mark.parametrize("name", fwd.HOSTILE)
def test_hostile_values(name):
    layout = tree([1999, 600, 300, 200, 77], [-1, 0, 1, 1, 0])
    q, k, v = fwd.inputs(layout)
    fwd.HOSTILE[name](q, k, v)
    fwd.check(q, k, v, layout)


def test_outgrown_references():
    """A key of an unmasked block far above all before, on some paths only, whose tiles take the recompute pass."""
    layout = tree([500, 700, 260, 40, 500, 600, 100], [-1, 0, 1, 2, 2, 0, 5])
    for head_dim, num_sms in ((64, 6), (128, 2), (128, 132), (192, 6), (512, 6)):
        q, k, v = fwd.inputs(layout, 8, 2, head_dim)
        k[500 + 300, 1] *= 400
        fwd.check(q, k, v, layout, num_sms)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nan_and_inf_stay_on_their_paths(head_dim):
    """Segments that share no tile: no block may let V in that its rows do not see. (0 * NaN is NaN.)"""
    heads = 8
    tile = forward_spec("bf16", head_dim, heads, trees=True).tile
    tokens = tile.tokens(heads)
    assert tokens % tile.tile_n, "or no block would reach past its region"
    layout = tree([3 * tokens, tokens, 2 * tokens, 5 * tokens, tokens, 2 * tokens], [-1, 0, 1, 1, 0, 4])
    q, k, v = fwd.inputs(layout, heads, 1, head_dim)
    want, want_lse = fwd.run(q, k, v, layout)
    end = layout._segments.subtree_end
    for segment in range(1, layout.num_segments):
        rows = slice(*layout.offsets[segment : segment + 2].tolist())
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[rows], bad_v[rows] = float("nan"), float("inf")
        out, lse = fwd.run(q, bad_k, bad_v, layout)
        others = torch.ones(layout.num_tokens, dtype=torch.bool, device="cuda")
        others[rows.start : int(end[segment])] = False
        assert torch.equal(out[others], want[others])
        assert torch.equal(lse[:, others], want_lse[:, others])
        assert not out[~others].isfinite().any()


def dense(q, k, v, layout, scale):
    """out [T, H, D] in the dtype of q, of one KV head, under a dense mask: quick where segments are many."""
    row = torch.arange(len(q), device="cuda")
    hidden = (row[None] > row[:, None]) | (row[:, None] >= layout.to("cuda").visible_end[None])
    outs = []
    for h in range(q.shape[1]):
        probs = (q[:, h] @ k[:, 0].T * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(probs @ v[:, 0])
    return torch.stack(outs, 1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_ten_thousand_segments(deterministic):
    layout = Layout.from_segments(*random_tree(3, 10_000, 64, 2))
    assert layout.depth == 64
    q, k, v, dout = bwd.inputs(layout, 2, 1)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scale = 128**-0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # says if no kernel serves
        out = dualkv.attention(*leaves, layout, deterministic=deterministic)
    got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    want = dense(*wide, layout, scale)
    wants = [want.detach(), *torch.autograd.grad(want, wide, dout.double())]
    plain = dense(*leaves, layout, scale)
    plains = [plain.detach(), *torch.autograd.grad(plain, leaves, dout)]
    for name, x, p, y in zip(("out", "dq", "dk", "dv"), got, plains, wants, strict=True):
        error, plain_error = x.double() - y, p.double() - y
        assert error.abs().max() <= 2 * plain_error.abs().max() + 1e-5, name
        assert error.norm() <= 2 * plain_error.norm() + 1e-5 * y.norm(), name
    if deterministic:
        for _ in range(20):
            again = torch.autograd.grad(dualkv.attention(*leaves, layout, deterministic=True), leaves, dout)
            assert all(map(torch.equal, again, got[1:]))


@pytest.mark.parametrize("gradients", ["q", "kv", "v"])
def test_parts_of_the_gradients(gradients):
    layout = LAYOUTS["random"]
    q, k, v, dout = bwd.inputs(layout)
    out, lse = oracle.attention(q.double(), k.double(), v.double(), layout.offsets, layout.parent, 128**-0.5)
    saved = out.to(BF16), lse.float()
    whole = bwd.run(q, k, v, dout, *saved, layout, True)
    part = bwd.run(q, k, v, dout, *saved, layout, True, gradients)
    for which, a, b in zip("qkv", part, whole, strict=True):
        if which in gradients:
            assert torch.equal(a, b)
        else:
            assert a.shape == (0,)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_orders_and_tiles_of_a_large_tree_agree(monkeypatch, head_dim):
    """Gradients of 122,000 rows: items by their queries or from the last block on, in clusters or without."""
    layout = parse("trace-branched-0").layout("cuda")
    q, dout = (torch.randn(layout.num_tokens, 8, head_dim, device="cuda", dtype=BF16) for _ in range(2))
    k, v = (torch.randn(layout.num_tokens, 8, head_dim, device="cuda", dtype=BF16) for _ in range(2))
    tiles, first = set(), None
    for walk, gain in ((0, np.inf), (np.inf, np.inf), (np.inf, 0), (0, 0)):
        monkeypatch.setattr(hopper, "FEW_KEYS_WALK", walk)
        monkeypatch.setattr(plan_backward, "GAIN_OF_TREES", gain)
        monkeypatch.setattr(plan_backward, "MANY", np.inf)
        fresh = Layout.from_segments(
            layout.offsets.tolist(), layout.parent.tolist(), device="cuda"
        )  # its plans are made anew
        out, lse = dualkv.attention(q, k, v, fresh, return_lse=True)
        got = hopper.backward(dout, q, k, v, out, lse, fresh._segments, head_dim**-0.5)[:3]
        tiles.add(hopper.few_keys_backward(fresh._segments, 8, None))
        first = first or got
        for x, y in zip(got, first, strict=True):
            assert (x.float() - y.float()).norm() < 1e-2 * y.float().norm()
    assert tiles == {False, True}


def test_two_levels_as_a_tree():
    """The kernel of paths serves every depth, though fewer than three levels have another one."""
    for name in ("ragged groups", "many in a tile", "one token"):
        layout = fwd.LAYOUTS[name]
        q, k, v = fwd.inputs(layout)
        spec, kernel = hopper._kernel(q.dtype, 128, 4, q.device, True)
        plan = hopper.forward_plan(layout._segments, q.device, spec, 8, 2)
        out = torch.full(q.shape, float("nan"), device="cuda", dtype=q.dtype)
        lse = torch.full((8, len(q)), float("nan"), device="cuda")
        (tables,) = plan.launches
        kernel(q, k, v, out, lse, *tables, 128**-0.5, hopper._num_sms(q.device))
        want, want_lse = oracle.attention(q.double(), k.double(), v.double(), layout.offsets, layout.parent, 128**-0.5)
        assert (out.double() - want).abs().max() < 0.03
        assert (lse - want_lse).abs().max() < 1e-4


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_a_part_below_a_path(head_dim, deterministic):
    """A walk runs such calls: rows of a path of three segments have no queries, subtrees hang on two of them."""
    layout = tree([300, 77, 130, 200, 90, 260, 41], [-1, 0, 1, 2, 3, 1, 0])
    silent = 300 + 77 + 130
    asked = layout.without_queries([silent])
    q, k, v, dout = bwd.inputs(layout, 8, 2, head_dim)
    dout[:silent] = 0
    wanted = oracle.attention_and_grads(q, k, v, layout.offsets, layout.parent, head_dim**-0.5, dout)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = dualkv.attention(q, k, v, asked, None, deterministic)
    assert not out[:silent].any()
    found = [out[silent:], *torch.autograd.grad(out, (q, k, v), dout)]
    assert not found[1][:silent].any()
    for got, want in zip(found, [wanted[0][silent:], *wanted[2:]], strict=True):
        assert (got.double() - want).norm() <= 0.01 * want.norm()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("ranks", [2, 5])
def test_parts_of_context_parallel_ranks(ranks, deterministic):
    """Rows of several groups behind paths of their own, in one call; the ranks' gradients of keys add up."""
    layout = tree([900, 300, 500, 1, 77, 700, 260, 41, 150, 391], [-1, 0, 1, 1, 0, -1, 5, 5, 7, -1])  # 3,320 rows
    q, k, v, dout = bwd.inputs(layout, 8, 2, 128)
    wanted = oracle.attention_and_grads(q, k, v, layout.offsets, layout.parent, 128**-0.5, dout)
    found = [torch.zeros_like(x, dtype=torch.double) for x in (dout, q, k, v)]
    for part in (part for of_rank in shares(layout._segments, ranks) for part in of_rank if part):
        keys, asked, of_keys = part_of(layout, part)
        keys, asked = (torch.from_numpy(x).to(q.device) for x in (keys, asked))
        own = keys[asked]
        leaves = [torch.zeros_like(q[keys]).index_copy(0, asked, q[own]), k[keys], v[keys]]
        leaves = [x.requires_grad_() for x in leaves]
        out = dualkv.attention(*leaves, of_keys, None, deterministic)
        dq, dk, dv = torch.autograd.grad(out, leaves, torch.zeros_like(out).index_copy(0, asked, dout[own]))
        found[0][own], found[1][own] = out[asked].double(), dq[asked].double()
        found[2].index_add_(0, keys, dk.double())
        found[3].index_add_(0, keys, dv.double())
    for got, want in zip(found, [wanted[0], *wanted[2:]], strict=True):
        assert (got - want).norm() <= 0.01 * want.norm()

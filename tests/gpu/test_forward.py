"""The Hopper forward kernel against float64: layouts, head dims, ratios, dtypes, tails, sizes, hostile values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from codegen.spec import forward_spec
from codegen.tiles import HEAD_DIMS, head_parts
from dualkv import Layout
from dualkv.ops import hopper
from tests import oracle
from tests.fuzz import dense
from tests.fuzz.case import segment_mask

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = [("bf16", 1), ("bf16", 4), ("bf16", 8), ("fp16", 1), ("fp16", 4)]  # dtypes and ratios at every head dim
WIDEST_RATIOS = (2, 3, 5, 8, 16)  # of head dim 512, whose warp groups share rows
LAYOUTS = {
    "one group": Layout.from_lengths([300], [[77, 128, 1, 200]]),
    "ragged groups": Layout.from_lengths(
        [0, 1, 129, 200, 64, 37], [[5, 70], [1, 1, 1], [], [100, 0, 300, 17], [64] * 5, [3] * 20]
    ),
    "one token": Layout.from_lengths([1], [[]]),
    "one response token": Layout.from_lengths([0], [[1]]),
    "many in a tile": Layout.from_lengths([40], [[5, 9, 300, 2, 2, 2, 128]]),
    "aligned": Layout.from_lengths([512], [[256, 128, 384]]),
    "many groups": Layout.from_lengths([16] * 60, [[3, 1, 9]] * 60),
    "one prompt token": Layout.from_lengths([1], [[1] * 500]),
    "no responses": Layout.from_lengths([1000, 3, 260], [[], [0, 0], []]),
}
LONG = Layout.from_lengths([1999], [[1000, 3, 700, 176]])


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    specs = [forward_spec(dtype, d, h) for d in HEAD_DIMS for dtype, h in KINDS]
    specs += [forward_spec("bf16", 128, h) for h in range(1, 17)] + [forward_spec("bf16", 64, 11)]
    specs += [forward_spec("bf16", 128, h, few_keys=True) for h in (1, 2)]
    compile_all(specs + [forward_spec("bf16", 512, h) for h in WIDEST_RATIOS])


def inputs(layout, heads=8, kv_heads=2, head_dim=128, dtype=BF16):
    generator = torch.Generator("cuda").manual_seed(layout.num_tokens * 1000 + heads * head_dim)
    shapes = [(layout.num_tokens, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for shape in shapes]


def run(q, k, v, layout, num_sms=None, few_keys=False):
    """(out, lse) of the kernel, into outputs filled with NaN."""
    kind = q.dtype, q.shape[2], q.shape[1] // k.shape[1], q.device, layout.depth > 2
    spec, kernel = hopper._kernel(*kind, few_keys=few_keys)
    plan = hopper.forward_plan(layout._segments, q.device, spec, q.shape[1], k.shape[1])
    out = torch.full(q.shape, float("nan"), device="cuda", dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"), device="cuda")
    sms = num_sms or hopper._num_sms(q.device)
    (tables,) = plan.launches
    kernel(q, k, v, out, lse, *tables, q.shape[2] ** -0.5, sms)
    return out, lse


def check(q, k, v, layout, num_sms=None, few_keys=False):
    """The bound of the issue: twice plain PyTorch's error in the same dtype; and the same bits every time."""
    out, lse = run(q, k, v, layout, num_sms, few_keys)
    for a, b in zip(run(q, k, v, layout, num_sms, few_keys), (out, lse), strict=True):
        assert torch.equal(a, b)
    scale = q.shape[2] ** -0.5
    arguments = layout.offsets, layout.parent, scale
    want, want_lse = oracle.attention(q.double(), k.double(), v.double(), *arguments)
    plain, _ = oracle.attention(q, k, v, *arguments)
    error, plain_error = out.double() - want, plain.double() - want
    assert error.abs().max() <= 2 * plain_error.abs().max() + 1e-5
    assert error.norm() <= 2 * plain_error.norm() + 1e-5 * want.norm()
    # Scores are sums of D products in fp32: beyond 100 their own rounding passes 1e-4. 512: 1.1e-4 seen.
    rounding = max(1.0, q.shape[2] / 256) * want_lse.abs().max().item() / 100
    assert (lse - want_lse).abs().max() <= 1e-4 * max(1.0, rounding)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, head_dim, dtype):
    for ratio in (1, 4):
        check(*inputs(LAYOUTS[name], 2 * ratio, 2, head_dim, dtype), LAYOUTS[name])


@pytest.mark.parametrize("ratio", [*range(1, 17), 17, 24, 32])
def test_gqa_ratios(ratio):
    for name in ("ragged groups", "many in a tile"):
        check(*inputs(LAYOUTS[name], 3 * ratio, 3), LAYOUTS[name])
    if ratio == 11:
        check(*inputs(LAYOUTS[name], ratio, 1, head_dim=64), LAYOUTS[name])
    if ratio in WIDEST_RATIOS:
        check(*inputs(LAYOUTS[name], ratio, 1, head_dim=512), LAYOUTS[name])


@pytest.mark.parametrize("head_dim", [*range(8, 257, 8), 264, 392, 504])
def test_head_dims(head_dim):
    check(*inputs(LAYOUTS["ragged groups"], head_dim=head_dim), LAYOUTS["ragged groups"])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tails(head_dim):
    """Every remainder of the last block of either region, in one batch of small groups."""
    lengths = range(1, 2 * 128 + 2)
    layout = Layout.from_lengths(lengths, [[(37 * n) % 131, (11 * n) % 67] for n in lengths])
    check(*inputs(layout, 4, 1, head_dim), layout)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_many_groups_whose_rows_see_few_keys(seed, ratio):
    layout = many_groups(seed)
    q, k, v = inputs(layout, 8 * ratio, 8)
    assert hopper.few_keys_forward(layout._segments, 128, ratio, 8)
    check(q, k, v, layout, few_keys=True)
    called = hopper.forward(q, k, v, layout._segments, 128**-0.5)
    assert all(map(torch.equal, called, run(q, k, v, layout, few_keys=True)))


@pytest.mark.parametrize("ratio", [5, 6, 10, 11, 12])
def test_heads_in_two_launches(monkeypatch, ratio):
    """Each launch computes what a call with its heads alone does."""
    monkeypatch.setattr(hopper, "FEW_KEYS_ROWS", 0)
    monkeypatch.setattr(hopper, "FEW_KEYS_COST", float("inf"))
    monkeypatch.setattr(hopper, "PARTS_COST", float("inf"))
    layout = LAYOUTS["ragged groups"]
    q, k, v = inputs(layout, 2 * ratio, 2)
    out, lse = hopper.forward(q, k, v, layout._segments, 128**-0.5)
    for heads in head_parts(ratio):
        own = [first + head for first in (0, ratio) for head in heads]
        alone, alone_lse = run(q[:, own], k, v, layout)
        assert torch.equal(out[:, own], alone)
        assert torch.equal(lse[own], alone_lse)


@pytest.mark.parametrize("num_sms", [1, 2, 7])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_few_ctas_take_all_the_work(head_dim, num_sms):
    """The persistent CTAs walk many tiles: pipelines and barriers carry over from one to the next."""
    num_sms = max(num_sms, 2)  # a cluster
    for name in ("ragged groups", "aligned"):
        check(*inputs(LAYOUTS[name], head_dim=head_dim), LAYOUTS[name], num_sms)


def grow(q, k, v):
    k.mul_(torch.linspace(0.1, 12, len(k), device="cuda")[:, None, None].to(k.dtype))


HOSTILE = {
    "large prompt keys": lambda q, k, v: k[:1999].mul_(13),
    "one huge key": lambda q, k, v: k[1000].mul_(250),
    "growing scores": grow,
    "late outliers": lambda q, k, v: (k[1990].mul_(100), k[-3].mul_(100)),
    "equal scores": lambda q, k, v: k.copy_(k[:1].expand_as(k).clone()),
    "tiny scores": lambda q, k, v: q.mul_(1e-6),
}


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values(name, dtype):
    q, k, v = inputs(LONG, dtype=dtype)
    HOSTILE[name](q, k, v)
    check(q, k, v, LONG)


@pytest.mark.parametrize("growth", [4, 30, 100])  # scores near 64 in base 2, beyond, beyond what fp32 holds as powers
@pytest.mark.parametrize("num_sms", [2, 6, 132])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_outgrown_references(head_dim, num_sms, growth):
    """A key of an unmasked block far above all before, in one KV head of one group: the tiles that see it, and no
    other, get a recompute pass in the same launch, by clusters that take nothing else, some other tiles, or all."""
    layout = Layout.from_lengths([300, 1500, 300], [[200], [260, 40, 500], [100, 100]])
    for ratio, dtype in ((3, BF16), (4, BF16), (4, FP16)) if head_dim == 128 else ((4, BF16), (4, FP16)):
        q, k, v = inputs(layout, 2 * ratio, 2, head_dim, dtype)
        k *= 3  # so that doing a tile again would show in its bits
        clean, clean_lse = run(q, k, v, layout, num_sms)
        k[500 + 700, 1] *= growth
        check(q, k, v, layout, num_sms)
        out, lse = run(q, k, v, layout, num_sms)
        for rows, heads in (
            (slice(0, 500), slice(None)),
            (slice(500, 2800), slice(ratio)),
            (slice(2800, None), slice(None)),
        ):
            assert torch.equal(out[rows, heads], clean[rows, heads])
            assert torch.equal(lse[heads, rows], clean_lse[heads, rows])


# Where the outlier is, and the first row with it above the rest: in the first block without a mask; in the prompt's
# last block, which has a mask and takes no maximum; at the beginning of a response, in such a block of later rows.
@pytest.mark.parametrize(("key", "first"), [(100, 600), (1690, 1700), (2005, 2100)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_height_of_an_outlier(head_dim, dtype, key, first):
    """A key that is 2^1 to 2^140 above the rest, each power of two for one to twelve rows. Among them what fp16 moves
    its references by, and the last powers of fp32, where a factor that undoes one is flushed to 0."""
    layout = Layout.from_lengths([1700], [[300, 300]])
    q, k, v = inputs(layout, 4, 1, head_dim, dtype)
    above = torch.linspace(1, 140, layout.num_tokens - first, device="cuda")
    k[key], k[:, :, 0], k[key, :, 0] = 0, 0, 64
    q[first:, :, 0] = (above * math.log(2) * head_dim**0.5 / 64)[:, None].to(dtype)
    check(q, k, v, layout)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_more_items_than_bits_for_those_done_again(dtype):
    """One CTA with 4,200 items, some of which share bits."""
    layout = Layout.from_lengths([400] * 700, [[5]] * 700)
    q, k, v = inputs(layout, 2, 2, 64, dtype)
    for group in (0, 1, 350, 699):
        k[405 * group + 3, 1] *= 400
    out, lse = run(q, k, v, layout, 1)
    assert not out.isnan().any()
    some = torch.tensor([0, 3, 130, 200, 300, 383, 384, 399, 400, 404])
    rows = torch.cat([405 * group + some for group in (0, 1, 2, 336, 337, 350, 699)]).cuda()
    want, want_lse = expected_rows(q, k, v, layout, rows)
    assert (out[rows].double() - want).abs().max() < 0.03
    assert (lse[:, rows] - want_lse).abs().max() < 0.01


def test_large_values():
    """Probabilities that bf16 holds, and sums of values that fp32 would not."""
    q, k, v = inputs(LONG)
    k[:1999].mul_(13)
    v.mul_(1e33)
    check(q, k, v, LONG)


def test_slices_and_strides():
    layout = LAYOUTS["ragged groups"]
    fused = torch.randn(layout.num_tokens, 12 * 136, device="cuda", dtype=BF16).view(layout.num_tokens, 12, 136)
    for head_dim in (128, 72):
        q, k, v = (x[:, :, :head_dim] for x in fused.split([8, 2, 2], 1))
        for got, want in zip(
            run(q, k, v, layout), run(q.contiguous(), k.contiguous(), v.contiguous(), layout), strict=True
        ):
            assert torch.equal(got, want)
        by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
        check(*by_head, layout)


def many_groups(seed):
    """Enough of them that both directions take CTAs without clusters; lengths from a quarter to 7/4 of their mean."""
    draw = np.random.default_rng(seed)
    prompts, responses = draw.integers(38, 263, 24), draw.integers(25, 176, (24, 8))
    responses[::5, 3], prompts[7] = 0, 1
    return Layout.from_lengths(prompts, responses)


def more_than_2_to_the_31(columns):
    """Equal groups whose rows of so many elements have more in all; one of these groups; the rows of the last one."""
    prompts, responses = [900], [[300, 201]]
    alone = Layout.from_lengths(prompts, responses)
    count = 2**31 // (alone.num_tokens * columns) + 2
    many = Layout.from_lengths(prompts * count, responses * count)
    assert many.num_tokens * columns > 2**31
    return many, alone, slice(many.num_tokens - alone.num_tokens, None)


def expected_rows(q, k, v, layout, rows):
    """out [n, H, D] and lse [H, n] in float64 of some rows alone."""
    end = torch.from_numpy(layout._segments.visible_end).cuda()
    keys = torch.arange(len(k), device="cuda")
    seen = (keys[None] <= rows[:, None]) & (rows[:, None] < end[None])
    ratio, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    outs, lses = [], []
    for h in range(q.shape[1]):
        scores = (q[rows, h].double() @ k[:, h // ratio].double().T * scale).masked_fill(~seen, -math.inf)
        outs.append(scores.softmax(1) @ v[:, h // ratio].double())
        lses.append(scores.logsumexp(1))
    return torch.stack(outs, 1), torch.stack(lses)


LARGE = {
    "long prompt": ([131072], [[100] * 4]),
    "long response": ([1], [[131072]]),
    "1024 responses": ([131072], [[1] * 1024]),
    "1024 long responses": ([700], [[300] * 1024]),
    "4000 groups": ([8] * 4000, [[5, 2]] * 4000),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_layouts(name):
    layout = Layout.from_lengths(*LARGE[name])
    q, k, v = inputs(layout, 4, 1)
    out, lse = run(q, k, v, layout)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    edges = torch.from_numpy(layout._segments.offsets[:-1]).cuda()[:: max(1, layout.num_segments // 32)]
    rows = torch.cat([edges, edges[1:] - 1, torch.randint(0, layout.num_tokens, (64,), device="cuda")])
    want, want_lse = expected_rows(q, k, v, layout, rows)
    assert (out[rows].double() - want).abs().max() < 0.03
    assert (lse[:, rows] - want_lse).abs().max() < 1e-4


def test_more_than_2_to_the_31_elements():
    """The last of many equal-shaped groups gives the bits that it gives alone: every offset is right past 2^31."""
    many, alone, last = more_than_2_to_the_31(128 * 128)
    q, k, v = inputs(many, 128, 128)
    out, lse = run(q, k, v, many)
    want, want_lse = run(q[last], k[last], v[last], alone)
    assert torch.equal(out[last], want)
    assert torch.equal(lse[:, last], want_lse)
    assert not out.isnan().any()
    check(q[last, :4], k[last, :4], v[last, :4], alone)


def test_nan_and_inf_stay_in_their_group():
    layout = LAYOUTS["ragged groups"]
    clean = inputs(layout)
    want, want_lse = run(*clean, layout)
    roots = (layout.parent == -1).nonzero().flatten()
    bounds = [*layout.offsets[roots].tolist(), layout.num_tokens]
    for bad in range(layout.num_groups):
        q, k, v = (x.clone() for x in clean)
        rows = slice(bounds[bad], bounds[bad + 1])
        k[rows], v[rows] = float("inf"), float("nan")
        out, lse = run(q, k, v, layout)
        others = torch.ones(layout.num_tokens, dtype=torch.bool, device="cuda")
        others[rows] = False
        assert torch.equal(out[others], want[others])
        assert torch.equal(lse[:, others], want_lse[:, others])
        assert out[rows].isnan().all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nan_and_inf_stay_in_their_response(head_dim):
    """Responses that share no tile: neither region's last block may let a neighbour's V in. (0 * NaN is NaN.)"""
    heads = 8
    spec = forward_spec("bf16", head_dim, heads)
    tokens = spec.tile.tokens(heads)
    assert tokens % spec.tile.tile_n, "or no block would reach past its region"
    for prompt in (tokens, 3 * tokens):
        layout = Layout.from_lengths([prompt], [[tokens, 5 * tokens, 2 * tokens]])
        q, k, v = inputs(layout, heads, 1, head_dim)
        want, want_lse = run(q, k, v, layout)
        for segment in (1, 2, 3):
            rows = slice(*layout.offsets[segment : segment + 2].tolist())
            bad_k, bad_v = k.clone(), v.clone()
            bad_k[rows], bad_v[rows] = float("nan"), float("inf")
            out, lse = run(q, bad_k, bad_v, layout)
            others = torch.ones(layout.num_tokens, dtype=torch.bool, device="cuda")
            others[rows] = False
            assert torch.equal(out[others], want[others])
            assert torch.equal(lse[:, others], want_lse[:, others])
            assert not out[rows].isfinite().any()


@pytest.mark.parametrize(("own", "context"), [(125, 126.5), (126, 127.5), (124.5, 128.5), (126.5, 125), (100, 140)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_keys_far_above_the_others(head_dim, own, context):
    """A warp group's own blocks without a mask, then the context's last one with a mask: both outgrow the reference."""
    lengths, parent = (100, 1530, 300), (-1, 0, 0)
    layout = Layout.from_segments([0, 100, 1630, 1930], parent)
    q, k, v = inputs(layout, 4, 1, head_dim)
    heights = torch.zeros(layout.num_tokens, device="cuda")
    heights[300], heights[98] = own, context  # the scores of these keys, in powers of two
    q.mul_(0.05)[:, :, 0] = 64.0
    k.mul_(0.05)[:, 0, 0] = heights * math.log(2) * head_dim**0.5 / 64.0
    out, lse = run(q, k, v, layout)
    mask = torch.from_numpy(segment_mask(lengths, parent)).cuda()
    want = dense.attention(q, k, v, mask, head_dim**-0.5, torch.zeros_like(q))
    assert want["out"].ratio(out) <= 1.0
    assert want["lse"].ratio(lse) <= 1.0


@pytest.mark.parametrize(("head_dim", "size"), [(64, 1e14), (128, 1e15), (256, 2e16), (512, 1e17), (128, 1e18)])
def test_scores_below_every_reference(head_dim, size):
    """Scores down to -1e38, all equal: each row is the mean of the values that it sees."""
    layout = Layout.from_lengths([70], [[90, 33]])
    q, k, v = inputs(layout, 4, 1, head_dim)
    out, lse = run(q.fill_(size), k.fill_(-size), v, layout)
    mask = torch.from_numpy(segment_mask((70, 90, 33), (-1, 0, 0))).cuda().double()
    mean, bound = (mask @ x[:, 0].double() / mask.sum(1, keepdim=True) for x in (v, v.abs()))
    assert ((out.double() - mean[:, None]).abs() <= 2**-8 * bound[:, None] + 2**-8 * mean[:, None].abs()).all()
    score = -(q[0, 0].double() * q[0, 0].double()).sum() * head_dim**-0.5
    assert ((lse - score).abs() <= 2**-18 * score.abs()).all()

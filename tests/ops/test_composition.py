"""The composition's parts, merge and sums, with PyTorch's CUDA-only FlashAttention calls replaced by dense ones."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv import Layout
from dualkv.ops import backends, composition
from dualkv.ops.features import Features, Window
from tests import oracle, strategies

CPU = torch.device("cpu")


# Of each depth, whether its keys are copied; None is the composition's own choice.
LEVELS = st.one_of(st.none(), st.lists(st.booleans(), min_size=10, max_size=10))


def choose(patch, levels, copied):
    """Make calls copy the keys of some levels, about so many in a call."""
    patch.setattr(composition, "COPIED_ROWS", copied)
    if levels is not None:
        patch.setattr(composition, "_copied", lambda segments: np.array(levels[: segments.max_depth], bool))


@settings(max_examples=100, deadline=None)
@given(strategies.trees(), strategies.windows(), LEVELS, st.sampled_from([1, 40, 2**18]))
def test_parts_hold_every_visible_pair_once(tree, window, levels, copied):
    layout, pairs = Layout.from_segments(*tree), []
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, levels, copied)
        parts = composition.parts(layout._segments, CPU, strategies.window_of(window))
    for part in parts:
        everything = torch.arange(layout.num_tokens)
        q_rows, k_rows = (everything if rows is None else everything[rows] for rows in (part.q_rows, part.k_rows))
        cu_q, cu_k = part.cu_q.tolist(), part.cu_k.tolist()
        assert (cu_q[-1], cu_k[-1]) == (len(q_rows), len(k_rows))
        for i in range(len(cu_q) - 1):
            queries, keys = q_rows[cu_q[i] : cu_q[i + 1]].tolist(), k_rows[cu_k[i] : cu_k[i + 1]].tolist()
            assert len(queries) <= part.max_q
            assert len(keys) <= part.max_k
            seen = visible(len(queries), len(keys), part.causal, **part.window())
            pairs += [(queries[a], keys[b]) for a, b in seen.nonzero().tolist()]
    end, position = layout.visible_end.tolist(), layout.position_ids.tolist()
    size, chunk = window.get("window", 2**30), window.get("chunk", 2**30)
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {
        (q, k)
        for k in range(layout.num_tokens)
        for q in range(k, end[k])
        if position[q] - position[k] < size and position[q] // chunk == position[k] // chunk
    }


def visible(n_q, n_k, causal, window_size_left=None, window_size_right=None):
    """[n_q, n_k] bool: which keys FlashAttention's queries see; the last query is at the last key."""
    ahead = torch.arange(n_k) - torch.arange(n_q)[:, None] - (n_k - n_q)
    seen = ahead <= (0 if causal else n_q)
    if window_size_left is not None:
        seen &= (ahead >= -window_size_left) & (ahead <= window_size_right)
    return seen


def dense_sequences(q, k, v, cu_q, cu_k, causal, scale, window):
    """Compute, for each sequence of a varlen call, its rows and its probabilities before division, exp(scores) and
    scores."""
    ratio = q.shape[1] // k.shape[1]
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        key, value = (x[keys].repeat_interleave(ratio, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], key) * scale
        yield rows, keys, key, value, scores.masked_fill(~visible(*scores.shape[1:], causal, **window), float("-inf"))


def dense_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, **window):
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for rows, _, _, value, scores in dense_sequences(q, k, v, cu_q, cu_k, causal, scale, window):
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse, None, None, None


def dense_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng_state, unused, *, scale, **window
):  # fmt: skip
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    ratio = q.shape[1] // k.shape[1]
    delta = (dout * out).sum(-1).t().unsqueeze(-1)
    for rows, keys, key, value, scores in dense_sequences(q, k, v, cu_q, cu_k, causal, scale, window):
        probs = (scores - lse[:, rows, None]).exp()
        dprobs = torch.einsum("qhd,khd->hqk", dout[rows], value)
        dscores = probs * (dprobs - delta[:, rows]) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", dscores, key)
        dk[keys] = torch.einsum("hqk,qhd->khd", dscores, q[rows]).unflatten(1, (-1, ratio)).sum(2)
        dv[keys] = torch.einsum("hqk,qhd->khd", probs, dout[rows]).unflatten(1, (-1, ratio)).sum(2)
    return dq, dk, dv


DENSE = SimpleNamespace(_flash_attention_forward=dense_forward, _flash_attention_backward=dense_backward)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (12, 3), (14, 2), (8, 8)], ids=str)
def test_heads_of_a_call(heads):
    """Each query head once, beside its own KV heads; calls as large as they may be, or of one head."""
    n, kv_heads = heads
    group = n // kv_heads
    for at_once in (1, 2, 3, 5, 7, 9, 100):
        floats = (composition.ELEMENTS - 1) // at_once
        slices = composition.head_slices(n, kv_heads, floats)
        assert [h for q, _ in slices for h in range(n)[q]] == list(range(n))
        for q, kv in slices:
            queries, keys = range(n)[q], range(kv_heads)[kv]
            assert len(queries) <= at_once
            assert len(queries) * floats < composition.ELEMENTS
            assert len(queries) % len(keys) == 0
            ratio = len(queries) // len(keys)
            assert [keys[i // ratio] for i in range(len(queries))] == [h // group for h in queries]
        assert len(slices) <= -(-n // at_once) + kv_heads
    with pytest.raises(ValueError, match="dq of one head has 2147483648 floats with padding, expected fewer"):
        composition.head_slices(n, kv_heads, 2**31)


@settings(max_examples=80, deadline=None)
@given(
    strategies.trees(length=st.integers(0, 12)), strategies.windows(40), st.booleans(),
    st.sampled_from([None, 1, 1e-9]), LEVELS, st.sampled_from([1, 40, 2**18]), st.sampled_from([1, 2, 3, 100]),
)  # fmt: skip
def test_parts_merge_to_the_whole(tree, window, with_sinks, dlse_size, levels, copied, heads):
    layout = Layout.from_segments(*tree)
    segments, total = layout._segments, layout.num_tokens
    if total == 0:
        return
    q, k, v, dout = (torch.randn(total, h, 8) for h in (4, 2, 2, 4))
    sinks, dlse = (
        torch.randn(4) if with_sinks else None,
        None if dlse_size is None else torch.randn(4, total) * dlse_size,
    )
    dout *= dlse_size or 1
    expected = oracle.attention_and_grads(q, k, v, *tree, 0.3, dout, dlse, sinks, **window)
    call = segments, 0.3, Features(sinks=sinks, **window)
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, levels, copied)
        slices = partial(composition.head_slices, floats=(composition.ELEMENTS - 1) // heads)
        patch.setattr(composition, "head_slices", lambda h, kv_heads, floats: slices(h, kv_heads))
        patch.setattr(composition, "aten", DENSE)
        out, lse = composition.forward(q, k, v, *call)
        *grads, dsinks = composition.backward(dout, q, k, v, out, lse, *call, dlse, deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert with_sinks or dsinks.shape == (0,)
    for i, (got, want) in enumerate(zip((out, lse, *grads, *[dsinks] * with_sinks), expected, strict=True)):
        size = 1.0 if i < 2 else dlse_size or 1.0
        assert (got - want).abs().max() <= 3e-5 * max(size, want.abs().max().item())


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_switch_is_strict_for_the_backward(deterministic, before, monkeypatch):
    """PyTorch's FlashAttention backward adds in any order where the switch only warns."""
    seen = []

    def backward(*given, **settings):
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )
        return dense_backward(*given, **settings)

    monkeypatch.setattr(composition, "aten", SimpleNamespace(**vars(DENSE) | {"_flash_attention_backward": backward}))
    layout = Layout.from_lengths([3], [[2, 1]])
    q, k, v = torch.randn(3, layout.num_tokens, 1, 8)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        out, lse = composition.forward(q, k, v, layout._segments, 0.3)
        composition.backward(q, q, k, v, out, lse, layout._segments, 0.3, deterministic=deterministic)
        assert (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ) == before
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(seen) == {(True, False) if deterministic else before}


def test_a_cap_goes_to_another_backend(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    q = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"), shape=(5, 4, 64))
    flash = backends.BACKENDS["flash"]
    assert flash.unsupported(q, q) is None
    assert flash.unsupported(q, q, Features(softcap=50.0)) == "softcap"


def test_many_short_pieces_are_several_calls():
    layout = Layout.from_lengths([5000], [[10]])
    calls = composition.parts(layout._segments, torch.device("cpu"), Window(chunk=1))
    pieces = [len(part.cu_q) - 1 for part in calls]
    assert sum(pieces) == layout.num_tokens
    assert max(pieces) <= composition.COPIED_ROWS // composition.ROWS_OF_A_PIECE


def in_16_bits(found):
    """Calls that compute in fp64 and return what FlashAttention does; `found` gets each backward's results."""

    def forward(q, k, v, *given, **more):
        out, lse, *rest = dense_forward(q.double(), k.double(), v.double(), *given, **more)
        return out.to(q.dtype), lse.float(), *rest

    def backward(dout, q, *given, **more):
        grads = dense_backward(dout.double(), q.double(), *(x.double() for x in given[:4]), *given[4:], **more)
        found.append([grad.to(q.dtype) for grad in grads])
        return found[-1]

    return SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("copied", [60, 2**18])
@pytest.mark.parametrize("levels", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("window", [None, Window(size=25), Window(chunk=16)], ids=str)
def test_sums_in_16_bits_are_rounded_once(window, levels, copied, with_dlse, monkeypatch):
    layout = Layout.from_segments(np.cumsum([0, 20, 130, 30, 130, 1, 139, 50]).tolist(), [-1, 0, 1, 2, 2, 1, 0])
    segments, total = layout._segments, layout.num_tokens
    choose(monkeypatch, [*levels, False, False], copied)
    monkeypatch.setattr(composition, "ROWS_OF_A_PIECE", 1)
    q, k, v, dout = (torch.randn(total, h, 16, dtype=torch.float64) for h in (4, 2, 2, 4))
    dlse = torch.randn(4, total) if with_dlse else None
    parts, expected = composition.parts(segments, CPU, window), []
    for dtype in (torch.float64, torch.bfloat16):
        found = []
        monkeypatch.setattr(composition, "aten", in_16_bits(found))
        given = [x.bfloat16().to(dtype) for x in (q, k, v)]
        call = segments, 0.3, Features(window and window.size, window and window.chunk)
        out, lse = composition.forward(*given, *call)
        got = composition.backward(dout.bfloat16().to(dtype), *given, out, lse, *call, dlse)[:3]
        if dtype == torch.float64:
            expected = got
    for grad, want in zip(got, expected, strict=True):
        assert (grad - want).norm() <= 0.02 * want.norm()
    if not with_dlse:
        sums = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
        for part, grads in zip(parts, found, strict=True):
            for one, grad, rows in zip(sums, grads, (part.q_rows, part.k_rows, part.k_rows), strict=True):
                one.index_add_(0, torch.arange(total)[slice(None) if rows is None else rows], grad.double())
        for grad, one in zip(got, sums, strict=True):
            # Half a unit in bf16's last place. fp32's own rounding of the sum, whose terms may cancel, is below 1e-5.
            assert ((grad - one).abs() <= 2**-8 * one.abs() + 1e-5).all()


@pytest.mark.parametrize(
    ("lengths", "parent", "copied"),
    [
        ([10, 90, 90], [-1, 0, 0], [False] * 2),
        # Three levels, of which the first is empty: two, in fact.
        ([0, 10, 90, 90], [-1, 0, 1, 1], [False] * 3),
        # As many copies as rows to merge, at each level, and 60 rows to merge of 40.
        ([10] * 4, [-1, 0, 1, 2], [True, True, True, False]),
        # Copies of 10 four times for 115 rows, of 90 three times for 25, of 5 twice for 20: 135 rows to merge of 125.
        ([10, 90, 5, 10, 10], [-1, 0, 1, 2, 2], [True, False, True, False]),
        # Three copies of 40 for 110 rows, two of 30 for 80: 80 rows to merge of 150.
        ([40, 30, 40, 40], [-1, 0, 1, 1], [False] * 3),
        # An empty segment takes no copies: three of 30 for 110 rows, 190 rows to merge of 140.
        ([30, 0, 30, 40, 40], [-1, 0, 0, 2, 2], [True, True, False]),
        # A small tree beside large groups of two levels changes nothing for them.
        ([100, 500, 500, 1, 1, 1], [-1, 0, 0, -1, 3, 4], [False] * 3),
    ],
)
def test_levels_with_few_keys_are_copied(lengths, parent, copied):
    segments = Layout.from_segments(np.cumsum([0, *lengths]).tolist(), parent)._segments
    assert composition._copied(segments).tolist() == copied


def test_copies_of_a_deep_tree_are_bounded():
    segments = Layout.from_segments(range(401), range(-1, 399))._segments
    calls = composition.parts(segments, CPU)
    assert sum(int(part.cu_k[-1]) for part in calls if part.causal) <= (composition.COPIES + 1) * segments.total
    assert composition._copied(segments).any()

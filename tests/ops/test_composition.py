"""The composition's parts, merge and sums, with PyTorch's CUDA-only FlashAttention calls replaced by dense ones."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv import Layout
from dualkv.ops import composition
from dualkv.ops.window import Window
from tests import oracle, strategies

CPU = torch.device("cpu")


# Of each depth, whether its keys are copied; None is the composition's own choice.
LEVELS = st.one_of(st.none(), st.lists(st.booleans(), min_size=10, max_size=10))


def choose(patch, levels, copied):
    """Have keys of some levels copied, about so many in a call."""
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
    """For each sequence of a varlen call: its rows and its probabilities before division, exp(scores) and scores."""
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
    features = strategies.window_of(window), sinks
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, levels, copied)
        slices = partial(composition.head_slices, floats=(composition.ELEMENTS - 1) // heads)
        patch.setattr(composition, "head_slices", lambda h, kv_heads, floats: slices(h, kv_heads))
        patch.setattr(composition, "aten", DENSE)
        out, lse = composition.forward(q, k, v, segments, 0.3, *features)
        *grads, dsinks = composition.backward(dout, q, k, v, out, lse, segments, 0.3, True, *features, None, dlse)
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
        composition.backward(q, q, k, v, out, lse, layout._segments, 0.3, deterministic)
        assert (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ) == before
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(seen) == {(True, False) if deterministic else before}


def test_a_cap_goes_to_the_reference(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    q = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"))
    assert composition.unsupported(q) is None
    assert composition.unsupported(q, 50.0) == "softcap"


def test_many_short_pieces_are_several_calls():
    layout = Layout.from_lengths([5000], [[10]])
    calls = composition.parts(layout._segments, torch.device("cpu"), Window(chunk=1))
    pieces = [len(part.cu_q) - 1 for part in calls]
    assert sum(pieces) == layout.num_tokens
    assert max(pieces) <= composition.COPIED_ROWS // composition.ROWS_OF_A_PIECE


@pytest.mark.parametrize(
    ("lengths", "parent", "copied"),
    [
        ([10, 90, 90], [-1, 0, 0], [False, False]),  # two levels
        (
            [10, 90, 5, 5],
            [-1, 0, 1, 1],
            [True, False, False],
        ),  # copies of 10 three times for 100 rows, of 90 twice for 10
        ([60, 30, 40, 40], [-1, 0, 1, 1], [False, True, False]),  # of 60 three times for 110, of 30 twice for 80
        ([60, 0, 30, 40, 40], [-1, 0, 1, 2, 2], [False, False, True, False]),  # an empty segment takes no copies
        ([10, 20, 0, 0], [-1, 0, 1, 1], [True, False, False]),  # no rows below the second level
    ],
)
def test_levels_with_few_keys_are_copied(lengths, parent, copied):
    segments = Layout.from_segments(np.cumsum([0, *lengths]).tolist(), parent)._segments
    assert composition._copied(segments).tolist() == copied

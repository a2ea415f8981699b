"""The composition's parts, merge and sums, with PyTorch's CUDA-only FlashAttention calls replaced by dense ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings

from dualkv import Layout
from dualkv.ops import composition
from tests import oracle, strategies

CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None)
@given(strategies.trees())
def test_parts_hold_every_visible_pair_once(tree):
    layout = Layout.from_segments(*tree)
    pairs = []
    for part in composition.parts(layout._segments, CPU):
        everything = torch.arange(layout.num_tokens)
        q_rows = everything if part.q_rows is None else part.q_rows
        k_rows = everything if part.k_rows is None else part.k_rows
        cu_q, cu_k = part.cu_q.tolist(), part.cu_k.tolist()
        assert (cu_q[-1], cu_k[-1]) == (len(q_rows), len(k_rows))
        for i in range(len(cu_q) - 1):
            queries, keys = q_rows[cu_q[i] : cu_q[i + 1]].tolist(), k_rows[cu_k[i] : cu_k[i + 1]].tolist()
            assert len(queries) <= part.max_q
            assert len(keys) <= part.max_k
            pairs += [(q, k) for a, q in enumerate(queries) for b, k in enumerate(keys) if not part.causal or b <= a]
    end = layout.visible_end.tolist()
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {(q, k) for k in range(layout.num_tokens) for q in range(k, end[k])}


def dense_sequences(q, k, v, cu_q, cu_k, causal, scale):
    """For each sequence of a varlen call: its rows and its probabilities before division, exp(scores) and scores."""
    ratio = q.shape[1] // k.shape[1]
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        key, value = (x[keys].repeat_interleave(ratio, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], key) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
        yield rows, keys, key, value, scores


def dense_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for rows, _, _, value, scores in dense_sequences(q, k, v, cu_q, cu_k, causal, scale):
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse, None, None, None


def dense_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng_state, unused, *, scale
):  # fmt: skip
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    ratio = q.shape[1] // k.shape[1]
    delta = (dout * out).sum(-1).t().unsqueeze(-1)
    for rows, keys, key, value, scores in dense_sequences(q, k, v, cu_q, cu_k, causal, scale):
        probs = (scores - lse[:, rows, None]).exp()
        dprobs = torch.einsum("qhd,khd->hqk", dout[rows], value)
        dscores = probs * (dprobs - delta[:, rows]) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", dscores, key)
        dk[keys] = torch.einsum("hqk,qhd->khd", dscores, q[rows]).unflatten(1, (-1, ratio)).sum(2)
        dv[keys] = torch.einsum("hqk,qhd->khd", probs, dout[rows]).unflatten(1, (-1, ratio)).sum(2)
    return dq, dk, dv


@settings(max_examples=40, deadline=None)
@given(strategies.trees(length=strategies.st.integers(0, 12)))
def test_parts_merge_to_the_whole(tree):
    layout = Layout.from_segments(*tree)
    segments, total = layout._segments, layout.num_tokens
    if total == 0:
        return
    q, k, v, dout = (torch.randn(total, h, 8) for h in (4, 2, 2, 4))
    expected = oracle.attention_and_grads(q, k, v, *tree, 0.3, dout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            composition,
            "aten",
            SimpleNamespace(_flash_attention_forward=dense_forward, _flash_attention_backward=dense_backward),
        )
        out, lse = composition.forward(q, k, v, segments, 0.3)
        grads = composition.backward(dout, q, k, v, out, lse, segments, 0.3, True)
    assert not torch.are_deterministic_algorithms_enabled()
    for got, want in zip((out, lse, *grads), expected, strict=True):
        assert (got - want).abs().max() <= 3e-5 * max(1.0, want.abs().max().item())

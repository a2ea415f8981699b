"""Trees of 64 levels and 10,000 segments: attention against every path alone, repeatable, and quick on the host."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from dualkv import Layout, attention
from dualkv.ops import composition
from tests import oracle
from tests.ops.test_composition import DENSE

DEPTH, SEGMENTS = 64, 10_000


def deep_tree(segments: int, seed: int = 0) -> Layout:
    """Segments of 0 to 3 tokens; most continue the one before, the others one anywhere above it."""
    rng = random.Random(seed)
    parent: list[int] = []
    path: list[int] = []
    for s in range(segments):
        if len(path) == DEPTH or (path and rng.random() < 0.1):
            path = path[: rng.randint(0, len(path) - 1)]
        parent.append(path[-1] if path else -1)
        path.append(s)
    return Layout.from_segments(np.cumsum([0, *(rng.choice((0, 1, 1, 2, 3)) for _ in parent)]), parent)


def of_paths(layout: Layout, q, k, v, dout, scale):
    """float64 out, lse, dq, dk, dv: every leaf's path as an ordinary sequence of one padded batch.

    A row's out and its gradient count in one of the sequences that it is part of; keys and values in all of them.
    """
    parent = layout.parent.tolist()
    rows, inner = oracle.paths(layout.offsets.tolist(), parent), set(parent)
    paths = [r for s, r in enumerate(rows) if s not in inner and r]
    width = max(map(len, paths))
    table = torch.tensor([r + [-1] * (width - len(r)) for r in paths])
    places = (table.flatten() >= 0).nonzero()[:, 0]
    own = torch.empty(layout.num_tokens, dtype=torch.int64)
    own[table.flatten()[places]] = places  # one of the places of each row
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    at = table.clamp(min=0)
    key, value = (x[at].repeat_interleave(q.shape[1] // k.shape[1], 2) for x in (k, v))
    scores = torch.einsum("nqhd,nkhd->nhqk", q[at], key) * scale
    scores = scores.masked_fill(torch.ones(width, width, dtype=torch.bool).triu(1), float("-inf"))
    # Padding lies behind: causality hides it from all rows that count.
    out = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), value).flatten(0, 1)[own]
    lse = scores.logsumexp(-1).transpose(1, 2).flatten(0, 1)[own].T
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def inputs(layout: Layout, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(layout.num_tokens, heads, 8, dtype=dtype) for heads in (2, 1, 1, 2)]


def test_the_reference_is_right_and_repeats():
    layout = deep_tree(SEGMENTS)
    assert (layout.depth, layout.num_segments) == (DEPTH, SEGMENTS)
    q, k, v, dout = inputs(layout, torch.float64)
    want = of_paths(layout, q, k, v, dout, 0.3)
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attention(*leaves, layout, 0.3, deterministic=True, return_lse=True)
        runs.append((out.detach(), lse, *torch.autograd.grad(out, leaves, dout)))
    for got, again, expected in zip(*runs, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(got, again)


def test_the_composition_is_right(monkeypatch: pytest.MonkeyPatch):
    layout = deep_tree(SEGMENTS // 10, seed=1)
    assert layout.depth == DEPTH
    q, k, v, dout = inputs(layout, torch.float32)
    monkeypatch.setattr(composition, "aten", DENSE)
    out, lse = composition.forward(q, k, v, layout._segments, 0.3)
    *grads, _ = composition.backward(dout, q, k, v, out, lse, layout._segments, 0.3, deterministic=True)
    for got, expected in zip((out, lse, *grads), of_paths(layout, q, k, v, dout, 0.3), strict=True):
        assert (got - expected).abs().max() <= 3e-5 * max(1.0, expected.abs().max().item())


def test_the_host_is_quick():
    """The plans take 0.02 s together on an idle core. A time that grows with the square of segments, or with depth
    times segments, would be seconds."""
    given = deep_tree(SEGMENTS)
    best = np.inf
    for _ in range(3):
        start = time.process_time()
        layout = Layout.from_segments(given.offsets, given.parent)
        assert len(layout.position_ids) == len(layout.visible_end) == layout.num_tokens
        composition.parts(layout._segments, torch.device("cpu"))
        best = min(best, time.process_time() - start)
    assert best < 0.3

"""The oracle of shared-prompt attention: dense float64 attention on the replicated sequences, one at a time.

Written apart from the library on purpose: it shares neither the visibility rule nor the packing with it. A packed row's
path is found by walking `parent`, and each path is an ordinary causal sequence.
"""

from __future__ import annotations

import torch


def paths(offsets: list[int], parent: list[int]) -> list[list[int]]:
    """List, for each segment, the packed rows of its replicated sequence, from its prompt's first token to its own
    last."""
    found: list[list[int]] = []
    for s, up in enumerate(parent):
        own = list(range(offsets[s], offsets[s + 1]))
        found.append((found[up] if up >= 0 else []) + own)
    return found


def attention(q, k, v, offsets, parent, scale, window=None, chunk=None, sinks=None, softcap=None):
    """q [T, H, D], k and v [T, Hk, D], sinks [H] float64 -> out [T, H, D], lse [H, T]; differentiable."""
    offsets, parent = [int(x) for x in offsets], [int(x) for x in parent]
    ratio = q.shape[1] // k.shape[1]
    out, lse = [], []
    for s, rows in enumerate(paths(offsets, parent)):
        own = offsets[s + 1] - offsets[s]
        n = len(rows)
        qs, ks, vs = q[rows], k[rows].repeat_interleave(ratio, 1), v[rows].repeat_interleave(ratio, 1)
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        query, key = torch.arange(n, device=q.device)[:, None], torch.arange(n, device=q.device)
        hidden = key > query
        if window is not None:
            hidden |= query - key >= window
        if chunk is not None:
            hidden |= query // chunk != key // chunk
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:  # a key that all rows see, whose value is zero
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], -1)
            vs = torch.cat([vs, vs.new_zeros(1, *vs.shape[1:])])
        result = torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs)
        out.append(result[n - own :])
        lse.append(scores.logsumexp(-1)[:, n - own :])
    return torch.cat(out), torch.cat(lse, 1)


def attention_and_grads(q, k, v, offsets, parent, scale, dout, dlse=None, sinks=None, **features):
    """float64 results for inputs of any dtype: out, lse, dq, dk, dv, and dsinks if there are sinks."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    wide = None if sinks is None else leaves[3]
    out, lse = attention(*leaves[:3], offsets, parent, scale, sinks=wide, **features)
    outputs, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    grads = torch.autograd.grad(outputs, leaves, [x.double() for x in grads])
    return out.detach(), lse.detach(), *grads

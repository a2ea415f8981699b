"""NaN and infinity in one response: what mathematics makes of them, and how results are held to it."""

from __future__ import annotations

import torch

import dualkv

NAN, INF = float("nan"), float("inf")
# Responses of a few rows share tiles with each other, with the prompt and with other groups; a long one spans tiles.
LENGTHS = [45, 20], [[24, 37, 1, 70, 210], [33, 18]]
SEGMENTS = 2, 5, 3, 7  # of responses to break: in the middle, long, of one row, of the next group
BROKEN = ("q",), ("k",), ("v",), ("dout",), ("k", "v")
WHERE = {"rows": (slice(None), slice(None)), "an element": (7, 3)}  # rows of the response, columns


def summed(mask, weight, x):
    """[H, N, D]: of each row the sum of weight * x over what the mask [N, M] has, and of nothing else."""
    return torch.stack(
        [torch.where(mask[..., None], w[..., None] * y, 0.0).sum(1) for w, y in zip(weight, x, strict=True)]
    )


def mathematics(q, k, v, dout, visible_end):
    """float64 out, dq, dk and dv [rows, heads, D], where what is hidden counts for nothing, NaN or not."""
    ratio, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    q, k, v, dout = (x.double().transpose(0, 1) for x in (q, k, v, dout))
    k, v = (x.repeat_interleave(ratio, 0) for x in (k, v))
    row = torch.arange(q.shape[1], device=q.device)
    mask = (row[None] <= row[:, None]) & (row[:, None] < visible_end[None])
    p = torch.where(mask, q @ k.mT * scale, -INF).softmax(-1)
    out = summed(mask, p, v)
    ds = torch.where(mask, p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)), 0.0) * scale
    dq, dk, dv = summed(mask, ds, k), summed(mask.mT, ds.mT, q), summed(mask.mT, p.mT, dout)
    dk, dv = (x.unflatten(0, (-1, ratio)).sum(1) for x in (dk, dv))
    return [x.transpose(0, 1) for x in (out, dq, dk, dv)]


def inputs(layout, head_dim, heads, kv_heads, dtype, head_dim_v=None):
    """q, k, v, dout"""
    generator = torch.Generator(layout.device).manual_seed(0)
    dims = head_dim, head_dim, *[head_dim_v or head_dim] * 2
    shapes = [(layout.num_tokens, *n) for n in zip((heads, kv_heads, kv_heads, heads), dims, strict=True)]
    return [torch.randn(s, device=layout.device, generator=generator).to(dtype) for s in shapes]


def broken(tensors, names, rows, where, value):
    """Copies of q, k, v and dout, some of them with `value` in a response's rows."""
    tensors, (at, column) = [x.clone() for x in tensors], WHERE[where]
    for name, x in zip(("q", "k", "v", "dout"), tensors, strict=True):
        if name in names:
            response = x[rows]
            response[at if at == slice(None) else min(at, len(response) - 1), :, column] = value
    return tensors


def step(tensors, layout, deterministic, needs="qkv"):
    """out and what is asked of dq, dk, dv"""
    *leaves, dout = tensors
    leaves = [x.detach().requires_grad_(name in needs) for name, x in zip("qkv", leaves, strict=True)]
    out = dualkv.attention(*leaves, layout, deterministic=deterministic)
    return [out.detach(), *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], dout)]


def check(names, got, want, clean, rows, limits=False):
    """Check that finite values outside `rows` are right, and that nothing that should not be finite is lost anywhere.

    `limits`: infinite scores, whose softmax may be NaN or its limit.
    """
    others = torch.ones(len(got[0]), dtype=torch.bool, device=got[0].device)
    others[rows] = False
    for name, x, y, healthy in zip(names, got, want, clean, strict=True):
        assert limits or not x[~y.isfinite()].isfinite().any(), f"{name} has lost a value that is not finite"
        judged = others[:, None, None] & y.isfinite()
        size = healthy.double()[others].abs().max()
        error = torch.where(judged, x.double() - y, 0.0).abs().max()  # NaN, if there is one where there should be none
        assert error <= 0.02 * size, f"{name} outside the broken response is off by {error:.3g} (of {size:.3g})"


def limits(names, value):
    """Whether such values make scores infinite."""
    return abs(value) == INF and not {"q", "k"}.isdisjoint(names)

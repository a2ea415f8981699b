"""Attention of the replicated sequences, which the benchmarks measure against: the fastest that this machine has.

:func:`register` makes transformers know each by a name. All sequences have one length here, so they are rows of a
batch, whether a model lays them end to end in one row or not: no mask, and no call that takes ragged lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import AttentionInterface

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]


def _sdpa(*backends: SDPBackend) -> Call:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(list(backends)):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    return call


def _fa4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    from flash_attn.cute.interface import flash_attn_func

    found = flash_attn_func(q, k, v, softmax_scale=scale, causal=True)
    return found[0] if isinstance(found, tuple) else found


# q [B, L, H, D], k and v [B, L, Hk, D] -> [B, L, H, D], causal.
CALLS: dict[str, Call] = {
    "fa4": _fa4,
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "math": _sdpa(SDPBackend.MATH),
}


def register(name: str, length: int) -> str:
    """Makes transformers know one of :data:`CALLS` for sequences of `length` tokens; the name it is known by."""
    call = CALLS[name]

    def forward(
        _module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: torch.Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, B * L, D] or [B, H, L, D] -> [1, B * L, H, D] or [B, L, H, D]."""
        batch, rows = query.shape[0], query.shape[2]
        if rows % length:
            raise ValueError(f"got {rows} rows, expected a multiple of the sequences' {length} tokens")
        q, k, v = (x.transpose(1, 2).reshape(-1, length, *x.shape[1::2]) for x in (query, key, value))
        return call(q, k, v, scaling).reshape(batch, rows, *q.shape[2:]), None

    known = f"stock-{name}-{length}"
    AttentionInterface.register(known, forward)
    return known


def seconds(name: str, batch: int, length: int, heads: int, kv_heads: int, head_dim: int, calls: int = 3) -> float:
    """Of a forward and a backward in bf16 on the current GPU, the mean of some calls after a first one."""
    shapes = [(batch, length, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    dout = torch.randn_like(q)
    for turn in range(calls + 1):
        if turn == 1:
            torch.cuda.synchronize()
            start = time.perf_counter()
        torch.autograd.grad(CALLS[name](q, k, v, None), (q, k, v), dout)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def fastest(batch: int, length: int, heads: int, kv_heads: int, head_dim: int) -> tuple[str, dict[str, float | str]]:
    """The fastest of :data:`CALLS` on the current GPU, and the seconds of each or why it does not run here."""
    found: dict[str, float | str] = {}
    for name in CALLS:
        if name == "math":  # holds the scores of all pairs
            continue
        try:
            found[name] = seconds(name, batch, length, heads, kv_heads, head_dim)
        except (ImportError, RuntimeError) as error:
            found[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    times = {name: value for name, value in found.items() if isinstance(value, float)}
    return min(times, key=lambda name: times[name]), found

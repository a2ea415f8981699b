"""Attention of the replicated sequences, which the benchmarks measure against: the fastest that this machine has.

:func:`register` makes transformers know each by a name. All sequences have one length here, so they are rows of a
batch, whether a model lays them end to end in one row or not: no mask, and no call that takes ragged lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from dualkv.bench.run import in_words

Kinds = Sequence[tuple[int | None, bool]]  # (window, whether there are sinks) of layers
PLAIN: Kinds = ((None, False),)


class Rule(NamedTuple):
    """The parts of scores besides q and k; sinks [H]."""

    scale: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


# q [B, L, H, D], k and v [B, L, Hk, D] -> [B, L, H, D], causal.
Call = Callable[[Tensor, Tensor, Tensor, Rule], Tensor]


def _sdpa(backend: SDPBackend) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        if rule.window or rule.sinks is not None:
            raise ValueError("PyTorch's scaled_dot_product_attention has no windows and no sinks")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([backend]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scale, enable_gqa=True)
        return out.transpose(1, 2)

    return call


def _fa4(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    from flash_attn.cute.interface import flash_attn_func

    left = rule.window - 1 if rule.window else None
    found = flash_attn_func(
        q, k, v, softmax_scale=rule.scale, causal=True, window_size=(left, None), learnable_sink=rule.sinks
    )
    return found[0] if isinstance(found, tuple) else found


@cache
def _block_mask(length: int, window: int | None, device: torch.device) -> Any:
    def mask(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k > q - (window or length))

    return flex_attention.create_block_mask(mask, None, None, length, length, device=device)


def _flex(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    seen = _block_mask(q.shape[1], rule.window, q.device)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    compiled: Any = torch.compile(flex_attention.flex_attention, dynamic=False)
    asked = flex_attention.AuxRequest(lse=True)
    out, aux = compiled(q, k, v, block_mask=seen, scale=rule.scale, enable_gqa=True, return_aux=asked)
    if rule.sinks is not None:
        out = out * torch.sigmoid(aux.lse - rule.sinks[:, None]).unsqueeze(-1).to(out.dtype)
    return out.transpose(1, 2)


def _math(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    length, ratio = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(ratio, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (rule.scale or q.shape[3] ** -0.5)
    behind = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    scores = scores.masked_fill((behind < 0) | (behind >= (rule.window or length)), float("-inf"))
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :length], v)


CALLS: dict[str, Call] = {
    "fa4": _fa4,
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "flex": _flex,
    "math": _math,  # holds the scores of all pairs
}
TIMED = 3  # calls of each
QUICK = "fa4", "cudnn", "fa2"  # FlexAttention compiles for a minute


def register(name: str, length: int) -> str:
    """Makes transformers know one of :data:`CALLS` for sequences of `length` tokens; the name it is known by."""
    from transformers.modeling_utils import AttentionInterface

    call = CALLS[name]

    def forward(
        _module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """query [1, H, B * L, D] or [B, H, L, D] -> [1, B * L, H, D] or [B, L, H, D]."""
        batch, rows = query.shape[0], query.shape[2]
        if rows % length:
            raise ValueError(f"got {rows} rows, expected a multiple of the sequences' {length} tokens")
        q, k, v = (x.transpose(1, 2).reshape(-1, length, *x.shape[1::2]) for x in (query, key, value))
        return call(q, k, v, Rule(scaling, sliding_window, s_aux)).reshape(batch, rows, *q.shape[2:]), None

    known = f"stock-{name}-{length}"
    AttentionInterface.register(known, forward)
    return known


def seconds(
    name: str, batch: int, length: int, heads: int, kv_heads: int, head_dim: int, kinds: Kinds = PLAIN
) -> float:
    """Time a forward and a backward in bf16 on the current GPU: the mean of TIMED calls after a first one, each of
    which runs all of `kinds` one after the other."""
    shapes = [(batch, length, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    logits = torch.randn(heads, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(q)
    for turn in range(TIMED + 1):
        if turn == 1:
            torch.cuda.synchronize()
            start = time.perf_counter()
        for window, sinks in kinds:
            out = CALLS[name](q, k, v, Rule(None, window, logits if sinks else None))
            torch.autograd.grad(out, (q, k, v, logits) if sinks else (q, k, v), dout)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / TIMED


def fastest(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, kinds: Kinds = PLAIN,
    names: Iterable[str] = QUICK,
) -> tuple[str, dict[str, float | str]]:  # fmt: skip
    """The fastest of some of :data:`CALLS` on the current GPU, and the seconds of each or why it does not run here.

    Raises:
        RuntimeError: none of them runs.
    """
    found: dict[str, float | str] = {}
    for name in names:
        try:
            found[name] = seconds(name, batch, length, heads, kv_heads, head_dim, kinds)
        except Exception as error:  # a package raises what it likes
            found[name] = in_words(error)
    times = {name: value for name, value in found.items() if isinstance(value, float)}
    if not times:
        raise RuntimeError(f"no attention of replicated sequences runs here: {found}")
    return min(times, key=lambda name: times[name]), found

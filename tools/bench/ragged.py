"""Attention of sequences end to end in one row, as transformers calls it: what the benchmarks measure against.

:data:`NAME` is what transformers knows it by. On a GPU one call of FlashAttention-4 for ragged lengths runs, or
PyTorch's FlashAttention-2 where that is not installed; elsewhere and in fp32 PyTorch's scaled_dot_product_attention,
sequence by sequence.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

NAME = "ragged-of-benchmark"


def sequences(position_ids: Tensor) -> tuple[Tensor, int]:
    """Find the ends [N + 1] of the sequences in position ids [1, T], which begin at 0 each, and the longest length.

    They are found once for a tensor, because the host waits for them."""
    found: tuple[Tensor, int] | None = getattr(position_ids, "_sequences", None)
    if found is None:
        starts = torch.nonzero(position_ids.flatten() == 0).flatten()
        ends = torch.cat([starts, starts.new_tensor([position_ids.numel()])]).int()
        found = ends, int(ends.diff().max())
        position_ids._sequences = found  # type: ignore[attr-defined]
    return found


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float | None = None,
    *, position_ids: Tensor, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [1, H, T, D] -> [1, T, H, D]. Sequences begin where positions are 0."""
    ends, longest = sequences(position_ids)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if q.device.type == "cuda" and q.dtype != torch.float32:
        if find_spec("flash_attn") is None:
            out, *_ = torch.ops.aten._flash_attention_forward(
                q, k, v, ends, ends, longest, longest, 0.0, True, False, scale=scaling
            )
            return out[None], None
        from flash_attn.cute.interface import flash_attn_varlen_func

        out = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest,
            softmax_scale=scaling, causal=True,
        )  # fmt: skip
        return (out[0] if isinstance(out, tuple) else out)[None], None
    lengths, parts = ends.diff().tolist(), []
    for rows in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        own, keys, values = (x.transpose(0, 1)[None] for x in rows)
        out = torch.nn.functional.scaled_dot_product_attention(
            own, keys, values, is_causal=True, scale=scaling, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)[None], None


AttentionInterface.register(NAME, attend)

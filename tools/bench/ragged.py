"""Attention of sequences end to end in one row, as transformers calls it: what the benchmarks measure against.

:data:`NAME` is what transformers knows it by. On a GPU one call of FlashAttention-4 for ragged lengths runs, or
PyTorch's FlashAttention-2 where that is not installed; elsewhere and in fp32 PyTorch's scaled_dot_product_attention,
sequence by sequence.
"""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

NAME = "ragged-of-benchmark"


class Ragged(NamedTuple):
    """Rows [ends_q[i], ends_q[i+1]) are queries, causal from the last key on, of rows [ends_k[i], ends_k[i+1]) of the
    keys, which `keys` gathers. On the device, and the longest of them."""

    ends_q: Tensor
    ends_k: Tensor
    longest: tuple[int, int]
    keys: Tensor | None = None

    @classmethod
    def of(cls, ends_q: list[int], ends_k: list[int], device: torch.device, keys: Any = None) -> Ragged:
        q, k = (torch.tensor(e, dtype=torch.int32, device=device) for e in (ends_q, ends_k))
        longest = int(np.diff(ends_q).max()), int(np.diff(ends_k).max())
        return cls(q, k, longest, None if keys is None else torch.from_numpy(keys).to(device))

    @classmethod
    def of_positions(cls, position_ids: Tensor) -> Ragged:
        """Find the sequences in position ids [1, T], which begin at 0 each. They are found once for a tensor, because
        the host waits for it."""
        found: Ragged | None = getattr(position_ids, "_ragged", None)
        if found is None:
            ends = [*torch.nonzero(position_ids.flatten() == 0).flatten().tolist(), position_ids.numel()]
            found = cls.of(ends, ends, position_ids.device)
            position_ids._ragged = found  # type: ignore[attr-defined]
        return found


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float | None = None,
    *, ragged: Ragged | None = None, position_ids: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [1, H, T, D] -> [1, T, H, D]. Without `ragged` sequences begin where positions are 0."""
    if ragged is None:
        if position_ids is None:
            raise ValueError(f"{NAME} got neither ragged nor position_ids, expected one of them")
        ragged = Ragged.of_positions(position_ids)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if ragged.keys is not None:
        k, v = k.index_select(0, ragged.keys), v.index_select(0, ragged.keys)
    if q.device.type == "cuda" and q.dtype != torch.float32:
        if find_spec("flash_attn") is None:
            out, *_ = torch.ops.aten._flash_attention_forward(
                q, k, v, ragged.ends_q, ragged.ends_k, *ragged.longest, 0.0, True, False, scale=scaling
            )
            return out[None], None
        from flash_attn.cute.interface import flash_attn_varlen_func

        out = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=ragged.ends_q, cu_seqlens_k=ragged.ends_k, max_seqlen_q=ragged.longest[0],
            max_seqlen_k=ragged.longest[1], softmax_scale=scaling, causal=True,
        )  # fmt: skip
        return (out[0] if isinstance(out, tuple) else out)[None], None
    parts = []
    spans = (itertools.pairwise(ends.tolist()) for ends in ragged[:2])
    for (a, b), (c, d) in zip(*spans, strict=True):
        seen = torch.arange(d - c, device=q.device) <= torch.arange(d - c - (b - a), d - c, device=q.device)[:, None]
        own, keys, values = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        out = torch.nn.functional.scaled_dot_product_attention(
            own, keys, values, attn_mask=seen, scale=scaling, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)[None], None


AttentionInterface.register(NAME, attend)

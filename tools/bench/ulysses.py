"""Ulysses around the attention functions that transformers knows, for veRL's own engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_world_size,
)


def exchange_heads(name: str) -> str:
    """Ulysses around an attention function, with veRL's exchange; the name that transformers knows it by.

    veRL itself has the exchange in transformers' call of the flash-attn package alone.
    """
    call = AttentionInterface()[name]

    def forward(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, rows of this rank, D] -> [1, rows of this rank, H, D]."""
        repeats = max(get_ulysses_sequence_parallel_world_size() // key.shape[1], 1)
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        # Rows before heads in memory, as where nothing is exchanged.
        rows = (gather_seq_scatter_heads(x.transpose(1, 2), seq_dim=1, head_dim=2) for x in (query, key, value))
        out, _ = call(module, *(x.transpose(1, 2) for x in rows), mask, **options)
        return gather_heads_scatter_seq(out, seq_dim=1, head_dim=2), None

    known = f"ulysses-{name}"
    AttentionInterface.register(known, forward)
    return known

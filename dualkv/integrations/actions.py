"""Models of OpenRLHF and SkyRL on packed rows: whole padded sequences [B, L] in, values of their actions [B, W] out."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch

from dualkv.data.gain import MIN_SHARED
from dualkv.data.trees import PackedSequences, pack_sequences


def pack(sequences: torch.Tensor, attention_mask: torch.Tensor, action_mask: Any = None) -> PackedSequences:
    """Pack sequences [B, L], of which the actions of a mask [B, W] of the last W columns count."""
    return pack_sequences(sequences, action_mask, attention_mask=attention_mask, min_shared=MIN_SHARED)


def head_values(model: Any, batch: PackedSequences, rows: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """[M] the value head's outputs of packed rows, and the decoder's outputs, of a model without PEFT that
    `get_llm_for_sequence_regression` made."""
    outputs = getattr(model, model.base_model_prefix)(input_ids=batch.input_ids, dualkv=batch.layout)
    head = getattr(model, model.value_head_prefix)
    return head(outputs.last_hidden_state[0, rows])[:, 0], outputs


def say_images(name: str, library: str) -> None:
    """Warn that batches with images stay replicated."""
    warn(f"{name} got images: batches with images run as {library} runs them, prompts once a rollout")


@cache  # once a process
def warn(sentence: str) -> None:
    """Warn of what the caller of a caller does."""
    warnings.warn(f"dualkv: {sentence}", stacklevel=4)

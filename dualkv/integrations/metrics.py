"""Metrics that packed trainers of TRL and ms-swift add to those of the library."""

from __future__ import annotations

from typing import Any

import torch

from dualkv.data.packing import PackedBatch
from dualkv.data.trees import PackedSequences


def count_rows(trainer: Any, batch: PackedBatch | PackedSequences, padded: torch.Tensor) -> None:
    """Adds to a trainer's metrics the rows of a micro-batch, packed and padded."""
    layout = batch.layout
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in {
        "tokens_packed": layout.num_tokens,
        "tokens_padded": padded.numel(),
        "dedup_ratio": padded.numel() / layout.num_tokens,
    }.items():
        metrics[f"dualkv/{name}"].append(value)

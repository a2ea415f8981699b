"""Metrics that packed trainers add to those of the library."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from dualkv.data.packing import PackedBatch
from dualkv.data.trees import PackedSequences

# The ratio exp(new - old) that is furthest from 1, of log-probs of the same weights.
RATIO = "dualkv/ratio_at_equal_weights"


def log_ratios(new: torch.Tensor, old: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """[2] the lowest and the highest difference of log-probs of the same weights, 0 if no token counts."""
    differences = (new.detach() - old)[counted != 0]
    differences = torch.cat([differences, differences.new_zeros(1)])  # equal log-probs are no news
    return torch.stack([differences.min(), differences.max()])


def furthest_ratio(log_ratios: torch.Tensor, others: Iterable[float] = ()) -> float:
    """exp of what :func:`log_ratios` returned on all ranks, or another ratio, whichever is furthest from 1; NaN if one
    is NaN."""
    ratios = [*others, *log_ratios.cpu().double().exp().tolist()]
    return max(ratios, key=lambda ratio: math.inf if math.isnan(ratio) else abs(ratio - 1))


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

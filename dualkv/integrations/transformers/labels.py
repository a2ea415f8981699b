"""Check labels and rows of logits in a packed call, which must not mix the rows of different responses."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from dualkv.integrations.transformers import layers

# Heads whose loss takes the label of each row as it is, without a shift.
UNSHIFTED = ("ForTokenClassification",)


def shifted(cls: type[nn.Module]) -> bool:
    """Whether a head's loss takes the label of a row for the row before it."""
    return not any(c.__name__.endswith(UNSHIFTED) for c in cls.__mro__)


def makes_own_loss(cls: type[nn.Module]) -> bool:
    """Whether `cls.forward` computes a loss itself. transformers' loss functions take labels that are shifted already,
    as `shift_labels`; such a forward does not."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    names = () if code is None else code.co_names
    return "loss_function" not in names and ("CrossEntropyLoss" in names or "cross_entropy" in names)


def refuse_shifts(module: nn.Module, named: dict[str, Any]) -> None:
    """Raises ValueError for labels that a head would shift, and for a number of last rows of which it makes logits."""
    if named.get("labels") is not None and shifted(type(module)):
        instead = "pass the label of each row as shift_labels too, or use dualkv.response_logprobs"
        if of_its_own := makes_own_loss(type(module)):
            instead = f"{type(module).__name__} makes a loss of its own: compute the loss from the logits"
        if of_its_own or named.get("shift_labels") is None:
            raise ValueError(
                "labels came together with dualkv and would be shifted by one row, from response to response:"
                f" {instead}"
            )
    keep = named.get("logits_to_keep")
    rows = keep.dim() == 1 if isinstance(keep, torch.Tensor) else keep is None or (type(keep) is int and keep == 0)
    if not rows:
        found = f"a tensor of shape {tuple(keep.shape)}" if isinstance(keep, torch.Tensor) else repr(keep)
        raise ValueError(
            f"logits_to_keep is {found} together with dualkv, and the last packed rows are those of one response:"
            " expected a tensor [K] of rows, such as batch.predict_rows"
        )


def refuse_alone(module: nn.Module, named: dict[str, Any]) -> None:
    """Raises ValueError for arguments that belong to labels, in a call without labels: transformers' Trainer takes the
    labels out of a call whose loss it computes itself.

    module: the head that callers call. (TRL's head is told to make log-probs of shift_labels, and no loss.)
    """
    alone = next((name for name in ("shift_labels", "num_items_in_batch") if named.get(name) is not None), None)
    makes_loss = "labels" in layers.arguments(type(module)) and not named.get("fused_lm_head")
    if alone is not None and named.get("labels") is None and makes_loss:
        raise ValueError(
            f"{alone} came together with dualkv and without labels, so {type(module).__name__} makes no loss, and label"
            " smoothing of transformers' Trainer would shift rows from response to response: set"
            " label_smoothing_factor=0 and pass labels and shift_labels, or compute the loss from the logits of a call"
            f" without {alone} (Trainer leaves num_items_in_batch out where the model has accepts_loss_kwargs=False)"
        )

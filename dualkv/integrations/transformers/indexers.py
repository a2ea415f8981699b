"""Attention layers with an indexer, which selects the `index_topk` keys that a query attends to (DeepSeek V3.2).

A query that sees no more keys than that attends to all of them, whatever the indexer's scores are. So a packed call
whose paths are no longer needs no selection: a pre-hook hands the indexer no rows, and its selection is empty. Longer
paths are refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from dualkv.integrations.transformers import masks

LAYER_TYPE = "indexed_attention"  # entry of `config.layer_types`


def of_layer(module: nn.Module) -> nn.Module | None:
    """The indexer of an attention layer, if the layer has one of the kind that is described above."""
    indexer = getattr(module, "indexer", None)
    if not isinstance(indexer, nn.Module) or not isinstance(getattr(indexer, "index_topk", None), int):
        return None
    return indexer if "attention_mask" in inspect.signature(type(indexer).forward).parameters else None


def longest_path(config: Any) -> int | None:
    """The tokens of a path up to which models of a configuration attend to all keys; None: there is no such limit."""
    limit = getattr(config, "index_topk", None)
    return limit if isinstance(limit, int) else None


def check_path(name: str, longest: int, limit: int | None) -> None:
    """Raises ValueError for a layout whose longest path has more tokens than the model of that name selects."""
    if limit is not None and longest > limit:
        raise ValueError(
            f"the longest path of the layout has {longest} tokens, expected at most {limit} for {name}: beyond that its"
            " indexer selects keys (index_topk), and dualkv.attention computes attention to all of them"
        )


def select_nothing(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of an indexer: in a packed call its inputs are cut to no rows, and its mask to no keys."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    mask = given["attention_mask"]
    if not masks.is_answer(mask[:, None]):  # the layer dropped the dimension of heads
        return None

    def cut(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(cut, x))
        return x[:, :0] if isinstance(x, torch.Tensor) else x

    named = {name: cut(x) for name, x in given.items() if name != "self"}
    return (), named | {"attention_mask": mask[..., :0]}


def is_empty(indices: Any) -> bool:
    """Whether a layer's selection is that of an indexer without rows."""
    return isinstance(indices, torch.Tensor) and indices.shape[1:] == (0, 0)


def restricted(mask: torch.Tensor, indices: torch.Tensor, query: torch.Tensor, keys: int) -> torch.Tensor:
    """The mask [B, 1, S, keys] without keys that are not among `indices` [B, S, index_topk], for queries [B, H, S, D].

    The layers do this themselves for implementations that are called eager or sdpa.
    """
    selected = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=mask.device)
    selected = selected.scatter(-1, indices.long(), True)[:, None]
    return mask & selected if mask.dtype == torch.bool else mask.masked_fill(~selected, torch.finfo(query.dtype).min)

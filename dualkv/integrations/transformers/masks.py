"""Let a layer of transformers say which keys it sees, by the shape of an empty mask.

In transformers a model chooses the mask of each layer: causal, with a sliding window, or in chunks. The choice lies in
the code of the model, and no field of its layers is sure to repeat it. So a packed call leaves the choice to the model:
the decoder gets :func:`request` for an attention mask, the registered mask function returns :func:`answer` where it
would make a mask, and each attention layer reads its own one by :func:`read`. No [T, T] mask is ever made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.masking_utils import causal_mask_function

from dualkv.models import WITH_WINDOWS_IN_FULL_LAYERS

# An attention mask of this shape holds no token: no call but a packed one has it.
REQUEST = (1, 0)

# Last dimension of an answer: FULL, FULL + window or CHUNKED + chunk; the dimension before is 0. A mask that a model
# adds to, repeats or shortens has another shape or names no size, so that nothing is read from it.
FULL = 1 << 29
CHUNKED = 1 << 30
# Behind these, how far a window or chunk is below 1: a layer that reads such a mask is refused. (Qwen2-MoE makes the
# mask of a window of 0 that no layer has.)
NO_WINDOW, NO_CHUNK = 1 << 27, 1 << 28
# The last dimension of a causal mask that the model wants made, to change it or to hand it to an indexer.
WANTED = FULL - 1
# What an answer says of any longer window or chunk, behind FULL or CHUNKED: a path of so many tokens fits on no GPU.
LONGEST = FULL - 1

FIELDS = "sliding_window", "attention_chunk_size"  # of configurations, as of Visible


class Visible(NamedTuple):
    """The keys of its path that a query sees: all up to itself, or those of a window or chunk, as for
    :func:`dualkv.attention`."""

    window: int | None = None
    chunk: int | None = None


def by_config(config: Any) -> list[Visible]:
    """The keys that queries of each layer see, by the fields of a configuration: for reports, not for attention.

    Models choose by these fields, each in its own code. One entry serves all layers of a configuration without a list.
    """
    config = config.get_text_config()
    window, chunk = (getattr(config, name, None) for name in FIELDS)
    kinds = {"sliding_attention": Visible(window=window), "chunked_attention": Visible(chunk=chunk)}
    kinds["hybrid_sliding"] = kinds["sliding_attention"]
    other = Visible(window=window)  # of models that have one kind of layers only
    types = getattr(config, "layer_types", None)
    if config.model_type in WITH_WINDOWS_IN_FULL_LAYERS:
        kinds["full_attention"] = other
    return [kinds.get(kind, Visible()) for kind in types] if types else [other]


def request(device: torch.device) -> torch.Tensor:
    """The attention mask that a packed call gives to the decoder."""
    return torch.empty(REQUEST, device=device)


def is_request(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.shape == REQUEST


def answer(
    *,
    mask_function: Any,
    config: Any,
    device: torch.device,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> torch.Tensor:
    """The mask of a packed call; takes the arguments of transformers' mask functions.

    transformers sets `use_vmap` or clears `allow_is_causal_skip` where a model adds a rule of its own to a mask, or
    changes the mask afterwards. The answer then says nothing, or WANTED, and the layer that gets it is refused unless
    it has an indexer.
    """
    size = 0
    if not use_vmap and mask_function is causal_mask_function:
        size = FULL if allow_is_causal_skip else WANTED
    elif not use_vmap and allow_is_causal_skip and type(local_size) is int:
        windows, chunks = (local_size == getattr(config, name, None) for name in FIELDS)
        if (windows or chunks) and local_size < 1:
            size = min(1 - local_size, NO_WINDOW - 1) + (NO_CHUNK if chunks else NO_WINDOW)
        elif windows != chunks:
            size = min(local_size, LONGEST) + (FULL if windows else CHUNKED)
    return torch.empty(1, 1, 0, size, device=device)


def of_all_keys(device: torch.device) -> torch.Tensor:
    """The mask of a packed call in which a layer sees all keys, or those of its sets."""
    return torch.empty(1, 1, 0, FULL, device=device)


def is_answer(mask: Any) -> bool:
    """Whether a layer got the mask of a packed call."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[:3] == (1, 1, 0)


def is_of_packed_call(masks: Any) -> bool:
    """Whether an attention mask is a request, or the answers to one that a model made for its decoder."""
    found = masks.values() if isinstance(masks, dict) else [masks]
    return all(is_request(mask) or is_answer(mask) for mask in found)


def read(mask: Any, selects: bool = False) -> Visible | None:
    """The keys that a layer sees by its mask; None for a mask that does not say. A layer that `selects` uses the mask
    only to select keys, by an indexer.

    Raises:
        ValueError: a window or chunk below 1.
    """
    if not is_answer(mask):
        return None
    size = FULL if selects and mask.shape[3] == WANTED else mask.shape[3]
    for field, begin in zip(FIELDS, (NO_WINDOW, NO_CHUNK), strict=True):
        if begin < size < begin + NO_WINDOW:
            raise ValueError(f"{field} is {1 + begin - size}, expected 1 or more")
    if size < FULL:
        return None
    if size == FULL:
        return Visible()
    return Visible(window=size - FULL) if size < CHUNKED else Visible(chunk=size - CHUNKED)

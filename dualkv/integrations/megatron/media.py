"""Images in packed calls of Megatron-Bridge's Qwen2.5-VL and Qwen3-VL, with tensor and sequence parallelism.

These models run the vision tower, put its features in the place of placeholders, share the rows among the ranks, and
call a `GPTModel` with positions of frames, height and width. All of it suits a packed row but the positions, which
count the row as one sequence. So a hook finds those of each row along its own path, by the model's own function, and
checks each segment's images. Another hook hands them to the rotary embedding, as in any `GPTModel` with "mrope".
"""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from torch import nn

from dualkv.data.media import OF_TOKENS, SEGMENTS
from dualkv.integrations import patching
from dualkv.integrations.megatron.rows import PackedGroups

BRIDGE = "megatron.bridge."
MODELS = ("Qwen25VLModel", "Qwen3VLModel")
# Self-attention of these models. It is megatron-core's, but rows have rotary frequencies of their own.
ATTENTION = ("Qwen3VLSelfAttention",)
IMAGES = ("pixel_values", "image_grid_thw")


def _is_of(cls: type, names: tuple[str, ...]) -> bool:
    return cls.__module__.startswith(BRIDGE) and cls.__name__ in names


def is_attention(cls: Any) -> bool:
    """Whether a class is one of ATTENTION."""
    return isinstance(cls, type) and issubclass(cls, SelfAttention) and _is_of(cls, ATTENTION)


# ---------------------------------------------------------------- models
def enable(target: nn.Module, gpt: Any) -> None:
    """Registers the hooks of a model whose `GPTModel` has multimodal positions.

    Raises:
        ValueError: another module than one of MODELS calls the `GPTModel`.
    """
    for module in target.modules():
        if module is gpt or all(part is not gpt for part in module.modules()):
            continue
        if any(_is_of(cls, MODELS) for cls in type(module).__mro__):
            patching.of(module).before(place, first=True)
            if _is_deep(module):
                patching.of(module.vision_model).behind(summed)
        elif not hasattr(module, "module"):  # of DDP, Float16Module
            raise ValueError(
                f"{type(module).__name__} calls a GPTModel with position_embedding_type 'mrope', expected"
                f" Megatron-Bridge's {' or '.join(MODELS)}: who else places images is not known"
            )
    if getattr(gpt, "rotary_pos_emb", None) is not None:
        patching.of(gpt.rotary_pos_emb).before(hand_positions)


def _is_deep(module: Any) -> bool:
    """Whether decoder layers add features of the tower to the rows of their own rank."""
    tower = getattr(module, "vision_model", None)
    return tower is not None and module.config.sequence_parallel


# ---------------------------------------------------------------- a call
def hand_positions(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Forward pre-hook of a multimodal rotary embedding: a packed call has the positions of its PackedGroups."""
    packed = getattr(kwargs.get("cp_group"), "packed", None)
    return None if packed is None else ((packed()._multimodal(), *args[1:]), kwargs)


def summed(tower: nn.Module, _args: Any, output: Any) -> Any:
    """Forward hook of a tower: its features for decoder layers get the gradients of the rows of all tensor-parallel
    ranks. Without PackedGroups these models leave each rank's tower with those of its own rows."""
    if not hasattr(tower, patching.LAYOUT):
        return None
    patching.take_back(tower)
    features, levels = output
    return features, [tensor_parallel.copy_to_tensor_model_parallel_region(x) for x in levels]


def place(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Forward pre-hook of one of MODELS: tells PackedGroups the positions of the call.

    Raises:
        ValueError: media that do not run packed; placeholders and images that do not match, also where an image would
            lie in several segments; images beside context or pipeline parallelism.
    """
    names = [*inspect.signature(type(module).forward).parameters][1:]
    named = dict(zip(names, args, strict=False)) | kwargs
    packed = named.get("packed_seq_params")
    if not isinstance(packed, PackedGroups):
        return None
    from dualkv.integrations.transformers import media

    segments = {patches: named.pop(of, None) for patches, of in SEGMENTS.items()}
    for name in OF_TOKENS:  # the ids say it, to these models too
        named.pop(name, None)
    name, ids, given = type(module).__name__, named["input_ids"], media.given(named)
    for other in given:
        if other not in IMAGES:
            raise ValueError(f"{other} came with PackedGroups: {name} runs packed with {', '.join(IMAGES)} and text")
    model = _Reader(module)
    kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    if given or kinds.any():
        _check(module.config, packed, ids)
        inputs, how = named | {media.KINDS: kinds}, media.FAMILIES["Qwen3VLModel"]
        packed._place(media.see(model, how, inputs, segments, packed.layout, None).positions)
    if given and _is_deep(module):
        patching.hand(module.vision_model, packed)
    # As far as these models read it, a row of one sequence: they ask whether it is there.
    packed.cu_seqlens_q = packed.cu_seqlens_kv = torch.tensor([0, ids.shape[1]], dtype=torch.int32, device=ids.device)
    return (), named | {"position_ids": packed._multimodal()}


def _check(config: Any, packed: PackedGroups, ids: torch.Tensor) -> None:
    for name in ("context_parallel_size", "pipeline_model_parallel_size"):
        if (ranks := getattr(config, name)) > 1:
            raise ValueError(f"images came and {name} is {ranks}, expected 1: it was not tried")
    if ids.shape != (expected := (1, packed.shard.num_tokens)):
        raise ValueError(f"input_ids has shape {tuple(ids.shape)}, expected {expected}")


class _Reader:
    """One of MODELS as :mod:`dualkv.integrations.transformers.media` reads transformers' models."""

    def __init__(self, model: Any) -> None:
        config, names = model.config, ("image_token_id", "video_token_id", "vision_start_token_id")
        self.tokens = {name: getattr(config, name) for name in names}
        self.merge = config.vision_config.spatial_merge_size if hasattr(config, "vision_config") else None
        self.merge = self.merge or config.spatial_merge_size
        self.config = SimpleNamespace(**self.tokens, vision_config=SimpleNamespace(spatial_merge_size=self.merge))
        cls = next(cls for cls in type(model).__mro__ if _is_of(cls, MODELS))
        self.own = getattr(model, "get_rope_index", None) or sys.modules[cls.__module__].get_rope_index

    def get_rope_index(self, **inputs: Any) -> Any:
        """Call the model's own function with what it takes."""
        known = self.tokens | {"spatial_merge_size": self.merge} | inputs
        return self.own(**{name: known[name] for name in inspect.signature(self.own).parameters if name in known})

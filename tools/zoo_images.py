"""Images in the zoo: one in a prompt and one in a response, packed and replicated, for models that run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dualkv
from dualkv.integrations.transformers import media

IMAGE, START, END, VIDEO, SOUND = 3, 4, 5, 6, 7  # ids below those that texts are drawn from
TOKENS = {
    "image_token_id": IMAGE,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_token_id": VIDEO,
    "audio_token_id": SOUND,
    "audio_start_token_id": 8,
}
Text = tuple[torch.Tensor, dict[str, Any]]


def seeing(model: nn.Module) -> Any:
    """The part of a model that puts features of images among embeddings; None for a model that runs text alone."""
    return next((module for module in model.modules() if media.family(type(module)) is not None), None)


def fit(config: Any) -> None:
    """Let a small configuration's tower make features of the decoder's width, as published ones do."""
    vision, width = getattr(config, "vision_config", None), getattr(config.get_text_config(), "hidden_size", None)
    for name in ("out_hidden_size", "hidden_size") if hasattr(vision, "embed_dim") else ("out_hidden_size",):
        if width is not None and hasattr(vision, name):
            setattr(vision, name, width)


def prepare(model: Any) -> None:
    """Give images, videos and audio ids within a small vocabulary, and towers windows of several patches."""
    tower: Any = getattr(seeing(model), "visual", None)
    if hasattr(tower, "window_size"):
        tower.window_size = tower.config.window_size = 2 * tower.config.spatial_merge_size * tower.config.patch_size
    how = media.family(type(seeing(model)))
    assert how is not None
    for part in (model, seeing(model)):
        for name, token in TOKENS.items():
            if hasattr(part.config, name) or how.by_ids:  # defaults lack some
                setattr(part.config, name, token)


def pixels(part: Any, draw: torch.Generator) -> dict[str, Any]:
    """Random inputs of a model's tower for one image."""
    how, vision, name = media.family(type(part)), part.config.vision_config, type(part).__name__
    assert how is not None
    if how.grid:
        grid = torch.tensor([[1, 2 * vision.spatial_merge_size, 3 * vision.spatial_merge_size]])
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        width = channels * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.randn(int(grid.prod()), width, generator=draw), "image_grid_thw": grid}
    if how.windows:
        side = 2 * vision.pooling_kernel_size
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)[None]
        return {
            "pixel_values": torch.rand(1, side**2, 3 * vision.patch_size**2, generator=draw),
            "image_position_ids": places,
        }
    side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    if name == "Mistral3Model":
        side = 2 * vision.patch_size * part.config.spatial_merge_size
    image = torch.randn(1, 3, side, side, generator=draw)
    if "pixel_attention_mask" in how.inputs:
        return {"pixel_values": image[None], "pixel_attention_mask": torch.ones(1, 1, side, side, dtype=torch.int64)}
    sizes = {"image_sizes": torch.tensor([[side, side]])}
    if name == "Mistral3Model":
        return {"pixel_values": image} | sizes
    if name.startswith(("LlavaNext", "LlavaOnevision")):
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        tiles = image_size_to_num_patches([side, side], part.config.image_grid_pinpoints, side)
        entry = {"pixel_values": torch.randn(1, tiles, 3, side, side, generator=draw)} | sizes
        return entry | ({"batch_num_images": torch.tensor([1])} if "batch_num_images" in how.inputs else {})
    return {"pixel_values": image}


def text(part: Any, vocabulary: int, draw: torch.Generator, images: int) -> Text:
    """Ids with some images between text, and what a processor returns for them."""

    def words(count: int) -> list[int]:
        return torch.randint(vocabulary // 8, vocabulary, (count,), generator=draw).tolist()

    ids, entries = words(5), []
    for _ in range(images):
        entry = pixels(part, draw)
        with torch.no_grad():
            found = part.get_image_features(**entry).pooler_output
        rows = sum(x.numel() for x in found) // part.get_input_embeddings().weight.shape[1]
        ids += [START, *[IMAGE] * rows, END, *words(4)]
        entries.append(entry)
    marks = torch.tensor([ids]) == IMAGE
    kinds = {"mm_token_type_ids": marks.long()} | ({"token_type_ids": marks.long()} if media.takes_blocks(part) else {})
    return torch.tensor(ids), (entries[0] if entries else {}) | kinds


def joined(*texts: Text) -> Text:
    """Texts behind each other."""
    entry: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, one in texts for name in one):
        in_rows = "type_ids" in name or any("pixel_attention_mask" in one for _, one in texts)
        entry[name] = torch.cat([one[name] for _, one in texts if name in one], int(in_rows))
    return torch.cat([ids for ids, _ in texts]), entry


def rollouts(model: Any, seed: int) -> tuple[dualkv.PackedBatch, list[Text]]:
    """A prompt with an image and two responses, one of them with an image: packed, and each rollout by itself."""
    part, draw = seeing(model), torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().num_embeddings
    prompt, *responses = (text(part, vocabulary, draw, images) for images in (1, 1, 0))
    batch = dualkv.pack(
        [prompt[0]], [[ids for ids, _ in responses]], media=[prompt[1]], response_media=[[m for _, m in responses]]
    )
    return batch, [joined(prompt, response) for response in responses]


def inputs(model: Any, media_of_text: dict[str, Any], ids: torch.Tensor) -> dict[str, Any]:
    """The inputs of a model for one text."""
    how = media.family(type(seeing(model)))
    assert how is not None
    taken = {name: value for name, value in media_of_text.items() if name in how.inputs}
    mask = {"attention_mask": torch.ones_like(ids[None])} if how.by_ids else {}  # else no positions of images
    return {"input_ids": ids[None]} | taken | mask

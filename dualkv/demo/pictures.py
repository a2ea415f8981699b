"""Pictures that the program draws itself, as a processor hands them to a Qwen-VL."""

from __future__ import annotations

from typing import Any

import torch

SIDE = 12, 8  # patches of a picture that stands; every second one lies
PICTURES = 2  # of a prompt


def draw(height: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """[3, height, width] from -1 to 1: discs and boxes on a ground of one colour."""
    y, x = torch.meshgrid(torch.arange(height) / height, torch.arange(width) / width, indexing="ij")
    picture = torch.rand(3, 1, 1, generator=generator).expand(3, height, width).clone()
    for shape in range(6):
        size, down, right = (torch.rand(3, generator=generator) * torch.tensor([0.3, 1.0, 1.0])).tolist()
        far = torch.stack([(y - down).abs(), (x - right).abs()])
        inside = (far.norm(dim=0) if shape % 2 else far.amax(0)) < 0.05 + size
        picture[:, inside] = torch.rand(3, 1, generator=generator)
    return picture * 2 - 1


def patches(picture: torch.Tensor, patch: int, frames: int, merge: int) -> torch.Tensor:
    """picture [3, H, W] -> [H * W / patch^2, 3 * frames * patch^2], in the order of Qwen's processors.

    The merge x merge patches of one token follow each other; a still picture repeats in each frame.
    """
    rows, columns = (side // (patch * merge) for side in picture.shape[1:])
    cut = picture.reshape(3, rows, merge, patch, columns, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
    return cut[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(rows * columns * merge**2, -1)


def check_config(config: Any) -> None:
    """Raises ValueError for the configuration of a model whose pictures are not those of Qwen-VL's processors."""
    named = [(config, name) for name in ("vision_start_token_id", "vision_end_token_id")]
    named += [(config.vision_config, name) for name in ("patch_size", "temporal_patch_size", "spatial_merge_size")]
    lacks = [name for of, name in named if getattr(of, name, None) is None]
    if lacks:
        raise ValueError(
            f"model is of type {config.model_type}, which sees pictures and has no {lacks[0]}: the demo draws pictures"
            " as Qwen2-VL, Qwen2.5-VL and Qwen3-VL take them, expected one of these or a model of text"
        )


def with_pictures(
    prompts: list[torch.Tensor], config: Any, seed: int
) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Each prompt behind two pictures of its own, and their media as :func:`dualkv.pack` takes them.

    Args:
        prompts: [P] token ids.
        config: for which :func:`check_config` raises nothing.
        seed: of the pictures.
    """
    generator, vision = torch.Generator().manual_seed(seed), config.vision_config
    start, image, end = config.vision_start_token_id, config.image_token_id, config.vision_end_token_id
    found, media = [], []
    for prompt in prompts:
        ids: list[int] = []
        pixels, grids = [], []
        for n in range(PICTURES):
            height, width = SIDE[:: -1 if n % 2 else 1]
            picture = draw(height * vision.patch_size, width * vision.patch_size, generator)
            merge = vision.spatial_merge_size
            pixels.append(patches(picture, vision.patch_size, vision.temporal_patch_size, merge))
            grids.append([1, height, width])
            ids += [start, *[image] * (height * width // merge**2), end]
        found.append(torch.cat([torch.tensor(ids), prompt]))
        kinds = (found[-1] == image).long()
        media.append(
            {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": kinds}
        )
    return found, media


def of_rows(media: list[dict[str, torch.Tensor]], width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Inputs of a model for rows of `width` tokens that begin with these prompts, each with its own copy of images."""
    if not media:
        return {}
    kinds = [torch.nn.functional.pad(m["mm_token_type_ids"], (0, width - len(m["mm_token_type_ids"]))) for m in media]
    joined = {name: torch.cat([m[name] for m in media]).to(device) for name in ("pixel_values", "image_grid_thw")}
    return joined | {"mm_token_type_ids": torch.stack(kinds).to(device)}

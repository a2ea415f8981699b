"""Images of a packed batch apart from each other: the share of each one in the inputs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dualkv.arrays import IntArray
from dualkv.data.media import BESIDE, GRIDS, IN_ROWS, PLACES, TOGETHER, Entry


def held(patches: str, inputs: Mapping[str, Any]) -> dict[str, IntArray] | None:
    """Count every image's part of the first dimension of each input of one kind, whose pixels are `patches`; None where
    images cannot be run apart."""
    if {IN_ROWS, TOGETHER} & inputs.keys():
        return None
    grid = next((inputs[name] for _, name, _ in GRIDS if name in inputs), None)
    frames = inputs.get("num_frames_per_video")
    images = len(next(x for x in (grid, frames, inputs[patches]) if x is not None))
    found = {name: np.ones(images, np.int64) for name in inputs}
    if grid is not None:
        found[patches] = grid.prod(1).cpu().numpy()
    elif frames is not None:
        found |= dict.fromkeys((patches, PLACES[patches]), torch.as_tensor(frames).cpu().numpy())
    return found if all(len(inputs[name]) == of.sum() for name, of in found.items()) else None


def some(value: Any, held: IntArray, images: IntArray) -> Any:
    """The part of an input that some images have."""
    begin = np.cumsum(held) - held
    rows = np.concatenate([np.arange(begin[i], begin[i] + held[i]) for i in images.tolist()])
    if isinstance(value, torch.Tensor):
        return value.index_select(0, torch.from_numpy(rows).to(value.device))
    return [value[i] for i in rows.tolist()]


def smallest(media: Mapping[str, Any]) -> dict[str, Entry]:
    """The inputs of the smallest image of each kind, by the name of its pixels; of all where they do not run apart."""
    found: dict[str, Entry] = {}
    for patches, beside in BESIDE.items():
        if patches in media:
            inputs = {name: media[name] for name in (patches, *beside) if name in media}
            of = held(patches, inputs)
            if of is not None:
                least = np.array([of[patches].argmin()])
                inputs = {name: some(value, of[name], least) for name, value in inputs.items()}
            found[patches] = inputs
    return found

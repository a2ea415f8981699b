"""Images, videos and audio of prompts: what a processor returns beside ids, kept once for each packed prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dualkv.arrays import IntArray
from dualkv.layout import Layout

# What a processor returns for one prompt; None or an empty mapping for a prompt of text alone.
Media = Sequence[Mapping[str, Any] | None]
Entry = dict[str, Any]

# One value for each token of the prompt; a response has zeros (text).
OF_TOKENS = ("mm_token_type_ids", "token_type_ids")

# What a processor returns about the text: `prompts` and the layout say it.
OF_TEXT = ("input_ids", "attention_mask")

# Patches, their grids [images, 3] (frames, height, width) and the kind of their tokens in mm_token_type_ids.
GRIDS = (("pixel_values", "image_grid_thw", 1), ("pixel_values_videos", "video_grid_thw", 2))

# What processors return for all images or videos of a prompt, beside their pixels.
BESIDE = {
    "pixel_values": ("image_grid_thw", "image_sizes", "image_position_ids", "batch_num_images", "pixel_attention_mask"),
    "pixel_values_videos": ("video_grid_thw", "image_sizes_videos", "second_per_grid_ts", "video_second_per_grid"),
}

# Seconds a frame, one value for each video.
SECONDS = ("second_per_grid_ts", "video_second_per_grid")

# A tensor with a row for each prompt: images are its second dimension (Idefics 3).
IN_ROWS = "pixel_attention_mask"


# ---------------------------------------------------------------- one prompt
def entries(media: Media | None, lens: Sequence[int], columns: Sequence[slice] | None = None) -> list[Entry] | None:
    """The media of each prompt with tensors in place of arrays, values of tokens as [P].

    Args:
        media: as for :func:`dualkv.pack`.
        lens: tokens of each prompt.
        columns: of a padded batch, where each prompt lies in its row; values of tokens may be rows of that width.

    Raises:
        ValueError: another number of entries; values of tokens that are not one a token; patches that their grids do
            not count; placeholders that do not fit the images, compared with other prompts.
        TypeError: an entry that is no mapping, a value that is neither tensor, array nor list of numbers.
    """
    if media is None:
        return None
    if isinstance(media, Mapping) or not isinstance(media, Sequence | np.ndarray):
        raise TypeError(
            f"media is a {type(media).__name__}, expected a list with one mapping (or None) a prompt: what a processor"
            " returns for that prompt"
        )
    if len(media) != len(lens):
        raise ValueError(f"media has {len(media)} entries for {len(lens)} prompts, expected as many")
    found = []
    for i, given in enumerate(media):
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"media[{i}] is a {type(given).__name__}, expected a mapping or None")
        entry = {}
        for name, value in (given or {}).items():
            if value is not None and name not in OF_TEXT:
                entry[name] = _value(f"media[{i}][{name!r}]", value)
        for name in OF_TOKENS:
            if name in entry:
                within = None if columns is None else columns[i]
                entry[name] = _of_tokens(f"media[{i}][{name!r}]", entry[name], lens[i], within)
        _check_patches(f"media[{i}]", entry)
        found.append(entry)
    _check_placeholders(found)
    return found


def _value(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value)
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value
    if isinstance(value, list | tuple) and all(isinstance(x, int | float) for x in value):
        return list(value)
    raise TypeError(
        f"{name} is a {type(value).__name__}, expected a tensor, an array or a list of numbers (processors return"
        " tensors for return_tensors='pt')"
    )


def _of_tokens(name: str, value: Any, count: int, columns: slice | None) -> torch.Tensor:
    values = torch.as_tensor(value)
    flat = values[0] if values.dim() == 2 and len(values) == 1 else values
    if columns is not None and flat.dim() == 1 and len(flat) != count and len(flat) >= columns.stop:
        flat = flat[columns]
    if flat.shape != (count,):
        raise ValueError(f"{name} has shape {tuple(values.shape)}, the prompt has {count} tokens, expected one a token")
    return flat


def _check_patches(name: str, entry: Entry) -> None:
    for patches, grids, _ in GRIDS:
        if grids in entry:
            grid = entry[grids]
            if not isinstance(grid, torch.Tensor) or grid.dim() != 2 or grid.shape[1] != 3:
                raise ValueError(f"{name}[{grids!r}] has shape {tuple(np.shape(grid))}, expected [images, 3]")
            held, counted = len(entry.get(patches, ())), int(grid.prod(1).sum())
            if held != counted:
                raise ValueError(
                    f"{name}[{patches!r}] has {held} patches, {grids} counts {counted}: expected those of the same"
                    " images"
                )
    check_seconds(entry, name)


def check_seconds(entry: Mapping[str, Any], of: str = "") -> None:
    """Raises ValueError where seconds are not one value for each video; `of` names the entry in its message."""
    grid = entry.get("video_grid_thw")
    for name in SECONDS:
        if entry.get(name) is not None and len(entry[name]) != (0 if grid is None else len(grid)):
            raise ValueError(
                f"{f'{of}[{name!r}]' if of else name} has {len(entry[name])} entries for"
                f" {0 if grid is None else len(grid)} videos of video_grid_thw, expected one a video"
            )


def _check_placeholders(found: Sequence[Entry]) -> None:
    """Compares patches a placeholder token between prompts: a model has one number, which is known to the model."""
    for patches, grids, kind in GRIDS:
        first: tuple[int, int, int] | None = None
        for i, entry in enumerate(found):
            if "mm_token_type_ids" not in entry or (patches in entry and grids not in entry):  # nothing to compare
                continue
            tokens = int((entry["mm_token_type_ids"] == kind).sum())
            count = int(entry[grids].prod(1).sum()) if grids in entry else 0
            if (tokens == 0) != (count == 0) or (first and tokens * first[2] != count * first[1]):
                beside = f", those of media[{first[0]}] have {first[2]} for {first[1]}" if first else ""
                raise ValueError(
                    f"media[{i}][{patches!r}] has {count} patches for {tokens} placeholder tokens{beside}:"
                    " expected one image for each placeholder"
                )
            first = first or ((i, tokens, count) if tokens else None)


def difference(a: Entry, b: Entry) -> str | None:
    """The first name under which two prompts have other media, by content; None if all are equal."""
    for name in {**a, **b}:
        x, y = a.get(name), b.get(name)
        if x is y:
            continue
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            same = x.shape == y.shape and x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
        else:
            same = isinstance(x, list) and x == y
        if not same:
            return name
    return None


def grouped(keys: Sequence[bytes], media: Sequence[Entry]) -> IntArray:
    """[N] the group of each rollout: equal keys and equal media. Groups are numbered in the order of their first.

    Args:
        keys: [N] what says that two prompts have equal tokens.
        media: [N] of each rollout, or empty without any.
    """
    found: dict[bytes, list[int]] = {}  # equal tokens make several groups if their media differ
    leaders: list[int] = []  # the first rollout of each group
    group = np.empty(len(keys), np.int64)
    for i, key in enumerate(keys):
        same = found.setdefault(key, [])
        g = next((g for g in same if not media or difference(media[leaders[g]], media[i]) is None), len(leaders))
        if g == len(leaders):
            same.append(g)
            leaders.append(i)
        group[i] = g
    return group


# ---------------------------------------------------------------- all prompts
def joined(found: Sequence[Entry], prompts: IntArray, layout: Layout) -> Entry:
    """The media of all packed prompts, as inputs of a model whose batch is one packed row.

    Args:
        found: [G] of :func:`entries`, in packed order.
        prompts: [G] the segment of each prompt; a segment may lack the prompt's last token.
        layout: of T rows; its device is that of the result.

    Returns:
        Values of tokens [1, T]; of everything else the values of all prompts end to end.

    Raises:
        ValueError: a name that some prompts with media have and others lack, shapes that cannot be joined, a last
            prompt token of an image where each response needs a copy of it.
    """
    result: Entry = {}
    for name in dict.fromkeys(name for entry in found for name in entry):
        have = [i for i, entry in enumerate(found) if name in entry]
        if name in OF_TOKENS:
            lacks = [i for i, entry in enumerate(found) if entry and name not in entry]
            if lacks:
                raise ValueError(f"media[{lacks[0]}] has no {name}, media[{have[0]}] has it: expected all or none")
            result[name] = _joined_of_tokens(name, found, prompts, layout)
        else:
            for pixels in (pixels for pixels, beside in BESIDE.items() if name in beside):
                lacks = [i for i, entry in enumerate(found) if pixels in entry and name not in entry]
                if lacks:
                    raise ValueError(
                        f"media[{lacks[0]}] has {pixels} and no {name}, media[{have[0]}] has it: expected all or none"
                    )
            result[name] = _joined(name, found, have, layout.device)
    return result


def placeholder_of_a_response(input_ids: torch.Tensor, media: Entry, layout: Layout) -> int | None:
    """The first row [of 1, T] of a response with a token that stands for an image in a prompt; None without any."""
    if "mm_token_type_ids" not in media:
        return None
    ids, kinds = input_ids[0], media["mm_token_type_ids"][0]
    of_responses = np.repeat(layout.parent.numpy() >= 0, np.diff(layout.offsets.numpy()))
    found = torch.from_numpy(of_responses) & torch.isin(ids, ids[kinds != 0].unique())
    return int(found.int().argmax()) if found.any() else None


def _padded(values: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """Pad the values with zeros at the end, so that all dimensions but `dim` have equal sizes."""
    if len({value.dim() for value in values}) > 1:
        return values
    most = np.max([value.shape for value in values], 0).tolist()
    result = []
    for value in values:
        shape = [*most[:dim], value.shape[dim], *most[dim + 1 :]]
        if list(value.shape) != shape:
            wide = value.new_zeros(shape)
            wide[tuple(map(slice, value.shape))] = value
            value = wide
        result.append(value)
    return result


def _joined_of_tokens(name: str, found: Sequence[Entry], prompts: IntArray, layout: Layout) -> torch.Tensor:
    offsets = layout.offsets.tolist()
    kinds = next(entry[name] for entry in found if name in entry)
    result = torch.zeros(1, layout.num_tokens, dtype=kinds.dtype, device=layout.device)
    for i, (entry, segment) in enumerate(zip(found, prompts.tolist(), strict=True)):
        if name in entry:
            begin, end = offsets[segment : segment + 2]
            if (entry[name][end - begin :] != 0).any():
                raise ValueError(
                    f"media[{i}][{name!r}] ends with {int(entry[name][-1])}, expected 0: with labels='roll' every"
                    " response gets a copy of its prompt's last token, which must be text"
                )
            result[0, begin:end] = entry[name][: end - begin].to(layout.device)
    return result


def _joined(name: str, found: Sequence[Entry], have: list[int], device: torch.device) -> Any:
    values = [found[i][name] for i in have]
    if any(isinstance(value, list) for value in values):
        if not all(isinstance(value, list) for value in values):
            raise TypeError(f"media[...][{name!r}] is a list in some prompts and a tensor in others, expected one kind")
        return [x for value in values for x in value]
    dim = int(name in ("pixel_values", IN_ROWS) and IN_ROWS in found[have[0]])
    if name in ("pixel_values", IN_ROWS) and not {"image_sizes", IN_ROWS}.isdisjoint(found[have[0]]):
        # The model knows the size of each image, so processors pad images, and tiles of images, to one size.
        values = _padded(values, dim)
    first = values[0]
    for i, value in zip(have, values, strict=True):
        rest = [list(x.shape[:dim] + x.shape[dim + 1 :]) for x in (first, value)]
        if rest[0] != rest[1] or value.dtype != first.dtype:
            raise ValueError(
                f"media[{i}][{name!r}] has shape {tuple(found[i][name].shape)} in {value.dtype},"
                f" media[{have[0]}] {tuple(found[have[0]][name].shape)} in {first.dtype}: expected shapes that can be"
                f" joined in dimension {dim}"
            )
    return torch.cat([value.to(device) for value in values], dim)

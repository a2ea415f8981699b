"""Images and videos in packed calls of transformers models: which models run them, and the positions of their rows.

Some models give the rows of an image positions of its grid (multimodal rotary embeddings). These positions, and those
of the text behind, come from the model's own `get_rope_index`, which runs on replicated sequences: on one for each path
with images, as positions of text count on. In other models an image's rows count as text does.

In Gemma 3 and 4 the rows of an image also see each other's rows behind them. :func:`attention` adds these keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from dualkv.arrays import IntArray
from dualkv.data.media import check_seconds
from dualkv.layout import Layout
from dualkv.ops.attention import attention as causal_attention
from dualkv.packed_rows import PackedRows, packed_rows
from dualkv.sequence_parallel import Shard

# Names that processors and models use for inputs other than text.
MEDIA = re.compile(
    r"pixel|image|video|audio|visual|vision|speech|grid_thw|second_per_grid|input_features|mm_token_type_ids|deepstack"
    r"|mm_encoder|cross_attention_states"
)
KINDS, BLOCKS = "mm_token_type_ids", "token_type_ids"


class Family(NamedTuple):
    """The way in which a model runs images.

    Attributes:
        inputs: the names of inputs that run packed.
        grid: rows of images have positions of their grids, from the model's `get_rope_index`.
        frames_are_images: the placeholders of videos are those of images.
        by_ids: `get_rope_index` finds images by their placeholders, and takes no mm_token_type_ids.
        alike: every image of `pixel_values` has as many rows as any other.
        ahead: the input that marks rows of images, which see all rows of their image.
        windows: they do so in layers with a window alone, if the text's config says "vision".
    """

    inputs: tuple[str, ...]
    grid: bool = False
    frames_are_images: bool = False
    by_ids: bool = False
    alike: bool = False
    ahead: str | None = None
    windows: bool = False


_IMAGES, _VIDEOS = ("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")
_GRID = Family((*_IMAGES, *_VIDEOS, KINDS), grid=True)
_SECONDS = _GRID._replace(inputs=(*_GRID.inputs, "second_per_grid_ts"))
_FRAMES = _GRID._replace(frames_are_images=True)
_OMNI = Family((*_IMAGES, *_VIDEOS, "video_second_per_grid"), grid=True, by_ids=True)
_GEMMA4 = (
    "pixel_values", "image_position_ids", "pixel_values_videos", "video_position_ids", "num_frames_per_video"
)  # fmt: skip
_ALIKE = Family(("pixel_values",), alike=True)
_SIZES = Family(("pixel_values", "image_sizes"))
_MASKED = Family(("pixel_values", "pixel_attention_mask"), alike=True)

# The classes that put features of images in the place of embeddings, each tested against replicated sequences.
FAMILIES = {
    "Qwen2VLModel": _GRID,
    "Qwen2_5_VLModel": _SECONDS,
    "Qwen3VLModel": _GRID,
    "Qwen3VLMoeModel": _GRID,
    "Glm4vModel": _FRAMES,
    "Glm4vMoeModel": _FRAMES,
    "Glm46VModel": _FRAMES,
    "GlmOcrModel": _FRAMES,
    "Qwen3_5Model": _GRID,
    "Qwen3_5MoeModel": _GRID,
    "Qwen2_5OmniThinkerModel": _OMNI,
    "Qwen3OmniMoeThinkerModel": _OMNI,
    "InternVLModel": _ALIKE,
    "VipLlavaModel": _ALIKE,
    "LlavaModel": _SIZES,
    "LlavaNextModel": _SIZES,
    "LlavaNextVideoModel": Family((*_SIZES.inputs, "pixel_values_videos")),
    "Mistral3Model": _SIZES,
    "LlavaOnevisionModel": Family((*_SIZES.inputs, "batch_num_images", "pixel_values_videos", "image_sizes_videos")),
    "Idefics3Model": _MASKED,
    "SmolVLMModel": _MASKED,
    "Gemma3Model": Family(("pixel_values", BLOCKS), alike=True, ahead=BLOCKS),
    "Gemma4Model": Family((*_GEMMA4, KINDS), ahead=KINDS, windows=True),
}

# The two kinds of rows: their number in mm_token_type_ids, patches, grids, the config's field of the placeholder.
ROWS = ((1, *_IMAGES, "image_token_id"), (2, *_VIDEOS, "video_token_id"))


# Decoders that get embeddings alone and count their rows as text unless they are told positions.
BLIND = ("Qwen2_5OmniThinkerTextModel", "Qwen3OmniMoeThinkerTextModel")

# torch.compile leaves out hooks behind a graph break, and `forward` called in place of the model does.
UNPLACED = (
    "with a layout, and no hook has placed images: call the enabled model that holds the vision tower, and compile its"
    " decoder alone (model.get_decoder().compile())"
)


class Placed(PackedRows):
    """A layout with images in its rows. As a layout, it is passed through the model, to its decoder.

    Attributes:
        layout: of T rows, or without images a Shard of them.
        position_ids: [1, T], or [3, 1, T] for frames, height and width.
        ahead: the keys of rows that see rows behind them; None where no row does.
    """

    # No pytree: wrappers move and copy those.
    __slots__ = ("_position_ids", "ahead", "layout")

    has_positions = True

    def __init__(self, layout: Layout | Shard, position_ids: torch.Tensor, ahead: Ahead | None = None) -> None:
        self.layout, self._position_ids, self.ahead = layout, position_ids, ahead

    @property
    def position_ids(self) -> torch.Tensor:
        return self._position_ids

    def to(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> Placed:
        """Copy with all tensors on `device`, None for the present one: hooks of Accelerate move arguments of layers."""
        if device is None:
            return self
        position_ids = self.position_ids.to(device, non_blocking=non_blocking)
        if position_ids is self.position_ids:
            return self
        ahead = None if self.ahead is None else self.ahead.to(device, non_blocking)
        return Placed(self.layout.to(device, non_blocking), position_ids, ahead)

    @property
    def whole(self) -> Layout:
        return packed_rows(self.layout).whole

    @property
    def rows(self) -> torch.Tensor | None:
        return packed_rows(self.layout).rows

    @property
    def of_layers(self) -> Any:
        return self.layout if self.ahead is None else self

    def attention_of(self, layer: Hashable) -> Callable[..., torch.Tensor]:
        return packed_rows(self.layout).attention_of(layer) if self.ahead is None else partial(attention, placed=self)


class Ahead(NamedTuple):
    """The extra keys that rows of images see after themselves, encoded as causal attention over each image in reverse.

    Row i of an image of n rows sees rows i + 1 to n - 1 of it. Backwards, these queries n - 2, ..., 0 and keys
    n - 1, ..., 1 are causal: the query at index j sees the keys up to j.

    Attributes:
        queries: [A] packed rows.
        keys: [A] packed rows.
        layout: of A rows, a segment for each image.
        windows: only layers with a window see these keys.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    layout: Layout
    windows: bool

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Ahead:
        """Copy with all tensors on `device`."""
        queries, keys = (x.to(device, non_blocking=non_blocking) for x in (self.queries, self.keys))
        return Ahead(queries, keys, self.layout.to(device), self.windows)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, placed: Placed, **features: Any) -> torch.Tensor:
    """:func:`dualkv.attention`, in which rows of images also see the rows of their image behind them.

    Args:
        q: [T, H, D].
        k: [T, Hk, D].
        v: [T, Hk, D].
        placed: of a model whose images look ahead.
        features: as for :func:`dualkv.attention`. A window or chunk hides no key behind a row.

    Returns:
        out [T, H, D].
    """
    ahead = placed.ahead
    assert ahead is not None
    if ahead.windows and features.get("window") is None:
        return causal_attention(q, k, v, placed.whole, **features)
    out, lse = causal_attention(q, k, v, placed.whole, **features, return_lse=True)
    features |= {"window": None, "chunk": None, "sinks": None}  # a sink takes its part once
    mine, theirs = (x.index_select(0, ahead.keys) for x in (k, v))
    more, its_lse = causal_attention(
        q.index_select(0, ahead.queries), mine, theirs, ahead.layout, **features, return_lse=True
    )
    share = torch.sigmoid(its_lse - lse.index_select(1, ahead.queries)).t()[..., None]
    merged = torch.lerp(out.index_select(0, ahead.queries).to(share.dtype), more.to(share.dtype), share)
    return out.index_copy(0, ahead.queries, merged.to(out.dtype))


# ---------------------------------------------------------------- models
_FAMILY: dict[type, Family | None] = {}  # dictionaries, because dynamo reads them while it traces
_CONTAINS: dict[type, bool] = {}


def family(cls: type[nn.Module]) -> Family | None:
    """Find how models of this class run images; None if they do not. Wrappers make subclasses of a model's class."""
    if cls not in _FAMILY:
        known = (c.__name__ for c in cls.__mro__ if c.__module__.startswith("transformers.models."))
        _FAMILY[cls] = next((FAMILIES[name] for name in known if name in FAMILIES), None)
    return _FAMILY[cls]


def families(model: nn.Module) -> list[Family]:
    """List how the model and its parts run images; empty for a model that runs no images packed."""
    # No `:=`: dynamo, which traces a model's first call, cannot read one in a comprehension.
    return [how for how in map(family, map(type, model.modules())) if how is not None]


def passes_on(module: PreTrainedModel) -> bool:
    """Whether a model hands images to a part that runs them; read once for each class of transformers' models."""
    cls = type(module)
    if cls not in _CONTAINS:
        _CONTAINS[cls] = bool(families(module))
    return _CONTAINS[cls]


def given(named: dict[str, Any]) -> list[str]:
    """The names of inputs of a call that hold images, videos or audio."""
    return [name for name, value in named.items() if MEDIA.search(name) and _has_tensor(value)]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensor, value)))


def refuse(module: nn.Module, named: dict[str, Any]) -> None:
    """Raises ValueError for images, videos and audio in a call of a model that runs text alone."""
    for name in given(named):
        if name in ("visual_pos_masks", "deepstack_visual_embeds"):
            raise ValueError(f"{name} came to {type(module).__name__} {UNPLACED}")
        raise ValueError(
            f"{name} came together with dualkv: {type(module).__name__} is not known to run packed with anything but"
            " text; run such a batch without a layout"
        )


def decodes_blindly(module: nn.Module) -> bool:
    """Whether a model of a known family has a decoder of BLIND, which takes placed layouts only."""
    how = family(type(module))
    return how is not None and how.by_ids


def takes_blocks(module: nn.Module) -> bool:
    """Whether a model of a known family reads token_type_ids."""
    how = family(type(module))
    return how is not None and BLOCKS in how.inputs


def refuse_unplaced(decoder: nn.Module, inputs: dict[str, Any]) -> None:
    """Raises ValueError where a decoder cannot see whether its embeddings hold images, and no model placed them."""
    if type(decoder).__name__ in BLIND and inputs.get("inputs_embeds") is not None:
        raise ValueError(f"inputs_embeds came to {type(decoder).__name__} {UNPLACED}")


# ---------------------------------------------------------------- a call
def place(module: Any, named: dict[str, Any], layout: Any) -> Placed | None:
    """The layout of a call of `module` with its positions; None for a call without images.

    Args:
        module: of a known family.
        named: the inputs of the call by name. Reading them waits for the device, once.
        layout: as the call got it.

    Raises:
        ValueError: an input that does not run packed; placeholders and images that do not match, also where an image
            would lie in several segments; positions other than the model's.
    """
    how = family(type(module))
    assert how is not None
    name = type(module).__name__
    if KINDS not in how.inputs:  # a processor's, which the model does not take
        named.pop(KINDS, None)
    names = given(named)
    for other in names:
        if other not in how.inputs:
            raise ValueError(
                f"{other} came together with dualkv: {name} runs packed with {', '.join(how.inputs)} and text"
            )
    kinds = named.pop(how.ahead, None) if how.ahead else named.get(KINDS)
    if not [name for name in names if name != KINDS] and not (isinstance(kinds, torch.Tensor) and kinds.any()):
        return None
    names = names or [how.ahead or KINDS]
    packed = packed_rows(layout)
    if packed.rows is not None or packed.has_positions:
        raise ValueError(
            f"{names[0]} came together with a {type(layout).__name__}: images do not run packed with sequence"
            " parallelism or in walks, where each call would need the features of all images"
        )
    layout = packed.whole
    ids = named.get("input_ids")
    if ids is None:
        raise ValueError(f"{names[0]} came without input_ids, expected them: they say where images are")
    if ids.shape != (1, layout.num_tokens):
        raise ValueError(f"input_ids has shape {tuple(ids.shape)}, expected [1, T] = {(1, layout.num_tokens)}")
    if how.grid:
        return Placed(layout, _grid_positions(module, how, named, layout).to(ids.device))
    if how.alike and named.get("pixel_values") is not None:
        _check_alike(module, named, layout)
    if how.windows:
        _check_patches(module, named, layout)
    ahead = None if kinds is None or not how.ahead else _ahead(module, how, ids, kinds, layout)
    return Placed(layout, layout.position_ids[None].to(ids.device), ahead)


def _ahead(module: Any, how: Family, ids: torch.Tensor, kinds: torch.Tensor, layout: Layout) -> Ahead | None:
    """The rows of each image, which lie next to each other; other images begin behind text."""
    if kinds.shape != ids.shape:
        raise ValueError(f"{how.ahead} has shape {tuple(kinds.shape)}, expected {tuple(ids.shape)}")
    assert how.ahead is not None
    marks = kinds[0].cpu()
    for kind, *_, token in ROWS[: 1 + how.windows]:
        _check_placeholders(module, how, ids[0].cpu(), marks, kind, token, how.ahead)
    if how.windows and module.config.get_text_config().use_bidirectional_attention != "vision":
        return None
    is_image = (marks == 1) | (marks == 2)
    rows = is_image.nonzero()[:, 0]
    segments = torch.searchsorted(layout.offsets[1:].long(), rows, right=True)
    parent, offsets = layout.parent.tolist(), layout.offsets.tolist()
    for segment in segments[torch.isin(rows, layout.offsets[:-1].long())].unique().tolist():
        up = parent[segment]
        while up >= 0 and offsets[up] == offsets[up + 1]:
            up = parent[up]
        if up >= 0 and is_image[offsets[up + 1] - 1]:  # the model takes neighbouring rows of images for one image
            raise ValueError(
                f"segment {segment} begins with an image and segment {up}, above it, ends with one: expected"
                " text between"
            )
    new = torch.ones(len(rows), dtype=torch.bool)
    new[1:] = (rows.diff() > 1) | (segments.diff() > 0)
    begin = new.nonzero()[:, 0].tolist()
    images = [image.flip(0) for image in rows.tensor_split(begin)[1:] if len(image) > 1]
    if not images:
        return None
    queries, keys = (torch.cat([image[cut] for image in images]) for cut in (slice(1, None), slice(0, -1)))
    of_images = Layout.from_lengths([len(image) - 1 for image in images], [[]] * len(images), ids.device)
    return Ahead(queries.to(ids.device), keys.to(ids.device), of_images, how.windows)


def _check_alike(module: Any, named: dict[str, Any], layout: Layout) -> None:
    images = named["pixel_values"]
    if images.dim() == 5:  # [1, images, channels, height, width]; models leave out images of zeros
        images = images.flatten(0, 1)[images.flatten(0, 1).flatten(1).any(1)]
    rows = (named["input_ids"][0] == module.config.image_token_id).nonzero()[:, 0].cpu()
    if len(images) == 0 or len(rows) == 0 or len(rows) % len(images):
        raise ValueError(
            f"pixel_values has {len(images)} images, input_ids {len(rows)} of their placeholders: expected as many"
            " placeholders for each image"
        )
    _owners(rows, torch.full((len(images),), len(rows) // len(images)), layout, "pixel_values")


def _check_patches(module: Any, named: dict[str, Any], layout: Layout) -> None:
    """Check images that are padded to a number of patches, and frames of videos; the position ids of padding are -1."""
    merged = module.config.vision_config.pooling_kernel_size**2
    for name, token in (("image_position_ids", "image_token_id"), ("video_position_ids", "video_token_id")):
        if named.get(name) is not None:
            counts = (named[name] != -1).all(-1).sum(-1).cpu() // merged
            rows = (named["input_ids"][0] == getattr(module.config, token)).nonzero()[:, 0].cpu()
            _owners(rows, counts, layout, name)


def _grid_positions(module: Any, how: Family, named: dict[str, Any], layout: Layout) -> torch.Tensor:
    """[3, 1, T] on the CPU: frames, height and width of each row, from the model's own function."""
    ids, kinds = named["input_ids"].cpu(), named.get(KINDS)
    if how.by_ids:
        kinds = sum(kind * (ids == getattr(module.config, token)) for kind, *_, token in ROWS)
    if kinds is None:
        raise ValueError(
            f"{KINDS} is missing, expected [1, T]: the processor returns it, dualkv.pack takes it in media"
        )
    if kinds.shape != ids.shape:
        raise ValueError(f"{KINDS} has shape {tuple(kinds.shape)}, expected {tuple(ids.shape)}")
    kinds = kinds.cpu()
    if how.frames_are_images and len({kind for kind, *_ in ROWS if (kinds == kind).any()}) > 1:
        raise ValueError(
            f"{KINDS} has images (1) and videos (2), which {type(module).__name__} cannot tell apart in one packed row:"
            " expected one kind"
        )
    check_seconds(named)
    if how.by_ids and named.get("video_grid_thw") is not None and named.get("video_second_per_grid") is None:
        raise ValueError("video_grid_thw came without video_second_per_grid, expected one value a video")
    owners: dict[str, IntArray] = {}
    grids: dict[str, torch.Tensor] = {}
    for kind, patches, grid, token in ROWS:
        rows = (kinds[0] == kind).nonzero()[:, 0]
        _check_placeholders(module, how, ids[0], kinds[0], kind, token)
        if named.get(grid) is None:
            if len(rows):
                raise ValueError(f"{KINDS} marks {len(rows)} rows with {kind}, and no {grid} came")
            continue
        grids[grid] = named[grid].cpu()
        held, counts = len(named[patches]) if named.get(patches) is not None else 0, grids[grid].prod(1)
        if held != int(counts.sum()):
            raise ValueError(f"{patches} has {held} patches, {grid} counts {int(counts.sum())}")
        merged = counts // module.config.vision_config.spatial_merge_size**2
        owners[grid] = _owners(rows, merged, layout, grid)
    return _from_replicated(module, how, named, layout, ids, kinds, grids, owners)


def _check_placeholders(
    module: Any, how: Family, ids: torch.Tensor, kinds: torch.Tensor, kind: int, token: str, name: str = KINDS
) -> None:
    """Check that the rows that get features, by their ids, are the rows that get an image's positions, by their
    kinds."""
    marked = kinds == kind
    if how.frames_are_images:
        if kind > 1:
            return
        marked = kinds > 0
    expected = getattr(module.config, token)
    differs = (ids == expected) != marked
    if differs.any():
        at = int(differs.int().argmax())
        raise ValueError(
            f"row {at} of input_ids holds {int(ids[at])}, its {name} is {int(kinds[at])}: expected {kind} for the"
            f" {token} {expected}, and for this id alone"
        )


def _owners(rows: torch.Tensor, counts: torch.Tensor, layout: Layout, name: str) -> IntArray:
    """The segment of each image, whose rows are the next `counts` of the placeholders in `rows`."""
    if len(rows) != int(counts.sum()):
        raise ValueError(
            f"{name} describes {len(counts)} images or videos of {int(counts.sum())} rows in all, input_ids has"
            f" {len(rows)} of their placeholders"
        )
    segments = torch.searchsorted(layout.offsets[1:].long(), rows, right=True)
    ends = counts.cumsum(0)
    first, last = segments[ends - counts], segments[ends - 1]
    if not torch.equal(first, last):
        at = int((first != last).int().argmax())
        raise ValueError(
            f"{name}[{at}] has {int(counts[at])} rows, in segments {int(first[at])} and {int(last[at])} of the layout:"
            " expected each segment's images next to each other, in the order of the segments"
        )
    return first.numpy()


def _from_replicated(
    module: Any,
    how: Family,
    named: dict[str, Any],
    layout: Layout,
    ids: torch.Tensor,
    kinds: torch.Tensor,
    grids: dict[str, torch.Tensor],
    owners: dict[str, IntArray],
) -> torch.Tensor:
    """[3, 1, T], on the CPU, by `get_rope_index` of replicated sequences.

    The longest of the text-only leaves below one segment stands for all of them: positions of text count on.
    """
    offsets, parent = layout.offsets.tolist(), layout.parent.tolist()
    found = layout.to("cpu").position_ids.repeat(3, 1, 1)
    own = {int(s) for segments in owners.values() for s in segments}
    paths: list[list[int]] = []
    for s, up in enumerate(parent):
        paths.append([*(paths[up] if up >= 0 else []), s])
    longest: dict[int, int] = {}
    inner = set(parent)
    for s, up in enumerate(parent):
        if s in inner or own.isdisjoint(paths[s]):
            continue
        alone = up < 0 or s in own
        key = -1 - s if alone else up
        rival = longest.get(key, s)
        longest[key] = s if offsets[s + 1] - offsets[s] >= offsets[rival + 1] - offsets[rival] else rival
    for key, leaf in longest.items():
        path = paths[leaf]
        rows = torch.cat([torch.arange(*offsets[s : s + 2]) for s in path])
        position, _ = module.get_rope_index(**_inputs(how, named, ids[:, rows], kinds[:, rows], grids, owners, path))
        found = found.to(position.dtype)  # Qwen3-Omni's are fp32
        found[:, :, rows] = position
        if key >= 0:
            before = len(rows) - (offsets[leaf + 1] - offsets[leaf])
            for s, up in enumerate(parent):
                if up == key and s not in inner and s not in own:
                    begin, end = offsets[s : s + 2]
                    found[:, :, begin:end] = position[:, :, before : before + end - begin]
    return found


def _inputs(
    how: Family,
    named: dict[str, Any],
    ids: torch.Tensor,
    kinds: torch.Tensor,
    grids: dict[str, torch.Tensor],
    owners: dict[str, IntArray],
    path: list[int],
) -> dict[str, Any]:
    """The arguments of `get_rope_index` for the sequence of the segments in `path`."""
    inputs: dict[str, Any] = {"input_ids": ids}
    if how.by_ids:
        inputs["attention_mask"] = torch.ones_like(ids)
    else:
        inputs[KINDS] = kinds
    for name, grid in grids.items():
        held = [i for i, segment in enumerate(owners[name].tolist()) if segment in path]
        inputs[name] = grid[held] if held else None
        if name == "video_grid_thw" and (seconds := named.get("second_per_grid_ts")) is not None and held:
            inputs["second_per_grid_ts"] = [seconds[i] for i in held]
        if name == "video_grid_thw" and (seconds := named.get("video_second_per_grid")) is not None and held:
            inputs["second_per_grids"] = torch.as_tensor(seconds)[held]
    return inputs

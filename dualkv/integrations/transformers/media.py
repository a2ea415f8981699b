"""Images and videos in packed calls of transformers models: which models run them, and the positions of their rows.

Some models give the rows of an image positions of its grid (multimodal rotary embeddings). These positions, and those
of the text behind, come from the model's own `get_rope_index`, which runs on replicated sequences: on one for each path
with images, as positions of text count on. In other models an image's rows count as text does.

In Gemma 3 and 4 the rows of an image also see each other's rows behind them; see
:mod:`dualkv.integrations.transformers.ahead`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from dualkv.arrays import IntArray
from dualkv.branches import Branch
from dualkv.data.media import AUDIO, BESIDE, PLACES, SEGMENTS, check_seconds
from dualkv.data.rows import media_of
from dualkv.data.trees import PackedSequences
from dualkv.integrations.transformers import towers
from dualkv.integrations.transformers.ahead import Ahead
from dualkv.integrations.transformers.placed import Placed
from dualkv.integrations.transformers.towers import FRAMES, Images, OfPart
from dualkv.layout import Layout
from dualkv.packed_rows import PackedRows, packed_rows
from dualkv.sequence_parallel import Shard

# Names that processors and models use for inputs other than text.
MEDIA = re.compile(
    r"pixel|image|video|audio|visual|vision|speech|grid_thw|second_per_grid|input_features|feature_attention_mask"
    r"|mm_token_type_ids|deepstack|mm_encoder|cross_attention_states"
)
KINDS, BLOCKS = "mm_token_type_ids", "token_type_ids"
POSITIONS = "position_ids"  # among the media of a walked batch: of all rows, in the place of the model's own
OF_AUDIO = (AUDIO, FRAMES)


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
_OMNI = Family((*_IMAGES, *_VIDEOS, "video_second_per_grid", *OF_AUDIO), grid=True, by_ids=True)
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


def marks(config: Any) -> dict[int, int]:
    """The kinds of tokens that stand for images (1) and videos (2) in a configuration, by their ids."""
    return {token: kind for kind, *_, name in ROWS if (token := getattr(config, name, None)) is not None}


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


def refuse_forgotten(module: nn.Module, named: dict[str, Any]) -> None:
    """Raises ValueError for the token ids of a packed batch without its images, whose placeholders would be text."""
    lacking = [name for name in SEGMENTS if name in media_of(named.get("input_ids")) and named.get(name) is None]
    if lacking:
        raise ValueError(
            f"{type(module).__name__} got the packed input_ids of a batch with {', '.join(lacking)} without them: pass"
            " **batch.media"
        )


def takes_blocks(module: nn.Module) -> bool:
    """Whether a model of a known family reads token_type_ids."""
    how = family(type(module))
    return how is not None and BLOCKS in how.inputs


def refuse_unplaced(decoder: nn.Module, inputs: dict[str, Any], packed: PackedRows) -> None:
    """Raises ValueError where a decoder cannot see whether its embeddings hold images, or its rows are of a batch with
    images, and no model placed them."""
    if isinstance(packed, Branch) and packed.has_images:
        raise ValueError(f"a part of a batch with images came to {type(decoder).__name__} {UNPLACED}")
    if type(decoder).__name__ in BLIND and inputs.get("inputs_embeds") is not None:
        raise ValueError(f"inputs_embeds came to {type(decoder).__name__} {UNPLACED}")


# ---------------------------------------------------------------- a call
def place(module: Any, named: dict[str, Any], layout: Any) -> Placed | None:
    """The layout of a call of `module`, of a known family, with its positions; None for a call without images. Reading
    the inputs waits for the device, once.

    Raises:
        ValueError: an input that does not run packed; placeholders and images that do not match, also where an image
            would lie in several segments; positions other than the model's.
    """
    how = family(type(module))
    assert how is not None
    if isinstance(layout, Branch):
        return _place_part(module, how, named, layout)
    segments, names, kinds = _separated(module, how, named)
    shard = layout if isinstance(layout, Shard) else None
    if shard is not None and shard.world_size > 1:
        towers.check_ranks(named, names, shard)
    if not [name for name in names if name != KINDS] and not (isinstance(kinds, torch.Tensor) and kinds.any()):
        return None
    names = names or [how.ahead or KINDS]
    packed = packed_rows(layout)
    if packed.has_positions or packed.is_part:
        raise ValueError(f"{names[0]} came together with a {type(layout).__name__}, expected a layout of all rows")
    ids = _checked_ids(names[0], named, packed.whole.num_tokens if shard is None else shard.num_tokens)
    of_all = named if how.ahead is None else named | {how.ahead: kinds}
    of_all = of_all if shard is None else towers.of_all_ranks(of_all, shard)
    seen = see(module, how, of_all, segments, packed.whole, shard)
    towers.ask(module, _not_counted(seen.images, shard))
    if shard is None:
        return Placed(packed.whole, seen.positions.to(ids.device), seen.ahead)
    ahead = None if seen.ahead is None else seen.ahead.over(shard)
    return Placed(shard, shard.split(seen.positions, -1).to(ids.device), ahead, seen.positions)


class Seen(NamedTuple):
    """Packed rows as a model sees them.

    Attributes:
        positions: [1, T], or [3, 1, T] for frames, height and width.
        images: by the name of the input with their pixels.
        ahead: the keys behind rows of images, if any.
    """

    positions: torch.Tensor
    images: dict[str, Images]
    ahead: Ahead | None


def see(
    module: Any,
    how: Family,
    named: dict[str, Any],
    segments: dict[str, Any],
    layout: Layout,
    shard: Shard | None,
    positions: torch.Tensor | None = None,
) -> Seen:
    """All rows of a layout; `named` has their token ids. positions: a caller's, in the place of the model's."""
    if positions is None:
        positions = _grid_positions(module, how, named, layout) if how.grid else layout.position_ids[None]
    images = _images(module, how, named, layout, shard, segments)
    kinds = named[how.ahead] if how.ahead else None
    ahead = None if kinds is None else _ahead(module, how, named["input_ids"], kinds, layout)
    return Seen(positions, images, ahead)


def _separated(
    module: Any, how: Family, named: dict[str, Any]
) -> tuple[dict[str, torch.Tensor | None], list[str], Any]:
    """Take the segments of images and what models do not take out of the inputs: (segments, names of inputs beside
    text, kinds of tokens).

    Raises:
        ValueError: an input that does not run packed.
    """
    segments = {patches: named.pop(of, None) for patches, of in SEGMENTS.items()}
    if KINDS not in how.inputs:  # a processor's, which the model does not take
        named.pop(KINDS, None)
    names = given(named)
    for other in names:
        if other not in how.inputs:
            raise ValueError(
                f"{other} came together with dualkv: {type(module).__name__} runs packed with {', '.join(how.inputs)}"
                " and text"
            )
    return segments, names, named.pop(how.ahead, None) if how.ahead else named.get(KINDS)


def _checked_ids(name: str, named: dict[str, Any], count: int) -> torch.Tensor:
    """The token ids [1, T] of a call with images."""
    ids: torch.Tensor | None = named.get("input_ids")
    if ids is None:
        raise ValueError(f"{name} came without input_ids, expected them: they say where images are")
    if ids.shape != (1, count):
        raise ValueError(f"input_ids has shape {tuple(ids.shape)}, expected [1, T] = {(1, count)}")
    return ids


# What models see in the batches that are walked.
_WALKED: WeakKeyDictionary[PackedSequences, WeakKeyDictionary[nn.Module, Seen]] = WeakKeyDictionary()


def _place_part(module: Any, how: Family, named: dict[str, Any], branch: Branch) -> Placed | None:
    """The rows of a part of a walk with their positions, and the inputs of its images, which come from the batch."""
    part, batch = branch.part, branch.part.batch
    if names := [*given(named), *[BLOCKS] * (named.get(BLOCKS) is not None)]:
        raise ValueError(
            f"{names[0]} came together with a part of a walk, expected the media of all parts in the batch, from where"
            " a part takes its own"
        )
    branch.took_images = True
    if not branch.runs_towers:
        return None
    ids = _checked_ids("a part of a batch with images", named, branch.num_tokens)
    branch.check_module(module)
    of_models = _WALKED.setdefault(batch, WeakKeyDictionary())
    seen = of_models.get(module) if branch.has_images else Seen(batch.layout.position_ids[None], {}, None)
    if seen is None:
        of_all = {**batch.media, "input_ids": batch.input_ids}
        segments, _, kinds = _separated(module, how, of_all)
        of_all |= {how.ahead: kinds} if how.ahead else {}
        seen = of_models[module] = see(module, how, of_all, segments, batch.layout, None, of_all.pop(POSITIONS, None))
    own = {patches: OfPart.of(images, part) for patches, images in seen.images.items()}
    own = {patches: images for patches, images in own.items() if len(images.own)}
    for patches in branch.unread.keys() - own.keys():  # ranks wait for each other's towers
        own[patches] = OfPart.unread(patches, branch.unread[patches], part)
    towers.ask(module, own)
    for images in own.values():
        named |= images.images.inputs
    ahead = None if seen.ahead is None else seen.ahead.of_part(part)
    return Placed(branch, seen.positions[..., branch.rows].to(ids.device), ahead, seen.positions)


def _not_counted(images: dict[str, Images], shard: Shard | None) -> dict[str, Images]:
    """The images of which towers must know, or that ranks run for each other."""
    return {patches: one for patches, one in images.items() if one.counts is None or shard is not None}


def ask(module: Any, named: dict[str, Any], layout: Layout, shard: Shard | None) -> None:
    """Tell the towers of `module`, of a known family, which images its next call has, where the caller has placed them:
    by the inputs of the call, with the token ids [1, T] of all rows, which ranks of `shard` share, if any.

    Raises:
        ValueError: placeholders and images that do not match.
    """
    how = family(type(module))
    assert how is not None
    segments = {patches: named.pop(of, None) for patches, of in SEGMENTS.items()}
    towers.ask(module, _not_counted(_images(module, how, named, layout, shard, segments), shard))


def _images(
    module: Any,
    how: Family,
    named: dict[str, Any],
    layout: Layout,
    shard: Shard | None,
    segments: dict[str, torch.Tensor | None],
) -> dict[str, Images]:
    """The images and videos of a call, checked segment by segment where the rows of each image are known."""
    found = {}
    audio = ((3, AUDIO, FRAMES, "audio_token_id"),) if how.by_ids else ()
    for _, patches, grid, token in (*ROWS, *audio):
        if named.get(patches) is None:
            continue
        token = "image_token_id" if how.frames_are_images else token
        rows = (named["input_ids"][0] == getattr(module.config, token)).nonzero()[:, 0].cpu()
        name, counts = _rows_of_images(module, how, named, patches, grid, len(rows))
        inputs = {name: named[name] for name in (patches, *BESIDE[patches]) if named.get(name) is not None}
        images = Images(patches, name, rows, counts, segments[patches], layout, shard, inputs)
        if counts is not None:
            images.check(counts)
        found[patches] = images
    return found


def _rows_of_images(
    module: Any, how: Family, named: dict[str, Any], patches: str, grid: str, rows: int
) -> tuple[str, torch.Tensor | None]:
    """The input that says how many rows each image has, and these numbers; None where only the tower says it."""
    if patches == AUDIO:
        return towers.rows_of_audio(module, named)
    needed = grid if how.grid else PLACES[patches] if how.windows else None
    if needed is not None and named.get(needed) is None:
        raise ValueError(f"{patches} came without {needed}, expected it for each image")
    if how.grid:
        return grid, named[grid].prod(1).cpu() // module.config.vision_config.spatial_merge_size**2
    if needed is not None:
        counts = (named[needed] != -1).all(-1).sum(-1).cpu() // module.config.vision_config.pooling_kernel_size**2
        frames = named.get("num_frames_per_video") if "video" in patches else None
        if frames is not None:
            counts = torch.stack([of_video.sum() for of_video in counts.split(torch.as_tensor(frames).tolist())])
        return needed, counts
    if not how.alike:
        return patches, None
    images = named[patches]
    if images.dim() == 5:  # [1, images, channels, height, width]; models leave out images of zeros
        images = images.flatten(0, 1)[images.flatten(0, 1).flatten(1).any(1)]
    if len(images) == 0 or rows == 0 or rows % len(images):
        raise ValueError(
            f"{patches} has {len(images)} images, input_ids {rows} of their placeholders: expected as many"
            " placeholders for each image"
        )
    return patches, torch.full((len(images),), rows // len(images))


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
    if how.by_ids and named.get("use_audio_in_video"):
        raise ValueError(
            f"use_audio_in_video came together with dualkv: {type(module).__name__} runs packed without it"
        )
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
        owners[grid] = towers.owners(rows, merged, layout, grid)
    if named.get(AUDIO) is not None:
        rows = (ids[0] == module.config.audio_token_id).nonzero()[:, 0]
        name, counts = towers.rows_of_audio(module, named)
        owners["audio_seqlens"] = towers.owners(rows, counts, layout, name)
        grids["audio_seqlens"] = named[name].sum(1).cpu()
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

"""Images, videos and audio: what a processor returns beside ids, kept once for each packed segment."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from dualkv.arrays import IntArray
from dualkv.layout import Layout
from dualkv.prefixes import PrefixTree, SharedPrefixes
from dualkv.tokens import MAX_TOKEN

# What a processor returns for one text; None or an empty mapping for text alone.
Media = Sequence[Mapping[str, Any] | None]
Entry = dict[str, Any]
Named = tuple[str, Entry]  # an entry behind its name in messages

# One value for each token of the text, 0 for text; the first one says where images are.
OF_TOKENS = ("mm_token_type_ids", "token_type_ids")

# What a processor returns about the text: `prompts` and the layout say it.
OF_TEXT = ("input_ids", "attention_mask")

# Patches, their grids [images, 3] (frames, height, width) and the kind of their tokens in mm_token_type_ids.
GRIDS = (("pixel_values", "image_grid_thw", 1), ("pixel_values_videos", "video_grid_thw", 2))
AUDIO = "input_features"  # of audio, whose tokens are 3 in mm_token_type_ids

# What processors return for all images, videos or audio of a prompt, beside their pixels or features.
BESIDE = {
    "pixel_values": ("image_grid_thw", "image_sizes", "image_position_ids", "batch_num_images", "pixel_attention_mask"),
    "pixel_values_videos": (
        "video_grid_thw", "image_sizes_videos", "second_per_grid_ts", "video_second_per_grid", "video_position_ids",
        "num_frames_per_video",
    ),
    AUDIO: ("feature_attention_mask",),
}  # fmt: skip

# Padded patches have these positions, -1 at padding.
PLACES = {"pixel_values": "image_position_ids", "pixel_values_videos": "video_position_ids"}

# The segment of each image, video or audio, for a model: only it knows how many placeholders one of a size has.
SEGMENTS = {"pixel_values": "image_segments", "pixel_values_videos": "video_segments", AUDIO: "audio_segments"}

# Seconds a frame, one value for each video.
SECONDS = ("second_per_grid_ts", "video_second_per_grid")

# A tensor with a row for each text: images are its second dimension (Idefics 3).
IN_ROWS = "pixel_attention_mask"

# The number of images of a text, on which it depends how they are cut (LLaVA-OneVision).
TOGETHER = "batch_num_images"

SAMPLED = 64  # numbers of a tensor that tell most images apart, before all are compared


# ---------------------------------------------------------------- one text
def entries(
    media: Media | None,
    lens: Sequence[int],
    columns: Sequence[slice | IntArray] | None = None,
    names: Sequence[str] | None = None,
) -> list[Named] | None:
    """The media of each text with tensors in place of arrays, values of tokens as [L].

    Args:
        media: as for :func:`dualkv.pack`.
        lens: tokens of each text.
        columns: of a padded batch, where each text lies in its row; values of tokens may be rows of that width.
        names: in messages; by default media[0], media[1] and so on.

    Raises:
        ValueError: another number of entries; values of tokens that are not one a token; patches that their grids do
            not count; placeholders that do not fit the images, compared with other texts.
        TypeError: an entry that is no mapping, a value that is neither tensor, array nor list of numbers.
    """
    if media is None:
        return None
    of = names[0].partition("[")[0] if names else "media"
    if isinstance(media, Mapping) or not isinstance(media, Sequence | np.ndarray):
        raise TypeError(
            f"{of} is a {type(media).__name__}, expected a list with one mapping (or None) a text: what a processor"
            " returns for that text"
        )
    if len(media) != len(lens):
        raise ValueError(f"{of} has {len(media)} entries for {len(lens)} token sequences, expected as many")
    found: list[Named] = []
    for i, given in enumerate(media):
        name = names[i] if names else f"media[{i}]"
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"{name} is a {type(given).__name__}, expected a mapping or None")
        entry = {}
        for key, value in (given or {}).items():
            if value is not None and key not in OF_TEXT:
                entry[key] = _value(f"{name}[{key!r}]", value)
        for key in OF_TOKENS:
            if key in entry:
                within = None if columns is None else columns[i]
                entry[key] = _of_tokens(f"{name}[{key!r}]", entry[key], lens[i], within)
        _check_patches(name, entry)
        found.append((name, entry))
    check_placeholders(found)
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


def _of_tokens(name: str, value: Any, count: int, columns: slice | IntArray | None) -> torch.Tensor:
    values = torch.as_tensor(value)
    flat = values[0] if values.dim() == 2 and len(values) == 1 else values
    if columns is not None and flat.dim() == 1 and len(flat) != count:
        end = columns.stop if isinstance(columns, slice) else int(columns[-1]) + 1
        if len(flat) >= end:
            flat = flat[columns if isinstance(columns, slice) else torch.from_numpy(columns)]
    if flat.shape != (count,):
        raise ValueError(f"{name} has shape {tuple(values.shape)}, its text has {count} tokens, expected one a token")
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


def check_placeholders(found: Sequence[Named]) -> None:
    """Compares images a placeholder token between texts: a model has one number, which is known to the model. In one
    packed row, images that a text lacks would be those that another one has too many."""
    for patches, grids, kind in GRIDS:
        first: tuple[str, int, int] | None = None
        for name, entry in found:
            kinds = _kinds(entry)
            if kinds is None:
                continue
            count, unit = _count(entry, patches, grids)
            if count is None:
                continue
            tokens = int((kinds == kind).sum())
            if (tokens == 0) != (count == 0) or (first and tokens * first[2] != count * first[1]):
                beside = f", those of {first[0]} have {first[2]} for {first[1]}" if first else ""
                raise ValueError(
                    f"{name}[{patches!r}] has {count} {unit} for {tokens} placeholder tokens{beside}:"
                    " expected one image for each placeholder"
                )
            first = first or ((name, tokens, count) if tokens else None)


def _kinds(entry: Entry) -> torch.Tensor | None:
    """The values that say where images are; None without any."""
    kinds = next((entry[key] for key in OF_TOKENS if key in entry), None)
    # Some tokenizers return token_type_ids of zeros, and these models ignore them.
    return None if kinds is None or (OF_TOKENS[0] not in entry and not kinds.any()) else kinds


def _count(entry: Entry, patches: str, grids: str) -> tuple[int | None, str]:
    """Count what placeholders of one kind are in proportion to, and name it; None where a model has another rule."""
    if patches == AUDIO:
        return None, ""
    if grids in entry:
        return int(entry[grids].prod(1).sum()), "patches"
    if PLACES[patches] in entry:
        return int((entry[PLACES[patches]] != -1).all(-1).sum()), "patches"
    if not len(entry.get(patches, ())):
        return 0, "patches"
    # Other names, such as image_sizes, are of models with such a rule.
    known = {*BESIDE, *(grids for _, grids, _ in GRIDS), *SECONDS, IN_ROWS, *OF_TOKENS}
    in_rows = patches == "pixel_values" and np.ndim(entry[patches]) == 5
    if not entry.keys() <= known or in_rows != (IN_ROWS in entry):
        return None, ""
    return int(_real(entry[patches]).sum()) if in_rows else len(entry[patches]), "images"


def _images(entry: Entry, patches: str, grids: str) -> int:
    """The number of images, or of videos, of one text."""
    if patches not in entry or (patches == "pixel_values" and IN_ROWS in entry):
        return int(_real(entry[patches]).sum()) if patches in entry else 0
    frames = "num_frames_per_video" if "video" in patches else grids
    return len(next(entry[name] for name in (grids, frames, patches) if name in entry))


def difference(a: Entry, b: Entry) -> str | None:
    """The first name under which two texts have other media, by content; None if all are equal."""
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


def grouped(keys: Sequence[Hashable], media: Sequence[Entry]) -> IntArray:
    """[N] the group of each rollout: equal keys [N] and equal media [N], if there are any. Groups are numbered in the
    order of their first."""
    found: dict[Hashable, list[int]] = {}  # equal tokens make several groups if their media differ
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


# ---------------------------------------------------------------- the images of one text
class Image(NamedTuple):
    """An image or video of a text, or all of them where they cannot be told apart.

    Attributes:
        begin: its first placeholder.
        end: the token behind its last placeholder. Between frames of a video there may be text.
        placeholders: all of them, ascending.
        entry: what a processor returns for it, without values of tokens.
    """

    begin: int
    end: int
    placeholders: IntArray
    entry: Entry


def images_of(name: str, entry: Entry) -> list[Image]:
    """The images and videos of a text, one of :func:`entries`, in the order of their placeholders.

    Raises:
        ValueError: images and no value of tokens that says where they are, or which marks none; the reverse.
    """
    apart = {key: value for key, value in entry.items() if key not in OF_TOKENS and len(value)}
    kinds = next((entry[key].cpu().numpy() for key in OF_TOKENS if key in entry), None)
    if not apart:
        if kinds is not None and kinds.any():
            raise ValueError(
                f"{name} marks {int((kinds != 0).sum())} tokens as placeholders and has no images, expected both or"
                " neither"
            )
        return []
    if kinds is None or not kinds.any():
        has = "no mm_token_type_ids" if kinds is None else "mm_token_type_ids that are all 0"
        raise ValueError(
            f"{name} has {next(iter(apart))} and {has}: expected one value a token, other than 0 at placeholders"
        )
    if AUDIO in apart and not (kinds == 3).any():
        raise ValueError(f"{name} has {AUDIO} and no 3 in mm_token_type_ids, expected it at audio tokens")
    found: list[Image] = []
    split = set(apart) <= {*BESIDE, *(key for beside in BESIDE.values() for key in beside)} - {TOGETHER}
    for kind, pixels in enumerate(BESIDE, 1):
        placeholders = np.flatnonzero(kinds == kind)
        if split and (len(placeholders) or pixels in apart):
            images = _split(apart, pixels, placeholders)
            split = images is not None
            found += images or []
    if not split:
        placeholders = np.flatnonzero(kinds)
        return [Image(int(placeholders[0]), int(placeholders[-1]) + 1, placeholders, apart)]
    return sorted(found, key=lambda image: image.begin)


def within(named: Named, kept: npt.NDArray[np.bool_]) -> Named:
    """The media of the tokens `kept` [L] of a text, as those of a text of its own, without images of other tokens."""
    name, entry = named
    kinds = {key: value[torch.from_numpy(kept).to(value.device)] for key, value in entry.items() if key in OF_TOKENS}
    marked = next((entry[key].cpu().numpy() != 0 for key in OF_TOKENS if key in entry), kept)
    if kept[marked].all():
        return name, entry | kinds
    own = [(name, image.entry) for image in images_of(name, entry) if kept[image.placeholders].all()]
    device = next(value.device for value in entry.values() if isinstance(value, torch.Tensor))
    return name, {key: _joined(key, own, device) for key in (own[0][1] if own else ())} | kinds


def _split(entry: Entry, pixels: str, placeholders: IntArray) -> list[Image] | None:
    """The images of one kind; None where one cannot say which placeholders are those of each image."""
    names = [key for key in (pixels, *BESIDE[pixels]) if key in entry]
    if pixels not in names or len(placeholders) == 0:
        return None
    in_rows = IN_ROWS in names
    if in_rows:
        real = _real(entry[pixels])
        entry = {key: entry[key].flatten(0, 1)[real] for key in names}
    grids = next((grids for patches, grids, _ in GRIDS if patches == pixels), "")
    grid, frames = entry.get(grids), entry.get("num_frames_per_video") if "video" in pixels else None
    images = len(entry[pixels]) if in_rows else _images(entry, pixels, grids)
    held = {key: np.ones(images, np.int64) for key in names}  # of each tensor's first dimension, by image
    weights: IntArray | None = held[pixels]  # placeholders are in proportion to them
    if grid is not None:
        weights = held[pixels] = grid.prod(1).cpu().numpy()
    elif (places := entry.get(PLACES.get(pixels, ""))) is not None:
        weights = (places != -1).all(-1).sum(-1).cpu().numpy().reshape(-1)
        if frames is not None:
            held[pixels] = held[PLACES[pixels]] = of_videos = torch.as_tensor(frames).cpu().numpy()
            weights = np.add.reduceat(weights, np.cumsum(of_videos) - of_videos)
    elif "image_sizes" in names or pixels == AUDIO:  # rows by a rule of the model
        weights = None
    if any(len(entry[key]) != held[key].sum() for key in names):
        return None
    counts = _placeholders_of(weights, images, placeholders)
    if counts is None:
        return None
    found = []
    for at, own in enumerate(np.split(placeholders, np.cumsum(counts)[:-1])):
        if len(own) == 0:
            return None
        begin = {key: int(of[:at].sum()) for key, of in held.items()}
        one = {key: entry[key][begin[key] : begin[key] + int(held[key][at])] for key in names}
        one = {key: value[None] if in_rows else value for key, value in one.items()}
        found.append(Image(int(own[0]), int(own[-1]) + 1, own, one))
    return found


def _real(pixels: torch.Tensor) -> torch.Tensor:
    """[texts * images] of pixels [texts, images, ...]: models leave out images of zeros, which pad a batch."""
    return pixels.flatten(0, 1).flatten(1).any(1)


def _placeholders_of(weights: IntArray | None, images: int, placeholders: IntArray) -> IntArray | None:
    """[images] the number of placeholders of each image; None if unknown."""
    if images == 1:
        return np.array([len(placeholders)])
    if weights is None:  # text between images tells them apart
        begins = np.flatnonzero(np.append(True, np.diff(placeholders) > 1))
        return np.diff(np.append(begins, len(placeholders))) if len(begins) == images else None
    counts, left = np.divmod(len(placeholders) * weights, max(1, int(weights.sum())))
    return None if left.any() else counts


def sampled(entry: Entry) -> bytes:
    """A key that equal entries have in common."""
    found = []
    for name, value in sorted(entry.items()):
        if isinstance(value, torch.Tensor):
            some = value.reshape(-1)[:: max(1, value.numel() // SAMPLED)].double().cpu().numpy().tobytes()
            found += [name.encode(), str((value.shape, value.dtype)).encode(), some]
    return b"/".join(found)


class SequenceMedia:
    """The images of whole sequences whose common beginnings are packed once, as a tree.

    Two sequences share an image's rows if all of its rows lie in what they have in common, and its content is equal.

    Args:
        found: [N] of :func:`entries`.

    Raises:
        ValueError: as :func:`images_of`.
    """

    def __init__(self, found: Sequence[Named]) -> None:
        self.found = found
        self.images = [images_of(*named) for named in found]

    def check(self, sequences: Sequence[IntArray]) -> None:
        """Raises ValueError for a token that stands for an image in some sequence, and for none where it is."""
        standing: set[int] = set()
        for tokens, images in zip(sequences, self.images, strict=True):
            for image in images:
                standing |= set(np.unique(tokens[image.placeholders]).tolist())
        for (name, _), tokens, images in zip(self.found, sequences, self.images, strict=True):
            bare = np.isin(tokens, [*standing])
            for image in images:
                bare[image.placeholders] = False
            if bare.any():
                at = int(bare.argmax())
                raise ValueError(
                    f"token {at} of the sequence of {name} is {tokens[at]}, which stands for an image or video"
                    " elsewhere, and has none: expected its mm_token_type_ids and its image in media"
                )

    def tokens(self, sequences: Sequence[IntArray]) -> list[IntArray]:
        """The sequences with a number for each content of an image, and the ids that stand for it, in the place of its
        placeholders.

        Raises:
            ValueError: as :meth:`check`; token ids that leave no numbers for images.
        """
        self.check(sequences)
        result = [np.array(tokens, np.int64) for tokens in sequences]
        flat = [
            (tokens[image.placeholders].tobytes(), image.entry)
            for tokens, images in zip(result, self.images, strict=True)
            for image in images
        ]
        content = iter(grouped([ids + sampled(entry) for ids, entry in flat], [entry for _, entry in flat]).tolist())
        first = max(int(tokens.max()) for tokens in sequences) + 1
        if first + len(flat) > MAX_TOKEN:
            raise ValueError(f"token ids go up to {first - 1}, expected at most {MAX_TOKEN - len(flat)} beside images")
        for tokens, images in zip(result, self.images, strict=True):
            for image in images:
                tokens[image.placeholders] = first + next(content)
        return result

    def whole(self, shared: SharedPrefixes) -> SharedPrefixes:
        """Return the same sequences without sharing the beginning of an image."""
        common = shared.common.copy()
        for i, s in enumerate(shared.order.tolist()):
            for image in reversed(self.images[s]):
                if image.begin < common[i] < image.end:
                    common[i] = image.begin
        return replace(shared, common=common)

    def packed(self, tree: PrefixTree, layout: Layout) -> Entry:
        """The media of all segments, as inputs of a model whose batch is the packed row of `layout`; see
        :func:`joined`."""
        parts = []
        for offset, s, begin, length in zip(tree.offsets, tree.source, tree.begin, tree.length, strict=False):
            name, entry = self.found[s]
            kinds = {key: entry[key][begin : begin + length] for key in OF_TOKENS if key in entry}
            own = [image.entry for image in self.images[s] if begin <= image.begin < begin + length]
            parts.append(Part(name, kinds, own, int(offset), int(offset + length)))
        return joined(parts, layout)


# ---------------------------------------------------------------- all texts
class Part(NamedTuple):
    """The media of a segment.

    Attributes:
        name: in messages.
        kinds: values of its tokens.
        entries: all others, end to end.
        begin: the packed row of its first token.
        end: the packed row behind the segment, which may lack the last of the tokens.
    """

    name: str
    kinds: Entry
    entries: list[Entry]
    begin: int
    end: int

    @classmethod
    def of(cls, named: Named, begin: int, end: int) -> Part:
        name, entry = named
        kinds = {key: entry[key] for key in OF_TOKENS if key in entry}
        return cls(name, kinds, [{k: v for k, v in entry.items() if k not in kinds}] if entry else [], begin, end)


def joined(parts: Sequence[Part], layout: Layout) -> Entry:
    """The media of all packed segments, as inputs of a model whose batch is one packed row.

    Args:
        parts: in packed order.
        layout: of T rows; its device is that of the result.

    Returns:
        Values of tokens [1, T]; of everything else the values of all segments end to end.

    Raises:
        ValueError: a name that some texts with media have and others lack, shapes that cannot be joined, a last
            prompt token of an image where each response needs a copy of it.
    """
    result, of_tokens = Entry(), Entry()
    for name in dict.fromkeys(name for part in parts for name in part.kinds):
        have = next(part.name for part in parts if name in part.kinds)
        for part in parts:
            if part.entries and name not in part.kinds:
                raise ValueError(f"{part.name} has no {name}, {have} has it: expected all or none")
        of_tokens[name] = _joined_of_tokens(name, parts, layout)
    found = [(part.name, entry) for part in parts for entry in part.entries]
    for name in dict.fromkeys(name for _, entry in found for name in entry):
        some = [named for named in found if name in named[1]]
        for pixels in (pixels for pixels, beside in BESIDE.items() if name in beside):
            for other, entry in found:
                if pixels in entry and name not in entry:
                    raise ValueError(f"{other} has {pixels} and no {name}, {some[0][0]} has it: expected all or none")
        result[name] = _joined(name, some, layout.device)
    for patches, grids, _ in (*GRIDS, (AUDIO, "", 3)):
        if (owners := _owners(parts, patches, grids, layout)) is not None:
            result[SEGMENTS[patches]] = owners
    return result | of_tokens


def _owners(parts: Sequence[Part], patches: str, grids: str, layout: Layout) -> torch.Tensor | None:
    """[images] the segment of each image; None where :func:`check_placeholders` compared the counts of all texts."""
    some = [(part, entry) for part in parts for entry in part.entries if patches in entry]
    if all(_kinds(x.kinds) is not None and _count(x.kinds | entry, patches, grids)[0] is not None for x, entry in some):
        return None
    counts = [sum(_images(entry, patches, grids) for entry in part.entries) for part in parts]
    segments = np.searchsorted(layout.offsets.numpy(), [part.begin for part in parts], "right") - 1
    return torch.from_numpy(np.repeat(segments, counts)).to(layout.device)


def moved(media: Entry, device: torch.device | str | int, non_blocking: bool = False) -> Entry:
    """Copy packed media with all tensors on `device`."""
    return {
        name: value if isinstance(value, list) else value.to(device, non_blocking=non_blocking)
        for name, value in media.items()
    }


def bare_placeholder(input_ids: torch.Tensor, media: Entry) -> int | None:
    """The first row [of 1, T] with a token that stands for an image elsewhere and has none; None without any."""
    if "mm_token_type_ids" not in media:
        return None
    ids, kinds = input_ids[0], media["mm_token_type_ids"][0]
    found = (kinds == 0) & torch.isin(ids, ids[kinds != 0].unique())
    return int(found.int().argmax()) if found.any() else None


def _padded(values: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """Pad the values with zeros at the end, so that all dimensions but `dim` have equal sizes."""
    if len({value.dim() for value in values}) > 1:
        return values
    most = np.max([value.shape for value in values], 0)
    missing = [[0 if at == dim else n for at, n in enumerate((most - value.shape).tolist())] for value in values]
    return [
        pad(x, [n for size in reversed(sizes) for n in (0, size)]) for x, sizes in zip(values, missing, strict=True)
    ]


def _joined_of_tokens(name: str, parts: Sequence[Part], layout: Layout) -> torch.Tensor:
    kinds = next(part.kinds[name] for part in parts if name in part.kinds)
    result = torch.zeros(1, layout.num_tokens, dtype=kinds.dtype, device=layout.device)
    for part in parts:
        if name in part.kinds:
            own, rows = part.kinds[name], part.end - part.begin
            if (own[rows:] != 0).any():
                raise ValueError(
                    f"{part.name}[{name!r}] ends with {int(own[-1])}, expected 0: with labels='roll' every"
                    " response gets a copy of its prompt's last token, which must be text"
                )
            result[0, part.begin : part.end] = own[:rows].to(layout.device)
    return result


def _joined(name: str, found: Sequence[Named], device: torch.device) -> Any:
    values = [entry[name] for _, entry in found]
    if any(isinstance(value, list) for value in values):
        if not all(isinstance(value, list) for value in values):
            raise TypeError(f"media[...][{name!r}] is a list in some texts and a tensor in others, expected one kind")
        return [x for value in values for x in value]
    first_name, beside = found[0]
    dim = int(name in ("pixel_values", IN_ROWS) and IN_ROWS in beside)
    if name in ("pixel_values", IN_ROWS) and not {"image_sizes", IN_ROWS}.isdisjoint(beside):
        # The model knows the size of each image, so processors pad images, and tiles of images, to one size.
        values = _padded(values, dim)
    if name in (AUDIO, *BESIDE[AUDIO]) and BESIDE[AUDIO][0] in beside and len({x.shape[1:-1] for x in values}) == 1:
        values = _padded(values, dim)  # of frames, which the mask leaves out
    first = values[0]
    for (of, entry), value in zip(found, values, strict=True):
        rest = [list(x.shape[:dim] + x.shape[dim + 1 :]) for x in (first, value)]
        if rest[0] != rest[1] or value.dtype != first.dtype:
            raise ValueError(
                f"{of}[{name!r}] has shape {tuple(entry[name].shape)} in {value.dtype},"
                f" {first_name} {tuple(beside[name].shape)} in {first.dtype}: expected shapes that can be"
                f" joined in dimension {dim}"
            )
    return torch.cat([value.to(device) for value in values], dim)

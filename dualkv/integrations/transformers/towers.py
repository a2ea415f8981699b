"""Vision towers in packed calls: each segment's placeholders get the features of its own images.

A part of a walk runs the tower on the images that have rows in it.

With sequence parallelism, a rank runs the tower on its share of the images. The features then go to the ranks that have
the rows of their placeholders, and gradients go back. So a rank's model fills the placeholders of its own rows, as it
does without ranks.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from dualkv.arrays import IntArray
from dualkv.data.apart import held, some
from dualkv.data.media import AUDIO, OF_TOKENS, SECONDS, sampled
from dualkv.data.parts import TreePart
from dualkv.integrations import patching
from dualkv.layout import Layout
from dualkv.sequence_parallel import Shard, exchanged

METHODS = {
    "pixel_values": "get_image_features",
    "pixel_values_videos": "get_video_features",
    AUDIO: "get_audio_features",
}
FRAMES = "feature_attention_mask"  # [audios, frames] of audio
AUDIO_ROWS = "_get_feat_extract_output_lengths"  # the function from these frames to rows, of a tower or its module


@dataclass
class Images:
    """The images of a call, or its videos, or its audio.

    Attributes:
        patches: the input with their pixels.
        name: the input that describes them, in messages.
        rows: [P] the packed rows of their placeholders, on the host.
        counts: [images] the placeholders of each image; None where only the tower's output says it.
        segments: [images] the segment of each image, as packed; None where the packer has compared counts.
        layout: of all rows.
        shard: the ranks that share the rows, if any.
        inputs: the inputs by name, of all images on every rank, or of all parts of a walk.
    """

    patches: str
    name: str
    rows: torch.Tensor
    counts: torch.Tensor | None
    segments: torch.Tensor | None
    layout: Layout
    shard: Shard | None
    inputs: dict[str, Any]

    def check(self, counts: torch.Tensor) -> None:
        """Raises ValueError where placeholders do not lie in the segments of their images."""
        found = owners(self.rows, counts, self.layout, self.name)
        if self.segments is None:
            return
        if len(self.segments) != len(found):
            raise ValueError(
                f"the packer counts {len(self.segments)} images, videos or audio in {self.patches}, the model"
                f" {len(found)}: expected as many"
            )
        expected = self.segments.cpu().numpy()
        differs = np.flatnonzero(found != expected)
        if len(differs):
            at = int(differs[0])
            raise ValueError(
                f"image, video or audio {at} of {self.patches} is one of segment {expected[at]} of the layout, and its"
                f" {int(counts[at])} placeholders lie in segment {found[at]}: expected one image for each placeholder"
                " of every prompt and response"
            )

    def count(self, output: Any) -> None:
        """Check the placeholders of each image, as the tower's output counts them where nothing else does."""
        if self.counts is None:
            self.counts = _counts(output.pooler_output)
            self.check(self.counts)


class OfPart(NamedTuple):
    """The images of a part of a walk.

    Attributes:
        images: of all parts.
        own: [p] the placeholders in the part, among those of `images`, in the order of the part's rows.
        device: of the tower. Inputs may wait in host memory.
    """

    images: Images
    own: IntArray
    device: torch.device

    @classmethod
    def of(cls, images: Images, part: TreePart) -> OfPart:
        places = part.local[images.rows.numpy()]
        order = np.argsort(places, kind="stable")
        return cls(images, order[places[order] >= 0], part.device)

    @classmethod
    def unread(cls, patches: str, inputs: dict[str, Any], part: TreePart) -> OfPart:
        """Make images whose features no row reads."""
        none = torch.zeros(len(inputs[patches]), dtype=torch.int64)
        images = Images(patches, patches, none[:0], none, None, part.batch.layout, None, inputs)
        return cls(images, none[:0].numpy(), part.device)

    def run(self, tower: Callable[..., Any], pixels: str, given: dict[str, Any]) -> Any:
        """The tower's output for the part's placeholders, by a call for the images that have some; see
        :func:`_shared`."""
        of_inputs, counts = held(self.images.patches, self.images.inputs), self.images.counts
        if of_inputs is None or counts is None:  # all run: in each part, or once for their counts
            output = tower(**self._on_device(given))
            self.images.count(output)
            return _of_rows(self.images.patches, output, lambda x: x.index_select(0, _on(x.device, self.own)))
        image = np.repeat(np.arange(len(counts)), counts.numpy())
        runs = np.unique(image[self.own]) if len(self.own) else np.array([of_inputs[self.images.patches].argmin()])
        output = tower(**self._on_device(_given(given, of_inputs, runs, pixels, self.images.patches)))
        index = (np.cumsum(np.isin(image, runs)) - 1)[self.own]
        return _of_rows(self.images.patches, output, lambda x: x.index_select(0, _on(x.device, index)))

    def _on_device(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def owners(rows: torch.Tensor, counts: torch.Tensor, layout: Layout, name: str) -> IntArray:
    """The segment of each image, whose rows are the next `counts` of the placeholders in `rows`."""
    if len(rows) != int(counts.sum()):
        raise ValueError(
            f"{name} describes {len(counts)} images, videos or audio of {int(counts.sum())} rows in all, input_ids has"
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


# ---------------------------------------------------------------- a tower
class Features:
    """The function of a model that runs its tower, in the place of the model's own.

    Attributes:
        instead: a function that somebody had put there before; None without any.
        asked: the images of the next call; None for a call that goes through.
    """

    def __init__(self, module: nn.Module, method: str) -> None:
        self.module, self.method = module, method
        self.instead: Callable[..., Any] | None = vars(module).get(method)
        self.asked: Images | OfPart | None = None

    @property
    def own(self) -> Callable[..., Any]:
        """The function that the model calls when it is not enabled."""
        # No bound method: behind a graph break dynamo looks it up in the module, where this object is.
        return self.instead or partial(getattr(type(self.module), self.method), self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the model's own function, by which `generate` finds its inputs."""
        return inspect.signature(self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked, self.asked = self.asked, None
        own = self.own
        if asked is None:
            return own(*args, **kwargs)
        names = [*inspect.signature(getattr(type(self.module), self.method)).parameters][1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        if isinstance(asked, OfPart):
            return asked.run(own, names[0], given)
        if asked.shard is not None and asked.shard.world_size > 1:
            return _shared(asked, asked.shard, own, names[0], given)
        output = own(*args, **kwargs)
        asked.count(output)
        return output


def install(module: nn.Module) -> None:
    """Put :class:`Features` in the place of the functions that run a model's tower."""
    for method in METHODS.values():
        if hasattr(type(module), method):
            patching.of(module).replace(method, Features(module, method))


def ask(module: nn.Module, images: Mapping[str, Images | OfPart]) -> None:
    """Tell a model's towers which images the next call has; none of a kind that `images` lacks.

    Raises:
        ValueError: somebody has put another function in the place of the tower's.
    """
    for patches, method in METHODS.items():
        tower = getattr(module, method, None)
        if isinstance(tower, Features):
            tower.asked = images.get(patches)
        elif patches in images:
            raise ValueError(
                f"{type(module).__name__}.{method} was replaced after dualkv was enabled, so nobody checks whose images"
                f" {patches} has: enable the model again"
            )


def _counts(features: Any) -> torch.Tensor:
    """[images] the rows of each image."""
    return torch.tensor([len(x) for x in features], dtype=torch.int64)


def rows_of_audio(module: Any, named: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """The input that says how long each audio is, and its rows by the model's own function."""
    features, mask = named[AUDIO], named.get(FRAMES)
    if mask is None or features.dim() != 3 or mask.shape != (len(features), features.shape[2]):
        raise ValueError(
            f"{AUDIO} has shape {tuple(features.shape)}, {FRAMES} {None if mask is None else tuple(mask.shape)},"
            " expected [audios, C, frames] and [audios, frames]"
        )
    lengths = mask.sum(1).cpu()
    rule = getattr(module.audio_tower, AUDIO_ROWS, None)
    if rule is not None:
        return FRAMES, rule(lengths)[1]
    chunk = 2 * module.config.audio_config.n_window
    widths = lengths.clamp(max=chunk)
    if (widths != widths[0]).any():
        raise ValueError(
            f"{FRAMES} has audio of {int(lengths.min())} frames beside longer audio, expected {chunk} frames or more,"
            f" or audio of one length: with longer audio beside it, {type(module).__name__} makes other features of it"
        )
    cls = next(c for c in type(module).__mro__ if c.__module__.startswith("transformers.models."))
    rule = getattr(sys.modules[cls.__module__], AUDIO_ROWS)
    return FRAMES, rule(lengths, *[chunk // 2][: len(inspect.signature(rule).parameters) - 1])


# ---------------------------------------------------------------- ranks
def check_ranks(named: dict[str, Any], names: list[str], shard: Shard) -> None:
    """Raises ValueError on all ranks, if they have other images. Every call compares, also one without images, for
    which a rank that has some would wait."""
    seen = {name: torch.as_tensor(named[name]) for name in (*names, *SECONDS) if named.get(name) is not None}
    seen = {name: value for name, value in seen.items() if name not in OF_TOKENS}
    digest = hashlib.blake2b(sampled(seen), digest_size=7)
    tokens = named["input_ids"] if named.get("input_ids") is not None else named["inputs_embeds"]
    mark = torch.tensor([int.from_bytes(digest.digest(), "big")], device=tokens.device)
    if (shard.join(mark) != mark).any():
        raise ValueError(
            f"{', '.join(seen) or 'images'} differ between the {shard.world_size} ranks that share the rows, expected"
            " those of all images on every rank"
        )


def of_all_ranks(named: dict[str, Any], shard: Shard) -> dict[str, Any]:
    """The inputs of a call with the token ids of all ranks, and with values of tokens for rows that pad the layout."""
    found = dict(named)
    for name in OF_TOKENS:
        values = found.get(name)
        if isinstance(values, torch.Tensor) and values.dim() == 2 and shard.pads(values.shape[1]):
            found[name] = pad(values, (0, shard.layout.num_tokens - values.shape[1]))
    found["input_ids"] = shard.join(named["input_ids"][0])[shard.places.to(named["input_ids"].device)][None]
    return found


def _shared(asked: Images, shard: Shard, tower: Callable[..., Any], pixels: str, given: dict[str, Any]) -> Any:
    """The tower's output for the placeholders of this rank's rows, from the ranks that ran their images; `pixels` names
    the tower's argument with the patches."""
    of_inputs = held(asked.patches, asked.inputs)
    at = np.argsort(shard.host_order)[asked.rows.numpy()]  # among the rows of all ranks, one rank after another
    if of_inputs is None:  # each rank runs all images
        output = tower(**given)
        asked.count(output)
        ordered = np.argsort(at)
        own = ordered[at[ordered] // shard.num_tokens == shard.rank]
        return _of_rows(asked.patches, output, lambda features: features.index_select(0, _on(features.device, own)))
    by_rank = _shares(of_inputs[asked.patches], shard.world_size)
    share = np.flatnonzero(by_rank == shard.rank)
    runs = share if len(share) else np.array([of_inputs[asked.patches].argmin()])  # for the collectives of FSDP
    output = tower(**_given(given, of_inputs, runs, pixels, asked.patches))
    counts = asked.counts
    if counts is None:
        of_all = torch.zeros(len(by_rank), dtype=torch.int64)
        of_all[torch.from_numpy(share)] = _counts(output.pooler_output)[: len(share)]
        of_all = of_all.to(asked.inputs[asked.patches].device)
        dist.all_reduce(of_all, group=shard.group)
        counts = of_all.cpu()
    asked.check(counts)
    ran = np.repeat(by_rank, counts.numpy())
    return _of_rows(asked.patches, output, lambda features: _to_readers(features, shard, at, ran))


def _of_rows(patches: str, output: Any, select: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tower's output with the selected features [rows, C], of all levels at once."""
    first = "last_hidden_state" if patches == AUDIO else "pooler_output"  # the output that models read
    levels = [output[first], *(getattr(output, "deepstack_features", None) or [])]
    flat = [level.flatten(0, -2) if isinstance(level, torch.Tensor) else torch.cat(list(level)) for level in levels]
    parts = select(torch.cat(flat, 1)).split([x.shape[1] for x in flat], 1)
    # Models join features that come image by image, and read two dimensions of others.
    found = [
        part.view(*[1] * (level.dim() - 2), *part.shape) if isinstance(level, torch.Tensor) else (part,)
        for part, level in zip(parts, levels, strict=True)
    ]
    output[first] = found[0]
    if len(levels) > 1:
        output.deepstack_features = found[1:]
    return output


def _shares(weights: IntArray, ranks: int) -> IntArray:
    """[images] the rank that runs each image: the largest images first, each by the rank with the least work."""
    work, found = np.zeros(ranks, np.int64), np.empty(len(weights), np.int64)
    for image in np.argsort(-weights, kind="stable").tolist():
        found[image] = work.argmin()
        work[found[image]] += weights[image]
    return found


def _given(
    given: dict[str, Any], of_inputs: dict[str, IntArray], images: IntArray, pixels: str, patches: str
) -> dict[str, Any]:
    """The arguments of a tower for some images."""
    found = dict(given)
    for name, of in of_inputs.items():
        argument = pixels if name == patches else name
        if given.get(argument) is not None:
            found[argument] = some(given[argument], of, images)
    return found


def _on(device: torch.device, index: IntArray) -> torch.Tensor:
    return torch.from_numpy(index).to(device)


def _to_readers(features: torch.Tensor, shard: Shard, at: IntArray, ran: IntArray) -> torch.Tensor:
    """The features of this rank's placeholders, in the order of its rows, from those [F, C] of images that each rank
    ran: `at` [P] are the places of all placeholders among the rows of one rank after another, `ran` [P] the ranks."""
    local = np.empty(len(ran), np.int64)  # the place among the features of the rank that ran the image
    for rank in range(shard.world_size):
        local[ran == rank] = np.arange(np.count_nonzero(ran == rank))
    ordered, reader = np.argsort(at), at // shard.num_tokens
    sent = ordered[ran[ordered] == shard.rank]
    reads = ordered[reader[ordered] == shard.rank]
    to, of = (np.bincount(x, minlength=shard.world_size).tolist() for x in (reader[sent], ran[reads]))
    received = exchanged(features.index_select(0, _on(features.device, local[sent])), to, of, shard.group)
    return received.index_select(0, _on(features.device, np.argsort(np.argsort(ran[reads], kind="stable"))))

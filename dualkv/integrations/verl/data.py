"""Reads a veRL batch on the host: lengths, groups, and reasons why the batch cannot be packed. Packs micro-batches."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from dualkv.arrays import IntArray, positions, to_device
from dualkv.data.gain import if_it_pays
from dualkv.data.media import OF_TOKENS, SequenceMedia, entries, grouped
from dualkv.data.trees import begins_of_spans, tree_rows, tree_tokens
from dualkv.integrations.verl.options import TREES
from dualkv.layout import Layout
from dualkv.prefixes import SharedPrefixes, shared_prefixes

logger = logging.getLogger(__name__)
POSITION_ROWS = 4  # of positions that veRL sends to models that see images: text, frames, height, width
# Warnings that are given once, because they would come with every batch.
DIFFERING = "differing prompts"
_said: list[str] = []


def _host(x: torch.Tensor) -> IntArray:
    return x.detach().cpu().numpy().astype(np.int64)


def _nested_lens(x: Any) -> IntArray:
    offsets = _host(x.offsets())
    return offsets[1:] - offsets[:-1]


@dataclass(frozen=True)
class Rollouts:
    """The N rollouts of one veRL batch.

    Attributes:
        prompt_lens: [N] tokens of each prompt.
        response_lens: [N] tokens of each response.
        group: [N] the group of each rollout; groups are numbered in the order in which they first appear.
        packed_once: the tokens that rollouts share, less the last one. Each rollout starts its own part with a copy of
            that token, so that the label of every row is the next row's token.
        trees: whether `packed_once` has everything that rollouts have in common, or only prompts.
        marks: the kinds of tokens that stand for images and videos, by their ids (:class:`Images`).
    """

    prompt_lens: IntArray
    response_lens: IntArray
    group: IntArray
    packed_once: SharedPrefixes
    trees: bool = False
    marks: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of_groups(cls, prompt_lens: IntArray, response_lens: IntArray, group: IntArray) -> Rollouts:
        """Rollouts that share the prompt within each group, and nothing else."""
        order = np.argsort(group, kind="stable")
        follows = np.append(False, np.diff(group[order]) == 0)
        common = np.where(follows, prompt_lens[order] - 1, 0)
        return cls(prompt_lens, response_lens, group, SharedPrefixes(prompt_lens + response_lens, order, common))

    def __len__(self) -> int:
        return len(self.group)

    def select(self, some: IntArray) -> Rollouts:
        """Some of the rollouts, in the order of `some`."""
        p, r, group = self.prompt_lens[some], self.response_lens[some], self.group[some]
        return Rollouts(p, r, group, self.packed_once.select(some), self.trees, self.marks)

    def members(self) -> list[IntArray]:
        """The rollouts of each group."""
        order = np.argsort(self.group, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.group))[:-1])


class Images(NamedTuple):
    """The names of inputs that an engine packs beside text, and by the ids of tokens that stand for images (1) and
    videos (2) their kinds."""

    inputs: tuple[str, ...]
    marks: dict[int, int]


def not_packable(data: Any, images: Images | str) -> str | None:
    """Say why this batch (a TensorDict) cannot be packed and veRL's own computation runs it; None if it can. `images`
    are what the engine packs beside text, or why it packs nothing."""
    if any(key not in data for key in ("prompts", "responses", "loss_mask")) or not data["input_ids"].is_nested:
        return "it does not consist of prompts and responses without padding in between"
    if tu.get_non_tensor_data(data, "distillation_use_topk", False) or tu.get_non_tensor_data(
        data, "distillation_only", False
    ):
        return "top-k distillation reads the teacher's values at every row"
    rows = data["position_ids"]
    row_count = len(rows.values()) if rows.dim() == 3 else 1  # the nested tensor's own shape may be of another order
    held = sorted({name for entry in _modalities(data) for name in entry})
    if held and isinstance(images, str):
        return f"it holds images, audio or video, and {images}"
    if row_count > 1 and isinstance(images, str):
        return f"its positions have {row_count} rows, and {images}"
    if row_count not in (1, POSITION_ROWS):
        return f"its positions have {row_count} rows, expected {POSITION_ROWS}: text, frames, height and width"
    if isinstance(images, Images) and (other := [name for name in held if name not in images.inputs]):
        return f"it holds {other[0]}, which is not known to run packed"
    sequences, prompts, responses = _nested_lens(data["input_ids"]), _lens(data, "prompts"), _lens(data, "responses")
    if not np.array_equal(prompts + responses, sequences):
        return "its sequences are not a prompt followed by a response"
    if (prompts == 0).any():
        return f"the prompt of rollout {int(np.argmin(prompts))} is empty"
    mask = data["loss_mask"]
    columns = _nested_lens(mask) if mask.is_nested else np.full(len(data), mask.shape[1])
    expected = responses if mask.is_nested else np.full(len(data), data["responses"].shape[-1])
    if not np.array_equal(columns, expected):
        return "prompt tokens are in the loss"
    if held and isinstance(images, Images):
        try:
            seen, tokens = _seen(data, images.marks)
            if seen is not None:
                seen.check(tokens)
        except (ValueError, TypeError) as error:
            return str(error)
    of_text = rows.values() if rows.dim() == 2 else rows.values()[0]
    if not np.array_equal(_host(of_text), positions(sequences)):
        return "its positions do not count from 0 in every sequence"
    return None


def _modalities(data: Any) -> list[dict[str, Any]]:
    """The inputs beside text of each rollout, without veRL's own for its metrics."""
    entries = (getattr(entry, "data", entry) for entry in data.get("multi_modal_inputs", []))
    return [{k: v for k, v in (entry or {}).items() if v is not None and k != "images_seqlens"} for entry in entries]


def _lens(data: Any, name: str) -> IntArray:
    """[N] tokens of the prompts or responses."""
    if data[name].is_nested:
        return _nested_lens(data[name])
    mask, width = data["attention_mask"], data["prompts"].shape[1]
    return _host((mask[:, :width] if name == "prompts" else mask[:, width:]).sum(1))


def _seen(data: Any, marks: dict[int, int]) -> tuple[SequenceMedia | None, list[IntArray]]:
    """The images of a batch's sequences, None without any; and the sequences."""
    sequences = np.split(_host(data["input_ids"].values()), _host(data["input_ids"].offsets())[1:-1])
    found = _modalities(data)
    if not any(found):
        return None, sequences
    for entry, tokens in zip(found, sequences, strict=True):
        kinds = sum((kind * (tokens == token) for token, kind in marks.items()), np.zeros_like(tokens))
        entry[OF_TOKENS[0]] = torch.from_numpy(kinds)
    names = [f"multi_modal_inputs[{i}]" for i in range(len(found))]
    return SequenceMedia(entries(found, [len(x) for x in sequences], names=names) or []), sequences


def read(data: Any, min_shared: int | None = None, images: Images | str = "", fixed_cuts: bool = False) -> Rollouts:
    """The rollouts of a batch for which :func:`not_packable` returned None.

    Without `min_shared`, equal prompts are packed once. With `min_shared`, every common beginning of sequences is
    packed once, as a tree; a segment of the tree with fewer tokens than `min_shared` is repeated. Where that saves next
    to nothing (:mod:`dualkv.data.gain`), nothing is shared, and a warning says so, once. Images are shared, as a whole,
    where their content is equal. With `fixed_cuts` the segments of a rollout do not depend on the others: it is cut
    before its response, or with `min_shared` before each run of tokens that count, and nowhere else.

    A group is the rollouts with equal prompts and images. If prompts of one `uid` differ, as an agent may change them,
    a warning names them, once.
    """
    prompt_lens, response_lens = _lens(data, "prompts"), _lens(data, "responses")
    sequences = data["input_ids"]
    tokens, starts = _host(sequences.values()), _host(sequences.offsets())[:-1]
    marks = images.marks if isinstance(images, Images) else {}
    seen, keys = _seen(data, marks)
    if seen is not None:
        keys = seen.tokens(keys)
    group = grouped([key[:length].tobytes() for key, length in zip(keys, prompt_lens, strict=True)], [])
    rollouts = replace(Rollouts.of_groups(prompt_lens, response_lens, group), marks=marks)
    uids = tu.get(data, "uid")
    ask = isinstance(uids, list) and DIFFERING not in _said
    if ask and (text := _differing_prompts(rollouts, uids, tokens, starts)):
        _said.append(DIFFERING)
        logger.warning(text)
    cuts = None
    if fixed_cuts:
        mask = None if min_shared is None else data["loss_mask"]
        cuts = begins_of_spans(_counted(prompt_lens, response_lens, mask), "roll", seen)

    def in_segments(once: SharedPrefixes) -> SharedPrefixes:
        if cuts is not None:
            return once.cut_at(cuts)
        return once if seen is None else seen.whole(once)

    if min_shared is None:
        return replace(rollouts, packed_once=in_segments(rollouts.packed_once))

    def with_copies(shared: SharedPrefixes) -> SharedPrefixes:
        common = np.minimum(shared.common, _same_temperature(data, rollouts, shared.order))
        return in_segments(replace(shared, common=np.maximum(common - 1, 0)))

    shared = shared_prefixes(keys)
    if cuts is None:
        shared, gain = if_it_pays(shared.at_least(min_shared))
        once = with_copies(shared)
    else:  # parts are shared as a whole
        once, gain = if_it_pays(with_copies(shared).at_least(min_shared))
    if not gain.pays and TREES not in _said:
        _said.append(TREES)
        logger.warning("dualkv: %s is set, but %s", TREES, gain)
    return replace(rollouts, packed_once=once, trees=True)


def _counted(prompt_lens: IntArray, response_lens: IntArray, mask: torch.Tensor | None) -> list[npt.NDArray[np.bool_]]:
    """The tokens of each sequence that count: those of a mask of responses, or without one all of a response, and the
    first token behind a prompt, even if the response is empty."""
    lens = zip(prompt_lens.tolist(), response_lens.tolist(), strict=True)
    if mask is None:
        return [np.arange(p + max(r, 1)) >= p for p, r in lens]
    rows = [_host(row) != 0 for row in mask.unbind()]
    return [np.append(np.zeros(p, bool), row[:r]) for row, (p, r) in zip(rows, lens, strict=True)]


def _same_temperature(data: Any, rollouts: Rollouts, order: IntArray) -> IntArray:
    """[N] the most tokens that each rollout of `order` may share with the one before it: if their temperatures differ,
    only the prompt."""
    lens = rollouts.prompt_lens + rollouts.response_lens
    may = lens[order]
    temperature = data["temperature"]
    if isinstance(temperature, torch.Tensor):
        differs = np.append(False, np.diff(temperature.cpu().double().numpy()[order]) != 0)
        prompts = np.minimum(rollouts.prompt_lens[order], rollouts.prompt_lens[np.roll(order, 1)])
        may = np.where(differs, prompts, may)
    return may


def _differing_prompts(rollouts: Rollouts, uids: list[Any], tokens: IntArray, starts: IntArray) -> str | None:
    """A sentence that names the first two rollouts with one `uid` and different prompts; None if there are none."""
    first: dict[Any, int] = {}
    for i, uid in enumerate(uids):
        j = first.setdefault(uid, i)
        if rollouts.group[i] == rollouts.group[j]:
            continue
        a, b = (tokens[starts[r] : starts[r] + rollouts.prompt_lens[r]] for r in (j, i))
        both = min(len(a), len(b))
        differs = np.flatnonzero(a[:both] != b[:both])
        where = f"at token {differs[0]}" if len(differs) else f"in length ({len(a)} and {len(b)} tokens)"
        if not len(differs) and len(a) == len(b):
            where = "in their images"
        return (
            f"dualkv: rollouts {j} and {i} have the uid {uid}, but their prompts differ {where};"
            " each is packed with equal prompts only"
        )
    return None


@dataclass(frozen=True)
class PackedRollouts:
    """One micro-batch, packed, on the host, with the rows of veRL's sequences to which its values belong.

    T is the number of packed rows, S of segments, M of response tokens, U of rows that predict a response token.

    Attributes:
        input_ids: [T] int64; each row predicts the next row's token.
        layout: the segments.
        source: [S] int64: a rollout to which each segment belongs.
        head_rows: [U] int64, ascending: rows that predict a response token. Rollouts may share a row.
        value: [M] int64: for each response token, the index in `head_rows` of the row that predicts it.
        sequence_rows: [M] int64: for each response token, the row that predicts it among the rows of the replicated
            sequences, concatenated in the order of the micro-batch.
        packed_rows: [rows] int64: for each row of the replicated sequences, the packed row.
        position_ids: [rows, T] int64 of models that see images, of text first; None where veRL sends one row.
        media: inputs of the model for the images of all segments, each once.
        labels: [T] int64: the token that each row predicts, where that is not the next row's, as in a part of a walk.
    """

    input_ids: torch.Tensor
    layout: Layout
    source: torch.Tensor
    head_rows: torch.Tensor
    value: torch.Tensor
    sequence_rows: torch.Tensor
    packed_rows: torch.Tensor
    position_ids: torch.Tensor | None
    media: dict[str, torch.Tensor]
    labels: torch.Tensor | None = None

    def to_sequences(self, values: torch.Tensor, sequences: Any) -> torch.Tensor:
        """Values [U, ...] of `head_rows` at the rows of the nested `sequences` of the micro-batch.

        Rollouts that share a row all get its value. Rows that predict no response token are NaN, so that a loss which
        reads them shows it.
        """
        return self.tokens_to_sequences(values[to_device(self.value, values.device)], sequences)

    def tokens_to_sequences(self, values: torch.Tensor, sequences: Any) -> torch.Tensor:
        """:meth:`to_sequences` of values [M, ...], one for each response token."""
        total = int(sequences.values().shape[0])
        whole = values.new_full((total, *values.shape[1:]), torch.nan)
        whole = whole.index_copy(0, to_device(self.sequence_rows, values.device), values)
        return torch.nested.nested_tensor_from_jagged(whole, sequences.offsets())


def on_device(data: TensorDict, device: Any) -> TensorDict:
    """Copy a micro-batch to a device. Unlike :meth:`TensorDict.to` this does not wait for what runs there."""
    copies: dict[int, torch.Tensor] = {}  # of offsets, which nested tensors that share them share there too

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not x.is_nested:
            return to_device(x, device)
        if x.dim() != 2:  # positions of models that see images, which have more rows
            return x.to(device)
        nested: Any = x
        offsets = nested.offsets()
        if id(offsets) not in copies:
            copies[id(offsets)] = to_device(offsets, device)
        lengths = {"min_seqlen": nested._maybe_min_seqlen, "max_seqlen": nested._maybe_max_seqlen}
        return torch.nested.nested_tensor_from_jagged(
            to_device(nested.values(), device), copies[id(offsets)], **lengths
        )

    return TensorDict({name: copy(x) for name, x in data.items()}, batch_size=data.batch_size, device=device)


def pack(data: Any, rollouts: Rollouts) -> PackedRollouts:
    """Pack a micro-batch, a TensorDict of rollouts for which :func:`read` returned `rollouts`. Raises ValueError for
    rollouts that share rows and have other positions there."""
    p, r = rollouts.prompt_lens, rollouts.response_lens
    tree = rollouts.packed_once.tree()
    sequence_rows = np.repeat(np.cumsum(p + r) - r - 1, r) + positions(r)
    packed_rows = tree_rows(tree)
    predicts = packed_rows[sequence_rows]
    is_head = np.zeros(tree.offsets[-1], bool)
    is_head[predicts] = True
    arrays = (
        tree_tokens(tree, [_host(s) for s in data["input_ids"].unbind()]),
        tree.source,
        np.flatnonzero(is_head),
        (np.cumsum(is_head) - 1)[predicts],
        sequence_rows,
        packed_rows,
    )
    input_ids, source, head_rows, value, of_sequences, of_packed = (torch.from_numpy(x) for x in arrays)
    position_ids = None
    if data["position_ids"].dim() == 3:
        replicated = _host(data["position_ids"].values())  # [rows, tokens]
        cuts = np.cumsum(p + r)[:-1]
        once = np.stack([tree_tokens(tree, np.split(row, cuts)) for row in replicated])
        if not np.array_equal(once[:, packed_rows], replicated):
            raise ValueError("position_ids differ between rollouts with equal prompts, expected equal positions")
        position_ids = torch.from_numpy(once)
    layout = Layout._from_arrays(tree.offsets, tree.parent, "cpu", last=tree.last)
    seen, _ = _seen(data, rollouts.marks)
    media = {} if seen is None else seen.packed(tree, layout)
    for name in OF_TOKENS:  # the model has positions
        media.pop(name, None)
    return PackedRollouts(input_ids, layout, source, head_rows, value, of_sequences, of_packed, position_ids, media)

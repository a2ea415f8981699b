"""Turn rollouts into packed groups, and packed values back into values of rollouts.

`pack` and `pack_padded` store every prompt once, followed by its responses. The prompt's last token predicts the first
token of every response. There are two label styles for that:

- `"gather"`: the whole prompt is shared, and `predict_rows` names its last row once for each response.
- `"roll"`: P-1 prompt tokens are shared, and each response starts with its own copy of the last prompt token. Then
  every row predicts the token of the next row, and `labels` work with heads and losses that expect one label a row.

Values of response tokens are always [M, ...]: the responses in the order of `PackedBatch.order`, each from its first
token to its last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from dualkv.arrays import (
    IntArray,
    TokenIds,
    check_integers,
    check_one_device,
    check_zeros_and_ones,
    outside_inference_mode,
    ranges,
    sequence_list,
    to_host,
    token_tensor,
)
from dualkv.data import media as images
from dualkv.data.rows import Form, PackedRows, as_rows, check_unpacked, of_packed_rows
from dualkv.layout import Layout

GroupIds = Sequence[Hashable] | npt.NDArray[Any] | torch.Tensor
LabelStyle = Literal["gather", "roll"]


@dataclass(frozen=True, eq=False, repr=False)
class PackedBatch(PackedRows):
    """Packed groups as input of a model, and the way back to one row per rollout.

    Made by :func:`pack` and :func:`pack_padded`. T packed tokens, N rollouts, M response tokens.

    Attributes:
        input_ids: [1, T] int64.
        layout: which rows belong to which prompt and response.
        label_style: "gather": `predict_rows` says which row predicts a token. "roll": each response has its own copy of
            its prompt's last token, and each row predicts the token of the next row.
        order: [N] int64, on the host: the index in the input of each response of [M]. Responses that came as lists, one
            list a prompt, stay in the order of the input.
        padded_width: columns of `unpack(form="padded")`: those of the padded input, or the longest response.
        media: inputs of the model for the images, videos and audio of all segments, each once: values of tokens
            (`mm_token_type_ids`) as [1, T], all others end to end; `image_segments` [images] where only the model can
            say how many placeholders an image has. Call the model with `**batch.media`.
    """

    input_ids: torch.Tensor
    layout: Layout
    label_style: LabelStyle
    order: IntArray
    padded_width: int
    media: dict[str, Any] = field(default_factory=dict)
    _columns: IntArray | None = None  # [N] of the input, the column of each response's first token; None: all 0
    _places: IntArray | None = None  # [N] of [M], each response's place among the packed ones; None: in packed order

    @property
    def num_rollouts(self) -> int:
        """N."""
        return len(self.order)

    @property
    def num_response_tokens(self) -> int:
        """M."""
        return int(self._packed_lens.sum())

    @property
    def response_lens(self) -> list[int]:
        """Tokens of each rollout's response, in the order of the input."""
        return self._packed_lens[self._inverse].tolist()

    # ------------------------------------------------------------------ per-token tensors, made at the first access
    @cached_property
    @outside_inference_mode
    def predict_rows(self) -> torch.Tensor:
        """[M] int64: the packed row that predicts each response token."""
        rows = self._target_rows - 1
        if self.label_style == "gather":
            some = self._packed_lens > 0
            # The row before a response belongs to another response, except for the first one: take the prompt's last.
            first = torch.from_numpy(self._packed_starts[some]).to(self.device)
            rows[first] = torch.from_numpy(self._segments(self._parent)[1][some] - 1).to(self.device)
        return rows

    @cached_property
    @outside_inference_mode
    def targets(self) -> torch.Tensor:
        """[M] int64: the response tokens."""
        return self.input_ids[0].index_select(0, self._target_rows)

    # ------------------------------------------------------------------ the way back
    def unpack(self, values: torch.Tensor, form: Form = "list", padding_value: float = 0) -> Any:
        """Values of response tokens as one row per rollout, in the order of the input; differentiable.

        Args:
            values: [M, ...] one value for each response token, such as log-probabilities.
            form: "list" for N tensors [R_i, ...]; "padded" for one tensor [N, padded_width, ...] with each response in
                the columns that it had in the padded input, or from column 0 on; "nested" for a jagged nested tensor of
                N rows.
            padding_value: fills "padded" around each response.

        Raises:
            ValueError: not one value for each response token, an unknown form, or values that require a gradient though
                no attention has used the layout (:meth:`Layout.mark_used`).
        """
        lens = self._packed_lens[self._inverse]
        check_unpacked(values, self.num_response_tokens, "response token", form, self.layout)
        if not np.array_equal(self.order, np.arange(len(self.order))):
            values = values.index_select(0, ranges(self._packed_starts[self._inverse], lens, values.device))
        return as_rows(values, lens, form, self.padded_width, padding_value, self._columns)

    def unpack_sequences(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Values of packed rows as full sequences, prompt and response, in the order of the input; differentiable.

        Args:
            values: [T, ...] or [1, T, ...] one value for each packed row, such as `input_ids` or hidden states.

        Returns:
            N tensors [P_i + R_i, ...].

        Raises:
            ValueError: not one value for each packed row, or values as :meth:`unpack` refuses them.
        """
        values = of_packed_rows(values, self.layout)
        # In both styles a sequence is the rows of its prompt's segment, then the rows of its own segment.
        pieces = np.stack([self._parent, self._leaf], 1)[self._inverse].reshape(-1)
        begin, end = self._segments(pieces)
        rows = values.index_select(0, ranges(begin, end - begin, values.device))
        return list(rows.split((end - begin).reshape(-1, 2).sum(1).tolist()))

    def __repr__(self) -> str:
        return (
            f"PackedBatch({self.num_rollouts} rollouts, {self.num_response_tokens} response tokens, "
            f"labels={self.label_style!r}, {self.layout!r})"
        )

    # ------------------------------------------------------------------ host side, [N] in the order of [M]
    def _segments(self, index: IntArray) -> tuple[IntArray, IntArray]:
        """The first row of each segment in `index`, and the row after its last one."""
        offsets = self.layout.offsets.numpy().astype(np.int64)
        return offsets[index], offsets[index + 1]

    @cached_property
    def _leaf(self) -> IntArray:
        """Segment of each response."""
        leaves = np.flatnonzero(self.layout.parent.numpy() >= 0)
        return leaves if self._places is None else leaves[self._places]

    @cached_property
    def _parent(self) -> IntArray:
        """Segment of each response's prompt."""
        return self.layout.parent.numpy()[self._leaf].astype(np.int64)

    @cached_property
    def _packed_lens(self) -> IntArray:
        """Tokens of each response, without its copy of a prompt token."""
        begin, end = self._segments(self._leaf)
        return end - begin - label_copies(self.label_style)

    @cached_property
    def _packed_starts(self) -> IntArray:
        """The index in [M] at which each response's values begin."""
        return np.cumsum(self._packed_lens) - self._packed_lens

    @cached_property
    def _tokens_of_row(self) -> IntArray:
        """[U] the number of response tokens that each row predicts, for rows that predict any, in their order."""
        group = np.unique(self._parent, return_inverse=True)[1]
        tokens = np.bincount(group, self._packed_lens).astype(np.int64)
        # A prompt's last row predicts one token for each response that is not empty, every other row one token.
        extra = np.maximum(np.bincount(group, self._packed_lens > 0).astype(np.int64) - 1, 0)
        if self.label_style == "roll":
            extra[:] = 0
        count = np.ones(int((tokens - extra).sum()), np.int64)
        first = np.cumsum(tokens - extra) - (tokens - extra)  # each group's last prompt row
        count[first[extra > 0]] += extra[extra > 0]
        return count

    @cached_property
    def _inverse(self) -> IntArray:
        """The index in the order of [M] of each rollout of the input."""
        return np.argsort(self.order)

    @cached_property
    @outside_inference_mode
    def _target_rows(self) -> torch.Tensor:
        """[M] the packed row that holds each response token."""
        begin, _ = self._segments(self._leaf)
        return ranges(begin + label_copies(self.label_style), self._packed_lens, self.device)


@outside_inference_mode
def pack(
    prompts: Sequence[TokenIds] | torch.Tensor,
    responses: Sequence[TokenIds] | Sequence[Sequence[TokenIds]] | torch.Tensor,
    *,
    labels: LabelStyle = "gather",
    group_ids: GroupIds | None = None,
    media: images.Media | None = None,
    response_media: images.Media | Sequence[images.Media] | None = None,
    device: torch.device | str | None = None,
) -> PackedBatch:
    """Pack unpadded token sequences. The type of `responses` selects one of two forms:

    - grouped: G prompts, and a list of responses for each prompt. Equal prompts are packed once, and values of response
      tokens stay in the order of the input;
    - one prompt for each rollout: N prompts and N responses. Rollouts are grouped by `group_ids`, or by equal prompts
      without `group_ids`. Groups keep the order in which they first appear.

    Prompts are equal if their tokens and their media are.

    Tokens on a GPU stay there. To compare prompts, they are copied to the host, once: in the second form all of them,
    in the first form only prompts that are as long as another one.

    Args:
        prompts: a list of 1-D integer tensors, arrays or lists, or a jagged nested tensor.
        responses: the same, or a list of such lists. Responses may be empty, prompts may not.
        labels: "gather" or "roll", see `PackedBatch.label_style`.
        group_ids: [N] hashable values (such as veRL's `uid`) or an integer tensor; only with one prompt per rollout.
            Rollouts of different ids share nothing: `range(N)` packs every sequence by itself.
        media: one mapping for each prompt (None for text alone): what a processor returns for this prompt, such as
            `pixel_values` [patches, C], `image_grid_thw` [images, 3] and `mm_token_type_ids` [P] or [1, P]. The media
            of a shared prompt are kept once, in `PackedBatch.media`. Media are compared by content. `input_ids` and
            `attention_mask` in a mapping are left out.
        response_media: one mapping (or None) for each response, in the form of `responses`: what a processor returns
            for this response, such as a screenshot that a tool wrote into it. Each needs values of its tokens, which
            say where its images are.
        device: of the batch; by default the device of the tokens.

    Raises:
        ValueError: an empty prompt, a group without responses, different prompts or media in one group of `group_ids`,
            negative tokens and placeholders without images (both checked on the CPU only), numbers of entries that do
            not match, tensors on different devices; patches, grids and placeholder tokens that do not match.
        TypeError: tokens that are not integers, group ids that cannot be hashed, media that are no mappings of tensors.
    """
    prompt_list, response_list = sequence_list("prompts", prompts), sequence_list("responses", responses)
    if len(prompt_list) != len(response_list):
        raise ValueError(f"responses has {len(response_list)} entries for {len(prompt_list)} prompts, expected as many")
    if not _is_grouped(response_list, group_ids is not None):
        own = [token_tensor(f"prompts[{i}]", p) for i, p in enumerate(prompt_list)]
        answers = [token_tensor(f"responses[{i}]", r) for i, r in enumerate(response_list)]
        of_prompts = images.entries(media, [len(p) for p in own])
        of_responses = _of_responses(response_media, of_prompts, [len(r) for r in answers])
        return _pack_rollouts(own, answers, labels, group_ids, of_prompts, of_responses, device)
    if group_ids is not None:
        raise ValueError(
            "group_ids is given and responses is grouped already, expected one prompt and response a rollout"
        )
    for g, group in enumerate(response_list):
        if isinstance(group, (torch.Tensor, np.ndarray)) or not isinstance(group, Sequence):
            raise TypeError(f"responses[{g}] is a {type(group).__name__}, expected a list of responses like the others")
        if len(group) == 0:
            raise ValueError(f"responses[{g}] is empty, expected at least one response a prompt")
    group_prompts = [token_tensor(f"prompts[{g}]", p) for g, p in enumerate(prompt_list)]
    flat = [
        token_tensor(f"responses[{g}][{i}]", r) for g, group in enumerate(response_list) for i, r in enumerate(group)
    ]
    counts = np.array([len(group) for group in response_list], np.int64)
    of_prompts = images.entries(media, [len(p) for p in group_prompts])
    of_responses = _of_responses(response_media, of_prompts, [len(r) for r in flat], counts.tolist())
    merged = _equal_prompts(group_prompts, of_prompts)
    leaders = np.unique(merged, return_index=True)[1].tolist()
    packed = np.argsort(np.repeat(merged, counts), kind="stable")
    groups = np.bincount(merged, counts).astype(np.int64)
    batch = _assemble(group_prompts, flat, leaders, packed, groups, labels, of_prompts, of_responses, device)
    return replace(batch, order=np.arange(len(flat)), _places=np.argsort(packed))


@outside_inference_mode
def pack_padded(
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    response_ids: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    labels: LabelStyle = "gather",
    group_ids: GroupIds | None = None,
    media: images.Media | None = None,
    response_media: images.Media | None = None,
    device: torch.device | str | None = None,
) -> PackedBatch:
    """Pack a padded batch, such as those of veRL and TRL.

    Prompts are padded on the left and responses on the right, or in any other way that leaves the tokens of a row
    together. `unpack(form="padded")` returns [N, Rmax] with each value in the column of its token.

    Args:
        prompt_ids: [N, Pmax] integers.
        prompt_mask: [N, Pmax] booleans, or zeros and ones of any dtype: 1 for the prompt's tokens.
        response_ids: [N, Rmax] integers.
        response_mask: [N, Rmax] as prompt_mask, for the response's tokens: the attention mask, not the loss mask.
        labels: as for :func:`pack`.
        group_ids: [N] as for :func:`pack`; without it rollouts are grouped by equal prompts.
        media: as for :func:`pack`, one mapping (or None) for each row; values of tokens may have Pmax columns.
        response_media: the same of responses; values of tokens may have Rmax columns.
        device: as for :func:`pack`.

    Raises:
        ValueError: shapes that do not match, a mask with holes or with other values than zeros and ones (an additive
            mask), and all errors of :func:`pack`.
        TypeError: tokens that are not integers, group ids that cannot be hashed.
    """
    runs = []
    for name, ids, mask in (("prompt", prompt_ids, prompt_mask), ("response", response_ids, response_mask)):
        check_integers(f"{name}_ids", ids)
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"{name}_mask must be a tensor, got a {type(mask).__name__}")
        if ids.dim() != 2:
            raise ValueError(f"{name}_ids must have two dimensions [N, tokens], got shape {tuple(ids.shape)}")
        if mask.shape != ids.shape:
            raise ValueError(
                f"{name}_mask has shape {tuple(mask.shape)}, expected that of {name}_ids, {tuple(ids.shape)}"
            )
        if mask.device != prompt_ids.device:
            raise ValueError(f"{name}_mask is on {mask.device}, prompt_ids on {prompt_ids.device}, expected one device")
        runs.append(_mask_runs(mask))
    if len(prompt_ids) != len(response_ids):
        raise ValueError(f"response_ids has {len(response_ids)} rows, prompt_ids {len(prompt_ids)}, expected as many")
    if len(prompt_ids) == 0:
        raise ValueError("prompt_ids has no rows, expected at least one rollout")
    # One copy to the host for both masks: [2, 4, N].
    split, spans = [], []
    for (name, ids, mask), (first, last, count, unclear) in zip(
        (("prompt", prompt_ids, prompt_mask), ("response", response_ids, response_mask)),
        torch.stack(runs).cpu().numpy(),
        strict=True,
    ):
        if unclear.any():
            at = int(np.argmax(unclear > 0))
            check_zeros_and_ones(f"{name}_mask[{at}]", mask[at].cpu().float().numpy())
        if mask.is_floating_point() and not count.any():
            raise ValueError(
                f"{name}_mask is {mask.dtype} and 0 everywhere, as an additive mask without padding is: expected ones"
                " for tokens, and booleans or integers for a mask without any"
            )
        holes = (count > 0) & (count != last - first + 1)
        if holes.any():
            at = int(np.argmax(holes))
            raise ValueError(
                f"{name}_mask[{at}] has holes, expected the tokens of a row together (pass the attention mask, not the "
                "mask of tokens that count in the loss)"
            )
        spans.append([slice(*ends) for ends in np.stack([first, first + count], 1).tolist()])
        begin = np.arange(len(ids)) * ids.shape[1] + first
        cuts = np.stack([begin, begin + count], 1).reshape(-1)
        split.append(list(ids.reshape(-1).long().tensor_split(cuts.tolist())[1::2]))
    of_prompts = images.entries(media, [len(p) for p in split[0]], spans[0])
    of_responses = _of_responses(response_media, of_prompts, [len(r) for r in split[1]], columns=spans[1])
    batch = _pack_rollouts(split[0], split[1], labels, group_ids, of_prompts, of_responses, device)
    columns = np.array([span.start for span in spans[1]])
    return replace(batch, padded_width=response_ids.shape[1], _columns=columns)


def _mask_runs(mask: torch.Tensor) -> torch.Tensor:
    """mask [N, L] -> int64 [4, N] on its device: the first column that is set, the last one, the number of those that
    are set, and of those that are neither 0 nor 1."""
    width = mask.shape[1]
    if width == 0:
        return torch.zeros(4, len(mask), dtype=torch.int64, device=mask.device)
    is_set = (mask != 0).view(torch.uint8)
    unclear = torch.zeros_like(is_set) if mask.dtype == torch.bool else is_set & (mask != 1)
    return torch.stack([is_set.argmax(1), width - 1 - is_set.flip(1).argmax(1), is_set.sum(1), unclear.sum(1)])


def label_copies(style: LabelStyle) -> int:
    """Copies of the prompt's last token at the start of each response."""
    return int(style == "roll")


def check_label_style(style: object) -> None:
    if style not in get_args(LabelStyle):
        raise ValueError(f"labels is {style!r}, expected 'gather' or 'roll'")


def _is_grouped(responses: Sequence[Any], has_group_ids: bool) -> bool:
    """Whether the entries are lists of responses. The first entry that is not an empty list decides."""
    for entry in responses:
        if isinstance(entry, (torch.Tensor, np.ndarray)) or not isinstance(entry, Sequence):
            return False
        if len(entry) > 0:
            return np.ndim(entry[0]) > 0
    return not has_group_ids


def _of_responses(
    media: Any,
    of_prompts: list[images.Named] | None,
    lens: list[int],
    counts: list[int] | None = None,
    columns: list[slice] | None = None,
) -> list[images.Named] | None:
    """The media of all responses [N], with their images checked; `counts` are the responses of each group."""
    if media is None:
        return None
    names = [f"response_media[{i}]" for i in range(len(lens))]
    if counts is not None:
        names = [f"response_media[{g}][{i}]" for g, count in enumerate(counts) for i in range(count)]
        if [len(group) if isinstance(group, Sequence) else -1 for group in media] != counts:
            raise ValueError(f"response_media is not in the form of responses, expected lists of {counts} mappings")
        media = [entry for group in media for entry in group]
    found = images.entries(media, lens, columns, names)
    for named in found or []:
        images.images_of(*named)
    images.check_placeholders([*(of_prompts or []), *(found or [])])
    return found


def _pack_rollouts(
    prompts: list[torch.Tensor],
    responses: list[torch.Tensor],
    labels: LabelStyle,
    group_ids: GroupIds | None,
    media: list[images.Named] | None,
    response_media: list[images.Named] | None,
    device: torch.device | str | None,
) -> PackedBatch:
    """Pack rollouts with one prompt each: group them, then pack in the order of the groups."""
    host = to_host(prompts)
    keys: list[Hashable] = [p.tobytes() for p in host] if group_ids is None else _group_keys(group_ids, len(prompts))
    of_media = [entry for _, entry in media or []]
    group = images.grouped(keys, of_media if group_ids is None else [])
    leader = np.unique(group, return_index=True)[1].tolist()
    for i, first in enumerate(np.array(leader)[group].tolist() if group_ids is not None else ()):
        differs = images.difference(of_media[i], of_media[first]) if of_media else None
        if not np.array_equal(host[i], host[first]):
            differs = "prompts"
        if differs is not None:
            raise ValueError(
                f"{differs} of rollouts {first} and {i} differ, but group_ids puts both into group {keys[i]!r}"
            )
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group)
    return _assemble(prompts, responses, leader, order, counts, labels, media, response_media, device)


def _equal_prompts(prompts: list[torch.Tensor], media: list[images.Named] | None) -> IntArray:
    """[G] the group of each prompt, numbered in the order of their first."""
    lens = Counter(map(len, prompts))
    some = [i for i, prompt in enumerate(prompts) if lens[len(prompt)] > 1]
    if not some:
        return np.arange(len(prompts))
    keys = [b"%d" % i for i in range(len(prompts))]
    for i, tokens in zip(some, to_host([prompts[i] for i in some]), strict=True):
        keys[i] = b"=" + tokens.tobytes()  # differs from every number
    return images.grouped(keys, [entry for _, entry in media or []])


def _group_keys(group_ids: GroupIds, rollouts: int) -> list[Hashable]:
    if isinstance(group_ids, (torch.Tensor, np.ndarray)):
        group_ids = group_ids.tolist()
    keys = list(group_ids) if isinstance(group_ids, Iterable) else group_ids
    if not isinstance(keys, list) or len(keys) != rollouts:
        found = len(keys) if isinstance(keys, list) else "no"
        raise ValueError(f"group_ids has {found} entries for {rollouts} rollouts, expected one a rollout")
    # Tensors with one value have a hash each, whatever their value is.
    keys = [key.item() if isinstance(key, torch.Tensor) and key.ndim == 0 else key for key in keys]
    for i, key in enumerate(keys):
        try:
            hash(key)
        except TypeError:
            raise TypeError(f"group_ids[{i}] is a {type(key).__name__}, expected a value that can be hashed") from None
    return keys


def _rollout_of(row: int, layout: Layout, order: IntArray) -> int:
    """The rollout whose response has a packed row; for a row of a prompt the rollout of its first response."""
    segment = np.searchsorted(layout.offsets.numpy(), row, side="right") - 1
    return int(order[np.count_nonzero(layout.parent.numpy()[:segment] >= 0)])


def _assemble(
    prompts: list[torch.Tensor],
    responses: list[torch.Tensor],
    leaders: list[int],
    order: IntArray,
    counts: IntArray,
    labels: LabelStyle,
    media: list[images.Named] | None,
    response_media: list[images.Named] | None,
    device: torch.device | str | None,
) -> PackedBatch:
    """Pack the prompts of the input that lead groups, [G] leaders, and the responses in the packed order [N]; counts
    [G] are the responses of each group."""
    check_label_style(labels)
    for i in leaders:
        if len(prompts[i]) == 0:
            raise ValueError(f"prompts[{i}] is empty, expected at least one token")
    prompts, responses = [prompts[i] for i in leaders], [responses[i] for i in order]
    media = media and [media[i] for i in leaders]
    response_media = response_media and [response_media[i] for i in order]
    check_one_device(prompts + responses)
    copies = label_copies(labels)
    pieces: list[torch.Tensor] = []
    ends = np.cumsum(counts)
    for prompt, begin, end in zip(prompts, (ends - counts).tolist(), ends.tolist(), strict=True):
        shared, last = prompt[: len(prompt) - copies], prompt[len(prompt) - copies :]
        pieces.append(shared)
        for response in responses[begin:end]:
            pieces.extend((last, response))
    input_ids = torch.cat(pieces)
    prompt_lens = np.array([len(p) for p in prompts], np.int64)
    response_lens = np.array([len(r) for r in responses], np.int64)
    layout = Layout.from_lengths(
        prompt_lens - copies,
        np.split(response_lens + copies, ends[:-1]),
        input_ids.device if device is None else device,
    )
    if input_ids.device.type == "cpu" and (lowest := int(input_ids.min())) < 0:
        at = _rollout_of(int(input_ids.argmin()), layout, order)
        raise ValueError(f"token ids must be 0 or more, got {lowest} in the prompt or response of rollout {at}")
    input_ids = input_ids.to(layout.device)[None]
    is_prompt, offsets = layout.parent.numpy() < 0, layout.offsets.tolist()
    parts: list[images.Part | None] = [None] * len(is_prompt)
    for of_segments, found, begins in (
        (np.flatnonzero(is_prompt), media, 0), (np.flatnonzero(~is_prompt), response_media, copies),
    ):  # fmt: skip
        for segment, named in zip(of_segments.tolist(), found or [], strict=found is not None):
            parts[segment] = images.Part.of(named, offsets[segment] + begins, offsets[segment + 1])
    joined = images.joined([part for part in parts if part is not None], layout)
    if layout.device.type == "cpu" and (row := images.bare_placeholder(input_ids, joined)) is not None:
        raise ValueError(
            f"the prompt or response of rollout {_rollout_of(row, layout, order)} holds the token"
            f" {int(input_ids[0, row])}, which stands for an image or video elsewhere, and its mm_token_type_ids is 0:"
            " expected its image in media or response_media"
        )
    return PackedBatch(input_ids, layout, labels, order, int(response_lens.max()), joined)

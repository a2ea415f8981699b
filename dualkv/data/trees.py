"""Rollouts that share more than a prompt: branching turns, tree search, several samples from one partial response.

`pack_sequences` finds the prefixes that whole sequences share, at any token, and packs each shared part once. A token
that several rollouts train on is one row. Its log-probability is computed once, `unpack` copies it into the row of each
rollout, and the gradients of these copies add up.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkv.arrays import (
    IntArray,
    Lengths,
    TokenIds,
    check_bool,
    check_zeros_and_ones,
    outside_inference_mode,
    positive,
    ranges,
    sequence_list,
)
from dualkv.data import media as images
from dualkv.data.frames import Frame, read_frame
from dualkv.data.packing import LabelStyle, PackedBatch, check_label_style, label_copies
from dualkv.data.rows import Form, PackedRows, as_rows, check_unpacked, of_packed_rows
from dualkv.layout import Layout
from dualkv.prefixes import PrefixTree, SharedPrefixes, read_sequences, shared_prefixes

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")

Mask = Sequence[bool] | Sequence[int] | npt.NDArray[Any] | torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class PackedSequences(PackedRows):
    """Sequences packed as trees, and the way back to one row per rollout. Made by :func:`pack_sequences`.

    T packed tokens, N rollouts, M trained tokens: packed rows whose token counts in at least one rollout's mask.

    Attributes:
        input_ids: [1, T] int64.
        layout: the segments, of any depth.
        label_style: "gather": `predict_rows` says which row predicts a token. "roll": branches have their own copies of
            the token before them, and all tokens that a row predicts are one token.
        media: inputs of the model for the images and videos of all segments, each once, as of
            :class:`dualkv.PackedBatch`. Call the model with `**batch.media`.
    """

    input_ids: torch.Tensor
    layout: Layout
    _rows: IntArray  # [sum of lengths] packed row of each token of each rollout
    _lens: IntArray  # [N] tokens of each rollout
    _mask: npt.NDArray[np.bool_]  # [sum of lengths] tokens that count
    label_style: LabelStyle = "gather"
    _frame: Frame | None = None  # of the tensor that held the sequences
    media: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_batch(
        cls, batch: PackedBatch, loss_masks: Sequence[Mask] | torch.Tensor | None = None, *, whole: bool = False
    ) -> PackedSequences:
        """The packed rows of a batch, in which only prompts are shared, with a mask of the tokens that count in each
        rollout.

        Args:
            batch: the result of :func:`dualkv.pack` or `pack_padded`.
            loss_masks: N masks, each as long as its response, in the order of the input; all tokens by default.
            whole: masks are as long as prompt and response together, for losses on prompts too; by default all tokens
                but the first of each sequence count. A token of a prompt counts once for each rollout whose mask has
                it, as in separate sequences.

        Raises:
            ValueError: masks of other lengths, with other values than 0 and 1, or that count the first token of a
                sequence.
            TypeError: another batch.
        """
        if not isinstance(batch, PackedBatch):
            raise TypeError(f"batch is a {type(batch).__name__}, expected what pack or pack_padded returns")
        check_bool("whole", whole)
        rows = batch.unpack_sequences(torch.arange(batch.layout.num_tokens))
        lens, own = np.array([len(r) for r in rows]), np.array(batch.response_lens)
        if whole:
            mask = _mask(loss_masks, lens)
        else:
            masks = [np.ones(n, bool) for n in own] if loss_masks is None else _masks(loss_masks, own, "responses")
            mask = np.concatenate([np.append(np.zeros(n - len(m), bool), m) for n, m in zip(lens, masks, strict=True)])
        of_rows = torch.cat(rows).numpy()
        return cls(batch.input_ids, batch.layout, of_rows, lens, mask, batch.label_style, media=batch.media)

    @property
    def num_rollouts(self) -> int:
        """N."""
        return len(self._lens)

    @property
    def trained_lens(self) -> list[int]:
        """The number of tokens of each rollout that count."""
        return self._trained_lens.tolist()

    @cached_property
    @outside_inference_mode
    def predict_rows(self) -> torch.Tensor:
        """[M] int64: the packed row that predicts each trained token."""
        return torch.from_numpy(self._before[self._trained]).to(self.device)

    @cached_property
    @outside_inference_mode
    def targets(self) -> torch.Tensor:
        """[M] int64: the trained tokens, in the order of their rows."""
        return self.input_ids[0].index_select(0, torch.from_numpy(self._trained).to(self.device))

    def unpack(
        self,
        values: torch.Tensor,
        form: Form = "list",
        padding_value: float = 0,
        *,
        whole: bool = False,
        like: torch.Tensor | None = None,
    ) -> Any:
        """Values of trained tokens as one row per rollout, in the order of the input; differentiable.

        The value of a token that several rollouts train on is copied to each of them, and the gradients of the copies
        add up.

        Args:
            values: [M, ...] one value for each trained token, such as log-probabilities.
            form: "list" for N tensors [trained_lens[i], ...]; "padded" for one tensor [N, max(trained_lens), ...];
                "nested" for a jagged nested tensor of N rows.
            padding_value: fills "padded" behind each row, and `whole` and `like` at tokens that do not count.
            whole: rows are whole sequences, with each value at the place of its token, like masks, advantages and old
                log-probs of whole sequences.
            like: [B, W], where the sequences came as a tensor [B, L]: the result is one tensor [B, W, ...] of its last
                W columns, with each value at the place of its token. W is L for whole rows, L - 1 for values of the
                token that each row predicts. Only the shape counts. For a tensor [L] of sequences [W].

        Raises:
            ValueError: not one value for each trained token, an unknown form, `like` beside a form or `whole`, `like`
                of other rows or without the column of a trained token, or values that require a gradient though no
                attention has used the layout (:meth:`Layout.mark_used`).
        """
        check_bool("whole", whole)
        if like is not None:
            return self._unpack_like(values, like, form, padding_value, whole)
        check_unpacked(values, len(self._trained), "trained token", form, self.layout)
        of_tokens, lens = self._of_tokens(values), self._trained_lens
        if whole:
            at = torch.from_numpy(np.flatnonzero(self._mask)).to(values.device)
            rows = values.new_full((len(self._mask), *values.shape[1:]), padding_value)
            of_tokens, lens = rows.index_copy(0, at, of_tokens), self._lens
        return as_rows(of_tokens, lens, form, int(lens.max()), padding_value)

    def _unpack_like(
        self, values: torch.Tensor, like: torch.Tensor, form: Form, padding_value: float, whole: bool
    ) -> torch.Tensor:
        if form != "list" or whole:
            raise ValueError(f"like is given with form={form!r} and whole={whole}, expected like alone")
        if not isinstance(like, torch.Tensor):
            raise TypeError(f"like must be a tensor, got a {type(like).__name__}")
        if self._frame is None:
            raise ValueError(f"like has shape {tuple(like.shape)}, and the sequences came as a list: leave it out")
        check_unpacked(values, len(self._trained), "trained token", form, self.layout)
        at = self._frame.columns("like", tuple(like.shape), self._frame.places[self._mask])
        index = tuple(torch.from_numpy(i).to(values.device) for i in np.unravel_index(at, like.shape))
        rows = values.new_full((*like.shape, *values.shape[1:]), padding_value)
        return rows.index_put(index, self._of_tokens(values))

    def _of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """values [M, ...] of trained tokens -> those of each rollout's trained tokens, end to end."""
        place = (np.cumsum(self._is_trained) - 1)[self._rows[self._mask]]
        return _repeated(values, torch.from_numpy(place).to(values.device))

    def unpack_sequences(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Values of packed rows as full sequences, in the order of the input; differentiable.

        Args:
            values: [T, ...] or [1, T, ...] one value for each packed row, such as `input_ids` or hidden states.

        Returns:
            N tensors [length_i, ...].

        Raises:
            ValueError: not one value for each packed row, or values as :meth:`unpack` refuses them.
        """
        values = of_packed_rows(values, self.layout)
        return list(_repeated(values, torch.from_numpy(self._rows).to(values.device)).split(self._lens.tolist()))

    def __repr__(self) -> str:
        return (
            f"PackedSequences({self.num_rollouts} rollouts, {len(self._trained)} trained tokens, "
            f"labels={self.label_style!r}, {self.layout!r})"
        )

    # ------------------------------------------------------------------ host side
    @cached_property
    def _trained(self) -> IntArray:
        """[M] trained rows, ascending."""
        return np.flatnonzero(self._is_trained)

    @cached_property
    def _is_trained(self) -> npt.NDArray[np.bool_]:
        """[T] rows whose token counts in some rollout."""
        trained = np.zeros(self.layout.num_tokens, bool)
        trained[self._rows[self._mask]] = True
        return trained

    @cached_property
    def _trained_lens(self) -> IntArray:
        ends = np.append(0, np.cumsum(self._mask))[np.append(0, np.cumsum(self._lens))]
        return np.diff(ends)

    @cached_property
    def _before(self) -> IntArray:
        """[T] the packed row before each on its path, -1 where a tree begins."""
        before = np.full(self.layout.num_tokens, -1, np.int64)
        first = np.append(0, np.cumsum(self._lens))[:-1]
        follows = np.ones(len(self._rows), bool)
        follows[first] = False
        before[self._rows[follows]] = self._rows[np.flatnonzero(follows) - 1]
        return before

    @cached_property
    def _tokens_of_row(self) -> IntArray:
        """[U] the number of trained tokens that each row predicts, for rows that predict any, in their order."""
        predicted = np.bincount(self._before[self._trained])
        return predicted[predicted > 0]


@outside_inference_mode
def pack_sequences(
    sequences: Sequence[TokenIds] | torch.Tensor,
    loss_masks: Sequence[Mask] | torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: Lengths | None = None,
    position_ids: torch.Tensor | None = None,
    min_shared: int = 1,
    fixed_cuts: bool = False,
    labels: LabelStyle = "gather",
    media: images.Media | None = None,
    device: torch.device | str | None = None,
) -> PackedSequences:
    """Pack whole sequences (prompt, turns and responses of a rollout, end to end), each shared prefix once.

    Sequences may branch at any token, end inside others, or be equal. Tokens on a GPU are copied to the host once for
    the comparison. They come as a list, or as trainers hold them: in one tensor.

        batch = pack_sequences(input_ids, labels[:, 1:] != -100, attention_mask=attention_mask)
        old_logp = batch.unpack(logp, like=labels[:, 1:])  # [B, L - 1]

    Args:
        sequences: N 1-D integer tensors, arrays or lists, or a jagged nested tensor; or a tensor of ids [B, L] with one
            of `attention_mask`, `cu_seqlens` and `position_ids`.
        loss_masks: the tokens that count (are trained on) in each rollout. The first token of a sequence cannot count,
            because no row predicts it. By default all other tokens count; a batch may count none. N masks, each as long
            as its sequence; of a tensor [B, L] a mask [B, W] of its last W columns. W is L for masks of whole rows, and
            L - 1 for masks in which column t is about token t + 1; or the number of response columns.
        attention_mask: [B, L] booleans, or zeros and ones of any dtype: 1 for tokens, with padding anywhere. Row i is
            sequence i. Positions count its tokens, as `attention_mask.cumsum(1) - 1` does.
        cu_seqlens: [N + 1] of one padding-free row [1, L] or [L]: sequence i has its tokens `cu_seqlens[i]` to
            `cu_seqlens[i + 1]`.
        position_ids: [B, L] of padding-free rows: 0 where a sequence begins, then 1, 2, and so on.
        min_shared: a part is shared only if it has at least this many tokens. Shorter parts are repeated, which keeps
            segments long where texts agree in a few tokens by chance.
        fixed_cuts: segments of a path begin where a run of tokens that count begins (with "roll" one token before), and
            nowhere else, whatever the other sequences are; for equal bits in all micro-batches. A part between two such
            places is shared as a whole or not at all, so micro-batches may take more tokens than
            :func:`plan_sequences` counts. `pack` and `pack_padded` cut so by nature, where responses begin.
        labels: "gather" or "roll", see `PackedSequences.label_style`. With "roll" every branch behind a shared part
            takes a row more: its copy of the part's last token.
        media: one mapping (or None) for each sequence: what a processor returns for all of its text, with values of
            tokens (`mm_token_type_ids` or `token_type_ids`, [length], or [L] of padded rows), which say where images
            are. Sequences share an image, with the text around it, if its content is equal. No image is cut. Images
            that are not told apart (with `batch_num_images`; of several `image_sizes` with no text between them) are
            shared or repeated together.
        device: of the batch; by default the device of the tokens.

    Raises:
        ValueError: an empty sequence, a token outside [0, 2^32), masks of other lengths or with other values than 0
            and 1, masks that count a first token or padding, a tensor with none or several of `attention_mask`,
            `cu_seqlens` and `position_ids`, or with one that does not fit, min_shared below 1, fixed_cuts without
            loss_masks, another label style; placeholders and images that do not match.
        TypeError: tokens that are not integers; fixed_cuts that is not a bool; media that are no mappings of tensors.
    """
    check_label_style(labels)
    check_bool("fixed_cuts", fixed_cuts)
    if fixed_cuts and loss_masks is None:
        raise ValueError("fixed_cuts is True and loss_masks is None, expected masks: paths are cut where they begin")
    host, shared, origin, frame = read_shared(sequences, min_shared, attention_mask, cu_seqlens, position_ids)
    seen = None if media is None else _seen(media, host, frame)
    if seen is not None:
        shared = shared_prefixes(seen.tokens(host))
    lens = np.array([len(tokens) for tokens in host], np.int64)
    mask = _mask(loss_masks, lens, frame)
    cuts = begins_of_spans(np.split(mask, np.cumsum(lens)[:-1]), labels, seen) if fixed_cuts else None
    tree = tree_of(shared, min_shared, labels, seen, cuts)
    batch = pack_tree(tree, host, mask, labels, origin if device is None else device, frame, seen)
    if batch._mask.any():
        NOTICE.look(batch.layout)
    return batch


def tree_of(
    shared: SharedPrefixes,
    min_shared: int,
    labels: LabelStyle,
    seen: images.SequenceMedia | None = None,
    cuts: list[IntArray] | None = None,
) -> PrefixTree:
    """The tree of sequences whose prefixes are known, for :func:`pack_tree`. No image of `seen` is cut; if `cuts` of
    :func:`begins_of_spans` are given, paths are cut there and nowhere else."""
    if cuts is not None:
        shared = shared.one_label_a_row() if labels == "roll" else shared
        return shared.cut_at(cuts).at_least(min_shared).tree()
    shared = shared.at_least(min_shared)
    if labels == "roll":
        shared = shared.one_label_a_row()
    return (shared if seen is None else seen.whole(shared)).tree()


def begins_of_spans(
    masks: list[npt.NDArray[np.bool_]], labels: LabelStyle, seen: images.SequenceMedia | None = None
) -> list[IntArray]:
    """Find where paths are cut: where a run of tokens that count begins.

    With "roll", the row before such a token belongs to its branch. A cut within an image moves to the image's begin.

    Returns:
        N ascending arrays, for :meth:`dualkv.prefixes.SharedPrefixes.cut_at`.
    """
    found = []
    for i, mask in enumerate(masks):
        begins = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) > 0) - label_copies(labels)
        for image in [] if seen is None else seen.images[i]:
            begins[(image.begin < begins) & (begins < image.end)] = image.begin
        found.append(np.unique(begins[begins > 0]))
    return found


def _seen(media: images.Media, host: list[npt.NDArray[Any]], frame: Frame | None) -> images.SequenceMedia:
    lens = [len(tokens) for tokens in host]
    columns = None
    if frame is not None and len(lens) == int(np.prod(frame.shape[:-1])):  # of padded rows
        columns = np.split(frame.places % frame.shape[-1], np.cumsum(lens)[:-1])
    return images.SequenceMedia(images.entries(media, lens, columns) or [])


def read_shared(
    sequences: Sequence[TokenIds] | torch.Tensor,
    min_shared: int,
    attention_mask: torch.Tensor | None,
    cu_seqlens: Lengths | None,
    position_ids: torch.Tensor | None,
) -> tuple[list[npt.NDArray[Any]], SharedPrefixes, torch.device, Frame | None]:
    """The sequences on the host, their shared prefixes, their device, and their frame if they came as one tensor."""
    if isinstance(sequences, torch.Tensor) and not sequences.is_nested:
        rows, frame = read_frame(sequences, attention_mask, cu_seqlens, position_ids)
        host, shared, _ = read_sequences(rows, min_shared)
        return host, shared, sequences.device, frame
    given = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "position_ids": position_ids}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is given, and sequences is no tensor [B, L]: expected sequences without padding")
    return *read_sequences(sequences, min_shared), None


@outside_inference_mode
def pack_tree(
    tree: PrefixTree,
    sequences: list[npt.NDArray[Any]],
    mask: npt.NDArray[np.bool_],
    labels: LabelStyle,
    device: torch.device | str,
    frame: Frame | None = None,
    seen: images.SequenceMedia | None = None,
) -> PackedSequences:
    """:func:`pack_sequences` of sequences [N] on the host whose tree is known, by :func:`tree_of`; `mask` [sum of
    lengths] are the tokens that count."""
    lens = np.array([len(tokens) for tokens in sequences], np.int64)
    layout = Layout._from_arrays(tree.offsets, tree.parent, device, last=tree.last)
    packed = torch.from_numpy(tree_tokens(tree, sequences)).to(layout.device)
    found = {} if seen is None else seen.packed(tree, layout)
    return PackedSequences(packed[None], layout, tree_rows(tree), lens, mask, labels, frame, found)


class Notice:
    """Says once in a process that packing saves nothing: if each of the first micro-batches shares no token."""

    FIRST = 8

    def __init__(self) -> None:
        self.left = self.FIRST

    def look(self, layout: Layout, otherwise: str = "dualkv.plan_sequences") -> None:
        if not self.left:
            return
        if layout.num_tokens < layout.nominal_tokens:
            self.left = 0
            return
        self.left -= 1
        if not self.left:
            logger.warning(
                "the first %d micro-batches share no token (the last one has %d rollouts), so packing saves nothing:"
                " put all rollouts of a prompt into one micro-batch (a larger one, or %s)",
                self.FIRST,
                layout.num_segments,
                otherwise,
            )


NOTICE = Notice()


def plan_sequences(
    sequences: Sequence[TokenIds] | torch.Tensor,
    budget: int,
    *,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: Lengths | None = None,
    position_ids: torch.Tensor | None = None,
    min_shared: int = 1,
    min_count: int = 1,
    soft: bool = False,
    media: images.Media | None = None,
) -> list[list[int]]:
    """Few micro-batches of at most `budget` packed tokens that hold every sequence once. The plan is deterministic.

    Sequences that share much stay together: a micro-batch is a run of neighbours in the tree of all sequences. Tokens
    that two micro-batches share are computed in both.

        for chosen in plan_sequences(sequences, budget):
            batch = pack_sequences([sequences[i] for i in chosen], [loss_masks[i] for i in chosen])

    Args:
        sequences, attention_mask, cu_seqlens, position_ids, min_shared, media: as for :func:`pack_sequences`.
        budget: packed tokens that a micro-batch may hold with `labels="gather"`; "roll" adds a row for each branch.
        min_count: at least so many micro-batches are made. Data-parallel ranks agree on the largest count, then plan
            again with that count.
        soft: a sequence longer than the budget gets a micro-batch of its own, with those that it begins with.

    Returns:
        The indices of the sequences of each micro-batch.

    Raises:
        ValueError: a sequence longer than the budget and not `soft`, fewer sequences than micro-batches, and sequences
            that :func:`pack_sequences` does not accept.
        TypeError: tokens that are not integers, `soft` that is not a bool.
    """
    budget, min_count = positive("budget", budget), positive("min_count", min_count)
    check_bool("soft", soft)
    host, shared, _, frame = read_shared(sequences, min_shared, attention_mask, cu_seqlens, position_ids)
    if media is not None:
        seen = _seen(media, host, frame)
        shared = seen.whole(shared_prefixes(seen.tokens(host)))
    return [run.tolist() for run in shared.runs_that_share(budget, min_shared, min_count, soft=soft)]


def tree_tokens(tree: PrefixTree, sequences: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """[T] the packed tokens."""
    begins = np.append(0, np.cumsum([len(tokens) for tokens in sequences]))
    return np.concatenate(sequences)[ranges(begins[tree.source] + tree.begin, tree.length, CPU).numpy()]


def tree_rows(tree: PrefixTree) -> IntArray:
    """[sum of lengths] the packed row of each token of each sequence, end to end."""
    path, _ = tree.paths()
    return ranges(tree.offsets[path], tree.length[path], CPU).numpy()


def _repeated(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """values [K, ...] at rows [n], which repeat. Gradients of repeated rows are summed in a fixed order."""
    return values.index_select(0, rows) if values.device.type == "cpu" else values[rows]  # index_select uses atomics


def _mask(
    loss_masks: Sequence[Mask] | torch.Tensor | None, lens: IntArray, frame: Frame | None = None
) -> npt.NDArray[np.bool_]:
    """[sum(lens)] which tokens count."""
    first = np.cumsum(lens) - lens
    if loss_masks is None:
        mask = np.ones(int(lens.sum()), bool)
        mask[first] = False
        return mask
    mask = np.concatenate(_masks(loss_masks, lens, "sequences")) if frame is None else frame.mask(loss_masks)
    if mask[first].any():
        i = int(np.argmax(mask[first]))
        place = f"[{i}]" if frame is None else f", at sequences{frame.at(int(frame.places[first[i]]))},"
        raise ValueError(f"loss_masks{place} counts the first token of its sequence, which nothing predicts")
    return mask


def _masks(loss_masks: Sequence[Mask] | torch.Tensor, lens: IntArray, of: str) -> list[npt.NDArray[np.bool_]]:
    """One mask for each of the `lens`."""
    masks = sequence_list("loss_masks", loss_masks, "masks")
    if len(masks) != len(lens):
        raise ValueError(f"loss_masks has {len(masks)} entries for {len(lens)} {of}, expected as many")
    parts = [np.asarray(m.cpu() if isinstance(m, torch.Tensor) else m) for m in masks]
    for i, (part, length) in enumerate(zip(parts, lens.tolist(), strict=True)):
        if part.ndim == 0 or part.dtype.kind not in "biuf":
            wanted = "expected a list of zeros and ones, one a token"
            raise TypeError(f"loss_masks[{i}] is {reprlib.repr(masks[i])}, {wanted}")
        if part.shape != (length,):
            raise ValueError(f"loss_masks[{i}] has shape {part.shape}, {of}[{i}] {length} tokens")
        check_zeros_and_ones(f"loss_masks[{i}]", part)
    return [part.astype(bool) for part in parts]

"""Rollouts that share more than a prompt: branching turns, tree search, several samples from one partial response.

`pack_sequences` finds the prefixes that whole sequences share, at any token, and packs each shared part once. A token
that several rollouts train on is one row. Its log-probability is computed once, `unpack` copies it into the row of each
rollout, and the gradients of these copies add up.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkv.arrays import (
    IntArray,
    TokenIds,
    check_zeros_and_ones,
    outside_inference_mode,
    positive,
    ranges,
    sequence_list,
)
from dualkv.data.packing import IGNORED, LabelStyle, PackedBatch, check_label_style
from dualkv.data.rows import Form, as_rows, check_unpacked, of_packed_rows, remember_layout
from dualkv.layout import Layout
from dualkv.prefixes import PrefixTree, read_sequences

CPU = torch.device("cpu")

Mask = Sequence[bool] | Sequence[int] | npt.NDArray[Any] | torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class PackedSequences:
    """Sequences packed as trees, and the way back to one row per rollout. Made by :func:`pack_sequences`.

    T packed tokens, N rollouts, M trained tokens: packed rows whose token counts in at least one rollout's mask.

    Attributes:
        input_ids: [1, T] int64.
        layout: the segments, of any depth.
        label_style: "gather": `predict_rows` says which row predicts a token. "roll": branches have their own copies of
            the token before them, and all tokens that a row predicts are one token.
    """

    input_ids: torch.Tensor
    layout: Layout
    _rows: IntArray  # [sum of lengths] packed row of each token of each rollout
    _lens: IntArray  # [N] tokens of each rollout
    _mask: npt.NDArray[np.bool_]  # [sum of lengths] tokens that count
    label_style: LabelStyle = "gather"

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
            ValueError: masks of other lengths, with other values than 0 and 1, without any token, or that count the
                first token of a sequence.
            TypeError: another batch.
        """
        if not isinstance(batch, PackedBatch):
            raise TypeError(f"batch is a {type(batch).__name__}, expected what pack or pack_padded returns")
        rows = batch.unpack_sequences(torch.arange(batch.layout.num_tokens))
        if whole:
            lens = np.array([len(r) for r in rows])
            mask = _mask(loss_masks, lens)
            return cls(batch.input_ids, batch.layout, torch.cat(rows).numpy(), lens, mask, batch.label_style)
        lens = np.array(batch.response_lens)
        masks = [np.ones(n, bool) for n in lens] if loss_masks is None else _masks(loss_masks, lens, "responses")
        padded = [np.append(np.zeros(len(r) - len(m), bool), m) for r, m in zip(rows, masks, strict=True)]
        lens = np.array([len(r) for r in rows])
        mask = _some(np.concatenate(padded))
        return cls(batch.input_ids, batch.layout, torch.cat(rows).numpy(), lens, mask, batch.label_style)

    def __post_init__(self) -> None:
        remember_layout(self.input_ids, self.layout)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and pickles do not run __post_init__."""
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def device(self) -> torch.device:
        """The device of `input_ids` and of all tensors derived from them."""
        return self.input_ids.device

    @property
    def num_rollouts(self) -> int:
        """N."""
        return len(self._lens)

    @property
    def trained_lens(self) -> list[int]:
        """The number of tokens of each rollout that count."""
        return self._trained_lens.tolist()

    @property
    def position_ids(self) -> torch.Tensor:
        """[1, T] int64: the position of each token in its own sequence."""
        return self.layout.position_ids[None]

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

    @cached_property
    @outside_inference_mode
    def labels(self) -> torch.Tensor:
        """[1, T] int64: `labels[0, t]` is the trained token that row t predicts, -100 where it predicts none.

        Raises:
            ValueError: in the gather style, where a row predicts the first token of every branch behind it.
        """
        if self.label_style == "gather":
            raise ValueError(
                "labels needs sequences packed with labels='roll', these have labels='gather', where one row predicts "
                "the first token of every branch; use predict_rows and targets"
            )
        labels = torch.full_like(self.input_ids, IGNORED)
        labels[0, self.predict_rows] = self.targets  # copies of a token have one row before them, and equal labels
        return labels

    def unpack(
        self, values: torch.Tensor, form: Form = "list", padding_value: float = 0, *, whole: bool = False
    ) -> Any:
        """Values of trained tokens as one row per rollout, in the order of the input; differentiable.

        The value of a token that several rollouts train on is copied to each of them, and the gradients of the copies
        add up.

        Args:
            values: [M, ...] one value for each trained token, such as log-probabilities.
            form: "list" for N tensors [trained_lens[i], ...]; "padded" for one tensor [N, max(trained_lens), ...];
                "nested" for a jagged nested tensor of N rows.
            padding_value: fills "padded" behind each row, and `whole` at tokens that do not count.
            whole: rows are whole sequences, with each value at the place of its token, like masks, advantages and old
                log-probs of whole sequences.

        Raises:
            ValueError: not one value for each trained token, an unknown form, or values that require a gradient though
                no attention has used the layout (:meth:`Layout.mark_used`).
        """
        check_unpacked(values, len(self._trained), "trained token", form, self.layout)
        place = torch.from_numpy((np.cumsum(self._is_trained) - 1)[self._rows[self._mask]]).to(values.device)
        of_tokens, lens = _repeated(values, place), self._trained_lens
        if whole:
            at = torch.from_numpy(np.flatnonzero(self._mask)).to(values.device)
            rows = values.new_full((len(self._mask), *values.shape[1:]), padding_value)
            of_tokens, lens = rows.index_copy(0, at, of_tokens), self._lens
        return as_rows(of_tokens, lens, form, int(lens.max()), padding_value)

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

    @outside_inference_mode
    def to(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> PackedSequences:
        """Copy the batch with its tensors on `device`, None for the present one."""
        if device is None:
            return self
        input_ids = self.input_ids.to(device, non_blocking=non_blocking)
        if input_ids is self.input_ids:
            return self
        layout = self.layout.to(input_ids.device)
        return PackedSequences(input_ids, layout, self._rows, self._lens, self._mask, self.label_style)

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
    min_shared: int = 1,
    labels: LabelStyle = "gather",
    device: torch.device | str | None = None,
) -> PackedSequences:
    """Pack whole sequences (prompt, turns and responses of a rollout, end to end), each shared prefix once.

    Sequences may branch at any token, end inside others, or be equal. Tokens on a GPU are copied to the host once for
    the comparison.

    Args:
        sequences: N 1-D integer tensors, arrays or lists, or a jagged nested tensor.
        loss_masks: N masks, each as long as its sequence: the tokens that count (are trained on) in each rollout. The
            first token of a sequence cannot count, because no row predicts it. By default all other tokens count.
        min_shared: a part is shared only if it has at least this many tokens. Shorter parts are repeated, which keeps
            segments long where texts agree in a few tokens by chance.
        labels: "gather" or "roll", see `PackedSequences.label_style`. With "roll" every branch behind a shared part
            takes a row more: its copy of the part's last token.
        device: of the batch; by default the device of the tokens.

    Raises:
        ValueError: an empty sequence, a token outside [0, 2^32), masks of other lengths or with other values than 0
            and 1, masks that count a first token or no token at all, min_shared below 1, another label style.
        TypeError: tokens that are not integers.
    """
    check_label_style(labels)
    host, shared, origin = read_sequences(sequences, min_shared)
    shared = shared.at_least(min_shared)
    tree = (shared.one_label_a_row() if labels == "roll" else shared).tree()
    return pack_tree(tree, host, loss_masks, labels, origin if device is None else device)


@outside_inference_mode
def pack_tree(
    tree: PrefixTree,
    sequences: list[npt.NDArray[Any]],
    loss_masks: Sequence[Mask] | torch.Tensor | None,
    labels: LabelStyle,
    device: torch.device | str,
) -> PackedSequences:
    """:func:`pack_sequences` of sequences [N] on the host whose tree is known; for labels="roll" the tree of their
    :meth:`dualkv.prefixes.SharedPrefixes.one_label_a_row`."""
    lens = np.array([len(tokens) for tokens in sequences], np.int64)
    mask = _mask(loss_masks, lens)
    layout = Layout._from_arrays(tree.offsets, tree.parent, device, last=tree.last)
    packed = torch.from_numpy(tree_tokens(tree, sequences)).to(layout.device)
    return PackedSequences(packed[None], layout, tree_rows(tree), lens, mask, labels)


def plan_sequences(
    sequences: Sequence[TokenIds] | torch.Tensor, budget: int, *, min_shared: int = 1, min_count: int = 1
) -> list[list[int]]:
    """Few micro-batches of at most `budget` packed tokens that hold every sequence once. The plan is deterministic.

    Sequences that share much stay together: a micro-batch is a run of neighbours in the tree of all sequences. Tokens
    that two micro-batches share are computed in both.

        for chosen in plan_sequences(sequences, budget):
            batch = pack_sequences([sequences[i] for i in chosen], [loss_masks[i] for i in chosen])

    Args:
        sequences, min_shared: as for :func:`pack_sequences`.
        budget: packed tokens that a micro-batch may hold.
        min_count: at least so many micro-batches are made. Data-parallel ranks agree on the largest count, then plan
            again with that count.

    Returns:
        The indices of the sequences of each micro-batch.

    Raises:
        ValueError: a sequence longer than the budget, fewer sequences than micro-batches, and sequences that
            :func:`pack_sequences` does not accept.
        TypeError: tokens that are not integers.
    """
    budget, min_count = positive("budget", budget), positive("min_count", min_count)
    _, shared, _ = read_sequences(sequences, min_shared)
    open_runs = shared.at_least(min_shared).runs(budget, min_count)
    runs: list[list[int]] = []
    while open_runs:
        run = open_runs.pop(0)
        # Which parts reach `min_shared` depends on the other sequences, so a run by itself may take more tokens.
        if len(run) > 1 and shared.select(run).at_least(min_shared).tokens > budget:
            open_runs[:0] = np.array_split(run, 2)
        else:
            runs.append(run.tolist())
    return runs


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


def _mask(loss_masks: Sequence[Mask] | torch.Tensor | None, lens: IntArray) -> npt.NDArray[np.bool_]:
    """[sum(lens)] which tokens count."""
    if loss_masks is None:
        mask = np.ones(int(lens.sum()), bool)
        mask[np.cumsum(lens) - lens] = False
        return _some(mask)
    masks = _masks(loss_masks, lens, "sequences")
    for i, mask in enumerate(masks):
        if mask[0]:
            raise ValueError(f"loss_masks[{i}] counts the first token of its sequence, which nothing predicts")
    return _some(np.concatenate(masks))


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


def _some(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    if not mask.any():
        raise ValueError("loss_masks counts no token of any sequence, expected at least one")
    return mask

"""Padded batches and padding-free rows: where the tokens of each sequence stand in the tensor that holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkv.arrays import IntArray, Lengths, check_integers, check_zeros_and_ones, cumulative_array, int_array


@dataclass(frozen=True)
class Frame:
    """The places of the tokens of N sequences in a tensor [..., L] of ids.

    Attributes:
        shape: of the tensor: [B, L], or [L] for one row.
        places: [sum of lengths] the index of each token in the flattened tensor, ascending, sequence after sequence.
        lens: [N] tokens of each sequence.
    """

    shape: tuple[int, ...]
    places: IntArray
    lens: IntArray

    def columns(self, name: str, shape: tuple[int, ...], places: IntArray) -> IntArray:
        """The indices of `places` [n] in a flattened tensor of `shape` [..., W], which has the last W columns.

        Raises:
            ValueError: a tensor `name` of other rows or more columns, or that lacks the column of a place.
        """
        *rows, width = self.shape
        if len(shape) != len(self.shape) or list(shape[:-1]) != rows or shape[-1] > width:
            expected = f"the rows of sequences {self.shape} and their last columns, {width} or fewer"
            raise ValueError(f"{name} has shape {shape}, expected {expected}")
        row, column = places // width, places % width - (width - shape[-1])
        if len(column) and int(column.min()) < 0:
            at = int(column.argmin())
            raise ValueError(
                f"{name} has the last {shape[-1]} of {width} columns, and a token that counts is in column"
                f" {int(places[at] % width)} of row {int(row[at])}"
            )
        return row * shape[-1] + column

    def at(self, place: int) -> str:
        """`place` as an index, such as "[2, 5]"."""
        return str([int(i) for i in np.unravel_index(place, self.shape)])

    def mask(self, loss_masks: object) -> npt.NDArray[np.bool_]:
        """[sum of lengths] which tokens count, of a mask [..., W] of the last W columns.

        Raises:
            ValueError: another shape, another value than 0 and 1, or a mask that counts a place without a token.
            TypeError: no tensor of numbers.
        """
        if not isinstance(loss_masks, torch.Tensor) or loss_masks.is_nested:
            came = "a nested tensor" if isinstance(loss_masks, torch.Tensor) else f"a {type(loss_masks).__name__}"
            raise TypeError(f"loss_masks is {came}, expected a tensor of zeros and ones as sequences is one tensor")
        self.columns("loss_masks", tuple(loss_masks.shape), np.zeros(0, np.int64))
        counts = _zeros_and_ones("loss_masks", loss_masks)
        full = np.zeros(self.shape, bool)
        full[..., full.shape[-1] - counts.shape[-1] :] = counts
        found = full.reshape(-1)[self.places]
        if int(found.sum()) != int(counts.sum()):
            full.reshape(-1)[self.places] = False
            at = self.at(int(full.reshape(-1).argmax()))
            raise ValueError(
                f"loss_masks counts sequences{at}, which attention_mask leaves out: expected zeros at padding, such as"
                " loss_masks * attention_mask"
            )
        return found


def read_frame(
    ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seqlens: Lengths | None,
    position_ids: torch.Tensor | None,
) -> tuple[list[npt.NDArray[Any]], Frame]:
    """The sequences in a tensor of ids, on the host, and their places; see :func:`dualkv.pack_sequences`."""
    check_integers("sequences", ids)
    given = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "position_ids": position_ids}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(
            f"sequences is one tensor of shape {tuple(ids.shape)} with {' and '.join(names) or 'nothing else'},"
            " expected one of attention_mask (of a padded batch), cu_seqlens and position_ids (of padding-free rows)"
        )
    if ids.dim() not in (1, 2) or ids.numel() == 0:
        raise ValueError(
            f"sequences has shape {tuple(ids.shape)}, expected [rows, tokens] or [tokens], and some tokens"
        )
    shape, rows = tuple(ids.shape), ids.numel() // ids.shape[-1]
    if cu_seqlens is not None:
        if rows != 1:
            raise ValueError(f"cu_seqlens is of one row, sequences has {rows} (shape {shape})")
        ends = cumulative_array("cu_seqlens", cu_seqlens)
        if ends[-1] != ids.numel():
            raise ValueError(f"cu_seqlens ends at {ends[-1]}, sequences has {ids.numel()} tokens")
        lens, places = np.diff(ends), np.arange(ids.numel())
        name = "cu_seqlens"
    elif attention_mask is not None:
        name = "attention_mask"
        _check_shape(name, attention_mask, shape)
        own = _zeros_and_ones(name, attention_mask).reshape(rows, -1)
        lens, places = own.sum(1).astype(np.int64), np.flatnonzero(own)
    else:
        assert position_ids is not None
        name = "position_ids"
        _check_shape(name, position_ids, shape)
        lens, places = _runs(int_array(name, position_ids.reshape(-1)), shape), np.arange(ids.numel())
    if (lens == 0).any():
        raise ValueError(f"{name} leaves no token of sequence {int(np.argmax(lens == 0))}, expected at least one")
    host = ids.reshape(-1).cpu().numpy()[places]
    return np.split(host, np.cumsum(lens)[:-1]), Frame(shape, places, lens)


def _runs(positions: IntArray, shape: tuple[int, ...]) -> IntArray:
    """[N] lengths of runs 0, 1, 2, ..., each within a row; ValueError for other position_ids."""
    index = np.arange(len(positions))
    begins = (positions == 0) | (index % shape[-1] == 0)
    expected = index - np.maximum.accumulate(np.where(begins, index, 0))
    if (wrong := positions != expected).any():
        at = int(np.argmax(wrong))
        place = [int(i) for i in np.unravel_index(at, shape)]
        raise ValueError(
            f"position_ids{place} is {positions[at]}, expected {expected[at]}, or 0 where a sequence begins: positions"
            " of padding-free rows (a padded batch has attention_mask)"
        )
    return np.diff(np.append(np.flatnonzero(begins), len(positions)))


def _check_shape(name: str, value: object, shape: tuple[int, ...]) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got a {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected that of sequences, {shape}")


def _zeros_and_ones(name: str, mask: torch.Tensor) -> npt.NDArray[np.bool_]:
    """A mask [..., L] on the host; ValueError for other values than 0 and 1."""
    host = mask.detach().cpu()
    if host.dtype == torch.bool:
        return host.numpy()
    if host.is_complex():
        raise TypeError(f"{name} is {mask.dtype}, expected zeros and ones")
    if host.is_floating_point():
        host = host.double()
    array = host.numpy()
    wrong = (array != 0) & (array != 1)
    if wrong.any():
        row, _ = divmod(int(np.argmax(wrong)), array.shape[-1])
        check_zeros_and_ones(f"{name}[{row}]" if array.ndim > 1 else name, array.reshape(-1, array.shape[-1])[row])
    return array.astype(bool)

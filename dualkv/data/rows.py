"""Turn values of tokens, end to end, into one row per rollout; and values of shared rows from those of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Self, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dualkv.arrays import IntArray, outside_inference_mode, ranges
from dualkv.data.media import moved
from dualkv.layout import Layout

Form = Literal["list", "padded", "nested"]
IGNORED = -100  # the label of rows that predict nothing: the default ignore_index of cross_entropy

_LAYOUTS, _MEDIA = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()


class PackedRows:
    """The base of packed batches. Their `input_ids` remember layout and images, for models that get them alone."""

    input_ids: torch.Tensor
    layout: Layout
    label_style: str
    media: dict[str, Any]

    def __post_init__(self) -> None:
        _LAYOUTS[self.input_ids] = self.layout
        if self.media:
            _MEDIA[self.input_ids] = self.media

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and pickles do not run __post_init__."""
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def device(self) -> torch.device:
        """The device of `input_ids` and of all tensors derived from them."""
        return self.input_ids.device

    @property
    def position_ids(self) -> torch.Tensor:
        """[1, T] int64: the position of each token in its own unpacked sequence."""
        return self.layout.position_ids[None]

    @cached_property
    @outside_inference_mode
    def labels(self) -> torch.Tensor:
        """[1, T] int64: `labels[0, t]` is the trained token that row t predicts, -100 where it predicts none.

        Raises:
            ValueError: in the gather style, where a row predicts the first token of every response or branch behind it.
        """
        if self.label_style == "gather":
            raise ValueError(
                "labels needs a batch packed with labels='roll', this one has labels='gather', where one row predicts "
                "the first token of every response or branch; use predict_rows and targets"
            )
        batch: Any = self  # the classes of batches define predict_rows and targets
        labels = torch.full_like(self.input_ids, IGNORED)
        labels[0, batch.predict_rows] = batch.targets  # copies of a token have one row before them, and equal labels
        return labels

    @outside_inference_mode
    def to(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> Self:
        """Copy the batch with its tensors on `device`, None for the present one."""
        input_ids = self.input_ids if device is None else self.input_ids.to(device, non_blocking=non_blocking)
        if input_ids is self.input_ids:
            return self
        layout, media = self.layout.to(input_ids.device), moved(self.media, input_ids.device, non_blocking)
        return replace(cast(Any, self), input_ids=input_ids, layout=layout, media=media)


def forgotten_layout(input_ids: Any) -> Layout | None:
    """The layout of a packed batch's `input_ids`, if causal attention over all rows would compute something else,
    unless :meth:`Layout.mark_used` has said that attention runs elsewhere."""
    found: Layout | None = _LAYOUTS.get(input_ids) if isinstance(input_ids, torch.Tensor) else None
    return None if found is None or found._segments.use.elsewhere or _is_one_sequence(found) else found


def media_of(input_ids: Any) -> Mapping[str, Any]:
    """The media of a packed batch's `input_ids`; empty without any, and in compiled functions."""
    if torch.compiler.is_compiling() or not isinstance(input_ids, torch.Tensor):
        return {}
    return _MEDIA.get(input_ids, {})


def _is_one_sequence(layout: Layout) -> bool:
    """Whether all sequences are all rows, which causal attention computes without a layout."""
    s = layout._segments

    def found() -> bool:
        return s.silent is None and bool(((s.first_position + s.lengths)[s.ends_sequence] == s.total).all())

    return s.cached("one sequence", found)


def check_unpacked(values: torch.Tensor, count: int, of: str, form: Form, layout: Layout) -> None:
    """Raise ValueError if there are not `count` values, or for an unknown form; and as :func:`_check_values`."""
    _check_values(values, layout)
    if values.dim() == 0 or values.shape[0] != count:
        raise ValueError(f"values has shape {tuple(values.shape)}, expected [{count}, ...]: one value for each {of}")
    if form not in get_args(Form):
        raise ValueError(f"form is {form!r}, expected 'list', 'padded' or 'nested'")


def check_used(layout: Layout, subject: str, argument: str = "dualkv=batch.layout") -> None:
    """Raise ValueError if no attention has used the layout, and causal attention over all rows is something else. The
    message begins with `subject`, before "of a layout", and names the argument that the model should have got."""
    use = layout._segments.use
    if use.seen:
        return
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()  # the attention of a compiled function has run behind it
    if not (use.seen or _is_one_sequence(layout)):
        raise ValueError(
            f"{subject} of a layout that no attention has used, so that every row saw all rows before it: call"
            f" dualkv.integrations.transformers.enable(model) and pass {argument} to the model, or pass the layout to"
            " dualkv.attention (where attention runs that DualKV cannot see: layout.mark_used())"
        )


def _check_values(values: object, layout: Layout) -> None:
    """Raise TypeError for no tensor; ValueError for values with gradients of a layout that no attention has used."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"values must be a tensor, got a {type(values).__name__}")
    if values.requires_grad:  # others may be targets, masks or advantages, which are unpacked before a forward
        check_used(layout, "values require a gradient and are")


def of_packed_rows(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """values [T, ...] or [1, T, ...] -> [T, ...]; raises ValueError for other shapes, and as :func:`_check_values`."""
    _check_values(values, layout)
    total = layout.num_tokens
    if values.dim() > 1 and values.shape[:2] == (1, total):
        return values[0]
    if values.dim() == 0 or values.shape[0] != total:
        raise ValueError(
            f"values has shape {tuple(values.shape)}, expected [{total}, ...] or [1, {total}, ...]: one value for each"
            " packed row"
        )
    return values


def as_rows(
    values: torch.Tensor, lens: IntArray, form: Form, width: int, padding_value: float, columns: IntArray | None = None
) -> Any:
    """values [sum(lens), ...] end to end -> one row for each length: a list, [N, width, ...] padded, where rows begin
    in `columns` [N], 0 by default, or nested."""
    if form == "list":
        return list(values.split(lens.tolist()))
    if form == "padded":
        rest = values.shape[1:]
        flat = values.new_full((len(lens) * width, *rest), padding_value)
        begin = np.arange(len(lens)) * width
        into = ranges(begin if columns is None else begin + columns, lens, values.device)
        return flat.index_copy(0, into, values).view(len(lens), width, *rest)
    offsets = torch.from_numpy(np.append(0, np.cumsum(lens))).to(values.device)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=int(lens.min()), max_seqlen=int(lens.max())
    )


def first_of_rows(rows: IntArray, recorded: torch.Tensor, total: int) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """The first route that is recorded for each packed row, and which records differ from it.

    Args:
        rows: [M] the packed row of each record.
        recorded: [M, L, k] integers on the host, experts of each record.
        total: T, of the packed rows.

    Returns:
        [T, L, k] int64, -1 where nothing was recorded; [M], whether a record goes to other experts in some layer, in
        whatever order.
    """
    known, first = np.unique(rows, return_index=True)
    source = np.full(total, -1)
    source[known] = first
    others = np.flatnonzero(source[rows] != np.arange(len(rows)))
    a, b = (recorded[torch.from_numpy(x)] for x in (others, source[rows[others]]))
    unequal = (a != b).flatten(1).any(1)  # few as a rule, of which some are the same experts in another order
    a, b = (x[unequal].sort(-1).values for x in (a, b))
    differs = np.zeros(len(rows), bool)
    differs[others[unequal.numpy()]] = (a != b).flatten(1).any(1).numpy()
    routes = torch.full((total, *recorded.shape[1:]), -1, dtype=torch.int64)
    routes[torch.from_numpy(known)] = recorded[torch.from_numpy(first)].long()
    return routes, differs

"""A look at a training that does not pack: what packing would save there, from the calls that its model gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from dualkv.arrays import check_model, positive
from dualkv.data.frames import read_frame
from dualkv.data.gain import MIN_SHARED, Gain
from dualkv.data.packing import LabelStyle, check_label_style
from dualkv.prefixes import shared_prefixes

Tokens = list[npt.NDArray[Any]]


@dataclass(frozen=True)
class Packed:
    """The observed calls, packed.

    Attributes:
        gain: the sum over the calls. Its `replicated_rows` are the rows that the model computed, padding included.
        largest: rows of the largest call.
    """

    gain: Gain
    largest: int


class Observed:
    """The training calls of a model that :func:`observe` has seen.

    Attributes:
        unread: the number of calls that could not be read; `why` says why the last one could not.
        rows: rows that the model computed in each call that has been read, padding included.
    """

    def __init__(self, model: str, labels: LabelStyle) -> None:
        self.unread, self.why = 0, ""
        self.rows: list[int] = []
        self._model, self._labels = model, labels
        self._sequences: Tokens = []
        self._sizes: list[int] = []  # sequences of each call

    @property
    def calls(self) -> int:
        """The number of calls that have been read."""
        return len(self.rows)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the arguments of a model's call."""
        try:
            found, rows = _sequences(args, kwargs)
        except (ValueError, TypeError) as error:
            self.unread, self.why = self.unread + 1, str(error)
            return
        self._sequences += found
        self._sizes.append(len(found))
        self.rows.append(rows)

    def as_they_come(self) -> Packed:
        """Pack the sequences of each call."""
        return self._packed(np.arange(len(self._sequences)))

    def together(self) -> Packed:
        """Pack calls of as many sequences, with those that begin alike next to each other."""
        return self._packed(shared_prefixes(self._sequences).order)

    def _packed(self, order: npt.NDArray[np.int64]) -> Packed:
        gains = []
        for chosen in np.split(order, np.cumsum(self._sizes)[:-1]):
            shared = shared_prefixes([self._sequences[i] for i in chosen]).at_least(MIN_SHARED)
            gains.append(Gain.of(shared.one_label_a_row() if self._labels == "roll" else shared))
        fields = zip(*(vars(gain).values() for gain in gains), strict=True)
        total = replace(Gain(*map(sum, fields)), replicated_rows=sum(self.rows))
        return Packed(total, max(gain.rows for gain in gains))

    def __str__(self) -> str:
        unread = f"; {self.unread} more could not be read ({self.why})" if self.unread else ""
        if not self.calls:
            return f"dualkv.observe: no training call of {self._model} could be read{unread}"
        padding = 1 - sum(map(len, self._sequences)) / sum(self.rows)
        lines = [
            f"dualkv.observe: {self.calls} training calls of {self._model} computed {sum(self.rows):,} rows,"
            f" {padding:.0%} of them padding{unread}. Packing would have computed"
        ]
        for how, packed in (
            ("in these calls", self.as_they_come()),
            ("with sequences that begin alike in one call", self.together()),
        ):
            gain = packed.gain
            lines.append(
                f"  {how}: {gain.rows:,} rows ({gain.ratio:.2f}x), about {gain.saved:.0%} less time; {packed.largest:,}"
                f" rows in the largest call, not {max(self.rows):,}, and as much less memory of activations"
            )
        return "\n".join(lines)


def observe(
    model: nn.Module, calls: int = 32, *, labels: LabelStyle = "gather", report: Callable[[str], Any] = print
) -> Observed:
    """Report after some training calls of a model what packing would have saved in them. The training does not change.

        dualkv.observe(model)    # before the loop; in TRL dualkv.observe(trainer.model, labels="roll")

    A forward pre-hook reads the sequences of each call in training mode with gradients: padded rows by their
    attention_mask, padding-free rows by their position_ids, else each row as one sequence. After the last call the hook
    is gone. Where ranks share the work, the first one reports its own calls.

    The report has rows, an estimate of the time (:class:`dualkv.data.gain.Gain`), and the rows of the largest call, of
    the calls as they are, and of calls of as many sequences that hold those together that begin alike.

    Args:
        model: any module that is called with `input_ids` [B, L], wrapped or not.
        calls: after which the report is made.
        labels: as for :func:`dualkv.pack_sequences`. TRL's and veRL's trainers pack with "roll".
        report: gets the report.

    Returns:
        The calls so far; `str()` makes the report.

    Raises:
        ValueError: `calls` below 1, another label style.
        TypeError: `model` is no module, `report` no function.
    """
    check_model(model)
    check_label_style(labels)
    left = positive("calls", calls)
    if not callable(report):
        raise TypeError(f"report is a {type(report).__name__}, expected a function of the report")
    found = Observed(type(model).__name__, labels)

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        found.read(args, kwargs)
        if found.calls + found.unread == left:
            hook.remove()
            if not dist.is_initialized() or dist.get_rank() == 0:
                report(str(found))

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    return found


def _sequences(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tokens, int]:
    """The sequences of a call on the host, and the number of its rows."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"input_ids is a {type(ids).__name__}, expected a tensor")
    if kwargs.get("dualkv") is not None:
        raise ValueError("the call is packed")
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is None and positions is None:
        mask = torch.ones_like(ids)
    found, _ = read_frame(ids, mask, None, positions if mask is None else None)
    return found, ids.numel()

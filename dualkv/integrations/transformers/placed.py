"""Packed rows of which some are those of images: the object that such a call has under `dualkv=`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from dualkv.branches import Branch
from dualkv.integrations.transformers.ahead import Ahead, attention
from dualkv.layout import Layout
from dualkv.packed_rows import PackedRows, packed_rows
from dualkv.sequence_parallel import Shard


class Placed(PackedRows):
    """A layout with images in its rows. As a layout, it is passed through the model, to its decoder.

    Attributes:
        layout: of T rows; or the Shard of a rank or the part of a walk that has T of them.
        position_ids: [1, T], or [3, 1, T] for frames, height and width.
        ahead: the keys of rows that see rows behind them; None where no row does.
        of_all: positions of all rows of the batch, on any device.
    """

    # No pytree: wrappers move and copy those.
    __slots__ = ("_position_ids", "ahead", "layout", "of_all")

    has_positions = True

    def __init__(
        self,
        layout: Layout | Shard | Branch,
        position_ids: torch.Tensor,
        ahead: Ahead | None = None,
        of_all: torch.Tensor | None = None,
    ) -> None:
        self.layout, self._position_ids, self.ahead = layout, position_ids, ahead
        self.of_all = position_ids if of_all is None else of_all

    @property
    def position_ids(self) -> torch.Tensor:
        return self._position_ids

    def to(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> Placed:
        """Copy with all tensors on `device`, None for the present one: hooks of Accelerate move arguments of layers."""
        if device is None:
            return self
        position_ids = self.position_ids.to(device, non_blocking=non_blocking)
        if position_ids is self.position_ids:
            return self
        ahead = None if self.ahead is None else self.ahead.to(device, non_blocking)
        layout = self.layout if isinstance(self.layout, Branch) else self.layout.to(device, non_blocking)
        return Placed(layout, position_ids, ahead, self.of_all)

    @property
    def is_part(self) -> bool:  # type: ignore[override]
        return packed_rows(self.layout).is_part

    @property
    def whole(self) -> Layout:
        return packed_rows(self.layout).whole

    @property
    def rows(self) -> torch.Tensor | None:
        return packed_rows(self.layout).rows

    @property
    def of_layers(self) -> Any:
        return self.layout if self.ahead is None else self

    def attention_of(self, layer: Hashable) -> Callable[..., torch.Tensor]:
        if self.ahead is None:
            return packed_rows(self.layout).attention_of(layer)
        return partial(attention, rows=self.layout, ahead=self.ahead, layer=layer)

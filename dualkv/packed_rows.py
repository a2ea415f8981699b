"""The interface under `dualkv=`: the packed rows that a call of a model gets, and the attention that they ask for.

A :class:`dualkv.Layout` may stand in its place, for all of its own rows; :func:`packed_rows` makes one of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from dualkv.layout import Layout
from dualkv.ops.attention import attention


class PackedRows:
    """The packed rows of a call of a model.

    Attributes:
        is_part: whether the call is one of several of a walk, whose paths lie in other calls.
        has_positions: whether `position_ids` are not those of the layout, as where rows belong to images.
        runs_towers: whether a model takes images from the object, and not from its inputs.
    """

    __slots__ = ()

    is_part = False
    has_positions = runs_towers = False

    @property
    def whole(self) -> Layout:
        """The layout of all rows of the batch. Its sequences are whole."""
        raise NotImplementedError

    @property
    def rows(self) -> torch.Tensor | None:
        """[t] int64: the packed rows of the batch that are in this call; None: all of them, in order."""
        return None

    @property
    def position_ids(self) -> torch.Tensor:
        """[t], or [1, t] or [3, 1, t] of rows with positions of their own."""
        raise NotImplementedError

    @property
    def of_layers(self) -> Any:
        """The object that a decoder hands to its layers under `dualkv=`."""
        return self

    def attention_of(self, layer: Hashable) -> Callable[..., torch.Tensor]:
        """The function of q, k and v of this call's rows, with further arguments of :func:`dualkv.attention`, for a
        layer, which has one name in all parts of a walk."""
        raise NotImplementedError


class _Whole(PackedRows):
    """All rows of a layout."""

    __slots__ = ("_layout",)

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @property
    def whole(self) -> Layout:
        return self._layout

    @property
    def position_ids(self) -> torch.Tensor:
        return self._layout.position_ids

    @property
    def of_layers(self) -> Layout:
        return self._layout

    def attention_of(self, layer: Hashable) -> Callable[..., torch.Tensor]:
        return partial(attention, layout=self._layout)


def packed_rows(dualkv: object) -> PackedRows:
    """The interface of what a call got under `dualkv=`; TypeError for others than layouts and packed rows."""
    if isinstance(dualkv, Layout):
        return _Whole(dualkv)
    if not isinstance(dualkv, PackedRows):
        raise TypeError(f"dualkv is a {type(dualkv).__name__}, expected a dualkv.Layout")
    return dualkv

"""Recurrent layers of a tree walked in parts (:func:`dualkv.walk`): states and last inputs that a path keeps.

A trunk runs as a chain of segments, cut where parts below leave the path. It keeps the state of each layer at every
cut, and of each convolution the k - 1 inputs before it. A part below starts its segments from these. Their gradients
are added up and enter the trunk's own backward, like those of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from dualkv.branches import Branch
from dualkv.integrations.recurrent import waves
from dualkv.layout import Layout

Tensor = torch.Tensor


class Trees:
    """The trees of one call of a recurrent layer, which begin from nothing."""

    keeps = False  # whether other calls start from states of this one

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    def scan_key(self) -> Hashable:
        """Make the key of the states of the next scan."""

    def initial(self, key: Hashable, device: torch.device) -> tuple[Tensor, waves.Gather] | None:
        """(states [A, ...], which of them segments of the first wave start from); None: from nothing."""

    def keep_state(self, key: Hashable, behind: int, state: Tensor) -> None:
        """Keep the state [1, ...] behind the first own rows for other calls."""

    def order(self, device: torch.device) -> waves.Order:
        """The waves of a scan."""
        return waves.order(self.layout, device, self.keeps)

    def to_heads(self, rows: list[Tensor]) -> list[Tensor]:
        """Tensors [1, t, H, ...] of own rows as those of a scan: [1, T, heads of this rank, ...]."""
        return rows

    def to_rows(self, x: Tensor) -> Tensor:
        """The results [1, T, heads of this rank, ...] of a scan as [1, t, H, ...] of own rows."""
        return x

    def share(self, weight: Tensor) -> Tensor:
        """The heads of a weight [H, ...] that this rank scans."""
        return weight

    def convolve(self, run: Callable[[waves.Windows | None, Tensor], Tensor], x: Tensor, back: int) -> Tensor:
        """A causal convolution of x [1, C, t] that reads `back` rows back, by `run` of the windows of a layout."""
        return run(waves.windows(self.layout, back, x.device), x)


class Walked(Trees):
    """The own rows of a branch in one call of a recurrent layer; make one for each call.

    Attributes:
        branch: the part that runs.
        layer: names the layer, the same in all parts.
        call: the number of this call of it.
    """

    def __init__(self, branch: Branch, layer: Hashable) -> None:
        super().__init__(branch.part.own)
        self.branch, self.layer, self.call = branch, layer, branch.call_of(layer)
        self.keeps = branch.part.is_trunk
        self._calls: dict[str, int] = {}

    @cached_property
    def _starts(self) -> list[int]:
        """Rows of the path that own segments continue, each number once, in the order of the segments."""
        return [rows for rows in dict.fromkeys(self.branch.part.hangs_at.tolist()) if rows > 0]

    def _key(self, kind: str) -> Hashable:
        """Make the key of a scan or convolution in this call: a layer may have several of a kind."""
        number = self._calls[kind] = self._calls.get(kind, -1) + 1
        return self.layer, self.call, kind, number

    # ------------------------------------------------------------------ scans
    def initial(self, key: Hashable, device: torch.device) -> tuple[Tensor, waves.Gather] | None:
        self.branch.check_gradients()
        if not self._starts:
            return None
        states = torch.cat([self.branch.kept_above((key, rows))[0] for rows in self._starts])
        return states, _gather(self.layout, self.branch.part.hangs_at, self._starts, device)

    def keep_state(self, key: Hashable, behind: int, state: Tensor) -> None:
        self.branch.keep((key, self.branch.part.path_rows + behind), state)

    def scan_key(self) -> Hashable:
        return self._key("state")

    # ------------------------------------------------------------------ convolutions
    def convolve(self, run: Callable[[waves.Windows | None, Tensor], Tensor], x: Tensor, back: int) -> Tensor:
        self.branch.check_gradients()
        if not back:
            return super().convolve(run, x, back)
        key, part = self._key("convolution"), self.branch.part
        tails = [self.branch.kept_above((key, rows))[0] for rows in self._starts]
        if self.keeps and not tails:
            tails = [x.new_zeros(x.shape[1], back)]  # zeros are what a path begins behind
        if not tails:
            return super().convolve(run, x, back)
        behind, sizes = _behind(self.layout, part.hangs_at, self._starts, back)
        parts = [piece for tail, own in zip(tails, x.split(sizes, 2), strict=True) for piece in (tail[None], own)]
        before = torch.cat(parts, 2)
        if self.keeps:
            for cut in part.cuts:
                self.branch.keep((key, part.path_rows + cut), before[0, :, cut : cut + back].clone())
        out = run(waves.windows(behind, back, x.device), before)
        return torch.cat(out.split([piece.shape[2] for piece in parts], 2)[1::2], 2)


def at_layer(dualkv: Any, layer: nn.Module) -> Any:
    """Put a branch's own rows of one call of a recurrent layer in its place; others stay as they are."""
    return Walked(dualkv, layer) if isinstance(dualkv, Branch) else dualkv


def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of recurrent layers: says which of them a branch comes to."""
    if kwargs.get("dualkv") is None:
        return None
    return args, {**kwargs, "dualkv": at_layer(kwargs["dualkv"], module)}


def _roots(layout: Layout) -> list[int]:
    """The segment at the top of each segment's tree."""
    roots: list[int] = []
    for segment, up in enumerate(layout.parent.tolist()):
        roots.append(segment if up < 0 else roots[up])
    return roots


def _gather(layout: Layout, hangs_at: Any, starts: list[int], device: torch.device) -> waves.Gather:
    """Make the gather of the segments of the first wave."""
    segments = layout._segments

    def make() -> waves.Gather:
        roots = _roots(layout)
        first = waves.of_first_wave(segments)
        parents = np.array([starts.index(int(hangs_at[roots[segment]])) for segment in first], np.int64)
        counts = np.bincount(parents, minlength=len(starts))
        return waves.Gather(torch.from_numpy(parents).to(device), torch.from_numpy(counts).to(device))

    return segments.cached(("walked states", device), make)


def _behind(layout: Layout, hangs_at: Any, starts: list[int], back: int) -> tuple[Layout, list[int]]:
    """The layout with a segment of `back` rows before the segments that continue the same rows of the path, and the
    numbers of rows of these; without `starts` before all of them."""

    def make() -> tuple[Layout, list[int]]:
        lengths, parent, sizes = list[int](), list[int](), list[int]()
        place: list[int] = []  # of each segment
        tail, last = -1, None
        for segment, ((a, b), up) in enumerate(
            zip(pairwise(layout.offsets.tolist()), layout.parent.tolist(), strict=True)
        ):
            start = int(hangs_at[segment]) if starts and up < 0 else last
            if not sizes or start != last:
                tail, last = len(lengths), start
                lengths.append(back)
                parent.append(-1)
                sizes.append(0)
            place.append(len(lengths))
            lengths.append(b - a)
            parent.append(tail if up < 0 else place[up])
            sizes[-1] += b - a
        return Layout.from_segments(np.append(0, np.cumsum(lengths)), parent, layout.device), sizes

    return layout._segments.cached(("walked convolution", back), make)

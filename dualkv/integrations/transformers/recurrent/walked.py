"""Recurrent layers of a tree walked in parts (:func:`dualkv.walk`): states and last inputs that a path keeps.

A trunk runs as a chain of segments, cut where parts below leave the path. It keeps the state of each layer at every
cut, and of each convolution the k - 1 inputs before it. A part below starts its segments from these. Their gradients
are added up and enter the trunk's own backward, like those of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from dualkv.branches import Branch
from dualkv.integrations.transformers.recurrent import waves
from dualkv.layout import Layout

Tensor = torch.Tensor


@dataclass
class Walked:
    """A branch in one call of a recurrent layer, in the place of a layout.

    Attributes:
        branch: the part that runs.
        layer: names the layer, the same in all parts.
        call: the number of this call of it.
    """

    branch: Branch
    layer: Hashable
    call: int
    _calls: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, branch: Branch, layer: Hashable) -> Walked:
        """Wrap the branch of one call of a layer; make one for each call."""
        return cls(branch, layer, branch.call_of(layer))

    @property
    def num_tokens(self) -> int:
        return self.branch.num_tokens

    @property
    def layout(self) -> Layout:
        """The layout of the own rows."""
        return self.branch.part.own

    @property
    def keeps(self) -> bool:
        """Whether parts below start from states of this one."""
        return self.branch.part.is_trunk

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
        """(states [A, ...] of the path, which of them segments of the first wave start from); None: from nothing."""
        self.branch.check_gradients()
        if not self._starts:
            return None
        states = torch.cat([self.branch.kept_above((key, rows))[0] for rows in self._starts])
        return states, _gather(self.layout, self.branch.part.hangs_at, self._starts, device)

    def keep_state(self, key: Hashable, behind: int, state: Tensor) -> None:
        """The state [1, ...] behind the first own rows of a trunk."""
        self.branch.keep((key, self.branch.part.path_rows + behind), state)

    def scan_key(self) -> Hashable:
        return self._key("state")

    # ------------------------------------------------------------------ convolutions
    def convolve(self, run: Callable[[Layout, Tensor], Tensor], x: Tensor, back: int) -> Tensor:
        """A causal convolution that reads `back` rows back, of the own rows behind the path's.

        Args:
            run: convolves [1, C, T] along the paths of a layout.
            x: [1, C, t].

        Returns:
            [1, C, t].
        """
        self.branch.check_gradients()
        if not back:
            return run(self.layout, x)
        key, part = self._key("convolution"), self.branch.part
        tails = [self.branch.kept_above((key, rows))[0] for rows in self._starts]
        if self.keeps and not tails:
            tails = [x.new_zeros(x.shape[1], back)]  # zeros are what a path begins behind
        if not tails:
            return run(self.layout, x)
        behind, sizes = _behind(self.layout, part.hangs_at, self._starts, back)
        parts = [piece for tail, own in zip(tails, x.split(sizes, 2), strict=True) for piece in (tail[None], own)]
        before = torch.cat(parts, 2)
        if self.keeps:
            for cut in part.cuts:
                self.branch.keep((key, part.path_rows + cut), before[0, :, cut : cut + back].clone())
        return torch.cat(run(behind, before).split([piece.shape[2] for piece in parts], 2)[1::2], 2)


def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of recurrent layers: says which of them a branch comes to."""
    branch = kwargs.get("dualkv")
    if not isinstance(branch, Branch):
        return None
    return args, {**kwargs, "dualkv": Walked.of(branch, module)}


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

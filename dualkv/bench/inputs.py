"""The inputs of every side of a benchmark: packed random tensors, and where prompts and responses lie in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkv.bench.workloads import Workload
from dualkv.ops.features import Features

Rows = npt.NDArray[np.int64]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Side:
    """One way to compute a workload in one direction.

    Attributes:
        call: what is timed: one forward, one backward, or both one after the other.
        results: of the last call, in packed order: (out [T, H, D],) of a forward, else (dq [T, H, D], dk and dv
            [T, Hk, D]); for a comparison. v, out and their gradients may have another head dim.
        parts: pieces to time apart, by name; `extra` names those that `call` leaves out.
    """

    call: Callable[[], Any]
    results: Callable[[], tuple[torch.Tensor, ...]]
    parts: dict[str, Callable[[], Any]] = field(default_factory=dict)
    extra: tuple[str, ...] = ()


class Inputs:
    """Random q, dout [T, H, D] and k, v [T, Hk, D] of a workload on a device, and the rows of its segments."""

    def __init__(self, workload: Workload, device: str = "cuda") -> None:
        self.workload, self.layout, self.device = workload, workload.layout(device), device
        self.scale = workload.head_dim**-0.5
        self._generator = torch.Generator(device).manual_seed(0)
        head_dim, head_dim_v = workload.head_dims
        self.q, self.k = self._draw(workload.heads, head_dim), self._draw(workload.kv_heads, head_dim)
        self.v = self._draw(workload.kv_heads, head_dim_v)
        offsets = self.layout.offsets.numpy().astype(np.int64)
        self._rows: list[Rows] = [np.arange(a, b) for a, b in itertools.pairwise(offsets)]  # of each segment
        self._parent = self.layout.parent.numpy()

    @cached_property
    def _paths(self) -> list[Rows]:
        """The rows of each segment behind all rows above it."""
        paths: list[Rows] = []
        for up, rows in zip(self._parent, self._rows, strict=True):
            paths.append(rows if up < 0 else np.concatenate([paths[up], rows]))
        return paths

    @property
    def groups(self) -> list[tuple[Rows, list[Rows]]]:
        """(rows of the prompt, rows of each response) of each group.

        Raises:
            ValueError: a tree, which has no such groups.
        """
        if self.layout.depth > 2:
            raise ValueError(f"computes prompts and responses, {self.workload.name} has {self.layout.depth} levels")
        rows, parent = self._rows, self._parent
        return [(rows[s], [rows[r] for r in np.flatnonzero(parent == s)]) for s in np.flatnonzero(parent == -1)]

    @cached_property
    def features(self) -> Features:
        """The features that the workload asks for."""
        w = self.workload
        return w.features(torch.randn(w.heads, generator=self._generator, device=self.device) if w.sinks else None)

    @cached_property
    def dout(self) -> torch.Tensor:
        """The gradient of out."""
        return self._draw(self.workload.heads, self.workload.head_dims[1])

    def _draw(self, heads: int, head_dim: int) -> torch.Tensor:
        shape, dtype = (self.layout.num_tokens, heads, head_dim), DTYPES[self.workload.dtype]
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=dtype)

    def check_plain(self) -> None:
        """Raise ValueError for a workload with features, of which the calling side has none."""
        if names := self.workload.names:
            raise ValueError(f"computes plain full attention, {self.workload.name} has {' and '.join(names)}")

    def copied(self) -> list[tuple[Rows, Rows]]:
        """(query rows, key rows) of sequences that together are the workload, causal from the last key on: each
        segment, or its part in a chunk, behind a copy of as much of its path as it sees."""
        found, reach = [], self.workload.reach
        for path, rows in zip(self._paths, self._rows, strict=True):
            position = np.arange(len(path) - len(rows), len(path))
            lowest = reach.lowest(position) if reach else np.zeros_like(position)
            chunk = lowest if self.workload.chunk else np.zeros_like(lowest)
            for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(chunk)) + 1) if len(rows) else ():
                found.append((rows[part], path[lowest[part[0]] : position[part[-1]] + 1]))
        return found

    def ranges(self) -> list[tuple[int, int, int, int, bool]]:
        """(first row, end, first key, end, whether causal) of each segment with itself and with every one above it."""
        found = []
        for s, rows in enumerate(self._rows):
            up = s
            while up >= 0:
                keys = self._rows[up]
                if len(rows) and len(keys):
                    found.append((int(rows[0]), int(rows[-1]) + 1, int(keys[0]), int(keys[-1]) + 1, up == s))
                up = int(self._parent[up])
        return found

    def replicated(self) -> list[Rows]:
        """The rows of each full sequence: all segments from the prompt to a leaf."""
        continued = set(self._parent.tolist())
        return [path for s, path in enumerate(self._paths) if s not in continued]

    def dout_of(self, rows: torch.Tensor) -> torch.Tensor:
        """dout of `rows`. A row that occurs n times has an nth of its dout each time, so that gradients add up to the
        packed ones."""
        times = torch.bincount(rows, minlength=self.layout.num_tokens)
        if int(times.max()) == 1:
            return take(self.dout, rows)
        return (self.dout / times.clamp(min=1).to(self.dout.dtype)[:, None, None])[rows]

    def index(self, rows: list[Rows]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows])).to(self.device)

    def cumulative(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=self.device)

    def empty(self) -> torch.Tensor:
        """Make a tensor for out: NaN until it is written."""
        return self.q.new_full((*self.q.shape[:2], self.v.shape[2]), float("nan"))


def take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows], without a copy where the rows lie one after another."""
    begin, n = int(rows[0]), len(rows)
    if int(rows[-1]) - begin == n - 1 and bool((rows == torch.arange(begin, begin + n, device=rows.device)).all()):
        return x[begin : begin + n]
    return x[rows]


def added(like: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The sum in fp32 of (rows, values) parts as a tensor of the shape and dtype of `like`; rows may repeat."""
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for rows, values in parts:
        total.index_add_(0, rows, values.float())
    return total.to(like.dtype)

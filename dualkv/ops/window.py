"""Sliding windows and chunks: which keys of its path a query sees. The host's one statement of the rule.

Every token has a path (the segments above its own, then its segment up to itself) and a position on that path. A query
at position p sees the keys of its path at `lowest(p)` and later. `lowest` never falls along a path, so that each key is
seen by the positions from its own to below `end`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from codegen.tiles import SHORT_WINDOW
from dualkv.arrays import IntArray


@dataclass(frozen=True)
class Window:
    """A sliding window or chunks, one of the two.

    Attributes:
        size: keys that a query sees, itself included (transformers' `sliding_window`).
        chunk: positions a chunk: a query sees the keys of its own chunk (Llama 4's `attention_chunk_size`).

    Raises:
        ValueError: both are given or none, or a number is below 1.
    """

    size: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if (self.size is None) == (self.chunk is None):
            raise ValueError(f"got window={self.size} and chunk={self.chunk}, expected one of the two")
        for name, value in (("window", self.size), ("chunk", self.chunk)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected 1 or more")

    @property
    def max_keys(self) -> int:
        """The most keys that a query sees."""
        return self.size or self.chunk or 0

    @property
    def short(self) -> bool:
        """Whether the forward takes the tile of short windows."""
        return self.max_keys <= SHORT_WINDOW

    def lowest(self, position: IntArray) -> IntArray:
        """The lowest position that a query at each position sees, 0 or more."""
        if self.size is not None:
            return np.maximum(position - self.size + 1, 0)
        assert self.chunk is not None
        return position // self.chunk * self.chunk

    def end(self, position: IntArray) -> IntArray:
        """One past the last position that sees a key at each position."""
        if self.size is not None:
            return position + self.size
        assert self.chunk is not None
        return (position // self.chunk + 1) * self.chunk

    def hides(self, longest_path: int) -> bool:
        """Whether it hides any key on paths of up to so many tokens; if not, attention is full."""
        return longest_path > self.max_keys

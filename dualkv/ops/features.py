"""Features of attention beyond softmax(q k^T) v: windows, chunks, sinks and softcapping.

:class:`Features` is what :func:`dualkv.attention` was asked for, on its way through the ops and backends to kernels.

:class:`Window` is the host's one statement of the keys that a query sees. Every token has a path (the segments above
its own, then its segment up to itself) and a position on that path. A query at position p sees the keys of its path at
`lowest(p)` and later. `lowest` never falls along a path, so that each key is seen by the positions from its own to
below `end`.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch

from codegen.tiles import SHORT_WINDOW
from cute_kernels.abi import MAX_ROWS
from dualkv.arrays import IntArray, positive

# fp32 holds softmax_scale / softcap; and the kernels' tanh is off by up to 2^-21, times the cap 2^-11 of a score.
SOFTCAP_MIN, SOFTCAP_MAX = 2.0**-20, 2.0**10
# Gradients of scores far above the cap underflow in fp16, whatever their sum is rounded to: at a cap of 2^-10 of scores
# around 1, dq is off by 10 times what rounding explains.
SOFTCAP_MIN_HALF = 2.0**-3


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


class FeatureArguments(TypedDict, total=False):
    """The keyword arguments of :func:`dualkv.attention` that are its :class:`Features`.

    Functions that take them hand them on, and must follow where a new one is for each head or each row: the shards of
    :mod:`dualkv.sequence_parallel` and :mod:`dualkv.context_parallel`, :mod:`dualkv.branches`, and the images of
    :mod:`dualkv.integrations.transformers.media`.
    """

    window: int | None
    chunk: int | None
    sinks: torch.Tensor | None
    softcap: float | None
    batch_invariant: bool


class Features(NamedTuple):
    """The features of a call of :func:`dualkv.attention`, in the order of the ops' arguments.

    Attributes:
        window: keys that a query sees, itself included; None: all.
        chunk: positions a chunk, in place of a window; None: no chunks.
        sinks: [H], a natural-log logit a head, neither scaled nor capped; the log-sum-exp contains it.
        softcap: scores are softcap * tanh(softmax_scale * q.k / softcap).
        batch_invariant: the bits of the forward's rows do not depend on what else is in the batch.
    """

    window: int | None = None
    chunk: int | None = None
    sinks: torch.Tensor | None = None
    softcap: float | None = None
    batch_invariant: bool = False

    @classmethod
    def given(
        cls,
        window: int | None = None,
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
        batch_invariant: bool = False,
    ) -> Features:
        """The features that a caller asks for, as Python's own types; :meth:`check` says whether a call takes them.

        Raises:
            ValueError: a window or chunk below 1, a cap out of range.
            TypeError: a window or chunk that is not an integer; a cap that is not a number; a `batch_invariant` that is
                not a bool.
        """
        if not isinstance(batch_invariant, bool):
            raise TypeError(f"batch_invariant is {batch_invariant!r}, expected True or False")
        if window is chunk is sinks is softcap is None and not batch_invariant:
            return NONE
        window = None if window is None else min(positive("window", window), MAX_ROWS)  # no path is longer
        chunk = None if chunk is None else min(positive("chunk", chunk), MAX_ROWS)
        if softcap is not None:
            check_number("softcap", softcap)
            _check_cap(softcap)
            softcap = float(softcap)
        return cls(window, chunk, sinks, softcap, batch_invariant)

    def check(self, q: torch.Tensor) -> None:
        """Check that attention with queries q [T, H, D] takes the features.

        Raises:
            ValueError: a cap out of range, sinks of another shape or device, a window or chunk below 1, or both.
            TypeError: sinks of another dtype.
        """
        if self.softcap is not None:
            _check_cap(self.softcap)
            if q.dtype == torch.float16 and self.softcap < SOFTCAP_MIN_HALF:
                raise ValueError(
                    f"softcap is {self.softcap} with torch.float16, whose gradients underflow there: expected at least"
                    " 2^-3, or torch.bfloat16"
                )
        if self.sinks is not None:
            if self.sinks.shape != q.shape[1:2]:
                raise ValueError(f"sinks has shape {tuple(self.sinks.shape)}, expected [H] = {tuple(q.shape[1:2])}")
            if self.sinks.dtype not in (q.dtype, torch.float32):
                either = "" if q.dtype == torch.float32 else " or torch.float32"
                raise TypeError(f"sinks is {self.sinks.dtype}, expected q's {q.dtype}{either}")
            if self.sinks.device != q.device:
                raise ValueError(f"sinks is on {self.sinks.device} and q on {q.device}, expected one device")
        if self.window is not None or self.chunk is not None:
            Window(self.window, self.chunk)

    def of_call(self, longest_path: int, lse_dtype: torch.dtype) -> Features:
        """The features as backends take them: without a window or chunks that hide no key on paths of up to
        `longest_path` tokens, and with contiguous sinks in the dtype of the log-sum-exp. A batch-invariant call keeps
        its window: whether it hides a key depends on other paths."""
        window, chunk, sinks, softcap, batch_invariant = self
        if window is None and chunk is None and sinks is None:
            return self
        if (reach := self.reach) is not None and not reach.hides(longest_path) and not batch_invariant:
            window = chunk = None
        sinks = None if sinks is None else sinks.to(lse_dtype).contiguous()
        return Features(window, chunk, sinks, softcap, batch_invariant)

    @property
    def reach(self) -> Window | None:
        """The window or chunks; None: a query sees all keys of its path."""
        return None if self.window is None and self.chunk is None else _window(self.window, self.chunk)

    @property
    def asked(self) -> dict[str, Any]:
        """Values that are asked for, by the names of `codegen.spec.FEATURES`; "window" stands for chunks too. And
        "batch_invariant", which is a plan's."""
        given = {"window": self.window or self.chunk, "sinks": self.sinks, "softcap": self.softcap}
        given["batch_invariant"] = self.batch_invariant or None
        return {name: x for name, x in given.items() if x is not None}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what is asked for."""
        return tuple(self.asked)


NONE = Features()
_window = lru_cache(64)(Window)  # every layer of a model asks for the same few


def _check_cap(softcap: float) -> None:
    if not SOFTCAP_MIN <= softcap <= SOFTCAP_MAX:
        raise ValueError(f"softcap is {softcap}, expected a number from 2^-20 to 2^10")


def check_number(name: str, value: object) -> None:
    """Raise TypeError for what is neither a number nor None."""
    if not isinstance(value, _NUMBERS) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a Python number")


_NUMBERS = (numbers.Real, torch.SymInt, torch.SymFloat, type(None))

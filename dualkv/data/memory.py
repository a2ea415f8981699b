"""Costs of rows in memory and in time, for plans of trees that do not fit into memory at once.

Bytes are counted beside weights, their gradients, the optimizer and the head's logits. Time is counted in rows, as in
:mod:`dualkv.data.gain`: a forward of a row is 1, its backward 2, and its forward again, where layers are recomputed, 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dualkv.data.gain import PAIRS_A_ROW

# Rows of projections and MLP, forward. Fitted to docs/results/walk-*-h200.json (Qwen3-8B, 8 layers, transformers' eager
# layers; walks, and passes of whole groups and trees), which they meet within 5 % at 6.2 us a row and 4 ms a pass that
# has a head.
BACKWARD = 2.0  # of a row
ATTENTION, ATTENTION_BACKWARD = 0.7, 2.0  # of as many FLOP as a row's products; the backward computes five for two
PATH_ROW = 0.002  # a forward copies keys and values of each row of its path, and as many rows without queries
PASS_BACKWARD = 2300  # adds to the gradients of all weights
LEAST_PASS = 3700  # of a forward: the host launches as many kernels for few rows
ROWS_AT_ONCE = 32768  # of all KV heads, for which the backward of attention behind a path makes room at a time

SHARES = tuple(i / 8 for i in range(8, -1, -1))  # of layers that keep all

PAIRS = "beside_path", "saved"  # of layers that keep all and of others; may be None
POSITIVE = "bytes", "graph", "recomputed", "pairs", "kv_heads", "other_heads"  # costs of a path and the head may be 0


def heads_at_once(rows: int, kv_heads: int) -> int:
    """Return the KV heads that the backward of a part's attention takes at a time, of rows of its path and its own.

    Behind a long path each call still has some blocks of keys for every multiprocessor.
    """
    return max(1, min(kv_heads, kv_heads * ROWS_AT_ONCE // max(rows, 1)))


class RowCosts(NamedTuple):
    """Bytes of a row, over all layers of a model, and of the head. :func:`dualkv.measure_rows` measures them.

    Attributes:
        kept: keys, values and states that a trunk's row keeps for the parts below, and the sums of their gradients.
        path: what a row of the path takes beside that while a part below it runs, in one layer at a time, if all KV
            heads run at once.
        graph: what a row takes in a pass whose layers keep all that their backward needs.
        recomputed: the same in a pass whose layers are recomputed in the backward.
        pairs: pairs of a query and a key that take the time of a row of projections and MLP.
        kv_heads: of the layer whose path takes the most. Behind a long path some run after others
            (:func:`heads_at_once`).
        head: bytes that the head and the loss of a pass take, whatever its rows. What they take of a row is in `saved`.
        beside_path: `graph` and `recomputed` at the time when rows of the path take `path`: in the backward of
            attention, where the MLP is done. None: the same.
        saved: `graph` and `recomputed` at the end of the forward, when the head runs. None: the same.
        other_heads: of layers with other numbers of KV heads: each number, and the share of `path` that it takes.
    """

    kept: float
    path: float
    graph: float
    recomputed: float
    pairs: float = PAIRS_A_ROW
    kv_heads: int = 1
    head: float = 0.0
    beside_path: tuple[float, float] | None = None
    saved: tuple[float, float] | None = None
    other_heads: tuple[tuple[int, float], ...] = ()

    def of_path(self, rows: int) -> float:
        """Return the bytes that a path of so many rows takes while a part below it runs."""
        layers = (self.kv_heads, 1.0), *self.other_heads
        return self.path * rows * max(share * heads_at_once(rows, heads) / heads for heads, share in layers)

    def own(self, keeps: float) -> tuple[float, float, float]:
        """Return the bytes of a pass's own row: at the peak of a layer, in attention's backward, and when the head
        runs.

        keeps: the share of layers that keep all. They are the last ones, whose backward is done when others run again.
        """
        most = self.graph, self.recomputed
        each = most, self.beside_path or most, self.saved or most
        peak, beside, saved = (keeps * of_kept + (1 - keeps) * of_others for of_kept, of_others in each)
        return peak, beside, saved


@dataclass(frozen=True)
class Memory:
    """A limit of memory as the budget of :func:`dualkv.walk` and of :func:`dualkv.plan_in_memory`.

    Attributes:
        bytes: that passes may take beside weights, their gradients and the optimizer: kept keys and values of all
            trunks that wait, the sums of their gradients, the rows that have a graph, and the head if `row` has it.
        row: what a row takes.

    Raises:
        ValueError: numbers that are not positive (costs of a path and the head may be 0).
        TypeError: what is no number.
    """

    bytes: float
    row: RowCosts

    def __post_init__(self) -> None:
        if not isinstance(self.row, RowCosts):
            raise TypeError(f"row is a {type(self.row).__name__}, expected a RowCosts")
        given = [("bytes", self.bytes)]
        for name in PAIRS:
            if (value := getattr(self.row, name)) is not None and not (isinstance(value, tuple) and len(value) == 2):
                raise TypeError(f"{name} is {value!r}, expected a pair of numbers, or None")
        for name, value in self.row._asdict().items():
            for x in value if isinstance(value, tuple) else [value]:
                given += [(name, y) for y in (x if isinstance(x, tuple) else [x]) if y is not None or name not in PAIRS]
        for name, value in given:
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"{name} is {value!r}, expected a number")
            if not 0 <= value < float("inf") or (value == 0 and name in POSITIVE):
                raise ValueError(f"{name} is {value}, expected a positive number")

    def of_pass(self, waiting: int, path: int, own: int, keeps: float, has_head: bool = True) -> float:
        """Count the bytes of a pass, at the largest of three peaks: in a layer, in the backward of attention that reads
        the path, and in the head.

        Args:
            waiting: rows of trunks that keep tensors then.
            path: rows of the path that the pass reads.
            own: rows of the pass.
            keeps: the share of its layers that keep all.
            has_head: whether it has a loss.
        """
        peak, beside, saved = self.row.own(keeps)
        peaks = own * peak, own * beside + self.row.of_path(path), (own * saved + self.row.head) * has_head
        return waiting * self.row.kept + max(peaks)

    def most_rows(self, waiting: int, path: int, keeps: float, is_trunk: bool) -> int:
        """Return the most own rows that a pass may have; a trunk's wait too, beside `waiting` of others."""
        peak, beside, saved = (x + self.row.kept * is_trunk for x in self.row.own(keeps))
        left = self.bytes - waiting * self.row.kept
        return max(0, int(min(left / peak, (left - self.row.of_path(path)) / beside, (left - self.row.head) / saved)))

    def most_kept(self, waiting: int, path: int, own: int, has_head: bool = True) -> float | None:
        """Return the share of a pass's layers that may keep all; None if it does not fit even where none does."""
        for share in SHARES:
            if self.of_pass(waiting, path, own, share, has_head) <= self.bytes:
                return share
        return None

    def time(self, path: int, own: int, pairs: float, keeps: float, is_trunk: bool = False) -> float:
        """Estimate the time of a part, forward and backward, in rows. A trunk runs forward once more."""
        forwards = 1 + is_trunk + (1 - keeps)
        of_backward = BACKWARD * own + ATTENTION_BACKWARD * pairs / self.row.pairs + 2 * PATH_ROW * path + PASS_BACKWARD
        return forwards * self.forward_time(path, own, pairs) + of_backward

    def forward_time(self, path: int, own: int, pairs: float) -> float:
        """Estimate the time of one forward of a part."""
        return max(own + ATTENTION * pairs / self.row.pairs + PATH_ROW * path, LEAST_PASS)

"""Costs of rows in memory and in time, for plans of trees that do not fit into memory at once.

Bytes are counted beside weights, their gradients, the optimizer and the head's logits. Time is counted in rows, as in
:mod:`dualkv.data.gain`: a forward of a row is 1, its backward 2, and its forward again, where layers are recomputed, 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dualkv.data.gain import PAIRS_A_ROW

FORWARD, BACKWARD, ATTENTION_BACKWARD = 1.0, 2.0, 2.5  # of a row; attention computes five products for two
PATH_ROW = 0.02  # rows: a pass copies keys and values of each row of its path, and as many rows without queries
PASS = 256  # rows: products of few rows leave some of a GPU's multiprocessors idle


class RowCosts(NamedTuple):
    """Bytes of a row, over all layers of a model. :func:`dualkv.measure_rows` measures them.

    Attributes:
        kept: keys, values and states that a trunk's row keeps for the parts below, and the sums of their gradients.
        path: what a row of the path takes beside that while a part below it runs, in one layer at a time.
        graph: what a row takes in a pass whose layers keep all that their backward needs.
        recomputed: the same in a pass whose layers are recomputed in the backward.
        pairs: pairs of a query and a key that take the time of a row of projections and MLP.
    """

    kept: float
    path: float
    graph: float
    recomputed: float
    pairs: float = PAIRS_A_ROW


@dataclass(frozen=True)
class Memory:
    """A limit of memory as the budget of :func:`dualkv.walk` and of :func:`dualkv.plan_in_memory`.

    Attributes:
        bytes: that passes may take beside weights, their gradients, the optimizer and the head's logits: kept keys and
            values of all trunks that wait, the sums of their gradients, and the rows that have a graph.
        row: what a row takes.

    Raises:
        ValueError: numbers that are not positive (costs of a path may be 0).
        TypeError: what is no number.
    """

    bytes: float
    row: RowCosts

    def __post_init__(self) -> None:
        if not isinstance(self.row, RowCosts):
            raise TypeError(f"row is a {type(self.row).__name__}, expected a RowCosts")
        for name, value in (("bytes", self.bytes), *self.row._asdict().items()):
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"{name} is {value!r}, expected a number")
            if not 0 <= value < float("inf") or (value == 0 and name in ("bytes", "graph", "recomputed", "pairs")):
                raise ValueError(f"{name} is {value}, expected a positive number")

    def of_pass(self, waiting: int, path: int, own: int, keeps_all: bool) -> float:
        """Count the bytes of a pass.

        Args:
            waiting: rows of trunks that keep tensors then.
            path: rows of the path that the pass reads.
            own: rows of the pass.
            keeps_all: whether its layers keep all.
        """
        row = self.row
        return waiting * row.kept + path * row.path + own * (row.graph if keeps_all else row.recomputed)

    def keeps_all(self, waiting: int, path: int, own: int) -> bool | None:
        """Say whether layers of a pass may keep all; None if the pass does not fit even where they are recomputed."""
        for choice in (True, False):
            if self.of_pass(waiting, path, own, choice) <= self.bytes:
                return choice
        return None

    def time(self, path: int, own: int, pairs: float, keeps_all: bool, is_trunk: bool = False) -> float:
        """Estimate the time of a part, forward and backward, in rows. A trunk runs forward once more."""
        forwards = FORWARD * (1 + is_trunk + (not keeps_all))
        of_path = PATH_ROW * path * (2 + is_trunk)
        of_pairs = (forwards + ATTENTION_BACKWARD) * pairs / self.row.pairs
        return (forwards + BACKWARD) * own + of_pairs + of_path + PASS * (forwards + BACKWARD)

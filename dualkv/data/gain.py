"""Whether packing what rollouts share pays: the one place that decides, for every planner.

The cost of a pass is counted in rows. A row of a layer's projections and MLP costs as much as `PAIRS_A_ROW` pairs of a
query and a key. Packing computes fewer rows and pairs, and adds borders: where a segment of a row's path ends, the
kernels compute half a block of keys too many on average. Hooks, plans and the trie are host work, which hides behind
the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dualkv.arrays import IntArray
from dualkv.prefixes import SharedPrefixes

# 6 FLOP for a weight over 12 for a head and its dim, forward and backward. Qwen3-0.6B has 3,800, Qwen3-8B 23,600: with
# the small number borders and pairs weigh the most.
PAIRS_A_ROW = 3800
PAIRS_A_BORDER = 64  # half of the widest block of keys
MIN_SHARED = 8  # tokens: parts that begin alike for fewer are repeated, which keeps segments long
MIN_GAIN = 0.02  # of the cost: below it, the shared part is not worth another layout


@dataclass(frozen=True)
class Gain:
    """The costs of sequences one by one, and of the same sequences packed.

    Attributes:
        replicated_rows, rows: tokens of all sequences, and packed.
        replicated_pairs, pairs: (query, key) pairs of a head that attention needs.
        borders: segments above a row on its path, summed over packed rows.
    """

    replicated_rows: int
    rows: int
    replicated_pairs: int
    pairs: int
    borders: int

    @classmethod
    def of(cls, shared: SharedPrefixes) -> Gain:
        tree = shared.tree()
        rows, pairs, borders = counts(tree.parent, tree.length)
        before = int((shared.lengths * (shared.lengths + 1) // 2).sum())
        return cls(int(shared.lengths.sum()), rows, before, pairs, borders)

    @property
    def ratio(self) -> float:
        """Replicated rows over packed rows."""
        return self.replicated_rows / self.rows

    @property
    def saved(self) -> float:
        """The part of the cost that packing saves, below 1; negative where packing costs."""
        return 1 - _cost(self.rows, self.pairs, self.borders) / _cost(self.replicated_rows, self.replicated_pairs, 0)

    @property
    def pays(self) -> bool:
        return self.saved >= MIN_GAIN

    def __str__(self) -> str:
        says = f"packing computes {self.rows:,} rows in place of {self.replicated_rows:,} ({self.ratio:.2f}x)"
        if self.pays:
            return f"{says} and saves about {self.saved:.0%} of a pass"
        return f"{says}, which saves less than {MIN_GAIN:.0%} of a pass: rollouts stay as they are"


def pays_over(parent: IntArray, length: IntArray, others: tuple[IntArray, IntArray]) -> bool:
    """Whether segments, `parent` [S] and `length` [S], save enough of the cost of the `others` of equal sequences."""
    return _cost(*counts(parent, length)) <= (1 - MIN_GAIN) * _cost(*counts(*others))


def counts(parent: IntArray, length: IntArray) -> tuple[int, int, int]:
    """Rows, pairs and borders of segments, parents first."""
    depth, begin = (np.zeros(len(parent), np.int64) for _ in range(2))
    for segment, up in enumerate(parent.tolist()):
        if up >= 0:
            depth[segment], begin[segment] = depth[up] + (length[up] > 0), begin[up] + length[up]
    end = begin + length
    pairs = end * (end + 1) // 2 - begin * (begin + 1) // 2
    return int(length.sum()), int(pairs.sum()), int((depth * length).sum())


def _cost(rows: int, pairs: int, borders: int) -> float:
    """Estimate the cost in rows."""
    return rows + (pairs + PAIRS_A_BORDER * borders) / PAIRS_A_ROW


def if_it_pays(shared: SharedPrefixes) -> tuple[SharedPrefixes, Gain]:
    """The prefixes as they are if sharing them pays, else the same sequences sharing nothing; and what was gained."""
    gain = Gain.of(shared)
    return (shared if gain.pays else replace(shared, common=np.zeros_like(shared.common))), gain

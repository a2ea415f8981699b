"""The work of rollouts, replicated and packed, and their assignment to ranks and updates.

Work is in veRL's units: tokens, and squared lengths for attention. A group stays on one rank and in one update, and
packed work is balanced.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualkv.arrays import IntArray
from dualkv.integrations.transformers.masks import Visible, by_config
from dualkv.integrations.verl.data import Rollouts

# veRL balances ranks by this many units for a token and one for a squared length, calibrated for a 7B model.
TOKEN_WORKLOAD = 24576


@dataclass(frozen=True)
class Work:
    """Attributes:
    tokens: rows that the model computes.
    squares: sum of squared lengths; for packed rows and windows, twice the number of visible pairs (less one a row).
        The mean over layers.
    """

    tokens: int
    squares: int

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.squares + other.squares)

    @property
    def workload(self) -> int:
        """One number to balance ranks by."""
        return TOKEN_WORKLOAD * self.tokens + self.squares

    def flops(self, counter: Any) -> float:
        """TFLOP of a forward and a backward without recomputation, by veRL's `FlopsCounter` of full attention.

        The counter takes lengths, but no lengths have the tokens and squares of packed rows. Its count is linear in
        both, so its counts of two lengths give the two rates. It counts recurrent layers of Qwen3.5 for each token, and
        a model whose type it does not know (all other hybrids) as 0.
        """
        short, long = 1 << 12, 1 << 13
        at_short, at_long = (float(counter.estimate_flops([n], 1.0)[0]) for n in (short, long))
        a_square = (at_long - 2 * at_short) / (long**2 - 2 * short**2)
        a_token = (at_short - a_square * short**2) / short
        return self.tokens * a_token + self.squares * a_square


NOTHING = Work(0, 0)
FULL = (Visible(),)  # layers of full attention only


def of_full_attention(config: Any) -> Any:
    """A configuration for veRL's `FlopsCounter`, without windows: those are in `Work.squares`.

    The counter has windows for some model types, and counts half of what is behind a window's length.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if getattr(text, "layer_types", None) and set(by_config(text)) != {Visible()}:
        windows = {"sliding_attention", "chunked_attention"}
        text.layer_types = ["full_attention" if kind in windows else kind for kind in text.layer_types]
    return config


def _squares(lengths: IntArray, layers: Sequence[Visible]) -> int:
    """The visible pairs twice, less one a row, as a length's square counts causal attention; the mean over layers."""
    of_layers = 0
    for (window, chunk), number in Counter(layers).items():
        if chunk is not None:
            found = lengths // chunk * chunk**2 + (lengths % chunk) ** 2
        else:
            seen = lengths if window is None else np.minimum(lengths, window)
            found = (2 * lengths - seen) * seen - (lengths - seen)
        of_layers += number * int(found.sum())
    return round(of_layers / len(layers))


def replicated(rollouts: Rollouts, layers: Sequence[Visible] = FULL) -> Work:
    """The work if every rollout has its own copy of the prompt."""
    lengths = rollouts.prompt_lens + rollouts.response_lens
    return Work(int(lengths.sum()), _squares(lengths, layers))


def packed(rollouts: Rollouts, layers: Sequence[Visible] = FULL) -> Work:
    """The work if tokens that rollouts share are computed once."""
    shared = rollouts.packed_once
    lengths = shared.lengths[shared.order]
    squares = _squares(lengths, layers) - _squares(shared.common, layers)
    return Work(int((lengths - shared.common).sum()), squares)


# ---------------------------------------------------------------- ranks and updates
def rollouts_by_tag(uids: Sequence[Hashable], prompt_lens: Sequence[int], response_lens: Sequence[int]) -> Rollouts:
    """Rollouts as a trainer sees them, without tokens: rollouts with equal `uid` and prompt length share a prompt."""
    found: dict[Hashable, int] = {}
    group = [found.setdefault(key, len(found)) for key in zip(uids, prompt_lens, strict=True)]
    lens = (np.array(x, np.int64) for x in (prompt_lens, response_lens, group))
    return Rollouts.of_groups(*lens)


def balance(rollouts: Rollouts, num_ranks: int, num_updates: int) -> list[list[int]]:
    """The rollouts of each data-parallel rank, update after update, the same number in each.

    Groups are placed from the largest to the smallest. Each goes to the place with the least packed work in which it
    fits. A group that fits nowhere is split, and its prompt is repeated. Raises ValueError for a number of rollouts
    that is no multiple of `num_ranks * num_updates`.
    """
    size, left = divmod(len(rollouts), num_ranks * num_updates)
    if left or size == 0:
        raise ValueError(
            f"got {len(rollouts)} rollouts, expected a multiple of {num_ranks} ranks times {num_updates} updates"
        )
    slots: list[list[int]] = [[] for _ in range(num_ranks * num_updates)]
    loads = [0] * len(slots)
    groups = [(packed(rollouts.select(members)).workload, members) for members in rollouts.members()]
    for _, members in sorted(groups, key=lambda group: -group[0]):
        rest = members
        while len(rest):
            whole = [s for s, slot in enumerate(slots) if size - len(slot) >= len(rest)]
            if whole:
                s = min(whole, key=lambda s: loads[s])
            else:
                s = min(range(len(slots)), key=lambda s: (len(slots[s]), loads[s]))
            free = size - len(slots[s])
            part, rest = rest[:free], rest[free:]
            slots[s] += part.tolist()
            loads[s] += packed(rollouts.select(part)).workload
    # Slots have about equal loads whatever their order; rank r takes every num_ranks-th slot from slot r on.
    return [[i for slot in slots[rank::num_ranks] for i in slot] for rank in range(num_ranks)]


def rank_works(rollouts: Rollouts, assignment: Sequence[Sequence[int]], num_updates: int) -> list[Work]:
    """The packed work of each rank; a prompt counts once in each update."""
    works = []
    for of_rank in assignment:
        parts = np.array_split(np.array(of_rank), num_updates)
        works.append(sum((packed(rollouts.select(part)) for part in parts), NOTHING))
    return works

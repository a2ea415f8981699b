"""Assigns rollouts to ranks and updates: a group stays on one rank and in one update, and packed work is balanced."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dualkv.arrays import IntArray
from dualkv.integrations.verl.data import Rollouts
from dualkv.integrations.verl.work import NOTHING, Work, packed


@dataclass
class Slot:
    """The rollouts of one rank in one update. `free` more rollouts fit; `load` is the packed work."""

    free: int
    load: int = 0
    rollouts: list[int] = field(default_factory=list)

    def add(self, part: IntArray, load: int) -> None:
        self.free -= len(part)
        self.load += load
        self.rollouts += part.tolist()


def rollouts_by_tag(uids: Sequence[Hashable], prompt_lens: Sequence[int], response_lens: Sequence[int]) -> Rollouts:
    """Rollouts as a trainer sees them, without tokens: rollouts with equal `uid` and prompt length share a prompt."""
    found: dict[Hashable, int] = {}
    group = [found.setdefault(key, len(found)) for key in zip(uids, prompt_lens, strict=True)]
    lens = (np.array(x, np.int64) for x in (prompt_lens, response_lens, group))
    return Rollouts.of_groups(*lens)


def balance(rollouts: Rollouts, num_ranks: int, num_updates: int) -> list[list[int]]:
    """The rollouts of each rank, update after update, the same number in each. Equal arguments give the same result.

    Groups are placed from the largest to the smallest. Each goes to the place with the least packed work in which it
    fits. A group that fits nowhere is split, and its prompt is repeated.

    Args:
        rollouts: N rollouts, a multiple of `num_ranks * num_updates`.
        num_ranks: data-parallel ranks.
        num_updates: mini-batches into which each rank cuts its rollouts, in order.

    Raises:
        ValueError: N is not such a multiple.
    """
    size, left = divmod(len(rollouts), num_ranks * num_updates)
    if left or size == 0:
        raise ValueError(
            f"got {len(rollouts)} rollouts, expected a multiple of {num_ranks} ranks times {num_updates} updates"
        )
    slots = [Slot(size) for _ in range(num_ranks * num_updates)]
    groups = [(packed(rollouts.select(members)).workload, members) for members in rollouts.members()]
    for _, members in sorted(groups, key=lambda group: -group[0]):
        rest = members
        while len(rest):
            whole = [slot for slot in slots if slot.free >= len(rest)]
            slot = min(whole, key=lambda s: s.load) if whole else max(slots, key=lambda s: (s.free, -s.load))
            part, rest = rest[: slot.free], rest[slot.free :]
            slot.add(part, packed(rollouts.select(part)).workload)
    # Slots have about equal loads whatever their order; rank r takes every num_ranks-th slot from slot r on.
    return [[i for slot in slots[rank::num_ranks] for i in slot.rollouts] for rank in range(num_ranks)]


def rank_works(rollouts: Rollouts, assignment: Sequence[Sequence[int]], num_updates: int) -> list[Work]:
    """The packed work of each rank; a prompt counts once in each update."""
    works = []
    for of_rank in assignment:
        parts = np.array_split(np.array(of_rank), num_updates)
        works.append(sum((packed(rollouts.select(part)) for part in parts), NOTHING))
    return works

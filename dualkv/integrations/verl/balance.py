"""Where rollouts run: groups on one rank and in one update, every rank with about the same packed work."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dualkv.arrays import IntArray
from dualkv.integrations.verl.data import Rollouts
from dualkv.integrations.verl.work import Work, packed


@dataclass
class Slot:
    """What one rank runs in one update: `free` more rollouts fit."""

    free: int
    load: int = 0
    rollouts: list[int] = field(default_factory=list)

    def add(self, part: IntArray, load: int) -> None:
        self.free -= len(part)
        self.load += load
        self.rollouts += part.tolist()


def rollouts_by_tag(uids: Sequence[Hashable], prompt_lens: Sequence[int], response_lens: Sequence[int]) -> Rollouts:
    """Rollouts as a trainer knows them, which does not hold their tokens: one `uid` and one length, one prompt."""
    found: dict[Hashable, int] = {}
    group = [found.setdefault(key, len(found)) for key in zip(uids, prompt_lens, strict=True)]
    lens = (np.array(x, np.int64) for x in (prompt_lens, response_lens, group))
    return Rollouts.of_groups(*lens)


def balance(rollouts: Rollouts, num_ranks: int, num_updates: int) -> list[list[int]]:
    """The rollouts of each rank, update by update, equally many in each; the same assignment every time.

    Groups, largest first, go where the packed work is least and they fit. One that fits nowhere is cut, which repeats
    its prompt.

    Args:
        rollouts: N of them, a multiple of `num_ranks * num_updates`.
        num_ranks: data-parallel ranks.
        num_updates: mini-batches that each rank cuts its rollouts into, in order.

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
    # Slots came to be equally loaded in any order; those of one rank are every num_ranks-th.
    return [[i for slot in slots[rank::num_ranks] for i in slot.rollouts] for rank in range(num_ranks)]


def rank_works(rollouts: Rollouts, assignment: Sequence[Sequence[int]], num_updates: int) -> list[Work]:
    """Packed work of each rank, prompts counted once an update."""
    works = []
    for of_rank in assignment:
        parts = np.array_split(np.array(of_rank), num_updates)
        works.append(sum((packed(rollouts.select(part)) for part in parts), Work(0, 0)))
    return works

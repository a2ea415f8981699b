"""Micro-batches of whole groups under a budget of packed tokens.

A group costs its prompt once plus its responses. Splitting a group repeats its prompt, so groups stay whole. A group is
split only if it exceeds the budget by itself, or if data-parallel ranks must run equally many micro-batches and there
are too few groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dualkv.arrays import IntArray, Lengths, length_array, length_arrays, positive
from dualkv.data.packing import LabelStyle, check_label_style, label_copies


@dataclass(frozen=True)
class MicroBatch:
    """The groups of one forward and backward.

    Attributes:
        parts: (group, its responses) pairs, both as indices in the input, ascending.
        tokens: packed tokens. The prompt of a split group counts in every part.
        rank: the data-parallel rank that runs the micro-batch.
    """

    parts: tuple[tuple[int, tuple[int, ...]], ...]
    tokens: int
    rank: int = 0


@dataclass
class _Piece:
    """A group, or some of its responses with its prompt."""

    group: int
    responses: list[int]
    tokens: int


def plan_micro_batches(
    prompt_lens: Lengths,
    response_lens: Iterable[Lengths],
    budget: int,
    *,
    num_ranks: int = 1,
    min_count: int = 1,
    labels: LabelStyle = "gather",
) -> list[MicroBatch]:
    """Few micro-batches of at most `budget` packed tokens that hold every response once. The plan is deterministic.

    Groups that exceed the budget are split by first-fit decreasing. First-fit decreasing then gives the number of
    micro-batches for groups and parts; these are spread evenly over the micro-batches where that keeps the budget.

    With `num_ranks` above 1 every rank gets the same number of micro-batches, and ranks are balanced by packed tokens.
    Each rank's largest micro-batches come first, so that ranks run about equally large ones at the same time. Ranks
    that plan their own groups agree on the largest count (an all-reduce), then plan again with that `min_count`.

        for m in plan_micro_batches(prompt_lens, response_lens, budget):
            batch = pack([prompts[g] for g, _ in m.parts], [[responses[g][i] for i in r] for g, r in m.parts])

    Args:
        prompt_lens: [G] tokens of each group's prompt, 1 or more.
        response_lens: G lists of response lengths, each list with at least one, each length 0 or more.
        budget: packed tokens that a micro-batch may hold.
        num_ranks: data-parallel ranks to plan for.
        min_count: every rank runs at least so many micro-batches.
        labels: the label style in which the groups will be packed. A group has P + sum(R) packed tokens for "gather",
            and P - 1 + sum(1 + R) for "roll".

    Returns:
        Rank by rank, each rank's largest first.

    Raises:
        ValueError: a budget below one prompt plus one response, an empty prompt, a group without responses, fewer
            responses than micro-batches, not one list of response lengths for each prompt.
        TypeError: lengths, `budget`, `num_ranks` or `min_count` that are not integers.
    """
    check_label_style(labels)
    budget, num_ranks = positive("budget", budget), positive("num_ranks", num_ranks)
    min_count, copies = positive("min_count", min_count), label_copies(labels)
    shared = length_array("prompt_lens", prompt_lens) - copies
    private = [lengths + copies for lengths in length_arrays("response_lens", response_lens)]
    _check_groups(shared, private, budget, copies)

    pieces = [
        _Piece(g, responses, int(shared[g] + costs[responses].sum()))
        for g, costs in enumerate(private)
        for responses in _first_fit(costs, budget - int(shared[g]))
    ]
    # The number that first-fit decreasing finds, rounded up to the same number on every rank.
    bins = _first_fit(np.array([p.tokens for p in pieces]), budget)
    count = -(-max(len(bins), num_ranks * min_count) // num_ranks) * num_ranks
    total = sum(map(len, private))
    if total < count:
        raise ValueError(
            f"num_ranks {num_ranks} with {count // num_ranks} micro-batches each (min_count, budget) need {count} "
            f"responses at least, got {total}"
        )
    while len(pieces) < count:
        _split_cheapest(pieces, shared, private)

    # Spread evenly where that keeps the budget. It does if pieces were split above: then a micro-batch is one piece.
    costs = np.array([p.tokens for p in pieces])
    even = _spread(costs, count)
    if max(costs[b].sum() for b in even) <= budget:
        bins = even
    while len(bins) < count:  # some bin then holds more than one piece, as there are at least `count` pieces
        at = max((i for i, b in enumerate(bins) if len(b) > 1), key=lambda i: (costs[bins[i]].sum(), -i))
        taken = bins.pop(at)
        bins += [[taken[i] for i in half] for half in _spread(costs[taken], 2)]
    return _on_ranks([[pieces[i] for i in b] for b in bins], num_ranks)


def _check_groups(shared: IntArray, private: list[IntArray], budget: int, copies: int) -> None:
    if len(shared) == 0:
        raise ValueError("prompt_lens is empty, expected at least one group")
    if len(private) != len(shared):
        raise ValueError(
            f"response_lens has {len(private)} lists for {len(shared)} prompts, expected one list a prompt"
        )
    for g, (prompt, costs) in enumerate(zip(shared.tolist(), private, strict=True)):
        if prompt + copies == 0:
            raise ValueError(f"prompt_lens[{g}] is 0, expected at least one token")
        if len(costs) == 0:
            raise ValueError(f"response_lens[{g}] is empty, expected at least one response a prompt")
        longest = int(costs.max())
        if prompt + longest > budget:
            raise ValueError(
                f"budget is {budget} tokens, group {g} needs {prompt + longest} for its prompt and response "
                f"{int(costs.argmax())} alone"
            )


def _first_fit(costs: IntArray, capacity: int) -> list[list[int]]:
    """costs [K], none above `capacity` -> bins of indices. Each index, largest cost first, goes into the first bin with
    room."""
    loads = np.zeros(len(costs), np.int64)
    bins: list[list[int]] = []
    for i in np.argsort(-costs, kind="stable").tolist():
        at = int(np.argmax(loads[: len(bins) + 1] + costs[i] <= capacity))
        if at == len(bins):
            bins.append([])
        bins[at].append(i)
        loads[at] += costs[i]
    return [sorted(b) for b in bins]


def _spread(costs: IntArray, count: int) -> list[list[int]]:
    """costs [K] -> `count` <= K bins of indices, none empty. Each index, largest cost first, goes into the least full
    bin."""
    bins: list[list[int]] = [[] for _ in range(count)]
    least = [(0, 0, b) for b in range(count)]  # cost, entries (empty responses may cost nothing), bin
    for i in np.argsort(-costs, kind="stable").tolist():
        load, entries, at = least[0]
        bins[at].append(i)
        heapq.heapreplace(least, (load + int(costs[i]), entries + 1, at))
    return [sorted(b) for b in bins]


def _split_cheapest(pieces: list[_Piece], shared: IntArray, private: list[IntArray]) -> None:
    """Replace one piece by two halves: the piece whose prompt is the shortest to repeat, and of these the largest."""
    at = min(
        (i for i, p in enumerate(pieces) if len(p.responses) > 1),
        key=lambda i: (shared[pieces[i].group], -pieces[i].tokens, i),
    )
    group, responses = pieces[at].group, np.array(pieces.pop(at).responses)
    prompt, costs = int(shared[group]), private[group]
    for half in _spread(costs[responses], 2):
        part = responses[half]
        pieces.append(_Piece(group, part.tolist(), prompt + int(costs[part].sum())))


def _on_ranks(bins: Sequence[list[_Piece]], num_ranks: int) -> list[MicroBatch]:
    """Equally many micro-batches for every rank. Each one, largest first, goes to the rank with the fewest tokens."""
    sized = []
    for pieces in bins:
        parts = tuple(sorted((p.group, tuple(p.responses)) for p in pieces))
        sized.append((sum(p.tokens for p in pieces), parts))
    sized.sort(key=lambda s: (-s[0], s[1]))
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    open_ranks = [(0, r) for r in range(num_ranks)]
    for tokens, parts in sized:
        load, r = heapq.heappop(open_ranks)
        ranks[r].append(MicroBatch(parts, tokens, r))
        if len(ranks[r]) < len(bins) // num_ranks:
            heapq.heappush(open_ranks, (load + tokens, r))
    return [m for rank in ranks for m in rank]

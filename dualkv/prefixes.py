"""Shared prefixes of token sequences, found at any token: a compressed trie, which becomes a tree of segments."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkv.arrays import IntArray, TokenIds, positive, sequence_list, to_host, token_tensor
from dualkv.tokens import MAX_TOKEN


@dataclass(frozen=True)
class PrefixTree:
    """Sequences as segments in depth-first order, each shared part once.

    S segments, N sequences. Segment s holds tokens `[begin[s], begin[s] + length[s])` of sequence `source[s]`.

    Attributes:
        parent: [S] the segment that each segment continues, -1 for the first one of a tree.
        length: [S] tokens.
        source: [S] the first sequence that contains the segment.
        begin: [S] tokens on the path above.
        last: [N] the last segment of each sequence, which the sequence fills to its end.
    """

    parent: IntArray
    length: IntArray
    source: IntArray
    begin: IntArray
    last: IntArray

    @property
    def offsets(self) -> IntArray:
        """[S + 1] first packed row of each segment, then their total."""
        return np.append(0, np.cumsum(self.length))

    def paths(self) -> tuple[IntArray, IntArray]:
        """The segments of each sequence in order, all sequences end to end, and [N] the number of each sequence."""
        paths: list[list[int]] = []
        for segment, up in enumerate(self.parent.tolist()):
            paths.append([*paths[up], segment] if up >= 0 else [segment])
        chosen = [paths[segment] for segment in self.last.tolist()]
        counts = np.array([len(path) for path in chosen], np.int64)
        return np.array([segment for path in chosen for segment in path], np.int64), counts


@dataclass(frozen=True)
class SharedPrefixes:
    """The prefixes that N sequences share; any selection of the sequences makes a tree.

    Attributes:
        lengths: [N] tokens of each sequence.
        order: [N] the sequences, sorted so that neighbours share the most.
        common: [N] tokens that sequence `order[i]` shares with `order[i - 1]`, 0 for the first. Two sequences further
            apart share the minimum of the entries between them.
        cuts: of :meth:`cut_at`; None for segments that end where sequences branch or end.
    """

    lengths: IntArray
    order: IntArray
    common: IntArray
    cuts: list[IntArray] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def tree(self) -> PrefixTree:
        """Every shared part as a segment. Trees, and the branches of a segment, have the order of their first
        sequences."""
        parent, end, last, _ = self._trie()
        return _in_order(parent, end, last)

    @property
    def tokens(self) -> int:
        """Packed tokens: each shared token counts once."""
        return int(self._ends[-1])

    def at_least(self, min_shared: int) -> SharedPrefixes:
        """Return the same sequences without sharing parts of fewer than `min_shared` tokens beyond the shared part
        above."""
        if min_shared <= 1:
            return self
        parent, end, _, branch = self._trie()
        kept = [0] * (len(end) + 1)  # tokens that the sequences of each node still share; the last entry is for -1
        for node in sorted(range(len(end)), key=end.__getitem__):  # parents first
            above = kept[parent[node]]
            kept[node] = end[node] if end[node] - above >= min_shared else above
        return replace(self, common=np.array([kept[node] for node in branch], np.int64))

    def one_label_a_row(self) -> SharedPrefixes:
        """Return the same sequences where two of them share a token only if the next one is equal too, or one of them
        ends.

        So where they branch, each has a copy of the last common token, and all sequences of a row go on with one token.
        """
        common = self.common.copy()
        # Of two neighbours the first one may end there: then it is the other one's prefix, and has no next token.
        goes_on = common[1:] < self.lengths[self.order[:-1]]
        common[1:] -= goes_on & (common[1:] > 0)
        return replace(self, common=common)

    def cut_at(self, cuts: list[IntArray]) -> SharedPrefixes:
        """Return the same sequences, each in parts of its own, which do not depend on the others.

        Two sequences share a part, as a whole, if all tokens and all cuts up to its end are equal. For one label a row,
        :meth:`one_label_a_row` comes before.

        cuts: [N] where each sequence has a new part, ascending, from 1 to its length - 1.
        """
        keys: list[list[tuple[int, int]]] = [[] for _ in cuts]  # of each part, equal where sequences share it
        ranks: list[int] = []  # the last one that shares less than a number of tokens, for all such numbers
        commons: list[int] = []
        for rank, (sequence, common) in enumerate(zip(self.order.tolist(), self.common.tolist(), strict=True)):
            while commons and commons[-1] >= common:
                commons.pop()
                ranks.pop()
            commons.append(common)
            ranks.append(rank)
            # The first of the neighbours that share so many tokens stands for their tokens.
            for end in [*cuts[sequence].tolist(), int(self.lengths[sequence])]:
                keys[sequence].append((ranks[bisect_left(commons, end) - 1], end))
        order = sorted(range(len(cuts)), key=keys.__getitem__)
        shared = [0]
        for a, b in itertools.pairwise(order):
            equal = 0
            for part, other in zip(keys[a], keys[b], strict=False):
                if part != other:
                    break
                equal = part[1]
            shared.append(equal)
        return SharedPrefixes(self.lengths, np.array(order, np.int64), np.array(shared, np.int64), cuts)

    def select(self, chosen: IntArray) -> SharedPrefixes:
        """Some of the sequences, in the order of `chosen`, one or more."""
        rank = np.empty(len(self), np.int64)
        rank[self.order] = np.arange(len(self))
        order = np.argsort(rank[chosen])
        ranks = rank[chosen][order]
        common = np.zeros(len(chosen), np.int64)
        if len(chosen) > 1:
            common[1:] = np.minimum.reduceat(self.common[: ranks[-1] + 1], ranks[:-1] + 1)
        cuts = None if self.cuts is None else [self.cuts[i] for i in chosen.tolist()]
        return SharedPrefixes(self.lengths[chosen], order, common, cuts)

    def _trie(self) -> tuple[list[int], list[int], list[int], list[int]]:
        ends = [[n] for n in self.lengths.tolist()]
        if self.cuts is not None:
            ends = [cuts.tolist() + end for cuts, end in zip(self.cuts, ends, strict=True)]
        return _trie(ends, self.order.tolist(), self.common.tolist())

    # ------------------------------------------------------------------ micro-batches: runs of neighbours
    def runs(self, budget: int, min_count: int = 1, most: int | None = None, *, soft: bool = False) -> list[IntArray]:
        """The sequences in runs of neighbours. The cuts repeat as few tokens as the budget allows. Of such cuts, the
        result makes few runs and keeps the largest run small.

        Args:
            budget: packed tokens that a run may hold. Every run holds its own copy of shared tokens.
            min_count: at least so many runs are made, by further cuts where these repeat the fewest tokens.
            most: sequences that a run may hold; None for any number.
            soft: a sequence beyond the budget may make a run, with sequences that it begins with.
        """
        longest = int(self.lengths.max())
        if longest > budget and not soft:
            raise ValueError(
                f"budget is {budget} tokens, rollout {int(self.lengths.argmax())} needs {longest} for itself alone"
            )
        if len(self) < min_count:
            raise ValueError(f"{min_count} micro-batches need {min_count} rollouts at least, got {len(self)}")
        most = len(self) if most is None else most
        cost, begins = self._cuts(budget, most)
        # Bounds of the tokens of the largest run, but for sequences beyond the budget.
        low, high = int(self.lengths[self.lengths <= budget].max(initial=1)), budget
        while low < high and len(begins) > 1:
            middle = (low + high) // 2
            other, other_begins = self._cuts(middle, most)
            if other == cost:
                begins, high = other_begins, middle
            else:
                low = middle + 1
        while len(begins) < min_count:
            begins = self._with_another_cut(begins)
        return np.split(self.order, begins[1:])

    def runs_that_share(
        self, budget: int, min_shared: int, min_count: int = 1, *, soft: bool = False
    ) -> list[IntArray]:
        """:meth:`runs` of sequences that are packed with `min_shared`, see :meth:`at_least`. Which parts reach it
        depends on the other sequences, so a run by itself may take more tokens; then it is halved."""
        found: list[IntArray] = []
        waiting = self.at_least(min_shared).runs(budget, min_count, soft=soft)
        while waiting:
            run = waiting.pop(0)
            most = max(budget, int(self.lengths[run].max()))  # above the budget only if it is soft
            if len(run) > 1 and self.select(run).at_least(min_shared).tokens > most:
                waiting[:0] = np.array_split(run, 2)
            else:
                found.append(run)
        return found

    @cached_property
    def _ends(self) -> IntArray:
        """[N + 1] packed tokens of the first i sequences of `order`."""
        return np.append(0, np.cumsum(self.lengths[self.order] - self.common))

    def _cuts(self, budget: int, most: int) -> tuple[tuple[int, int], list[int]]:
        """((tokens repeated, runs), first sequence of each run) of the cuts within the budget that repeat the fewest
        tokens and, among these, make the fewest runs."""
        ends, common = self._ends.tolist(), self.common.tolist()
        # A run as long as its last sequence has only what that one begins with. A run above its limit stays above the
        # limit with more sequences behind it.
        limits = np.maximum(self.lengths[self.order], budget).tolist()
        cost = [(0, 0)]  # entry i: of the first i sequences
        begin = []  # entry i: the first sequence of the run that ends with sequence i
        # Where the current run may begin, ascending, with the costs, which ascend too.
        candidates: deque[tuple[int, tuple[int, int]]] = deque()
        for last in range(len(self)):
            repeated, count = cost[last]
            added = repeated + common[last], count + 1
            while candidates and candidates[-1][1] >= added:
                candidates.pop()
            candidates.append((last, added))
            first = candidates[0][0]
            while ends[last + 1] - ends[first] + common[first] > limits[last] or last - first >= most:
                candidates.popleft()
                first = candidates[0][0]
            begin.append(first)
            cost.append(candidates[0][1])
        begins = [begin[-1]]
        while begins[-1] > 0:
            begins.append(begin[begins[-1] - 1])
        return cost[-1], begins[::-1]

    def _with_another_cut(self, begins: list[int]) -> list[int]:
        """One more run: the cut that repeats the fewest tokens, and among these the one that best halves the largest
        run."""
        bounds = np.array([*begins, len(self)])
        run = np.searchsorted(bounds, np.arange(len(self)), side="right") - 1
        # For a cut before each sequence, the larger of the two parts of the run.
        above, below = self._ends[:-1] - self._ends[bounds[run]], self._ends[bounds[run + 1]] - self._ends[:-1]
        larger = np.maximum(above + self.common[bounds[run]], below + self.common)
        size = np.diff(self._ends[bounds])[run]
        cut = np.full(len(self), False)
        cut[begins] = True
        at = np.lexsort((larger, -size, self.common, cut))[0]
        return sorted([*begins, int(at)])


def shared_prefixes(sequences: list[npt.NDArray[Any]]) -> SharedPrefixes:
    """The prefixes that sequences share. Takes time linear in the tokens, and sorts the sequences.

    Args:
        sequences: N non-empty 1-D arrays of tokens from 0 to 2^32 - 1.
    """
    keys = [tokens.astype(">u4").tobytes() for tokens in sequences]  # big-endian: bytes sort as the tokens do
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    lengths = np.array([len(tokens) for tokens in sequences], np.int64)
    common = [0] + [_common(sequences[a], sequences[b]) for a, b in itertools.pairwise(order)]
    return SharedPrefixes(lengths, np.array(order, np.int64), np.array(common, np.int64))


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Tokens of the longest common prefix."""
    most = min(len(a), len(b))
    differ = a[:most] != b[:most]
    at = int(differ.argmax()) if most else 0
    return at if most and differ[at] else most


def _trie(
    ends: list[list[int]], order: list[int], common: list[int]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """The nodes of the trie of :class:`SharedPrefixes`, made in one pass; a parent may come behind its children.

    ends: [N] tokens of each sequence up to its cuts and its end.

    Returns:
        parent [K], -1 for none; end [K], tokens from the beginning to each node's end; [N] the node in which each
        sequence ends; [N] the node in which sequence `order[i]` branches off from the one before, -1 for none.
    """
    parent: list[int] = []
    end: list[int] = []
    last = [0] * len(ends)
    branch = []
    path: list[int] = []  # nodes from the root to the end of the last sequence
    for sequence, shared in zip(order, common, strict=True):
        closed = -1
        while path and end[path[-1]] > shared:
            closed = path.pop()
        if closed >= 0 and shared > (end[path[-1]] if path else 0):
            parent.append(parent[closed])  # the branch begins within `closed`: its upper part becomes a node
            end.append(shared)
            parent[closed] = len(end) - 1
            path.append(len(end) - 1)
        branch.append(path[-1] if path else -1)
        for own in ends[sequence]:
            if own > (end[path[-1]] if path else 0):
                parent.append(path[-1] if path else -1)
                end.append(own)
                path.append(len(end) - 1)
        last[sequence] = path[-1]
    return parent, end, last, branch


def _in_order(parent: list[int], end: list[int], last: list[int]) -> PrefixTree:
    """The nodes in depth-first order, branches in the order of their first sequences."""
    source = [len(last)] * len(parent)
    for sequence, node in enumerate(last):
        source[node] = min(source[node], sequence)
    for node in sorted(range(len(parent)), key=end.__getitem__, reverse=True):  # children first
        if parent[node] >= 0:
            source[parent[node]] = min(source[parent[node]], source[node])
    children: list[list[int]] = [[] for _ in parent]
    roots: list[int] = []
    for node, up in enumerate(parent):
        (children[up] if up >= 0 else roots).append(node)
    visit: list[int] = []
    stack = sorted(roots, key=source.__getitem__, reverse=True)
    while stack:
        node = stack.pop()
        visit.append(node)
        stack.extend(sorted(children[node], key=source.__getitem__, reverse=True))
    place = np.empty(len(parent) + 1, np.int64)
    place[visit], place[-1] = np.arange(len(visit)), -1
    at = np.array(visit, np.int64)
    ends, above = np.append(end, 0), np.array(parent, np.int64)[at]
    begin = ends[above]
    return PrefixTree(place[above], ends[at] - begin, np.array(source, np.int64)[at], begin, place[np.array(last)])


def read_sequences(
    sequences: Sequence[TokenIds] | torch.Tensor, min_shared: int
) -> tuple[list[npt.NDArray[Any]], SharedPrefixes, torch.device]:
    """The sequences on the host, their shared prefixes, and the device they come from; see `dualkv.pack_sequences`."""
    rows = [token_tensor(f"sequences[{i}]", x) for i, x in enumerate(sequence_list("sequences", sequences))]
    positive("min_shared", min_shared)
    host = to_host(rows)
    for i, tokens in enumerate(host):
        if len(tokens) == 0:
            raise ValueError(f"sequences[{i}] is empty, expected at least one token")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > MAX_TOKEN:
            raise ValueError(f"sequences[{i}] has token {low if low < 0 else high}, expected 0 to {MAX_TOKEN}")
    return host, shared_prefixes(host), rows[0].device

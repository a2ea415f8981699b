"""Shared prefixes of token sequences, found at any token: the compressed trie behind trees of rollouts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkv.layout import IntArray


@dataclass(frozen=True)
class PrefixTree:
    """Sequences as segments in depth-first order, each shared part once.

    S segments, N sequences. Segment s holds tokens `[begin[s], begin[s] + length[s])` of sequence `source[s]`.

    Attributes:
        parent: [S] the segment each continues, -1 where a tree begins.
        length: [S] tokens.
        source: [S] the first sequence that passes through.
        begin: [S] tokens on the path above.
        last: [N] the segment in which each sequence ends, at the segment's end.
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
        """Segments that each sequence passes, in order: those of all sequences end to end, and [N] how many each."""
        paths: list[list[int]] = []
        for segment, up in enumerate(self.parent.tolist()):
            paths.append([*paths[up], segment] if up >= 0 else [segment])
        chosen = [paths[segment] for segment in self.last.tolist()]
        counts = np.array([len(path) for path in chosen], np.int64)
        return np.array([segment for path in chosen for segment in path], np.int64), counts


def prefix_tree(sequences: list[npt.NDArray[Any]], min_shared: int = 1) -> PrefixTree:
    """The compressed trie of N sequences, in time linear in their tokens but for sorting the sequences.

    Trees, and the branches of a segment, come in the order in which their first sequences do.

    Args:
        sequences: N non-empty 1-D arrays of tokens from 0 to 2^32 - 1.
        min_shared: a segment that several sequences share has at least this many tokens; what branches sooner is held
            by each sequence itself.
    """
    keys = [tokens.astype(">u4").tobytes() for tokens in sequences]  # big-endian: bytes sort as the tokens do
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    shared = [0] + [_common(sequences[a], sequences[b]) for a, b in itertools.pairwise(order)]
    return _in_order(*_dissolved(*_trie([len(tokens) for tokens in sequences], order, shared), min_shared))


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Tokens of the longest common prefix."""
    most = min(len(a), len(b))
    differ = a[:most] != b[:most]
    at = int(differ.argmax()) if most else 0
    return at if most and differ[at] else most


Nodes = tuple[
    list[int], list[int], list[int]
]  # parent (-1: none), tokens from the beginning to its end, of each sequence


def _trie(lengths: list[int], order: list[int], shared: list[int]) -> Nodes:
    """Nodes of the trie in any order in which parents may come later: (parent [K], end [K], node of each sequence [N]).

    `shared[i]`: tokens that sequences `order[i - 1]` and `order[i]` have in common. One pass with the open path.
    """
    parent: list[int] = []
    end: list[int] = []
    last = [0] * len(lengths)
    path: list[int] = []  # nodes from the tree's beginning to the last sequence's
    for sequence, common in zip(order, shared, strict=True):
        closed = -1
        while path and end[path[-1]] > common:
            closed = path.pop()
        if closed >= 0 and common > (end[path[-1]] if path else 0):
            parent.append(parent[closed])  # the branch begins within `closed`: its upper part becomes a node
            end.append(common)
            parent[closed] = len(end) - 1
            path.append(len(end) - 1)
        if not path or end[path[-1]] < lengths[sequence]:
            parent.append(path[-1] if path else -1)
            end.append(lengths[sequence])
            path.append(len(end) - 1)
        last[sequence] = path[-1]
    return parent, end, last


def _dissolved(parent: list[int], end: list[int], last: list[int], min_shared: int) -> tuple[Nodes, list[int]]:
    """Nodes less those that share fewer than `min_shared` tokens, whose tokens go to each branch and sequence below.

    Returns also the tokens before each node, in the same numbering, parents first.
    """
    children: list[list[int]] = [[] for _ in parent]
    ending: list[list[int]] = [[] for _ in parent]
    roots: list[int] = []
    for node, up in enumerate(parent):
        (children[up] if up >= 0 else roots).append(node)
    for sequence, node in enumerate(last):
        ending[node].append(sequence)
    new_parent: list[int] = []
    new_end: list[int] = []
    new_begin: list[int] = []
    new_last = [0] * len(last)

    def add(up: int, begin: int, to: int) -> int:
        new_parent.append(up)
        new_begin.append(begin)
        new_end.append(to)
        return len(new_end) - 1

    stack = [(root, -1, 0) for root in roots]  # node, the kept node above it, tokens before it
    while stack:
        node, up, begin = stack.pop()
        is_shared = len(children[node]) + len(ending[node]) > 1
        if is_shared and end[node] - begin < min_shared:
            for sequence in ending[node]:
                new_last[sequence] = add(up, begin, end[node])
        else:
            up = add(up, begin, end[node])
            begin = end[node]
            for sequence in ending[node]:
                new_last[sequence] = up
        stack.extend((child, up, begin) for child in children[node])
    return (new_parent, new_end, new_last), new_begin


def _in_order(nodes: Nodes, begin: list[int]) -> PrefixTree:
    """Depth-first, branches by the first sequence that takes them."""
    parent, end, last = nodes
    source = [len(last)] * len(parent)
    for sequence, node in enumerate(last):
        source[node] = min(source[node], sequence)
    for node in range(len(parent) - 1, -1, -1):  # parents come first
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
    starts = np.array(begin, np.int64)[at]
    return PrefixTree(
        parent=place[np.array(parent, np.int64)[at]],
        length=np.array(end, np.int64)[at] - starts,
        source=np.array(source, np.int64)[at],
        begin=starts,
        last=place[np.array(last, np.int64)],
    )

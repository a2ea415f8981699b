"""Plans of micro-batches in a limit of memory: trees that fit are packed, larger ones are cut, walked or left alone.

Every way is exact. They differ in what they compute: cut trees repeat what their parts share, a walk
(:func:`dualkv.walk`) runs trunks twice and repeats nothing, and rollouts that are left alone share nothing. The plan
takes the way that takes the least time, in rows as :mod:`dualkv.data.memory` counts them, and the simpler one where the
gain is small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from dualkv.arrays import IntArray, Lengths, TokenIds
from dualkv.data.gain import MIN_GAIN, PAIRS_A_BORDER, counts
from dualkv.data.memory import Memory
from dualkv.data.parts import Fitting, TreePart, fitted, fitting
from dualkv.data.trees import PackedSequences, read_shared
from dualkv.layout import Layout
from dualkv.prefixes import SharedPrefixes

Way = Literal["packed", "cut", "walked", "alone"]
ALONE = 2**40  # tokens to share at least: nothing is


class PlannedBatch(NamedTuple):
    """Sequences that run together.

    Attributes:
        sequences: their indices.
        way: "packed" (whole trees in one pass), "cut" (a part of a tree in one pass), "walked" (a tree in parts), or
            "alone" (sequences that share nothing).
        min_shared: for :func:`dualkv.pack_sequences`.
        rows: packed tokens.
        walk: the parts of a walked tree, of a batch without tokens.
    """

    sequences: list[int]
    way: Way
    min_shared: int
    rows: int
    walk: Fitting | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """The result of :func:`plan_in_memory`.

    Attributes:
        batches: every sequence is in one of them.
        time: forward and backward of all, in rows (a forward of a row is 1).
        reasons: a sentence for each tree that does not fit into one pass, and one for those that are left alone.
    """

    batches: list[PlannedBatch]
    time: float
    reasons: list[str]

    def __str__(self) -> str:
        numbers = Counter(batch.way for batch in self.batches)
        said = ", ".join(f"{number} {way}" for way, number in sorted(numbers.items()))
        return "; ".join([f"{len(self.batches)} micro-batch{'es' * (len(self.batches) != 1)}: {said}", *self.reasons])


def plan_in_memory(
    sequences: Sequence[TokenIds] | torch.Tensor,
    memory: Memory,
    *,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: Lengths | None = None,
    position_ids: torch.Tensor | None = None,
    min_shared: int = 1,
) -> MemoryPlan:
    """Micro-batches that hold every sequence once and that fit into memory. The plan is deterministic.

    One loop runs them all, because a walk of what fits into one pass is that pass:

        plan = plan_in_memory(sequences, memory)
        for one in plan.batches:
            chosen = [sequences[i] for i in one.sequences]
            batch = pack_sequences(chosen, [loss_masks[i] for i in one.sequences], min_shared=one.min_shared)
            walk(batch, memory, forward, loss)

    Args:
        sequences, attention_mask, cu_seqlens, position_ids, min_shared: as for :func:`dualkv.pack_sequences`.
        memory: the limit of each pass.

    Raises:
        ValueError: a sequence that does not fit even if it is walked alone, and sequences that
            :func:`dualkv.pack_sequences` does not accept.
        TypeError: another limit.
    """
    if not isinstance(memory, Memory):
        raise TypeError(f"memory is a {type(memory).__name__}, expected a dualkv.Memory")
    _, shared, *_ = read_shared(sequences, min_shared, attention_mask, cu_seqlens, position_ids)
    return plan_shared(shared, memory, min_shared)


def plan_shared(whole: SharedPrefixes, memory: Memory, min_shared: int = 1) -> MemoryPlan:
    """:func:`plan_in_memory` of sequences whose shared prefixes are known."""
    shared = whole.at_least(min_shared)
    starts = np.flatnonzero(shared.common == 0).tolist()
    together: dict[tuple[Way, bool], list[int]] = {}  # sequences in one pass, by way and whether layers keep all
    batches: list[PlannedBatch] = []
    reasons: list[str] = []
    walked_time, alone = 0.0, 0
    for begin, end in zip(starts, [*starts[1:], len(shared)], strict=True):
        members = shared.order[begin:end]
        choice = _choose(shared.select(members), memory)
        if choice.reason:
            reasons.append(f"the tree of sequence {int(members.min())}, {choice.reason}")
        if choice.walk is not None:
            batches.append(PlannedBatch(sorted(members.tolist()), "walked", min_shared, choice.rows, choice.walk))
            walked_time += choice.time
            continue
        alone += len(members) if choice.way == "alone" else 0
        together.setdefault(("alone" if choice.way == "alone" else "packed", choice.keeps_all), []).extend(members)
    if alone:
        reasons.append(f"{alone} sequences are left alone: sharing would save less than {MIN_GAIN:.0%}")
    time = walked_time
    for (way, keeps_all), some in together.items():
        made, taken = _in_one_pass(whole, np.array(some), memory, keeps_all, way == "alone", min_shared)
        batches += made
        time += taken
    return MemoryPlan(batches, time, reasons)


class _Choice(NamedTuple):
    """The way of a tree: its packed tokens, the time that it takes, and why it is not simply packed."""

    way: Way
    rows: int
    time: float
    keeps_all: bool = False
    walk: Fitting | None = None
    reason: str = ""


def _choose(tree: SharedPrefixes, memory: Memory) -> _Choice:
    """Choose the way of the sequences of one tree, [N] in it."""
    fits = [c for keeps_all in (True, False) if (c := _cut(tree, memory, keeps_all, False)) is not None]
    if len(tree) > 1:
        apart = replace(tree, common=np.zeros_like(tree.common))
        fits += [c for keeps_all in (True, False) if (c := _cut(apart, memory, keeps_all, True)) is not None]
    fits.sort(key=lambda choice: choice.time)
    found = next((choice for choice in fits if choice.way == "alone"), None)
    shares = next((choice for choice in fits if choice.way != "alone"), None)
    if found is None or (shares is not None and shares.time <= (1 - MIN_GAIN) * found.time):
        found = shares
    # One pass that recomputes layers holds some trees. A walk whose parts keep all may take less time.
    simple = found is not None and found.way == "packed" and found.keeps_all
    walk = None if simple else fitting(_batch(tree), memory)
    if walk is None or len(walk.parts) == 1:
        if found is None:
            longest = int(tree.lengths.max())
            raise ValueError(
                f"memory is {memory.bytes:,.0f} bytes, which do not hold a sequence of {longest:,} tokens, not even in"
                " parts"
            )
        return found
    rows = tree.tokens
    says = f"{len(tree)} sequences in {rows:,} rows, is walked in {len(walk.parts)} parts of up to {walk.rows:,} rows"
    if found is None:
        return _Choice("walked", rows, walk.time, walk=walk, reason=f"{says}: a sequence alone does not fit")
    others = {"packed": "one pass", "cut": f"cutting it ({found.reason})", "alone": "leaving its sequences alone"}
    other, ratio = others[found.way], found.time / walk.time
    if walk.time > (1 - MIN_GAIN) * found.time:
        if found.way == "packed":
            return found
        kept = "is cut" if found.way == "cut" else "is left alone"
        why = f"{len(tree)} sequences in {rows:,} rows, {kept}: a walk would be {ratio:.2f} times as fast"
        return found._replace(reason=why)
    return _Choice("walked", rows, walk.time, walk=walk, reason=f"{says}, {ratio:.2f} times as fast as {other}")


def arrange(
    batch: PackedSequences, shared: Callable[[], SharedPrefixes], memory: Memory, values_first: bool = True
) -> tuple[list[TreePart], SharedPrefixes | None, str]:
    """Choose how :func:`dualkv.walk_values` computes a micro-batch.

    Args:
        batch: of all sequences, as they share now.
        shared: what they share; asked where the batch does not fit into one pass.

    Returns:
        (parts of the batch, None, why); or, where copies of what they share take less time, ([], what they share then,
        why).

    Raises:
        ValueError: the smallest parts do not fit.
    """
    walk = fitting(batch, memory, values_first)
    rows = batch.layout.num_tokens
    if walk is not None and len(walk.parts) == 1:
        return walk.parts, None, f"{rows:,} rows run in one pass"
    whole = shared()
    apart = replace(whole, common=np.zeros_like(whole.common))
    others = [
        (_cut(x, memory, keeps_all, x is apart, values_first), x) for x in (apart, whole) for keeps_all in (True, False)
    ]
    found, of = min(((c, x) for c, x in others if c is not None), key=lambda one: one[0].time, default=(None, whole))
    if found is None or (walk is not None and walk.time <= (1 - MIN_GAIN) * found.time):
        walk = walk or fitted(batch, memory, values_first)
        than = "" if found is None else f", {found.time / walk.time:.2f} times as fast as copies of what is shared"
        return walk.parts, None, f"{rows:,} rows are walked in {len(walk.parts)} parts{than}: {walk}"
    if of is apart:
        return [], apart, f"{len(whole)} sequences are left alone: sharing would save less than {MIN_GAIN:.0%}"
    runs = whole.runs(memory.most_rows(0, 0, found.keeps_all, False))
    run_of = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    common = np.where(np.diff(run_of, prepend=0) > 0, 0, whole.common)
    return [], replace(whole, common=common), f"{rows:,} rows are cut into {found.reason}"


def _cut(
    tree: SharedPrefixes, memory: Memory, keeps_all: bool, is_alone: bool, values_first: bool = False
) -> _Choice | None:
    """Cut a tree into passes that fit; None if one of its sequences does not fit. For `values_first` see
    :func:`dualkv.data.parts.plan_parts`."""
    budget = memory.most_rows(0, 0, keeps_all, False)
    if int(tree.lengths.max()) > budget:
        return None
    runs = tree.runs(budget)
    taken = [_counts_of(tree.select(run)) for run in runs]
    time = sum(memory.time(0, rows, pairs, memory.most_kept(0, 0, rows) or 0.0) for rows, pairs in taken)
    if values_first and len(runs) > 1:
        time += sum(memory.forward_time(0, rows, pairs) for rows, pairs in taken)
    way: Way = "alone" if is_alone else "packed" if len(runs) == 1 else "cut"
    total = sum(rows for rows, _ in taken)
    reason = f"{len(runs)} micro-batches with {total:,} rows" if way == "cut" else ""
    return _Choice(way, tree.tokens, time, keeps_all, reason=reason)


def _in_one_pass(
    whole: SharedPrefixes, members: IntArray, memory: Memory, keeps_all: bool, is_alone: bool, min_shared: int
) -> tuple[list[PlannedBatch], float]:
    """Micro-batches of sequences that run in one pass each, trees together, and the time that they take."""
    some = whole.select(members)
    if is_alone:
        some = replace(some, common=np.zeros_like(some.common))
    runs = some.runs_that_share(memory.most_rows(0, 0, keeps_all, False), min_shared)
    run_of = np.empty(len(some), np.int64)
    for number, run in enumerate(runs):
        run_of[run] = number
    begins, common = run_of[some.order], some.at_least(min_shared).common
    split = {int(r) for at in np.flatnonzero(np.diff(begins)) if common[at + 1] for r in begins[at : at + 2]}
    batches, time = [], 0.0
    for number, run in enumerate(runs):
        rows, pairs = _counts_of(some.select(run).at_least(min_shared))
        way: Way = "alone" if is_alone else "cut" if number in split else "packed"
        batches.append(PlannedBatch(sorted(members[run].tolist()), way, ALONE if is_alone else min_shared, rows))
        time += memory.time(0, rows, pairs, memory.most_kept(0, 0, rows) or 0.0)
    return batches, time


def _counts_of(tree: SharedPrefixes) -> tuple[int, float]:
    """(rows, pairs), with pairs for the borders of segments."""
    made = tree.tree()
    rows, pairs, borders = counts(made.parent, made.length)
    return rows, pairs + PAIRS_A_BORDER * borders


def _batch(tree: SharedPrefixes) -> PackedSequences:
    """A batch of the tree's rows without tokens, of which parts can be planned."""
    made = tree.tree()
    none = np.zeros(0, np.int64)
    layout = Layout.from_segments(made.offsets, made.parent)
    return PackedSequences(torch.zeros(1, layout.num_tokens, dtype=torch.int64), layout, none, none, none > 0)

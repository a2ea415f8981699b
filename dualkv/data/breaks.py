"""Places where sequences stop sharing and then agree again: turns that were tokenized again, contexts that were edited.

A prefix is shared up to the first token that differs. If an environment encodes a turn's text again, some tokens may
come out otherwise than they were sampled, and everything behind them is computed twice. If a context manager drops or
replaces text, what follows stands at other positions. Both are right as they are, and cost what could be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkv.prefixes import SharedPrefixes

RUN = 32  # tokens in a row that must agree again
FEW = 16  # tokens that differ at most where a turn may have been tokenized again
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class Break:
    """Attributes:
    sequences: the two that part, which share more with each other than with others.
    at: tokens that they share.
    differ: tokens of each before they agree again.
    agree: tokens that then agree, `RUN` or more.
    same_text: whether the differing tokens stand for equal text; None: not known.
    """

    sequences: tuple[int, int]
    at: int
    differ: tuple[int, int]
    agree: int
    same_text: bool | None = None

    @property
    def tokenized_again(self) -> bool:
        """Whether the texts are equal, or, if they are not known, as few tokens differ as tokenizing again changes."""
        return max(self.differ) <= FEW if self.same_text is None else self.same_text


def find(
    sequences: Sequence[Tokens], shared: SharedPrefixes, decode: Callable[[list[int]], str] | None = None
) -> list[Break]:
    """The breaks between sequences that are neighbours in the order of their tokens and share at least one; `decode`
    makes text of tokens, to compare the texts of differing ones."""
    found = []
    for i, common in enumerate(shared.common.tolist()):
        if not common:
            continue
        pair = int(shared.order[i - 1]), int(shared.order[i])
        a, b = (np.asarray(sequences[s])[common:] for s in pair)
        if (again := _first_run(a, b)) is None:
            continue
        x, y = again
        most = min(len(a) - x, len(b) - y)
        unequal = np.flatnonzero(a[x : x + most] != b[y : y + most])
        agree = int(unequal[0]) if len(unequal) else most
        same = None
        if decode is not None:
            # With a token that agrees, for tokenizers that join what they decode.
            same = decode(a[: x + 1].tolist()) == decode(b[: y + 1].tolist())
        found.append(Break(pair, common, (x, y), agree, same))
    return found


def _first_run(a: Tokens, b: Tokens) -> tuple[int, int] | None:
    """The first place of `a`, with the first of `b`, from which `RUN` tokens agree."""
    of_a, of_b = _hashes(a), _hashes(b)
    if not len(of_a) or not len(of_b):
        return None
    values, first = np.unique(of_b, return_index=True)
    place = np.minimum(np.searchsorted(values, of_a), len(values) - 1)
    for x in np.flatnonzero(values[place] == of_a).tolist():
        y = int(first[place[x]])
        if (a[x : x + RUN] == b[y : y + RUN]).all():
            return x, y
    return None


def _hashes(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """Hash every run of `RUN` tokens."""
    count = len(tokens) - RUN + 1
    found = np.zeros(max(count, 0), np.uint64)
    for i in range(RUN if count > 0 else 0):
        found = found * _FACTOR + tokens[i : i + count].astype(np.uint64)
    return found


def described(breaks: Sequence[Break], where: Callable[[int], str]) -> list[str]:
    """A sentence for each kind of break, with the first of them; `where` names a sequence."""
    sentences = []
    for what, again in ("tokenized again", True), ("edited", False):
        some = [one for one in breaks if one.tokenized_again is again]
        if not some:
            continue
        first = max(some, key=lambda one: one.agree)
        sure = "" if not again or first.same_text else " (if their texts are equal: --tokenizer compares them)"
        total = sum(one.agree for one in some)
        names = " and ".join(where(s) for s in first.sequences)
        x, y = first.differ
        sentences.append(
            f"{len(some)} times a sequence parts from its neighbour and agrees again later, as where text was"
            f" {what}{sure}; {total:,} tokens behind are not shared; {names} part at token {first.at}: {x} and {y}"
            f" tokens differ, {first.agree:,} agree"
        )
    return sentences

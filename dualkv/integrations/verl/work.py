"""Work of rollouts, replicated and packed, as veRL counts it: tokens, and pairs of tokens in attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dualkv.integrations.verl.data import Rollouts

# veRL balances ranks by this many units a token and one a squared length, calibrated for a 7B model.
TOKEN_WORKLOAD = 24576


@dataclass(frozen=True)
class Work:
    """Attributes:
    tokens: rows that the model computes.
    squares: sum of squared lengths; of packed rows twice the pairs of which one sees the other.
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
        """Of a forward and a backward without recomputation, in TFLOP, by veRL's `FlopsCounter`.

        The counter takes lengths, and no lengths have the tokens and squares of packed rows. What it counts is linear
        in both, so two lengths tell the two rates.
        """
        short, long = 1 << 12, 1 << 13
        at_short, at_long = (float(counter.estimate_flops([n], 1.0)[0]) for n in (short, long))
        a_square = (at_long - 2 * at_short) / (long**2 - 2 * short**2)
        a_token = (at_short - a_square * short**2) / short
        return self.tokens * a_token + self.squares * a_square


NOTHING = Work(0, 0)


def replicated(rollouts: Rollouts) -> Work:
    """Every rollout with a prompt of its own."""
    lengths = rollouts.prompt_lens + rollouts.response_lens
    return Work(int(lengths.sum()), int((lengths**2).sum()))


def packed(rollouts: Rollouts) -> Work:
    """Every rollout without what is packed with another one."""
    shared = rollouts.packed_once
    lengths = shared.lengths[shared.order]
    return Work(int((lengths - shared.common).sum()), int((lengths**2 - shared.common**2).sum()))

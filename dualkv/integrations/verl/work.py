"""The work of rollouts, replicated and packed, in veRL's units: tokens, and squared lengths for attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dualkv.integrations.verl.data import Rollouts

# veRL balances ranks by this many units for a token and one for a squared length, calibrated for a 7B model.
TOKEN_WORKLOAD = 24576


@dataclass(frozen=True)
class Work:
    """Attributes:
    tokens: rows that the model computes.
    squares: sum of squared lengths; for packed rows, twice the number of visible pairs.
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
        """TFLOP of a forward and a backward without recomputation, by veRL's `FlopsCounter`.

        The counter takes lengths, but no lengths have the tokens and squares of packed rows. Its count is linear in
        both, so its counts of two lengths give the two rates.
        """
        short, long = 1 << 12, 1 << 13
        at_short, at_long = (float(counter.estimate_flops([n], 1.0)[0]) for n in (short, long))
        a_square = (at_long - 2 * at_short) / (long**2 - 2 * short**2)
        a_token = (at_short - a_square * short**2) / short
        return self.tokens * a_token + self.squares * a_square


NOTHING = Work(0, 0)


def replicated(rollouts: Rollouts) -> Work:
    """The work if every rollout has its own copy of the prompt."""
    lengths = rollouts.prompt_lens + rollouts.response_lens
    return Work(int(lengths.sum()), int((lengths**2).sum()))


def packed(rollouts: Rollouts) -> Work:
    """The work if tokens that rollouts share are computed once."""
    shared = rollouts.packed_once
    lengths = shared.lengths[shared.order]
    return Work(int((lengths - shared.common).sum()), int((lengths**2 - shared.common**2).sum()))

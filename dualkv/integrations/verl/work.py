"""The work of rollouts, replicated and packed, in veRL's units: tokens, and squared lengths for attention."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
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

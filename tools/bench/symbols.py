"""A task that a tiny model learns from random weights within a hundred updates, for trainings that are compared.

A prompt holds a few of the symbols, in random order, and a response is rewarded for each of its tokens that occurs in
the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SYMBOLS = 32


@dataclass(frozen=True)
class Task:
    """The prompts of an update, responses of each, and tokens."""

    groups: int = 8
    responses: int = 16
    prompt_len: int = 96
    response_len: int = 8
    present: int = 4  # symbols that a prompt holds

    def prompts(self, seed: int) -> torch.Tensor:
        """[groups, prompt_len] int64."""
        generator = torch.Generator().manual_seed(seed)
        symbols = torch.rand(self.groups, SYMBOLS, generator=generator).argsort(1)[:, : self.present]
        picked = torch.randint(self.present, (self.groups, self.prompt_len), generator=generator)
        return symbols.gather(1, picked)

    def rewards(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """responses [groups, N, R] -> [groups, N] the share of tokens that occur in the prompt."""
        return (responses[..., None] == prompts[:, None, None]).any(-1).float().mean(-1)

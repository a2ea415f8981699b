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
    """Attributes:
    groups: prompts of an update.
    responses: responses of each prompt.
    prompt_len: tokens of each prompt.
    response_len: tokens of each response.
    present: symbols that a prompt holds.
    """

    groups: int = 8
    responses: int = 16
    prompt_len: int = 96
    response_len: int = 8
    present: int = 4

    def prompts(self, seed: int) -> torch.Tensor:
        """[groups, prompt_len] int64."""
        generator = torch.Generator().manual_seed(seed)
        symbols = torch.rand(self.groups, SYMBOLS, generator=generator).argsort(1)[:, : self.present]
        picked = torch.randint(self.present, (self.groups, self.prompt_len), generator=generator)
        return symbols.gather(1, picked)

    def rewards(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """responses [groups, N, R] -> [groups, N] the share of tokens that occur in the prompt."""
        return (responses[..., None] == prompts[:, None, None]).any(-1).float().mean(-1)

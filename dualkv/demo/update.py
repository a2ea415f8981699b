"""GRPO updates of a policy on the same rollouts: log-probs, loss, optimizer, and the time and memory that they take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from dualkv.data.rollouts import Rollouts
from dualkv.demo.measure import PeakMemory
from dualkv.demo.settings import DemoSettings
from dualkv.grpo import ALGORITHMS, group_advantages, policy_loss, token_weights
from dualkv.integrations.metrics import furthest_ratio, log_ratios
from dualkv.integrations.transformers import disable, enable, head
from dualkv.integrations.transformers.batches import WAYS, longest_sequence, rows_of_one_group
from dualkv.progress import Track, untracked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRPO, LEARNING_RATE = ALGORITHMS["grpo"], 1e-3


class Update(NamedTuple):
    """The log-probs of an update [M], its loss, and the gradient of each parameter by name; on the CPU."""

    logp: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Way:
    """Costs of one way.

    Attributes:
        tokens: rows that the model computes for one pass over the rollouts.
        seconds: by phase, over all updates: "packing" (making micro-batches), "old log-probs", "forward", "backward",
            "optimizer".
        peak_bytes: of all phases, above the weights; see :class:`PeakMemory`.
        ratio: with `batch_invariant`, of the first update's log-probs to the old ones, the one furthest from 1.
    """

    tokens: int
    micro_batches: int
    seconds: dict[str, float]
    peak_bytes: int | None
    ratio: float | None


def _in_place(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """(places, values) of every micro-batch as one [M]."""
    places, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return torch.empty_like(values).index_copy_(0, places, values)


def train(
    model: PreTrainedModel, way: str, rollouts: Rollouts, settings: DemoSettings, track: Track = untracked
) -> tuple[Way, list[Update]]:
    """Make GRPO updates of a causal language model, all on the same rollouts.

    Args:
        model: updated in place; the policy that it is at first is also the reference of the KL term.
        way: "replicated", "packed" (prompts) or "tree" (whatever is shared).

    Returns:
        The costs, and each update before its optimizer step.

    Raises:
        ValueError: no response tokens, a budget that is too small, rewards that are not finite, a model whose logits
            are not known or that cannot run packed.
    """
    lens, device = rollouts.trained_lens, model.device
    if not sum(lens):
        raise ValueError("the rollouts have no response tokens, there is nothing to learn from")
    disable(model)
    head(model)
    if packed := way != "replicated":
        enable(model, batch_invariant=settings.batch_invariant)
    rewards = torch.tensor([r for group in rollouts.rewards for r in group], dtype=torch.float64)
    advantages = group_advantages(rewards, rollouts.group_sizes).repeat_interleave(torch.tensor(lens)).to(device)
    weights = token_weights(lens, GRPO.mean).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    seconds, memory = defaultdict[str, float](float), PeakMemory(device)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        """Take time and peak memory, on CUDA until all work is done."""
        with memory.measured():  # waits for the device before it begins
            start = time.perf_counter()
            yield
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name] += time.perf_counter() - start

    invariant = packed and settings.batch_invariant
    cuts = {"fixed_cuts": True} if invariant and way == "tree" else {}
    with phase("packing"):
        of_old = batches = WAYS[way](rollouts, settings.budget or rows_of_one_group(rollouts), device, **cuts)
        if invariant:
            of_old = WAYS[way](rollouts, longest_sequence(rollouts), device, **cuts)
    if device.type == "cuda":  # kernels are compiled or loaded before a pass is timed
        batches[0].logprobs(model)[0].sum().backward()
        model.zero_grad(set_to_none=True)
    with phase("old log-probs"), torch.no_grad():
        old = _in_place([(batch.places, batch.logprobs(model)[0]) for batch in of_old])
    updates = []
    for _ in range(settings.steps):
        loss, parts = torch.zeros((), device=device), []
        model.train()
        for batch in track(batches, way, len(batches)):
            at = batch.places
            with phase("forward"):
                logp, _ = batch.logprobs(model)
                given = old[at], advantages[at], weights[at], GRPO.clip_low, GRPO.clip_high
                part, _ = policy_loss(logp, *given, ref_logp=old[at], kl_coef=GRPO.kl_coef)
            with phase("backward"):
                part.backward()
            parts.append((at, logp.detach()))
            loss = loss + part.detach()
            del part, logp  # the graph, before the next one is built
        model.eval()
        gradients = {n: p.grad.to("cpu", copy=True) for n, p in model.named_parameters() if p.grad is not None}
        updates.append(Update(_in_place(parts).cpu(), loss.item(), gradients))
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    ratio = furthest_ratio(log_ratios(updates[0].logp, old.cpu(), torch.ones(sum(lens)))) if invariant else None
    tokens = sum(batch.tokens for batch in batches)
    return Way(tokens, len(batches), dict(seconds), memory.bytes, ratio), updates

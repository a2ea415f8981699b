"""Micro-batches of rollouts as inputs of a causal language model: replicated, with packed prompts, or packed as trees.

All take the same rollouts and the same log-prob computation over the rows that predict response tokens; they differ in
the rows that the model computes and in its attention. Per-token values of the rollouts are flat, [M]: the tokens of
response 0 of group 0 first, of each response those that count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualkv.data.microbatch import plan_micro_batches
from dualkv.data.packing import PackedBatch, pack
from dualkv.data.rollouts import Rollouts
from dualkv.data.trees import PackedSequences, pack_sequences, plan_sequences
from dualkv.integrations.transformers.heads import head
from dualkv.layout import Layout
from dualkv.logprobs import response_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelBatch:
    """Some responses of an update as one input of the model.

    Attributes:
        inputs: keyword arguments of the model without its head.
        batch: its rows, [B * L] of a padded input: which of them predict which response tokens.
        places: [m] int64, the places in [M] of these tokens, in the order of :meth:`logprobs`.
    """

    inputs: dict[str, Any]
    batch: PackedBatch | PackedSequences
    places: torch.Tensor

    @property
    def tokens(self) -> int:
        """Rows that the model computes, padding included."""
        return self.batch.layout.num_tokens

    def logprobs(self, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each response token, [m] and [m]."""
        hidden = model.base_model(**self.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        logp, entropy = response_logprobs(hidden, head(model), self.batch)
        return torch.cat(self.batch.unpack(logp)), torch.cat(self.batch.unpack(entropy))


def _places(rollouts: Rollouts, responses: Sequence[int], device: torch.device) -> torch.Tensor:
    """The places in [M] of the tokens of some responses, counted through all groups."""
    lens = rollouts.trained_lens
    starts = [0, *itertools.accumulate(lens)]
    return torch.cat([torch.arange(starts[i], starts[i] + lens[i]) for i in responses]).to(device)


def replicated_batches(rollouts: Rollouts, budget: int, device: torch.device) -> list[ModelBatch]:
    """Every response behind its own copy of the prompt: right-padded batches of sequences of similar length.

    Right padding needs no attention mask: under causal attention no token sees the padding behind it, and no row of the
    padding is read. So attention runs its fastest causal path. Padding counts in the budget.

    Raises:
        ValueError: a budget below the longest sequence.
    """
    pairs = list(zip(rollouts.flat_prompts, rollouts.flat_responses, strict=True))
    masks = None if rollouts.masks is None else rollouts.flat_masks
    total = [len(p) + len(r) for p, r in pairs]
    order = sorted((i for i, n in enumerate(rollouts.trained_lens) if n), key=lambda i: -total[i])
    batches = []
    while order:
        width = total[order[0]]
        if budget < width:
            raise ValueError(f"budget is {budget} tokens, the longest prompt with its response has {width}")
        chosen, order = order[: budget // width], order[budget // width :]
        input_ids = torch.zeros(len(chosen), width, dtype=torch.int64)
        for row, i in enumerate(chosen):
            input_ids[row, : total[i]] = torch.cat(pairs[i])
        input_ids = input_ids.to(device)
        # As packed groups: one response each, and behind each the padding as a group of its own without responses.
        layout = Layout.from_lengths(
            [n for i in chosen for n in (len(pairs[i][0]), width - total[i])],
            [n for i in chosen for n in ([len(pairs[i][1])], [])],
            device,
        )
        layout.mark_used()  # separate sequences, which the model computes without it
        batch = PackedBatch(input_ids.view(1, -1), layout, "gather", np.arange(len(chosen)), width)
        counted = batch if masks is None else PackedSequences.from_batch(batch, [masks[i] for i in chosen])
        batches.append(ModelBatch({"input_ids": input_ids}, counted, _places(rollouts, chosen, device)))
    return batches


def packed_batches(rollouts: Rollouts, budget: int, device: torch.device) -> list[ModelBatch]:
    """Packed groups: each prompt once, its responses behind it; a group beyond the budget is split.

    Raises:
        ValueError: a budget below one prompt with one of its responses; rollouts with masks, which are trees.
    """
    if rollouts.masks is not None:
        raise ValueError("rollouts have masks, expected responses whose tokens all count: take tree_batches")
    prompts, responses = rollouts.prompts, rollouts.responses
    firsts = list(itertools.accumulate(rollouts.group_sizes, initial=0))
    batches = []
    for plan in plan_micro_batches([len(p) for p in prompts], [[len(r) for r in g] for g in responses], budget):
        batch = pack([prompts[g] for g, _ in plan.parts], [[responses[g][i] for i in some] for g, some in plan.parts])
        places = _places(rollouts, [firsts[g] + i for g, some in plan.parts for i in some], device)
        batches.append(_packed(batch.to(device), places))
    return batches


def tree_batches(rollouts: Rollouts, budget: int, device: torch.device, fixed_cuts: bool = False) -> list[ModelBatch]:
    """Packed trees: everything that rollouts begin with alike once in a micro-batch, over all groups; with fixed cuts
    see :func:`dualkv.pack_sequences`.

    Raises:
        ValueError: a budget below one prompt with one of its responses.
    """
    flat = zip(rollouts.flat_prompts, rollouts.flat_responses, rollouts.flat_masks, strict=True)
    rows = [(torch.cat([p, r]), torch.cat([torch.zeros(len(p), dtype=torch.bool), mask])) for p, r, mask in flat]
    kept = [i for i, n in enumerate(rollouts.trained_lens) if n]
    batches = []
    for plan in plan_sequences([rows[i][0] for i in kept], budget):
        chosen = [kept[i] for i in plan]
        sequences, masks = zip(*(rows[i] for i in chosen), strict=True)
        batch = pack_sequences(sequences, masks, fixed_cuts=fixed_cuts, device=device)
        batches.append(_packed(batch, _places(rollouts, chosen, device)))
    return batches


def _packed(batch: PackedBatch | PackedSequences, places: torch.Tensor) -> ModelBatch:
    return ModelBatch({"input_ids": batch.input_ids, "dualkv": batch.layout}, batch, places)


# Each takes an update's rollouts, a budget (the most rows of a micro-batch) and the device of the inputs.
WAYS: dict[str, Callable[..., list[ModelBatch]]] = {
    "replicated": replicated_batches,
    "packed": packed_batches,
    "tree": tree_batches,
}


def rows_of_one_group(rollouts: Rollouts) -> int:
    """Rows of the largest group as a padded batch: the default budget, under which both ways take a group at once."""
    groups = zip(rollouts.prompts, rollouts.responses, strict=True)
    return max(len(group) * (len(prompt) + max(map(len, group))) for prompt, group in groups)


def longest_sequence(rollouts: Rollouts) -> int:
    """Tokens of the longest prompt with its response: the smallest budget."""
    groups = zip(rollouts.prompts, rollouts.responses, strict=True)
    return max(len(prompt) + max(map(len, group)) for prompt, group in groups)

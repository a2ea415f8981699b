"""Rollouts of a prompt stay together: on a data-parallel rank, in an optimizer step and in a micro-batch.

OpenRLHF's dynamic batches balance tokens and take rollouts of any prompt. These take neighbours in the tree of all
sequences, and count packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer

from dualkv.data.gain import MIN_SHARED
from dualkv.data.trees import plan_sequences
from dualkv.integrations import patching
from dualkv.prefixes import read_sequences

_stock_setup = NaiveReplayBuffer.setup_dynamic_batch
_stock_split = RemoteExperienceMaker.split_rollout_samples


def keep_groups_together() -> None:
    """Replace the three functions of OpenRLHF that choose dynamic batches, in this process."""
    patching.of(NaiveReplayBuffer).replace("setup_dynamic_batch", setup_dynamic_batch)
    patching.of(RemoteExperienceMaker).replace("split_rollout_samples", split_rollout_samples)
    patching.of(ppo_trainer).replace("balance_experiences", balance_experiences)


def tokens(samples: Sequence[Any]) -> list[torch.Tensor]:
    """The tokens of single rollouts, without padding."""
    return [s.sequences.reshape(-1)[s.attention_mask.reshape(-1).bool()] for s in samples]


def packed_tokens(samples: Sequence[Any]) -> int:
    """Rows that a model computes for rollouts in one micro-batch."""
    return read_sequences(tokens(samples), MIN_SHARED)[1].at_least(MIN_SHARED).tokens


def plan(samples: Sequence[Any], budget: int, min_count: int = 1) -> list[list[int]]:
    """The rollouts of each micro-batch of at most `budget` packed tokens; a longer rollout has one by itself."""
    return plan_sequences(tokens(samples), budget, min_shared=MIN_SHARED, min_count=min_count, soft=True)


def setup_dynamic_batch(self: Any, strategy: Any) -> None:
    """Choose the micro-batches of a replay buffer. OpenRLHF chooses the rollouts of each optimizer step, and sums over
    them."""
    _stock_setup(self, strategy)
    strategy.boundaries = None
    ends = (np.flatnonzero(self.dynamic_optimizer_step) + 1).tolist()
    if not ends:
        return
    begins = [0, *ends[:-1]]
    steps = [sorted(i for own in self.dynamic_indices[b:e] for i in own) for b, e in zip(begins, ends, strict=True)]
    items, budget = [[self.items[i] for i in step] for step in steps], strategy.args.train.max_tokens_per_gpu
    plans = [plan(samples, budget) for samples in items]
    # The same number on every rank: each micro-batch is a collective of all.
    counts = strategy.all_reduce(torch.tensor([len(p) for p in plans], dtype=torch.int), op="max").tolist()
    plans = [
        p if len(p) == count else plan(samples, budget, count)
        for p, samples, count in zip(plans, items, counts, strict=True)
    ]
    for samples, chosen in zip(items, plans, strict=True):
        packed = sum(packed_tokens([samples[i] for i in own]) for own in chosen)
        ratio = sum(map(len, tokens(samples))) / packed
        for sample in samples:  # OpenRLHF's metrics are means over rollouts
            sample.info |= {"dualkv/tokens_packed": float(packed), "dualkv/dedup_ratio": ratio}
    self.dynamic_indices = [[step[i] for i in own] for step, p in zip(steps, plans, strict=True) for own in p]
    self.dynamic_sample_loss_scale = [len(own) / sum(map(len, p)) for p in plans for own in p]
    self.dynamic_optimizer_step = [int(own is p[-1]) for p in plans for own in p]
    strategy.boundaries = cycle(self.dynamic_optimizer_step)  # again in each epoch
    for name in ("dynamic_batch_num_tokens", "dynamic_global_batch_size"):  # one value for all of a step
        values = getattr(self, name)
        setattr(self, name, [values[b] for b, count in zip(begins, counts, strict=True) for _ in range(count)])


def split_rollout_samples(self: Any, rollout_samples: list[Any]) -> list[Any]:
    """Make the batches in which models compute log-probs, values and rewards: a multiple of the number of actors."""
    args = self.args
    actors = args.actor.num_nodes * args.actor.num_gpus_per_node
    if not args.train.dynamic_batch_enable:
        return _stock_split(self, rollout_samples)
    budget = args.rollout.max_tokens_per_gpu
    batches = plan(rollout_samples, budget)
    if (count := -(-len(batches) // actors) * actors) > len(rollout_samples):
        return _stock_split(self, rollout_samples)
    if len(batches) < count:
        batches = plan(rollout_samples, budget, count)
    for i, sample in enumerate(rollout_samples):
        sample.index = [i]
    padding = self.tokenizer.pad_token_id
    return [Experience.concat_experiences([rollout_samples[i] for i in own], padding) for own in batches]


def balance_experiences(experiences: list[Any], args: Any) -> list[Any]:
    """Deal whole groups to ranks: in the order of the input, one to each rank in turn, the largest to the rank with the
    fewest packed tokens. Ranks get equally many rollouts, or one more; a group between two ranks is cut."""
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    groups: dict[tuple[str, ...], list[Any]] = {}
    for item in (item for experience in experiences for item in split_experience_batch(experience)):
        groups.setdefault(tuple(item.prompts), []).append(item)
    sized = [(packed_tokens(group), group) for group in groups.values()]
    whole = len(sized) // ranks * ranks
    dealt: list[list[Any]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for at in range(0, whole, ranks):
        free = sorted(range(ranks), key=lambda r: loads[r])
        for rank, (size, group) in zip(free, sorted(sized[at : at + ranks], key=lambda s: -s[0]), strict=True):
            dealt[rank] += group
            loads[rank] += size
    rest = [item for _, group in sized[whole:] for item in group]
    dealt = [own + rest[len(rest) * r // ranks : len(rest) * (r + 1) // ranks] for r, own in enumerate(dealt)]
    counts = [len(own) for own in dealt]
    if max(counts) - min(counts) > 1:
        items = [item for own in dealt for item in own]
        dealt = [items[len(items) * r // ranks : len(items) * (r + 1) // ranks] for r in range(ranks)]
    return [make_experience_batch(own) for own in dealt]

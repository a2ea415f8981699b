"""A program of a user, for mypy --strict: the public names with the types that their documentation gives them."""

from __future__ import annotations

from typing import assert_type

import torch

import dualkv
from dualkv import grpo
from dualkv.integrations.transformers import disable, enable, recompute_layers
from dualkv.sequence_parallel import Shard


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: dualkv.Layout) -> torch.Tensor:
    assert_type(dualkv.attention(q, k, v, layout), torch.Tensor)
    out, lse = dualkv.attention(q, k, v, layout, softmax_scale=0.1, deterministic=True, return_lse=True)
    assert_type(lse, torch.Tensor)
    return out


def update(prompts: list[torch.Tensor], responses: list[list[torch.Tensor]], hidden: torch.Tensor) -> torch.Tensor:
    lens = [[len(response) for response in group] for group in responses]
    micro_batches = dualkv.plan_micro_batches([len(prompt) for prompt in prompts], lens, budget=1024, num_ranks=2)
    assert_type(micro_batches, list[dualkv.MicroBatch])
    batch = dualkv.pack(prompts, responses, labels="gather")
    assert_type(batch, dualkv.PackedBatch)
    assert_type(batch.layout.dedup_ratio, float)
    batch.layout.mark_used()  # `hidden` comes from elsewhere
    logp, entropy = dualkv.response_logprobs(hidden, hidden, batch, temperature=0.7)
    rewards = torch.ones(batch.num_rollouts)
    advantages = grpo.group_advantages(rewards, [len(group) for group in responses])
    weights = grpo.token_weights([n for group in lens for n in group], "token")
    loss, metrics = grpo.policy_loss(logp, logp.detach(), advantages, weights, clip_low=0.2, clip_high=0.2)
    assert_type(metrics, dict[str, torch.Tensor])
    return loss - 0.01 * entropy.mean()


def trees(sequences: list[list[int]]) -> dualkv.PackedSequences:
    assert_type(dualkv.plan_sequences(sequences, budget=64, min_count=2), list[list[int]])
    batch = dualkv.pack_sequences(sequences, min_shared=4, device="cpu")
    layout = dualkv.Layout.from_token_sequences(sequences, device=torch.device("cpu"))
    assert layout == batch.layout
    return batch


def packed_model(model: torch.nn.Linear, shard: Shard, x: torch.Tensor) -> torch.nn.Linear:
    assert_type(enable(model, deterministic=True), torch.nn.Linear)
    assert_type(recompute_layers(model, keep="attention"), torch.nn.Linear)
    assert_type(shard.attention(x, x, x), torch.Tensor)
    assert_type(shard.layout, dualkv.Layout)
    return disable(model)


def papers(x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    return dualkv.flash_attn_dualkv_varlen_func(x, x, x, x, x, cu, cu, 1, 1, 1, causal=True)


def wrong(layout: dualkv.Layout) -> None:
    dualkv.attention(layout, layout, layout, layout)  # type: ignore[call-overload]
    dualkv.Layout.from_lengths("8192", [])  # type: ignore[arg-type]
    enable(layout)  # type: ignore[type-var]

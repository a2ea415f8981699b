"""Tiny transformers models with random weights, a ragged layout, and a loss that packed and replicated form share."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn

import dualkv

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # large: attention must matter
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
ARCHITECTURES = {
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "granite": ("Granite", {"attention_multiplier": 0.2}),  # softmax scale of its own
}
# Ragged groups: an empty response, prompts of one token, a group of one, a group without responses, a shared part of 0.
LAYOUT = dualkv.Layout.from_lengths([7, 1, 5, 3, 0], [[4, 0, 9], [2, 6], [3], [], [3, 2]])


def make_model(
    name: str = "qwen3", dtype: torch.dtype = torch.float32, attention: str = "sdpa", **settings: Any
) -> Any:
    """A tiny model with random weights: equal arguments, equal weights."""
    family, extra = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(tf, f"{family}Config")(**{**SIZES, **extra, **settings}, attn_implementation=attention)
    model = getattr(tf, f"{family}ForCausalLM")(config).to(dtype)
    if dtype == torch.float64 and name == "qwen3_moe":
        model.set_experts_implementation("eager")  # grouped_mm takes no fp64
    return model


def token_ids(layout: dualkv.Layout, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, layout.num_tokens), generator=torch.Generator().manual_seed(seed))


# Turns that branch, five levels: an empty segment on a path, a chain, a leaf beside a subtree, a tree of one segment.
TREE = dualkv.Layout.from_segments(
    np.cumsum([0, 6, 3, 2, 0, 4, 1, 5, 2, 3, 7, 2, 4]), [-1, 0, 1, 1, 3, 4, 0, 6, 6, 8, -1, 10]
)


def paths(layout: dualkv.Layout) -> list[tuple[list[int], int]]:
    """The packed rows of every replicated sequence that has a token, and how many of them are its prompt."""
    offsets, parent = layout.offsets.tolist(), layout.parent.tolist()
    segments = [list(range(*ends)) for ends in itertools.pairwise(offsets)]
    rows: list[list[int]] = []
    prompts: list[int] = []
    for s, up in enumerate(parent):
        rows.append((rows[up] if up >= 0 else []) + segments[s])
        prompts.append(prompts[up] if up >= 0 else len(segments[s]))
    return [(rows[s], prompts[s]) for s in range(len(parent)) if s not in parent and rows[s]]


class Losses:
    """A weighted sum of response log-probs; each token has its own weight."""

    def __init__(self, layout: dualkv.Layout, ids: torch.Tensor, dtype: torch.dtype) -> None:
        self.layout, self.ids = layout, ids
        self.weight = torch.randn(layout.num_tokens, generator=torch.Generator().manual_seed(9)).to(dtype)

    def logprobs(self, logits: torch.Tensor, predicts: list[int], rows: list[int]) -> torch.Tensor:
        return logits[0, predicts].log_softmax(-1).gather(-1, self.ids[0, rows, None])[:, 0]

    def packed(self, model: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs in path order, loss."""
        return self.of_packed(model(input_ids=self.ids, dualkv=self.layout, **kwargs))

    def of_packed(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        predicts, rows = [], []
        for path, shared in paths(self.layout):
            at = range(max(shared, 1), len(path))
            predicts += [path[i - 1] for i in at]
            rows += [path[i] for i in at]
        logp = self.logprobs(out.logits, predicts, rows)
        return logp, (logp * self.weight[rows]).sum()

    def replicated(self, model: Any) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Hidden states of each path, log-probs and loss, each sequence run by itself."""
        hidden, logps, loss = [], [], torch.zeros((), dtype=self.weight.dtype)
        for path, shared in paths(self.layout):
            out = model(input_ids=self.ids[:, path], output_hidden_states=True, use_cache=False)
            at = range(max(shared, 1), len(path))
            logp = self.logprobs(out.logits, [i - 1 for i in at], [path[i] for i in at])
            hidden.append(out.hidden_states[-1][0])
            logps.append(logp)
            loss = loss + (logp * self.weight[[path[i] for i in at]]).sum()
        return hidden, torch.cat(logps), loss


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (got - expected).norm().item()
    assert error <= tolerance * expected.norm().item(), f"{name}: {error} against a norm of {expected.norm().item()}"


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_pre_hooks_with_kwargs) for m in model.modules())

"""Tiny transformers models with random weights, a ragged layout, and a loss that packed and replicated form share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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
SLIDING, FULL = "sliding_attention", "full_attention"
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Models whose attention has more than a softmax, in small: the field that `window` sets, and settings.
FEATURED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_oss": ("GptOss", "sliding_window", {"layer_types": [SLIDING, FULL], **LOCAL_EXPERTS}),
    "gemma2": ("Gemma2", "sliding_window", {"layer_types": [SLIDING, FULL], "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", "sliding_window", {"layer_types": [SLIDING, FULL]}),
    # Two head dims; the last two layers read keys and values of the first two.
    "gemma4": ("Gemma4Text", "sliding_window", {
        "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2, "global_head_dim": 16,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}),
    "gemma3n": ("Gemma3nText", "sliding_window", {
        "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
        "activation_sparsity_pattern": [0.0] * 4}),
    "olmo3": ("Olmo3", "sliding_window", {"layer_types": [SLIDING, FULL]}),
    "exaone4": ("Exaone4", "sliding_window", {"layer_types": [SLIDING, FULL]}),
    "cohere2": ("Cohere2", "sliding_window", {"layer_types": [SLIDING, FULL]}),
    "mistral": ("Mistral", "sliding_window", {}),
    "ministral": ("Ministral", "sliding_window", {"layer_types": [SLIDING, FULL]}),
    "phi3": ("Phi3", "sliding_window", {}),
    # The window is in the mask alone.
    "phimoe": ("Phimoe", "sliding_window", {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0, **LOCAL_EXPERTS}),
    "qwen2": ("Qwen2", "sliding_window", {"layer_types": [SLIDING, FULL], "use_sliding_window": True}),
    # Chunks, then a layer without positions whose temperature grows with them.
    "llama4": ("Llama4Text", "attention_chunk_size", {
        "layer_types": ["chunked_attention", FULL], "no_rope_layers": [1, 0], "floor_scale": 2, "attn_scale": 0.5,
        "intermediate_size_mlp": 32, "interleave_moe_layer_step": 2, **LOCAL_EXPERTS}),
    # Window layers have sinks, and twice the KV heads; values have another head dim and a factor.
    "mimo_v2_flash": ("MiMoV2Flash", "sliding_window", {
        "layer_types": [FULL, SLIDING], "num_key_value_heads": 1, "v_head_dim": 16, "mlp_layer_types": ["dense"] * 2,
        "attention_value_scale": 0.707}),
}  # fmt: skip
# Ragged groups: an empty response, prompts of one token, a group of one, a group without responses, a shared part of 0.
LAYOUT = dualkv.Layout.from_lengths([7, 1, 5, 3, 0], [[4, 0, 9], [2, 6], [3], [], [3, 2]])


def make_model(
    name: str = "qwen3", dtype: torch.dtype = torch.float32, attention: str = "sdpa", **settings: Any
) -> Any:
    """A tiny model with random weights: equal arguments, equal weights."""
    family, extra = ARCHITECTURES[name]
    return _made(family, dtype, attention, extra | settings)


def make_featured(name: str, window: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A tiny model of FEATURED with a window, or with chunks, of so many tokens."""
    family, field, extra = FEATURED[name]
    return _made(family, dtype, "eager", extra | {field: window} | settings)


def _made(family: str, dtype: torch.dtype, attention: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(tf, f"{family}Config")(**{**SIZES, **settings}, attn_implementation=attention)
    model = getattr(tf, f"{family.removesuffix('Text')}ForCausalLM")(config).to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped_mm takes no fp64
    return model


def make_vision_language() -> Any:
    """A Qwen2.5-VL in fp32."""
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "fullatt_block_indexes": [0]}
    config = tf.Qwen2_5_VLConfig(
        text_config=SIZES | {"rope_parameters": rotary},
        vision_config=vision | {"out_hidden_size": SIZES["hidden_size"]},
        image_token_id=3,
    )
    return tf.Qwen2_5_VLForConditionalGeneration(config).float()


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


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Take the gradients out of a model."""
    found = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    return found


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert_close(name, gradient, expected[name], tolerance)


def gradients_asked(run: Callable[[], Any]) -> set[str]:
    """The inputs of attention whose gradients its backwards compute while `run` runs."""
    found = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.dualkv.bwd.default:
                names = [argument.name for argument in func._schema.arguments]
                found.add(dict(zip(names, args, strict=False)).get("gradients", "qkv"))  # defaults are left out
            return func(*args, **(kwargs or {}))

    with Watch():
        run()
    return found


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    got, expected = got.double(), expected.double()  # weights of 4 bits are integers
    error = (got - expected).norm().item()
    assert error <= tolerance * expected.norm().item(), f"{name}: {error} against a norm of {expected.norm().item()}"


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_pre_hooks_with_kwargs) for m in model.modules())

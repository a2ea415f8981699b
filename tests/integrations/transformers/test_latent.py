"""Multi-head latent attention, whose values have another head dim: packed groups against every replicated sequence
alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import dualkv

tf = pytest.importorskip("transformers")

from tests.integrations.tiny import LAYOUT, SIZES, TREE  # noqa: E402
from tests.integrations.transformers.test_enabling import check_packed  # noqa: E402

LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2", EXPERTS),
    "deepseek_v3": ("DeepseekV3", EXPERTS),  # Kimi K2.5's and Moonlight's too
    "minicpm3": ("MiniCPM3", {}),
    "youtu": ("Youtu", {}),
    "axk1": ("AXK1", EXPERTS),
    "glm4_moe_lite": ("Glm4MoeLite", EXPERTS),
    "longcat_flash": ("LongcatFlash", {
        "num_layers": 2, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2,
        "n_routed_experts": 4}),
}  # fmt: skip


def make(name: str, dtype: torch.dtype) -> Any:
    family, extra = MODELS[name]
    torch.manual_seed(0)
    config = getattr(tf, f"{family}Config")(**SIZES | LATENT | extra, attn_implementation="eager")
    model = getattr(tf, f"{family}ForCausalLM")(config).to(dtype)
    model.set_experts_implementation("eager")  # grouped_mm takes no fp64
    return model


@pytest.mark.parametrize("layout", [LAYOUT, TREE], ids=["groups", "tree"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_is_replicated(name: str, layout: dualkv.Layout) -> None:
    check_packed(partial(make, name), layout)

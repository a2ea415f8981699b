"""Every field of megatron-core's configs is judged: exact, refused, or allowed with what it means."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from dualkv.integrations.megatron import configs, enable
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import (
    EXPERTS,
    LATENT,
    build,
    config,
    layer_spec,
    packed_against_replicated,
    rollouts,
    update,
)

KINDS = (ModelParallelConfig, TransformerConfig, MLATransformerConfig, HeterogeneousTransformerConfig)
PAGE = Path(__file__).parents[3] / "docs" / "megatron.md"


def test_every_field_is_judged_once() -> None:
    for kind in KINDS:
        assert configs.unjudged(kind) == ()
        assert {field.name for field in dataclasses.fields(kind)} <= configs.JUDGED
    judged = " ".join([*configs.EXACT.values(), *configs.NEEDED, *configs.MEANING, *configs.COUNTED, configs.RULED])
    assert [name for name, times in Counter(judged.split()).items() if times > 1] == []


def test_a_field_that_nobody_has_judged_is_refused_unless_it_has_its_default() -> None:
    made = dataclasses.make_dataclass("New", [("mixes_rows", bool, False)], bases=(TransformerConfig,))
    made.__module__ = "megatron.core.transformer.new"
    assert configs.unjudged(made) == ("mixes_rows",)
    found = config()
    found.__class__ = made
    found.mixes_rows = False
    configs.refuse(found)
    found.mixes_rows = True
    with pytest.raises(ValueError, match=r"^mixes_rows is True, expected its default False: "):
        configs.refuse(found)
    made.__module__ = "a_trainer.configs"  # fields of others are theirs
    configs.unjudged.cache_clear()
    configs.refuse(found)


def test_products_of_8_bits_are_said_once() -> None:
    found = config()
    found.fp8 = "hybrid"
    configs._warn.cache_clear()
    with pytest.warns(UserWarning, match="fp8 is hybrid: a scale of 8 or 4 bits may be"):
        configs.refuse(found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configs.refuse(found)


def test_what_allowed_fields_mean_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert [name for name in (*configs.MEANING, *configs.COUNTED) if f"`{name}`" not in page] == []


def test_a_budget_beyond_which_a_dispatcher_stops_is_none_that_drops_tokens() -> None:
    cpu.parallel()
    model = build(layer_spec(**EXPERTS), EXPERTS)
    model.config.moe_expert_rank_capacity_factor = 1.5
    model.config.moe_token_dispatcher_type, model.config.moe_flex_dispatcher_backend = "flex", "ncclep"
    assert enable(model) is model


# Values of exact fields that a CPU runs, other than those of test_updates.py.
EXACT: dict[str, dict[str, Any]] = {
    "experts, all ways to score": EXPERTS
    | {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.0},
    "groups of experts": EXPERTS
    | {"num_moe_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_pre_softmax": True},
    "shared experts": EXPERTS | {"moe_shared_expert_intermediate_size": 24},
    "probabilities first": EXPERTS
    | {"moe_router_topk": 1, "moe_apply_probs_on_input": True, "moe_router_pre_softmax": True},
    "gathered": EXPERTS | {"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False},
    "layers with experts": EXPERTS | {"moe_layer_freq": [0, 1]},
    "biases": {"add_bias_linear": True, "gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
    "biases of q, k, v": {"add_qkv_bias": True},
    "linear offset": {"glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5},
    "norms": {"layernorm_epsilon": 1e-2},
    "norms behind": {"apply_residual_connection_post_layernorm": True},
    "norms of q and k by length": {"qk_l2_norm": True, "qk_layernorm": False, "norms": True},
    "fused": {"bias_activation_fusion": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True},
    "fp32 residuals": {"fp32_residual_connection": True},
    "per token": {"calculate_per_token_loss": True},
    "latent": LATENT | {"qk_layernorm": True},
}
LEFT_OUT = ("latent", "fp32", "per token", "fused", "norms behind", "biases of")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith(LEFT_OUT) else ()) for name in EXACT]
)
def test_exact_fields(name: str) -> None:
    logp, gradients = packed_against_replicated(**EXACT[name])
    assert logp is not None
    assert logp < 1e-5
    assert gradients < 1e-5


@pytest.mark.parametrize("settings", [{"hidden_dropout": 0.2}, EXPERTS | {"moe_input_jitter_eps": 0.2}])
def test_noise_of_rows_is_allowed(settings: dict[str, Any]) -> None:
    """A model in evaluation has no noise; in training, rows that rollouts share draw once."""
    cpu.parallel()
    packed, replicated = rollouts()
    model = build(enable(layer_spec(**settings)), settings)
    torch.manual_seed(0)
    noisy = update([model.train()], packed)
    torch.manual_seed(1)
    other = update([model], packed)
    assert noisy.logp is not None
    assert other.logp is not None
    assert (noisy.logp - other.logp).abs().max() > 1e-3
    if "hidden_dropout" in settings:
        found, expected = (update([model.eval()], batches) for batches in (packed, replicated))
        assert found.logp is not None
        assert expected.logp is not None
        assert (found.logp - expected.logp).abs().max() < 1e-5

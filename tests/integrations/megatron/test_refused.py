"""Errors name in one sentence what cannot run packed: at `enable`, when a layer is built, or at the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

import dualkv
from codegen import packages
from dualkv.integrations.megatron import PackedGroups, disable, enable, enabling
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import COUNTED, EXPERTS, HYBRID, LATENT, RECURRENT, build, hybrid, layer_spec

LAYOUT = dualkv.Layout.from_lengths([3], [[2, 1]])


STAGES = {"pipeline_model_parallel_size": 2, "variable_seq_lengths": False}
INTERLEAVED = STAGES | {"virtual_pipeline_model_parallel_size": 3, "batch_p2p_comm": True}
UNKNOWN_BALANCE = {"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"], "moe_aux_loss_coeff": [0, 0]}


@pytest.mark.parametrize(
    ("of_model", "settings", "says"),
    [
        ({}, {"attention_dropout": 0.1}, "attention_dropout is 0.1, expected 0: "),
        ({}, {"hybrid_context_parallel": True}, "hybrid_context_parallel is True, expected False: "),
        ({}, {"virtual_pipeline_model_parallel_size": 2}, "variable_seq_lengths is True and virtual_pipeline_model_pa"),
        ({}, INTERLEAVED, "batch_p2p_comm is True and virtual_pipeline_model_parallel_size 3 on 2 stages, expected Fa"),
        (
            {},
            {"mrope_section": [2, 3, 3]},
            r"mrope_section is \[2, 3, 3\] and position_embedding_type 'rope', expected",
        ),
        ({}, {"cuda_graph_impl": "local"}, "cuda_graph_impl is 'local', expected 'none': "),
        ({}, {"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor is 1.0, expected None: "),
        ({}, {"window_size": (4, -1)}, r"window_size is \(4, -1\), expected \(n, 0\) or \(-1, 0\): "),
        ({}, {"kv_channels": 12}, "kv_channels is 12, expected a multiple of 8 up to 512"),
        ({}, STAGES, "variable_seq_lengths is False and pipeline_model_parallel_size 2, expected True: "),
        (LATENT, {"cache_mla_latents": True}, "cache_mla_latents is True, expected False: "),
        (LATENT, {"apply_rope_fusion": True}, "apply_rope_fusion is True, expected False: "),
        (LATENT, {"qk_pos_emb_head_dim": 6}, r"qk_head_dim \+ qk_pos_emb_head_dim is 22, expected a multiple of 8 up"),
        (LATENT, {"v_head_dim": 520}, "v_head_dim is 520, expected a multiple of 8 up to 512"),
        (EXPERTS, {"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type is 'sinkhorn', exp"),
        (EXPERTS, UNKNOWN_BALANCE, r"moe_router_load_balancing_type is \['aux_loss', 'quantile_balancing'\], expected"),
        (EXPERTS, {"moe_expert_rank_capacity_factor": 1.5}, "moe_expert_rank_capacity_factor is 1.5, expected None: "),
        (EXPERTS, {"moe_token_dropping": True}, "moe_token_dropping is True, expected False: "),
        ({}, {"experimental_attention_variant": "dsa"}, "experimental_attention_variant is 'dsa', expected None or 'g"),
    ],
)
def test_configs(of_model: dict[str, Any], settings: dict[str, Any], says: str) -> None:
    """Fields are set after the checks of megatron-core, which refuses some of them itself."""
    cpu.parallel()
    model = build(enable(layer_spec(**of_model)), of_model)
    for name, value in settings.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=f"^{says}") as caught:
        enable(model)
    assert len(str(caught.value).splitlines()) == 1


def test_a_config_is_read_where_a_model_is_built_and_where_one_is_enabled() -> None:
    cpu.parallel()
    with pytest.raises(ValueError, match=r"^attention_dropout is 0.1"):
        build(enable(layer_spec()), {"attention_dropout": 0.1})
    model = build(layer_spec(), {"attention_dropout": 0.1})
    with pytest.raises(ValueError, match=r"^attention_dropout is 0.1"):
        enable(model)


def changed(spec: Any, **fields: Any) -> Any:
    """Replace parts of a spec's self-attention, or of the layer where it has parts of that name."""
    for name, value in fields.items():
        owner = spec.submodules if hasattr(spec.submodules, name) else spec.submodules.self_attention.submodules
        setattr(owner, name, value)
    return spec


def masked() -> Any:
    spec = layer_spec()
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    return spec


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: changed(layer_spec(), core_attention=torch.nn.Linear),
            "core_attention of layer 0 of the spec is Linear, expected megatron-core's DotProductAttention",
        ),
        (
            lambda: TransformerBlockSubmodules([layer_spec(), changed(layer_spec(), cross_attention=torch.nn.Linear)]),
            r"layer 1 of the spec has cross-attention \(Linear\), expected a layer of a decoder without it",
        ),
        (
            lambda: changed(layer_spec(), self_attention=torch.nn.Linear),
            "self_attention of layer 0 of the spec is Linear, expected the ModuleSpec of one",
        ),
        (masked, "layer 0 of the spec has attn_mask_type no_mask, expected causal or padding_causal"),
        (lambda: torch.nn.Linear(2, 2), "Linear holds 0 GPTModel( or HybridModel)?, expected one"),
    ],
)
def test_specs_and_models(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        enable(make())


def test_a_spec_that_is_refused_does_not_change() -> None:
    good, bad = layer_spec(), masked()
    before = good.submodules.self_attention.module
    with pytest.raises(ValueError, match="no_mask"):
        enable(TransformerBlockSubmodules([good, bad]))
    assert good.submodules.self_attention.module is before


@pytest.mark.parametrize("change", [enable, disable])
def test_neither_a_spec_nor_a_model(change: Any) -> None:
    with pytest.raises(TypeError, match=r"^str is neither a GPTModel nor the spec"):
        change("qwen3")


def test_models_without_rotary_embeddings() -> None:
    cpu.parallel()
    given = {"position_embedding_type": "learned_absolute"}
    with pytest.raises(ValueError, match=r"^position_embedding_type is 'learned_absolute', expected 'rope', 'yarn', "):
        enable(build(layer_spec(), {}, **given))
    with pytest.raises(ValueError, match=r"^layer 1 gets no rotary_pos_emb, expected a model whose position_embedding"):
        call(build(enable(layer_spec()), {}, **given))


@pytest.mark.skipif(cpu.hybrid_block is None, reason="megatron-core before 0.19 has no HybridModel")
def test_hybrid_models(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.parallel()
    model = hybrid(HYBRID)
    assert disable(model) is model
    kinds = [type(getattr(layer, "mixer", getattr(layer, "self_attention", None))) for layer in model.decoder.layers]
    assert kinds == [cpu.mamba_mixer.MambaMixer, GatedDeltaNet, SelfAttention, IdentityOp]
    for owner, name, value, says in (
        (model, "position_embedding_type", "learned_absolute", "position_embedding_type is 'learned_absolute', exp"),
        (model, "mtp_num_depths", 1, "hybrid_layer_pattern is 'MG[*]-', expected none of multi-token prediction: "),
        (model.config, "is_hybrid_model", False, "is_hybrid_model is False, expected True: "),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            with pytest.raises(ValueError, match=f"^{says}"):
                enable(model)
    model.config.context_parallel_size, model.position_embedding_type = 2, "rope"
    with pytest.raises(ValueError, match=r"^position_embedding_type is 'rope' and context_parallel_size 2, expected"):
        enable(model)
    says = "moe_router_enable_expert_bias is True, expected none in a HybridModel: the router of layer 3 has no"
    with pytest.raises(ValueError, match=f"^{says}"):
        hybrid(HYBRID | COUNTED | {"pattern": "M*EG"})


def call(model: Any, layout: dualkv.Layout = LAYOUT, rows: int = 6, **arguments: Any) -> None:
    given = {"attention_mask": None, "packed_seq_params": PackedGroups(layout)} | arguments
    model(torch.zeros(1, rows, dtype=torch.int64), torch.zeros(1, rows, dtype=torch.int64), **given)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rows": 7}, "layer 1 gets 1 sequences of 7 tokens, expected one of 6: "),
        (
            {"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)},
            "attention_mask came together with PackedGroups",
        ),
        ({"extra_block_kwargs": {"attention_bias": torch.zeros(6, 6)}}, "attention_bias came together with Packed"),
    ],
)
def test_calls(arguments: dict[str, Any], says: str) -> None:
    cpu.parallel()
    with pytest.raises(ValueError, match=f"^{says}"):
        call(build(enable(layer_spec()), {}), **arguments)


def test_a_cache_and_frequencies_of_other_positions() -> None:
    cpu.parallel()
    attention = build(enable(layer_spec()), {}).decoder.layers[0].self_attention
    rows, packed = torch.zeros(6, 1, 32), PackedGroups(LAYOUT)
    with pytest.raises(ValueError, match=r"^inference_context came together with PackedGroups"):
        attention(rows, None, packed_seq_params=packed, inference_context=object())
    with pytest.raises(ValueError, match=r"^rotary_pos_emb has shape \(6, 1, 1, 16\), expected \(5, 1, 1, 'D'\)"):
        attention(rows, None, packed_seq_params=packed, rotary_pos_emb=torch.zeros(6, 1, 1, 16))


def test_arguments_by_position() -> None:
    cpu.parallel()
    model, rows, packed = build(enable(layer_spec(**RECURRENT)), RECURRENT), torch.zeros(6, 1, 32), PackedGroups(LAYOUT)
    for mixer in (layer.self_attention for layer in model.decoder.layers):
        with pytest.raises(ValueError, match=r"^PackedGroups came by position, expected packed_seq_params=Packed"):
            mixer(rows, None, None, packed)
        with pytest.raises(ValueError, match=r"^arguments behind attention_mask came by position with PackedGroups"):
            mixer(rows, None, object(), packed_seq_params=packed)


def test_recurrent_layers() -> None:
    """Layers that are not enabled, and heads that do not fit together or the tensor-parallel ranks."""
    cpu.parallel()
    settings = RECURRENT | {"linear_attention_freq": [1, 1]}
    model = build(enable(layer_spec(**settings)), settings)
    net = model.decoder.layers[0].self_attention
    net.num_key_heads = 3
    with pytest.raises(
        ValueError, match=r"^the gated delta net of layer 1 has 4 value heads, expected a multiple of 3 "
    ):
        call(model)
    net.tp_size = 2
    with pytest.raises(ValueError, match=r"^the gated delta net of layer 1 has 3 key heads, expected a multiple of"):
        call(model)
    disable(model)
    with pytest.raises(ValueError, match=r"^layer 1 \(GatedDeltaNet\) got PackedGroups and is not enabled: call"):
        call(model)
    if cpu.hybrid_block is not None:
        with pytest.raises(ValueError, match=r"^layer 1 \(MambaMixer\) got PackedGroups and is not enabled: call"):
            call(disable(hybrid(HYBRID | {"pattern": "M", "num_layers": 1})))


def test_one_length_for_all_micro_batches() -> None:
    cpu.parallel()
    with pytest.raises(ValueError, match=r"^layout has 6 rows, expected at most length=5$"):
        PackedGroups(LAYOUT, length=5)
    with pytest.raises(ValueError, match=r"^length is 9, expected a multiple of 2, which ranks share$"):
        PackedGroups(LAYOUT, 2, length=9)
    for name, value, error in (("multiple", 0, ValueError), ("multiple", 1.5, TypeError), ("length", "8", TypeError)):
        with pytest.raises(error, match=rf"^{name} is {value!r}, expected "):
            PackedGroups(LAYOUT, **{name: value})
    model = build(enable(layer_spec()), {})
    model.config.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(ValueError, match=r"^length of PackedGroups is None and virtual_pipeline_model_parallel_size 2"):
        call(model)


def test_experts_that_gather_rows_of_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EXPERTS | {"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False}
    model = build(enable(layer_spec(**settings)), settings)
    model.config.expert_model_parallel_size = 2
    call(model)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"^length of PackedGroups is None and moe_token_dispatcher_type 'allgather'"):
        call(model)


def test_not_a_layout() -> None:
    with pytest.raises(TypeError, match=r"^layout is a list, expected a dualkv\.Layout or a batch that has one$"):
        PackedGroups([3, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^layout is a layout without some queries .* expected one of all rows: "):
        PackedGroups(LAYOUT.without_prompt_queries())


def test_a_version_whose_surface_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer version runs as far as it fits: a router that has changed concerns models with experts alone."""
    monkeypatch.setattr(packages, "found", lambda name: "0.20.0")
    monkeypatch.setattr(enabling, "_check_borrowed", enabling._check_borrowed.__wrapped__)
    own = SelfAttention.forward
    enable(layer_spec(num_moe_experts=4))
    with monkeypatch.context() as changed:
        changed.delattr(TopKRouter, "_apply_seq_aux_loss")
        enable(layer_spec())
        with pytest.raises(ImportError, match=r"megatron-core 0\.20\.0 does not fit .*no method _apply_seq_aux_loss"):
            enable(layer_spec(num_moe_experts=4))

    def forward(self: Any, hidden_states: Any, attention_mask: Any, *, rotary_pos_emb: Any, layout: Any) -> Any:
        return own(self, hidden_states, attention_mask)

    monkeypatch.setattr(SelfAttention, "forward", forward)
    with pytest.raises(ImportError, match=r"SelfAttention\.forward\(.*\).* has no argument packed_seq_params"):
        enable(layer_spec())

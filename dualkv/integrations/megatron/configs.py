"""Decide which configs of megatron-core can run packed groups: every field of its configs is judged here.

A packed row holds the tokens of many sequences, and a shared token once. So what a field makes a model compute has one
of these judgements:

- :data:`EXACT`: each row is computed from itself and the rows that it sees, or the field has no part in it.
- :data:`NEEDED` and the rules of :func:`objections`: other values are refused, in one sentence.
- :data:`MEANING`: allowed, with what it means for packed rows.
- :data:`COUNTED`: what counts rows counts rollouts (:mod:`dualkv.integrations.megatron.routers`).

A field of megatron-core's that is not here is refused, unless it has its default.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

from codegen.tiles import HEAD_DIM_RULE, takes_head_dim

EXACT: dict[str, str] = {
    "the ranks and what they send": """
        tensor_model_parallel_size tensor_parallel_num_weight_shards gtp_weight_remat_size sequence_parallel
        context_parallel_size hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank expert_model_parallel_size
        expert_tensor_parallel_size expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
        tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend async_tensor_model_parallel_allreduce moe_extended_tp
        overlap_moe_expert_parallel_comm overlap_dispatch_backward_with_experts_wgrad high_priority_a2a_comm_stream
        ep_overlap_early_attn_memory_release symmetric_ar_type""",
    "the exchange of attention: PackedGroups has its own": "cp_comm_type",
    "pipeline stages and schedules": """
        pipeline_model_parallel_comm_backend pipeline_dtype overlap_p2p_comm batch_p2p_sync use_ring_exchange_p2p
        deallocate_pipeline_outputs defer_embedding_wgrad_compute wgrad_deferral_limit overlap_p2p_comm_warmup_flush
        microbatch_group_size_per_vp_stage num_microbatches_with_partial_activation_checkpoints
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split mtp_standalone delay_wgrad_compute
        barrier_with_L1_time""",
    "functions of the trainer, and logs": """
        timers finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func no_sync_func
        grad_sync_func param_sync_func config_logger_dir moe_per_layer_logging test_mode""",
    "the loss, of the trainer's own tokens": """
        calculate_per_token_loss cross_entropy_loss_fusion cross_entropy_fusion_impl""",
    "dtypes of weights and products": """
        fp16 bf16 params_dtype enable_autocast autocast_dtype fp32_residual_connection attention_softmax_in_fp32
        disable_bf16_reduced_precision_matmul deterministic_mode mamba_training_ssm_states_dtype""",
    "weights and their first values": """
        perform_initialization use_cpu_initialization init_method output_layer_init_method init_method_std
        embedding_init_method embedding_init_method_std init_model_with_meta_device use_te_rng_tracker
        disable_parameter_transpose_cache hetereogenous_dist_checkpoint gradient_accumulation_fusion""",
    "sizes": """
        num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size num_moe_experts moe_ffn_hidden_size
        moe_layer_freq moe_latent_size moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank
        heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json per_block_parameters""",
    "attention: computed by dualkv, or row by row": """
        softmax_scale softmax_type window_attn_skip_freq attention_output_gate qk_layernorm qk_l2_norm no_rope_freq
        multi_latent_attention apply_query_key_layer_scaling""",
    "attention: not used by dualkv": """
        attention_backend flash_attention_version masked_softmax_fusion qk_clip_alpha qk_clip_threshold""",
    "rotary embeddings, by position": """
        rotary_interleaved mrope_section rope_type rotary_base rotary_percent rotary_scaling_factor
        original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim""",
    "layers, row by row": """
        apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear
        add_qkv_bias gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value normalization
        bias_activation_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion fused_residual_rmsnorm
        use_fused_weighted_squared_relu use_transformer_engine_op_fuser use_te_activation_func
        use_grouped_gemm_for_dense_mlp mlp_chunks_for_training clone_scatter_output_in_embedding use_mup mup_width_mult
        mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power""",
    "experts, row by row": """
        moe_router_topk moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk
        moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
        moe_router_fusion moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_shared_expert_gate
        moe_shared_expert_overlap moe_shared_expert_glu_interleave_size use_grouped_gemm_for_shared_expert
        moe_grouped_gemm moe_single_grouped_weight moe_single_grouped_bias moe_use_legacy_grouped_gemm
        moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep
        moe_hybridep_pad_uneven_dispatch_inputs moe_permute_fusion moe_apply_probs_on_input moe_flex_dispatcher_num_sms
        moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy moe_mlp_glu_interleave_size""",
    "memory": """
        recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations
        moe_layer_recompute cpu_offloading cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers
        fine_grained_activation_offloading offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks activation_offload_fraction fine_grained_offloading_max_inflight_offloads
        moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu activation_func_fp8_input_store""",
    "parts of fields that have a judgement of their own": """
        mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern
        moe_pad_expert_input_to_capacity moe_token_drop_policy moe_router_bias_update_rate
        moe_router_quantile_balancing_ema fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval
        fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_output_proj tp_only_amax_red first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4_recipe fp4_param fp4_quantizer_factory
        kitchen_attention_backend cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
        cuda_graph_modules cuda_graph_scope experimental_attention_variant_loss_scale_func dsa_indexer_n_heads
        dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
        dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_attention_freq
        linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads""",
    "read where a spec is made; `enable` checks the classes that it names": """
        transformer_impl use_kitchen_attention mla_down_proj_fusion heterogeneous_block_specs is_hybrid_model
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path""",
    "inference": """
        inference_cuda_graph_scope flash_decode inference_rng_tracker inference_sampling_seed
        nccl_all_reduce_for_prefill use_inference_optimized_layers inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels
        inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        mlp_chunks_for_prefill moe_pad_experts_for_cuda_graph_inference""",
}

NOISE = "noise of each row: the rows of a prompt draw once for all rollouts of their group"
SCALES = "a scale of 8 or 4 bits may be that of a block of rows, or of all rows of a call: neighbours are others"
# Allowed with these meanings. docs/megatron.md has them too.
MEANING: dict[str, str] = {
    "hidden_dropout": NOISE,
    "moe_input_jitter_eps": NOISE,
    "moe_router_force_load_balancing": NOISE,
    "moe_router_force_biased": NOISE,
    "fp8": SCALES,
    "fp4": SCALES,
    "use_kitchen": SCALES,
    "quant_recipe": SCALES,
    "moe_enable_routing_replay": "routes are those of packed rows, in their order",
    "tp_comm_overlap": "buffers have one number of rows: PackedGroups takes it as `length`",
}

# What these count are rows, and with PackedGroups(count="rollouts") rollouts that share them.
COUNTED = ("moe_router_enable_expert_bias", "moe_aux_loss_coeff", "moe_z_loss_coeff")

# Fields that the rules of `objections` read, beside those that they name themselves.
RULED = """
    window_size kv_channels qk_head_dim qk_pos_emb_head_dim v_head_dim apply_rope_fusion
    pipeline_model_parallel_size virtual_pipeline_model_parallel_size variable_seq_lengths batch_p2p_comm
    moe_router_load_balancing_type moe_expert_rank_capacity_factor experimental_attention_variant"""

# Fields of a TransformerConfig: the value that packed groups need, and why. Some versions lack some of them.
NEEDED: dict[str, tuple[Any, str]] = {
    "attention_dropout": (0, "attention dropout is not computed"),
    "mtp_num_layers": (None, "the next token of a packed row is not always the next row"),
    "fused_single_qkv_rope": (False, "megatron-core runs it for unpacked sequences only"),
    "fp8_dot_product_attention": (False, "attention is computed in 16 bits or more"),
    "fp8_multi_head_attention": (False, "attention is computed in 16 bits or more"),
    "qk_clip": (False, "the largest attention logit is not recorded"),
    "log_max_attention_logit": (False, "the largest attention logit is not recorded"),
    "batch_invariant_mode": (False, "kernels choose their order of summation by the layout"),
    "cuda_graph_impl": ("none", "a CUDA graph would repeat the attention of one layout"),
    "enable_cuda_graph": (False, "a CUDA graph would repeat the attention of one layout"),
    "external_cuda_graph": (False, "a CUDA graph would repeat the attention of one layout"),
    "hybrid_context_parallel": (False, "rows are shared by all context-parallel ranks"),
    "cache_mla_latents": (False, "packed groups run without a cache"),
    "moe_expert_capacity_factor": (None, "which tokens an expert drops depends on all rows of a micro-batch"),
    "moe_token_dropping": (False, "which tokens an expert drops depends on all rows of a micro-batch"),
}


JUDGED = frozenset(" ".join([*EXACT.values(), *NEEDED, *MEANING, *COUNTED, RULED]).split())
VARIANTS = (None, "gated_delta_net")
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


@cache
def unjudged(kind: type) -> tuple[str, ...]:
    """Fields of a class of configs that megatron-core defines and nobody has judged."""
    own = [cls for cls in kind.__mro__ if cls.__module__.startswith("megatron.core.") and dataclasses.is_dataclass(cls)]
    return tuple(sorted({field.name for cls in own for field in dataclasses.fields(cls)} - JUDGED))


def window_of(config: Any) -> int | None:
    """Keys that a row of a windowed layer sees. `window_size` is (keys to the left, keys to the right)."""
    left = config.window_size[0]
    return None if left == -1 else left + 1


def objections(config: Any) -> Iterator[str]:
    """Reasons, by a TransformerConfig, why its model cannot run packed groups."""
    for name, (needed, why) in NEEDED.items():
        value = getattr(config, name, needed)
        if (value or None) != (needed or None):
            yield f"{name} is {value!r}, expected {needed!r}: {why}"
    for name in unjudged(config.__class__):
        value, known = getattr(config, name), type(config).__dataclass_fields__[name]
        default = known.default if known.default_factory is dataclasses.MISSING else known.default_factory()
        if value != default:
            yield f"{name} is {value!r}, expected its default {default!r}: what it makes of packed rows is not known"
    if config.num_moe_experts is not None:
        yield from _objections_of_experts(config)
    variant = getattr(config, "experimental_attention_variant", None)
    if variant not in VARIANTS:
        yield (
            f"experimental_attention_variant is {variant!r}, expected {' or '.join(map(repr, VARIANTS))}: its layers"
            " would take the rows of all sequences for one sequence"
        )
    activation = getattr(config.activation_func, "__name__", config.activation_func)
    if variant is not None and activation not in ("silu", "swish"):
        yield f"activation_func is {activation}, expected silu: gated delta nets run no other"
    window = config.window_size
    if window and (window[0] < -1 or window[1] != 0):
        yield f"window_size is {tuple(window)}, expected (n, 0) or (-1, 0): causal attention sees no key to the right"
    dims = {"kv_channels": config.kv_channels}
    if config.multi_latent_attention:
        both = "qk_head_dim + qk_pos_emb_head_dim"
        dims = {both: config.qk_head_dim + config.qk_pos_emb_head_dim, "v_head_dim": config.v_head_dim}
        if config.apply_rope_fusion:
            yield "apply_rope_fusion is True, expected False: fused latent attention counts positions by rows"
    for name, dim in dims.items():
        if not takes_head_dim(dim):
            yield f"{name} is {dim}, expected {HEAD_DIM_RULE}"
    stages, interleaved = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    if interleaved:
        if config.variable_seq_lengths:
            yield (
                f"variable_seq_lengths is True and virtual_pipeline_model_parallel_size {interleaved}, expected False:"
                " megatron-core's interleaved stages hang when micro-batches differ in length (PackedGroups.length)"
            )
        if stages == 2 and config.batch_p2p_comm:
            yield (
                f"batch_p2p_comm is True and virtual_pipeline_model_parallel_size {interleaved} on 2 stages, expected"
                " False: each of the two would take one message of the other for another"
            )
    elif stages > 1 and not config.variable_seq_lengths:
        yield (
            f"variable_seq_lengths is False and pipeline_model_parallel_size {stages}, expected True: stages exchange"
            " micro-batches of different lengths"
        )


def _objections_of_experts(config: Any) -> Iterator[str]:
    found = config.moe_router_load_balancing_type
    for kind in [found] if isinstance(found, str) else found:
        if kind not in BALANCING:
            yield (
                f"moe_router_load_balancing_type is {found!r}, expected {', '.join(map(repr, BALANCING))}: the experts"
                " of a row would depend on all rows of a micro-batch"
            )
    capacity = getattr(config, "moe_expert_rank_capacity_factor", None)
    stops = config.moe_token_dispatcher_type == "flex" and config.moe_flex_dispatcher_backend == "ncclep"
    if capacity is not None and not stops:  # NCCL's dispatcher stops where others drop tokens
        yield (
            f"moe_expert_rank_capacity_factor is {capacity!r}, expected None: which tokens a rank drops depends on all"
            " rows of a micro-batch"
        )


def counted(config: Any) -> list[str]:
    """The fields of :data:`COUNTED` that have a part in training."""
    if config.num_moe_experts is None:
        return []
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = [(kinds, coefficients)] if isinstance(kinds, str) else zip(kinds, coefficients, strict=True)
    active = (
        config.moe_router_enable_expert_bias,
        any(kind != "none" and coefficient for kind, coefficient in pairs),
        config.moe_z_loss_coeff is not None,
    )
    return [name for name, on in zip(COUNTED, active, strict=True) if on]


def gathers_experts(config: Any) -> bool:
    """Whether ranks with other experts gather each other's rows, and take them to be equally many."""
    experts = config.num_moe_experts is not None and config.expert_model_parallel_size > 1
    return bool(experts and config.moe_token_dispatcher_type == "allgather")


def refuse_count(config: Any) -> None:
    """Raises ValueError for a config whose experts cannot count by rollouts, though it has something to count."""
    if not (names := counted(config)):
        return
    found = None
    if config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ()):
        found = f"recompute_modules is {config.recompute_modules!r}", "without 'moe' or recompute_granularity='full'"
    elif (chunks := getattr(config, "mlp_chunks_for_training", 1)) > 1:
        found = f"mlp_chunks_for_training is {chunks}", "1"
    if found is not None:
        is_, expected = found
        raise ValueError(
            f"{is_} and {names[0]} {getattr(config, names[0])!r}, expected {expected}, or PackedGroups(count='rows'):"
            " routers would not know which rollouts share a row"
        )


def refuse(config: Any) -> None:
    """Raises ValueError for the TransformerConfig of a model that cannot run packed groups. Warns once in a process of
    products of 8 or 4 bits."""
    for sentence in objections(config):
        raise ValueError(sentence)
    for name, meaning in MEANING.items():
        if meaning is SCALES and (value := getattr(config, name, None)):
            _warn(name, str(value))


@cache
def _warn(name: str, value: str) -> None:
    warnings.warn(f"dualkv: {name} is {value}: {SCALES} (docs/megatron.md)", stacklevel=4)

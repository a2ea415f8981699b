"""Which configs of megatron-core can run packed groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codegen.tiles import HEAD_DIM_RULE, takes_head_dim

# Fields of a TransformerConfig: the value that packed groups need, and why. Some versions lack some of them.
NEEDED: dict[str, tuple[Any, str]] = {
    "attention_dropout": (0, "attention dropout is not computed"),
    "mrope_section": (None, "multimodal rotary embeddings have positions that a layout does not say"),
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
}


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


def refuse(config: Any) -> None:
    """Raises ValueError for the TransformerConfig of a model that cannot run packed groups."""
    for sentence in objections(config):
        raise ValueError(sentence)

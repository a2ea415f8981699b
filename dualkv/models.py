"""Named model configurations with random weights, and models from local folders, for demonstration and benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from dualkv.data.pretrained import PACKAGED, pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
          "max_position_embeddings": 40960, "num_key_value_heads": 8}  # fmt: skip

_QWEN35 = {"model_type": "qwen3_5_text", "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
           "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "tie_word_embeddings": False,
           "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                               "mrope_section": [11, 11, 10], "mrope_interleaved": True}}  # fmt: skip

# Model types whose layers of full attention have windows where there is a `sliding_window`: their code alone says so.
WITH_WINDOWS_IN_FULL_LAYERS = ("minimax",)

# Written out from the configurations their authors publish (config.json of each model); weights are random.
CONFIGS: dict[str, dict[str, Any]] = {
    # A Qwen3 in small, with a vocabulary for bytes and weights wide enough for its size to have something to unlearn.
    "tiny": _QWEN3 | {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
                      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.05},
    "qwen3-0.6b": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                            "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-1.7b": _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                            "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                          "num_attention_heads": 32, "tie_word_embeddings": True},
    "qwen3-8b": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                          "num_attention_heads": 32},
    "qwen2.5-7b": {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
                   "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
                   "rope_theta": 1e6, "max_position_embeddings": 131072},
    "qwen3-30b-a3b": _QWEN3 | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
                               "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                               "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                               "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
                               "router_aux_loss_coef": 0.001},
    "llama-3-8b": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
                   "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                   "rope_theta": 5e5, "max_position_embeddings": 8192},
    "mistral-7b": {"model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
                   "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                   "rope_theta": 1e6, "max_position_embeddings": 32768, "sliding_window": None},
    # Windows of 128 on every other layer, and sinks.
    "gpt-oss-20b": {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
                    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                    "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5,
                    "max_position_embeddings": 131072,
                    "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0, "beta_fast": 32.0,
                                        "beta_slow": 1.0, "truncate": False,
                                        "original_max_position_embeddings": 4096}},
    # Windows of 1024 on five of six layers; the text model.
    "gemma-3-12b": {"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360,
                    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
                    "sliding_window": 1024, "query_pre_attn_scalar": 256, "max_position_embeddings": 131072,
                    "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    # Windows of 4096 on three of four layers.
    "olmo-3-7b": {"model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008,
                  "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6,
                  "sliding_window": 4096, "max_position_embeddings": 65536,
                  "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 5e5,
                                                         "original_max_position_embeddings": 8192, "beta_fast": 32.0,
                                                         "beta_slow": 1.0, "attention_factor": 1.2079441541679836},
                                      "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
    # Three of four layers are gated delta nets; the text model.
    "qwen3.5-9b": _QWEN35 | {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
                             "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
                             "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                             "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "tiny-hybrid": _QWEN35 | {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
                              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
                              "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
                              "linear_value_head_dim": 32, "initializer_range": 0.05},
}  # fmt: skip


def read_config(model: str) -> Any:
    """The fields of a model's configuration: of a name in :data:`CONFIGS`, or of the path of a config.json or its
    folder; None for others."""
    if model in CONFIGS:
        return CONFIGS[model]
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def load_model(name_or_path: str, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
    """A causal language model, also one that sees pictures.

    Args:
        name_or_path: a name in :data:`CONFIGS` (random weights) or in :data:`PACKAGED`, a local folder in Hugging
            Face's format, or a GGUF file.
        dtype, device: of weights and computation.
        seed: of random weights; the same on every device.
    """
    path = Path(name_or_path)
    local = path.is_dir() or (path.suffix == ".gguf" and path.is_file())
    if name_or_path not in {**CONFIGS, **PACKAGED} and not local:
        raise ValueError(
            f"model {name_or_path!r} is neither a local folder nor a GGUF file nor one of "
            f"{', '.join([*CONFIGS, *PACKAGED])}"
        )
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    model: Any
    if name_or_path in CONFIGS:
        settings = dict(CONFIGS[name_or_path])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # not those of GPUs, which are not restored
            # Made on the CPU: there the random numbers are the same on every machine.
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        where = pretrained(name_or_path)
        config = AutoConfig.from_pretrained(**where)
        of_text = type(config) in AutoModelForCausalLM._model_mapping
        auto = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
        model = auto.from_pretrained(**where, config=config, dtype=dtype)  # a GGUF file takes seconds to read
        if "gguf_file" in where:  # read into plain weights, which transformers still takes for quantized ones
            model.is_quantized, model.hf_quantizer = False, None
            vars(model.config).pop("quantization_config", None)
    in_dtype(model, dtype)
    model.to(device).eval()
    return cast("PreTrainedModel", model)


def in_dtype(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model in another dtype, changed in place; in fp64 its RMS norms compute in fp64 too.

    transformers' norms compute in fp32 whatever the model's dtype. Norms that scale by their weight alone are replaced;
    these call their epsilon `variance_epsilon`.
    """
    model.to(dtype)
    if dtype == torch.float64:
        for module in list(model.modules()):
            for name, norm in module.named_children():
                if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
                    weight, eps = cast(torch.nn.Parameter, norm.weight), cast(float, norm.variance_epsilon)
                    wide = torch.nn.RMSNorm(weight.shape, eps=eps)
                    wide.weight = weight
                    setattr(module, name, wide)
    return model

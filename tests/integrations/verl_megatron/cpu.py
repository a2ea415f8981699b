"""veRL's Megatron engine on the CPU, through mbridge.

veRL runs its own code here, and mbridge its own reading and writing of checkpoints of transformers. Stand-ins are what
needs a GPU: CUDA's names (tests/integrations/megatron/cpu.py), the layers of Transformer Engine, for which
megatron-core has local ones with other names of weights, attention of sequences in one row, and veRL's fused head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from mbridge.core.bridge import Bridge
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.nn.functional import scaled_dot_product_attention
from verl.models.mcore import model_forward_fused
from verl.workers.config import EngineRouterReplayConfig, McoreActorConfig, McoreEngineConfig, McoreOptimizerConfig

from tests.integrations.megatron import cpu
from tools.bench import verl_megatron

TYPE_OF_TENSOR = torch.Tensor.type
NAMES_OF_WEIGHTS = Bridge._weight_name_mapping_mcore_local_to_global
# For the CPU: without fused and grouped kernels.
TRANSFORMER = {
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
    "moe_router_dtype": "fp32",
}


def _attention(self: Any, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
    """[T, H, D] of sequences in one row -> [T, 1, H * D]."""
    cuts = packed_seq_params.cu_seqlens_q.tolist()
    found = [
        scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1) for x in (query, key, value)), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        for a, b in pairwise(cuts)
    ]
    return torch.cat(found).reshape(len(query), 1, -1)


def _names(self: Any, model: Any, consider_ep: bool = True) -> dict[str, str]:
    """The names that Transformer Engine's layers have for the weights of local ones."""
    found = NAMES_OF_WEIGHTS(self, model, consider_ep=False)
    first = self.mpu.ep_rank * (self.config.num_moe_experts or 0) // self.mpu.ep_size if consider_ep else 0
    for local, name in found.items():
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if not self.config.num_moe_experts:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        expert = r"\.local_experts\.(\d+)\.(linear_fc\d)\.weight"
        found[local] = re.sub(expert, lambda m: f".{m[2]}.weight{int(m[1]) + first}", name)
    return found


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the CUDA name of a tensor's type, which megatron-core's distributed optimizer expects."""
    found = TYPE_OF_TENSOR(self, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found


@contextmanager
def on_cpu() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(cpu.on_cpu())
        stack.enter_context(verl_megatron.local_layers())
        for owner, name, value in (
            (torch.nn.Module, "cuda", lambda self, *_: self),
            (torch.Tensor, "type", _type),
            (DotProductAttention, "forward", _attention),
            (Bridge, "_weight_name_mapping_mcore_local_to_global", _names),
            (model_forward_fused, "linear_cross_entropy", verl_megatron.chunked_head),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def configurations(s: dict[str, Any], batching: dict[str, Any], actor: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Make the configurations of the engine, its optimizer and the actor, from a scenario, in fp32."""
    cpu.close_groups()
    engine = McoreEngineConfig(
        vanilla_mbridge=True,
        use_dynamic_bsz="budget" in s,
        use_fused_kernels="fused" in s,
        pad_to_length="pad_to" in s,
        pad_to_length_bucket=s.get("pad_to", 1),
        override_transformer_config=deepcopy(TRANSFORMER) | s.get("transformer", {}),
        router_replay=EngineRouterReplayConfig(mode=s.get("router_replay", "disabled")),
        **{name: s[short] for short, name in SIZES.items() if short in s},
        **batching,
        **s.get("engine", {}),
    )
    object.__setattr__(engine, "dtype", "float32")  # veRL takes half precision only
    optimizer = McoreOptimizerConfig(
        lr=1e-3, total_training_steps=10, lr_warmup_steps=0, lr_decay_style="constant", weight_decay=0.0
    )
    return engine, optimizer, McoreActorConfig(megatron=engine, optim=optimizer, **actor)


SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "cp": "context_parallel_size",
}


def weights(worker: Any) -> dict[str, torch.Tensor]:
    """Export the weights by the names of transformers, whole, on every rank."""
    exported = worker.engine.bridge.export_weights(worker.engine.module)
    return {name: value.detach().float().clone() for name, value in exported}

"""A megatron-core model for the option `--megatron` of the benchmarks of steps and walks, as its local spec builds it.

Transformer Engine is not needed. Whole layers are recomputed. The local spec's own attention holds the scores of all
pairs, so replicated sequences run another attention in place of megatron-core's core attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from dualkv.data.memory import RowCosts
from dualkv.data.parts import TreePart
from dualkv.data.trees import PackedSequences
from dualkv.integrations.megatron import PackedGroups, enable, measure_rows, walk_passes
from dualkv.integrations.transformers.batches import ModelBatch
from tools.bench import harness, stock_attention
from tools.bench.walk_ways import Runner


def with_nets(spec: Any, is_net: Sequence[Any], norm: Any) -> Any:
    """Make a block of layers of a local spec, some with a gated delta net in place of attention. megatron-core's own
    function for that takes the modules of Transformer Engine alone."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules  # not in every version

    net = copy.deepcopy(spec)
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear)
    net.submodules.self_attention = ModuleSpec(GatedDeltaNet, submodules=parts)
    return TransformerBlockSubmodules([net if one else spec for one in is_net], norm)


def make_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Make a GPTModel with the sizes of a transformers configuration, dense or hybrid, from an enabled local spec."""
    if not dist.is_initialized():
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # of megatron-core's compiled functions, which see many forms
    fused, is_net = device.type == "cuda", [kind == "linear_attention" for kind in config.layer_types]
    hybrid: dict[str, Any] = {}
    if any(is_net):
        sizes = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
        hybrid = {f"linear_{name}": getattr(config, f"linear_{name}") for name in sizes}
        hybrid |= {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(one) for one in is_net],
            "attention_output_gate": True,
        }
    made = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        **hybrid,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    if hybrid:
        spec = with_nets(spec, is_net, WrappedTorchNorm)
    model = GPTModel(
        made, enable(spec), config.vocab_size, 1 << 20, position_embedding_type="rope", rotary_base=1_000_000,
        rotary_percent=0.25 if hybrid else 1.0, share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return model.to(device, dtype).train()


def set_attention(model: Any, name: str) -> None:
    """Replace megatron-core's core attention by one of :data:`stock_attention.CALLS`."""

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        """query [L, B, H, D], key and value [L, B, Hk, D] -> [L, B, H * D]."""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return stock_attention.CALLS[name](q, k, v, stock_attention.Rule()).transpose(0, 1).flatten(2)

    for layer in model.decoder.layers:
        if hasattr(layer.self_attention, "core_attention"):
            layer.self_attention.core_attention.forward = forward


def hidden_states(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute the hidden states [L, B, C] behind the last norm."""
    with mock.patch.object(model, "post_process", False):  # no head; the norm is the decoder's
        out: torch.Tensor = model(*args, **kwargs)
    return out


def head_logprobs(model: Any, hidden: torch.Tensor, targets: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """hidden [m, C], targets [m] -> [m]; logits of a chunk at a time, made again in the backward."""

    def of(some: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        return -vocab_parallel_cross_entropy(model.output_layer(some[:, None])[0][:, 0], asked)

    parts = zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    return torch.cat([checkpoint(of, *part, use_reentrant=False) for part in parts])


def logprobs(model: Any, one: ModelBatch, chunk_size: int) -> torch.Tensor:
    """Compute the log-probs [m] of the response tokens of a packed or replicated micro-batch."""
    ids, batch = one.inputs["input_ids"], one.batch
    if "dualkv" in one.inputs:
        packed = PackedGroups(batch.layout)
        hidden = hidden_states(model, ids, batch.position_ids, None, packed_seq_params=packed)
    else:
        hidden = hidden_states(model, ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids), None)
    rows = hidden.transpose(0, 1).flatten(0, 1)
    return head_logprobs(model, rows[batch.predict_rows], batch.targets, chunk_size)


class MegatronRunner(Runner):
    """The ways of :mod:`tools.bench.walk` in a megatron-core model."""

    def __init__(self, sizes: Any, device: torch.device) -> None:
        """sizes: `tools.bench.walk.Sizes`."""
        self.sizes, self.device = sizes, device
        config = harness.make_config(sizes.model, sizes.layers)
        self.model = make_model(config, getattr(torch, sizes.dtype), device)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def predicted(self, part: str, hidden: torch.Tensor, asked: Any) -> torch.Tensor:
        """Compute [m] values of tokens from the hidden states [T, 1, C] of rows that predict some of them."""
        rows = hidden[asked.predict_rows, 0]
        if part == "layers":
            return rows.float().sum(-1) / rows.shape[-1]
        return head_logprobs(self.model, rows, asked.targets, self.sizes.chunk_size)

    def of_batch(self, part: str, batch: PackedSequences) -> torch.Tensor:
        packed = PackedGroups(batch)
        hidden = hidden_states(self.model, batch.input_ids, batch.position_ids, None, packed_seq_params=packed)
        return self.predicted(part, hidden, batch)

    def walked(self, part: str, batch: PackedSequences, parts: list[TreePart]) -> Callable[[], list[torch.Tensor]]:
        def run() -> list[torch.Tensor]:
            found = []
            for one in walk_passes(self.model, [batch], parts):
                loss = None
                with one:
                    ids, positions, rows = one.input_ids, one.position_ids, one.packed
                    hidden = hidden_states(self.model, ids, positions, None, packed_seq_params=rows)
                    if one.has_loss:
                        values = one.part.expand(self.predicted(part, hidden, one.predictions))
                        found.append(values.detach().sum())
                        loss = values.sum() / 1000
                del hidden
                one.backward(loss)
            return found

        return run

    def costs(self, job: Any) -> RowCosts:
        def loss(hidden: torch.Tensor, one: Any) -> torch.Tensor:
            return self.predicted("update", hidden, one.predictions).sum()

        more = self.rows_and_pairs(job, self.model.decoder.layers[0], self.model.config.kv_channels)
        with mock.patch.object(self.model, "post_process", False):  # the head is in `loss`
            return measure_rows(self.model, job.sequences[0].to(self.device), loss, **more)

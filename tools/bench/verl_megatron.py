"""Policy updates of veRL's Megatron engine, its own on replicated sequences or packed groups:

    torchrun --nproc-per-node 1 -m tools.bench.verl_megatron --model qwen3-8b --layers 8 --rows rows.json --json o.json

The worker, its loss, the rollouts and the figures are those of `tools.bench.verl`, for models that mbridge knows. The
layers are megatron-core's local ones, because Transformer Engine is not everywhere: whole layers are recomputed, both
engines have the same fusions, head and distributed optimizer, and the replicated sequences run the attention that
`--attention` names. veRL's own engine runs without context parallelism, which needs Transformer Engine.

Before a fresh worker makes a step, its log-probs of a few rollouts are compared with those of the first worker whose
tensor and pipeline parallelism, and so random weights, are the same.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import torch._dynamo.config
import torch.distributed as dist
import typer
from mbridge.core.bridge import Bridge
from mbridge.core.llm_bridge import LLMBridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.utils.checkpoint import checkpoint
from verl.models.mcore import model_forward_fused
from verl.trainer.config import CheckpointConfig
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from dualkv.integrations.megatron import enable
from dualkv.integrations.verl import MODEL_TYPE
from tools.bench import harness, stock_attention, verl
from tools.bench.random_weights import save_config
from tools.bench.record import JsonPath
from tools.bench.verl import Engine

CHUNK = 4096  # rows of the chunked head at a time
# A fresh worker's log-probs are compared on these rollouts.
COMPARED: dict[str, Any] = {"groups": 1, "responses": 4, "prompt_len": 384, "response_len": 96, "max_tokens": 1920}
TRANSFORMER = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    # The others need Apex or Transformer Engine.
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}


@dataclass(frozen=True, kw_only=True)
class Settings(verl.Common):
    """The settings of a measurement with megatron-core."""

    tensor_parallel: Annotated[int, typer.Option(help="Ranks, with sequence parallelism.")] = 1
    context_parallel: Annotated[int, typer.Option(help="Ranks; packed groups only.")] = 1
    pipeline_parallel: Annotated[int, typer.Option(help="Stages.")] = 1
    attention: Annotated[str, typer.Option(help=f"Of veRL's own engine: {', '.join(stock_attention.CALLS)}.")] = "fa2"
    head: Annotated[str, typer.Option(help="veRL's triton or unfused, or PyTorch's, chunked.")] = "triton"
    untimed: verl.Untimed = 1


# ---------------------------------------------------------------- what stands in for Transformer Engine
def _layers(self: Any, vp_stage: int | None = None) -> Any:
    self.has_vp_stage = True
    spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, vp_stage=vp_stage)
    # Of local attention only ours takes context parallelism.
    return enable(spec) if self.config.context_parallel_size > 1 else spec


def _norm(_cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.RMSNorm:
    """megatron-core's own refuses sequence parallelism."""
    made = torch.nn.RMSNorm(hidden_size, eps=eps)
    made.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made


@contextmanager
def local_layers() -> Iterator[None]:
    """Models that mbridge makes have megatron-core's local layers."""
    with (
        mock.patch.object(LLMBridge, "_get_transformer_layer_spec", _layers),
        mock.patch.object(WrappedTorchNorm, "__new__", _norm),
    ):
        yield


def attention_of_row(
    name: str, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any
) -> torch.Tensor:
    """query [T, H, D], key and value [T, Hk, D] -> [T, 1, H * D]: of sequences of one length, by one of
    :data:`stock_attention.CALLS`."""
    length = packed_seq_params.max_seqlen_q
    if len(query) % length:
        raise ValueError(f"got {len(query)} rows, expected a multiple of the sequences' {length} tokens")
    q, k, v = (x.reshape(-1, length, *x.shape[1:]) for x in (query, key, value))
    return stock_attention.CALLS[name](q, k, v, stock_attention.Rule()).reshape(len(query), 1, -1)


def chunked_head(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy [rows], in the place of veRL's Triton kernels; a chunk's logits are made again in the
    backward."""

    def of(some: torch.Tensor, asked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = some @ weight.T / temperature
        return -vocab_parallel_cross_entropy(logits.clone(), asked), vocab_parallel_entropy(logits)

    parts = zip(hidden.flatten(0, -2).split(CHUNK), labels.flatten().split(CHUNK), strict=True)
    found = (checkpoint(of, *part, use_reentrant=False, preserve_rng_state=False) for part in parts)
    logp, entropy = zip(*found, strict=True)
    return torch.cat(logp), torch.cat(entropy)


HEADS = {"triton": model_forward_fused.linear_cross_entropy, "chunked": chunked_head, "unfused": None}


# ---------------------------------------------------------------- the worker
def build(s: Settings) -> Any:
    """The worker of this rank, in new groups of ranks; random weights, the same ones for each seed of veRL's."""
    parallel_state.destroy_model_parallel()
    batching = {"max_token_len_per_gpu": s.max_tokens, "micro_batch_size_per_gpu": s.micro_batch}
    engine = McoreEngineConfig(
        vanilla_mbridge=True,
        tensor_model_parallel_size=s.tensor_parallel,
        context_parallel_size=s.context_parallel,
        pipeline_model_parallel_size=s.pipeline_parallel,
        use_dynamic_bsz=s.max_tokens is not None,
        use_fused_kernels=s.head != "unfused",
        override_transformer_config=dict(TRANSFORMER),
        **batching,
        **{f"infer_{name}": value for name, value in batching.items()},
    )
    if s.dtype == "fp32":
        object.__setattr__(engine, "dtype", "float32")  # veRL takes half precision only
    optimizer = McoreOptimizerConfig(
        lr=s.learning_rate, total_training_steps=100, lr_warmup_steps=0, lr_decay_style="constant"
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        save_config(s.model, s.layers, Path(folder))
        patches.enter_context(local_layers())
        # The weights stay those that megatron-core drew.
        patches.enter_context(mock.patch.object(Bridge, "load_weights"))
        model = HFModelConfig(path=folder, load_tokenizer=False, use_fused_kernels=s.head != "unfused")
        model.tokenizer = SimpleNamespace(pad_token_id=0)  # which veRL's engine asks
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type=MODEL_TYPE if s.engine is Engine.DUALKV else "language_model",
                model_config=model,
                engine_config=engine,
                optimizer_config=optimizer,
                checkpoint_config=CheckpointConfig(),
            )
        )
        worker.reset()
    if s.engine is Engine.VERL:
        cores = (m for stage in worker.engine.module for m in stage.modules() if isinstance(m, DotProductAttention))
        for core in cores:
            core.forward = partial(attention_of_row, s.attention)
    if HEADS[s.head]:
        model_forward_fused.linear_cross_entropy = HEADS[s.head]
    verl.set_loss(worker, s)
    return worker


class Compared:
    """A comparison of log-probs of a few rollouts with those of the first worker that has the same weights."""

    def __init__(self) -> None:
        self.first: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, s: Settings, worker: Any) -> dict[str, Any]:
        found = verl.log_probs_on(replace(s, micro_batch=None, **COMPARED), worker)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        mine = worker.engine.get_data_parallel_rank() == 0 and found
        dist.all_gather_object(of_ranks, torch.cat(found) if mine else None)
        logp = next(x for x in of_ranks if x is not None)
        first = self.first.setdefault((s.model, s.layers, s.tensor_parallel, s.pipeline_parallel), logp)
        apart = (logp - first).double()
        figures = {"rms": apart.square().mean().sqrt(), "max": apart.abs().max(), "deviation": first.std()}
        return {"logp_from_first": {name: float(x) for name, x in figures.items()}}


def settings_of(options: dict[str, Any]) -> Settings:
    """Settings from the options of the command line.

    Raises:
        typer.BadParameter: as `tools.bench.verl` does; context parallelism of veRL's own engine; an unknown head or
            attention.
    """
    s = verl.settings_of(options, Settings)
    if s.engine is Engine.VERL and s.context_parallel > 1:
        raise typer.BadParameter("context parallelism of veRL's own engine needs Transformer Engine")
    for name, known in (("head", HEADS), ("attention", stock_attention.CALLS)):
        if options[name] not in known:
            raise typer.BadParameter(f"{name} {options[name]!r} is none of {', '.join(known)}")
    return s


@harness.takes(Settings)
def main(json_to: JsonPath, settings: Settings, rows: verl.Rows = None) -> None:
    """Measure policy updates of veRL's Megatron engine; the first rank prints and writes the figures."""
    given = asdict(settings)
    listed = [settings_of(given | row) for row in (json.loads(rows.read_text()) if rows else [{}])]
    torch._dynamo.config.recompile_limit = 64  # of megatron-core's fusions, which see rows of many numbers
    verl.run(listed, json_to, build, None, Compared())


if __name__ == "__main__":
    typer.run(main)

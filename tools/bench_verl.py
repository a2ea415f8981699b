"""Policy updates of veRL on this machine's GPUs, its own engine or packed groups:

    torchrun --nproc-per-node 4 -m tools.bench_verl --engine dualkv --model qwen3-8b --max-tokens 73760 --json ours.json
    torchrun --nproc-per-node 4 -m tools.bench_verl --engine verl --model qwen3-8b --micro-batch 8 --json verl.json

One engine and one size of micro-batch a run, so that a run that does not fit spoils no other. The worker is veRL's own,
with veRL's loss, without sampling and without a Ray cluster: prompts, responses and weights are random. (veRL 0.9.1's
engine takes a fused head with FSDP2 only where it is tied to the embedding; --strategy fsdp serves the others.)
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from tensordict import NonTensorData, TensorDict
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_torch_device
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from dualkv.bench.run import environment
from dualkv.bench.timing import Meter
from dualkv.integrations.verl import MODEL_TYPE, work
from dualkv.integrations.verl.balance import rollouts_by_tag
from dualkv.models import CONFIGS


class Engine(StrEnum):
    VERL = "verl"
    DUALKV = "dualkv"


class Algorithm(StrEnum):
    GRPO = "grpo"
    DAPO = "dapo"


# Beside veRL's defaults, among them the mean over tokens.
LOSSES: dict[Algorithm, dict[str, Any]] = {
    Algorithm.GRPO: {"use_kl_loss": True, "kl_loss_coef": 0.001},
    Algorithm.DAPO: {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 10.0,
        "loss_agg_mode": "token-mean",
    },
}


@dataclass(frozen=True)
class Settings:
    """What is measured: the options of the command line, which explains them."""

    engine: Engine
    model: str
    layers: int | None
    groups: int
    responses: int
    prompt_len: int
    response_len: int
    micro_batch: int | None
    max_tokens: int | None
    algorithm: Algorithm
    strategy: str
    sequence_parallel: int
    attention: str
    fused_head: bool
    checkpointing: bool
    keep: str
    offload: bool
    dtype: str
    updates: int
    learning_rate: float


def save_config(model: str, layers: int | None, folder: Path) -> int:
    """The configuration of a named model, for veRL to read; its vocabulary's size."""
    settings = dict(CONFIGS[model])
    if layers is not None:
        settings["num_hidden_layers"] = layers
    kind = settings.pop("model_type")
    config = AutoConfig.for_model(kind, **settings)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.save_pretrained(folder)
    return int(config.vocab_size)


def random_model(*_: Any, config: Any, torch_dtype: torch.dtype, **__: Any) -> Any:
    """In place of `AutoModelForCausalLM.from_pretrained`: one block of random numbers, repeated, for every weight.

    Random numbers for billions of weights would take minutes, and the time of an update does not depend on them.
    """
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    block = torch.randn(1 << 20, dtype=torch_dtype, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.is_meta:  # the first rank sends its own
                continue
            if "norm" in name:
                weight.fill_(1)
                continue
            for part in weight.view(-1).split(len(block)):
                part.copy_(block[: len(part)])
    return model


def make_worker(s: Settings, folder: Path) -> Any:
    """veRL's worker of this rank, with veRL's loss, for the model in `folder`."""
    batching = {"max_token_len_per_gpu": s.max_tokens, "micro_batch_size_per_gpu": s.micro_batch}
    fsdp = FSDPEngineConfig(
        strategy=s.strategy,
        model_dtype="fp32",
        mixed_precision={"param_dtype": s.dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_dynamic_bsz=s.max_tokens is not None,
        ulysses_sequence_parallel_size=s.sequence_parallel,
        param_offload=s.offload,
        optimizer_offload=s.offload,
        **batching,
        **{f"infer_{name}": value for name, value in batching.items()},
    )
    optimizer = FSDPOptimizerConfig(lr=s.learning_rate, total_training_steps=100, lr_warmup_steps=0)
    actor = FSDPActorConfig(
        strategy=s.strategy,
        rollout_n=s.responses,
        ppo_micro_batch_size_per_gpu=1,
        fsdp_config=fsdp,
        optim=optimizer,
        **LOSSES[s.algorithm],
    )
    model = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        enable_gradient_checkpointing=s.checkpointing,
        override_config={"attn_implementation": s.attention},
        use_fused_kernels=s.fused_head,
        fused_kernel_options={"impl_backend": "torch", "dualkv_keep": s.keep},
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=MODEL_TYPE if s.engine is Engine.DUALKV else "language_model",
            model_config=model,
            engine_config=fsdp,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def make_rollouts(s: Settings, vocab: int, rank: int) -> TensorDict:
    """Random rollouts of one data-parallel rank, without padding."""
    generator = torch.Generator().manual_seed(rank)
    n, length = s.groups * s.responses, s.prompt_len + s.response_len
    prompts = torch.randint(vocab, (s.groups, s.prompt_len), generator=generator).repeat_interleave(s.responses, 0)
    responses = torch.randint(vocab, (n, s.response_len), generator=generator)
    ones = torch.ones_like(responses)
    rows = {
        "input_ids": torch.cat([prompts, responses], 1),
        "position_ids": torch.arange(length).repeat(n, 1),
        "prompts": prompts,
        "responses": responses,
        "response_mask": ones,
        "loss_mask": ones,
        "advantages": torch.randn(n, 1, generator=generator).repeat(1, s.response_len),
        "old_log_probs": torch.full((n, s.response_len), -12.0),
        "ref_log_prob": torch.full((n, s.response_len), -12.0),
    }
    nested = {name: torch.nested.as_nested_tensor(list(x), layout=torch.jagged) for name, x in rows.items()}
    data = TensorDict(nested, batch_size=[n])
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=False, global_token_num=NonTensorData([length] * n))
    return data


def measure(s: Settings) -> dict[str, Any]:
    """Updates on the ranks of the default process group, each of all rollouts; the same figures on every rank."""
    random_weights = mock.patch.object(AutoModelForCausalLM, "from_pretrained", random_model)
    with tempfile.TemporaryDirectory() as folder, random_weights:
        vocab = save_config(s.model, s.layers, Path(folder))
        worker = make_worker(s, Path(folder))
    ranks = worker.engine.get_data_parallel_size()
    data = make_rollouts(s, vocab, worker.engine.get_data_parallel_rank())
    size = ranks * len(data)
    tu.assign_non_tensor(data, mini_batch_size=size, global_batch_size=size, dataloader_kwargs={"shuffle": False})

    device = get_torch_device()
    seconds, metrics = [], {}
    for update in range(s.updates + 1):
        if update == 1:
            device.reset_peak_memory_stats()
        dist.barrier()
        device.synchronize()
        start = time.perf_counter()
        found = worker.train_mini_batch(data.clone())
        device.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        if found is not None:
            metrics = tu.get(found, "metrics")
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, device.max_memory_allocated() / 2**30)

    prompts = [g for g in range(ranks * s.groups) for _ in range(s.responses)]
    rollouts = rollouts_by_tag(prompts, [s.prompt_len] * len(prompts), [s.response_len] * len(prompts))
    tokens, median = work.replicated(rollouts).tokens, statistics.median(seconds[1:])
    return {
        "ranks": dist.get_world_size(),
        "seconds": {"first": seconds[0], "each": seconds[1:], "median": median},
        "replicated_tokens": tokens,
        "replicated_tokens_per_second": tokens / median,
        "peak_gib": peaks,
        "metrics": {
            name: float(torch.tensor(values).float().mean())
            for name, values in metrics.items()
            if name == "mfu" or name.startswith("dualkv/")
        },
    }


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")],
    engine: Annotated[Engine, typer.Option(help="veRL's own, or packed groups.")] = Engine.DUALKV,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}; random weights.")] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Of the model; all of them by default.")] = None,
    groups: Annotated[int, typer.Option(help="Prompts in an update of each data-parallel rank.")] = 1,
    responses: Annotated[int, typer.Option("--responses", "-n", help="Responses of each prompt.")] = 32,
    prompt_len: Annotated[int, typer.Option("--prompt-len", "-p", help="Tokens of each prompt.")] = 8192,
    response_len: Annotated[int, typer.Option("--response-len", "-r", help="Tokens of each response.")] = 2048,
    micro_batch: Annotated[int | None, typer.Option(help="Rollouts a micro-batch.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Or tokens, packed ones with packed groups.")] = None,
    algorithm: Annotated[Algorithm, typer.Option(help="Whose loss.")] = Algorithm.GRPO,
    strategy: Annotated[str, typer.Option(help="fsdp or fsdp2.")] = "fsdp2",
    sequence_parallel: Annotated[int, typer.Option(help="Ulysses degree.")] = 1,
    attention: Annotated[str, typer.Option(help="transformers' attention that veRL's own engine runs.")] = "sdpa",
    fused_head: Annotated[bool, typer.Option(help="Log-probs without the logits of all rows at once.")] = True,
    checkpointing: Annotated[bool, typer.Option(help="Compute layers again in the backward.")] = True,
    keep: Annotated[str, typer.Option(help="But not attention, or products; with packed groups.")] = "nothing",
    offload: Annotated[bool, typer.Option(help="Parameters and optimizer wait on the host.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the computation: bf16 or fp32.")] = "bf16",
    updates: Annotated[int, typer.Option(help="To measure, after one that is not.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, constant.")] = 1e-6,
    commit: Annotated[str | None, typer.Option(help="To record as this code's commit where git cannot tell.")] = None,
) -> None:
    """Measure policy updates of one engine; the first rank prints and writes the figures."""
    if model not in CONFIGS:
        raise typer.BadParameter(f"{model!r} is none of {', '.join(CONFIGS)}")
    if (micro_batch is None) == (max_tokens is None):
        raise typer.BadParameter("expected one of --micro-batch and --max-tokens")
    given = {name: value for name, value in locals().items() if name not in ("json_path", "commit")}
    settings = Settings(**given)
    dist.init_process_group("cpu:gloo,cuda:nccl" if get_device_name() == "cuda" else "gloo")
    figures = measure(settings)
    if dist.get_rank() == 0:
        meter = Meter() if get_device_name() == "cuda" else None
        recorded = {**environment(meter, commit), "settings": asdict(settings), **figures}
        json_path.write_text(json.dumps(recorded, indent=1) + "\n")
        print(
            f"{engine}: {figures['seconds']['median']:.3f} s an update,"
            f" {figures['replicated_tokens_per_second']:,.0f} replicated tokens/s,"
            f" peak {max(figures['peak_gib']):.1f} GiB, {figures['metrics']}"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)

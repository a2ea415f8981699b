"""`python -m tools.bench.train_verl --json FILE`: a short GRPO training by veRL's engine and by packed groups.

The task (:mod:`tools.bench.symbols`) is learned from random weights. Prompts and random numbers of the sampling are the
same for both engines. One process, on the GPU where there is one; veRL's worker, losses and optimizer, sampling by
transformers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.progress import track
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from dualkv.grpo import group_advantages
from tools.bench.record import JsonPath, Record
from tools.bench.symbols import SYMBOLS, Task
from tools.bench.train_hybrid import sample
from tools.bench.verl import Algorithm, Engine, Settings, log_probs_of, make_batch, make_worker, set_log_probs

MODEL = {
    "vocab_size": SYMBOLS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "architectures": ["Qwen3ForCausalLM"],
}


def save_model(folder: Path, seed: int, head_dim: int = 16) -> None:
    """A small model with random weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model("qwen3", **MODEL | {"head_dim": head_dim})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def copy_weights(worker: Any, model: PreTrainedModel) -> None:
    state = worker.engine.module.state_dict()
    model.load_state_dict({k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()})


def settings_for(task: Task, updates: int, learning_rate: float, dtype: str = "fp32") -> Settings:
    """Make the settings of veRL's own engine: one group a micro-batch."""
    return Settings(
        engine=Engine.VERL,
        model="a random Qwen3",
        layers=None,
        groups=task.groups,
        responses=task.responses,
        prompt_len=task.prompt_len,
        response_len=task.response_len,
        micro_batch=task.responses,
        max_tokens=None,
        algorithm=Algorithm.GRPO,
        attention="fa2" if get_device_name() == "cuda" else "sdpa",
        head="torch",  # the unfused one goes through the rows one by one
        liger=False,
        checkpointing=False,
        keep="nothing",
        dtype=dtype,
        updates=updates,
        learning_rate=learning_rate,
    )


def train(settings: Settings, task: Task, folder: Path, seed: int) -> Iterator[int]:
    """Yields the rewarded tokens before each update, then makes the update."""
    worker = make_worker(settings, folder)
    model = AutoModelForCausalLM.from_pretrained(folder).to(get_device_name()).eval()
    for update in track(range(settings.updates), settings.engine.value):
        copy_weights(worker, model)
        prompts = task.prompts(seed + update)
        responses = sample(model, prompts, task, seed + update)
        scores = task.rewards(prompts, responses)
        yield round(float(scores.mean()) * responses.numel())
        flat, repeated = responses.flatten(0, 1), prompts.repeat_interleave(task.responses, 0)
        advantages = group_advantages(scores.flatten(), [task.responses] * task.groups).float()
        data = make_batch(list(repeated), list(flat), list(torch.ones_like(flat)), advantages)
        set_log_probs(data, log_probs_of(data, worker), "old_log_probs", "ref_log_prob")
        size = len(data)
        tu.assign_non_tensor(data, mini_batch_size=size, global_batch_size=size, dataloader_kwargs={"shuffle": False})
        worker.train_mini_batch(data)


def one_process() -> bool:
    """Make the process group of one rank; whether there is a GPU."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    cuda = get_device_name() == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return cuda


def main(
    json_to: JsonPath,
    updates: Annotated[int, typer.Option(help="Of each engine.")] = 200,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, constant.")] = 1e-3,
    prompt_len: Annotated[int, typer.Option("--prompt-len", "-p")] = 96,
    dtype: Annotated[str, typer.Option(help="Of the computation: bf16 or fp32.")] = "fp32",
    head_dim: Annotated[int, typer.Option(help="Of the model; the kernels for a GPU take 64 and more, in bf16.")] = 16,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
) -> None:
    """Train with both engines and write how many tokens of each update were rewarded."""
    task = Task(prompt_len=prompt_len)
    record = Record(json_to, one_process())
    settings = settings_for(task, updates, learning_rate, dtype)
    rewarded = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), seed, head_dim)
        for engine in Engine:
            rewarded[engine.value] = list(train(replace(settings, engine=engine), task, Path(folder), seed))
    found = {
        "settings": asdict(settings) | {"seed": seed, "head_dim": head_dim},
        "task": asdict(task),
        "rewarded": rewarded,  # tokens of each update
    }
    record.write(found)
    tokens = task.groups * task.responses * task.response_len
    for name, each in rewarded.items():
        print(
            f"{name}: reward {each[0] / tokens:.3f} at first, {mean(each[-10:]) / tokens:.3f} in the last ten updates"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)

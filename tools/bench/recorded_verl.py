"""`python -m tools.bench.recorded_verl --rollouts runs/packed-0/rollouts.jsonl --json FILE`: real weights in veRL.

SmolLM2-135M-Instruct trains on rollouts that `examples/real_model.py` recorded, by veRL's own engine, by packed groups,
and by veRL's engine with smaller micro-batches. An update takes the next prompts of the file; old log-probs are the
policy's, and the reference is the model before the first update. The third run shows how far rounding alone takes two
runs of one engine. One process, on the GPU where there is one.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.progress import track
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_torch_device

from dualkv.data.rollouts import load_tokenizer, read_rollouts
from dualkv.grpo import group_advantages
from dualkv.models import load_model
from tools.bench import harness
from tools.bench.record import JsonPath, Record
from tools.bench.verl import (
    Engine,
    Settings,
    log_probs_of,
    make_batch,
    make_worker,
    one_update,
    restore,
    set_log_probs,
    set_loss,
)

LOGGED = "loss", "grad_norm", "kl_loss"
LENGTHS = "prompts", "responses"
Weights = dict[str, torch.Tensor]
LogProbs = list[list[torch.Tensor]]  # of each update's responses
Trained = tuple[dict[str, Any], LogProbs, LogProbs, Weights]


def read_updates(path: Path, groups: int, updates: int) -> tuple[list[TensorDict], list[list[float]]]:
    """veRL's batches of recorded rollouts, and the rewards of each.

    Raises:
        ValueError: fewer prompts than the updates take.
    """
    found = read_rollouts(path, load_tokenizer(None), None)
    if len(found.prompts) < groups * updates:
        raise ValueError(f"{path} has {len(found.prompts)} prompts, expected at least {groups} x {updates}")
    batches, rewards = [], []
    for at in range(0, groups * updates, groups):
        responses, sizes = found.responses[at : at + groups], found.group_sizes[at : at + groups]
        prompts = [p for p, n in zip(found.prompts[at : at + groups], sizes, strict=True) for _ in range(n)]
        flat = [response for group in responses for response in group]
        rewards.append([reward for group in found.rewards[at : at + groups] for reward in group])
        advantages = group_advantages(torch.tensor(rewards[-1]), sizes)
        batches.append(make_batch(prompts, flat, [torch.ones_like(r) for r in flat], advantages))
    return batches, rewards


def one_process() -> bool:
    """Make the process group of one rank; return whether there is a GPU."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    cuda = get_device_name() == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return cuda


def runs_for(
    model: str, batches: list[TensorDict], groups: int, max_tokens: int, learning_rate: float, dtype: str
) -> dict[str, Settings]:
    """Make the settings of each run."""
    longest = {name: max(int(batch[name].offsets().diff().max()) for batch in batches) for name in LENGTHS}
    s = Settings(
        engine=Engine.VERL,
        model=model,
        groups=groups,
        responses=len(batches[0]) // groups,
        prompt_len=longest["prompts"],
        response_len=longest["responses"],
        max_tokens=max_tokens,
        attention="ragged",
        head="torch",  # the unfused one goes through the rows one by one
        checkpointing=False,
        dtype=dtype,
        updates=len(batches),
        learning_rate=learning_rate,
    )
    return {
        "verl": s,
        "dualkv": replace(s, engine=Engine.DUALKV),
        "verl, smaller micro-batches": replace(s, max_tokens=max_tokens // 3),
    }


def worker_for(s: Settings, folder: Path, kl: float) -> Any:
    gc.collect()
    get_torch_device().empty_cache()
    restore(AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(folder))])
    worker = make_worker(s, folder)
    set_loss(worker, s, kl_loss_coef=kl, loss_agg_mode="seq-mean-token-mean")
    return worker


def score_all(s: Settings, batches: list[TensorDict], worker: Any) -> LogProbs:
    return [[x.cpu() for x in log_probs_of(one_update(s, batch.copy()), worker)] for batch in batches]


def weights_of(worker: Any) -> Weights:
    """fp32 copies on the host."""
    state = worker.engine.module.state_dict()
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}
    return {name: x.detach().to("cpu", torch.float32, copy=True) for name, x in whole.items()}


def train(s: Settings, batches: list[TensorDict], folder: Path, kl: float) -> Trained:
    """One update for each batch: its figures, the log-probs of all responses before and after, weights."""
    worker, device = worker_for(s, folder, kl), get_torch_device()
    before, steps = score_all(s, batches, worker), list[dict[str, float]]()
    device.reset_peak_memory_stats()
    for batch, reference in track(list(zip(batches, before, strict=True)), s.engine.value):
        data = one_update(s, batch.copy())
        set_log_probs(data, log_probs_of(data, worker), "old_log_probs")
        set_log_probs(data, reference, "ref_log_prob")
        device.synchronize()
        start = time.perf_counter()
        metrics = tu.get(worker.train_mini_batch(data), "metrics")
        device.synchronize()
        made = {"seconds": time.perf_counter() - start}
        steps.append(made | {name: float(torch.tensor(metrics[name]).sum()) for name in LOGGED})
    figures = {name: [step[name] for step in steps] for name in steps[0]}
    peak = device.max_memory_allocated() / 2**30
    after = score_all(s, batches, worker)
    return figures | {"median_s": median(figures["seconds"]), "peak_gib": peak}, before, after, weights_of(worker)


def difference(found: LogProbs, wanted: LogProbs) -> dict[str, float]:
    """The distance of log-probs in nats: the mean over all tokens, and the largest."""
    apart = torch.cat([x - y for a, b in zip(found, wanted, strict=True) for x, y in zip(a, b, strict=True)]).abs()
    return {"mean": float(apart.mean()), "largest": float(apart.max())}


def per_answer(log_probs: LogProbs, rewards: list[list[float]], rewarded: bool) -> float:
    """The mean log-prob, in nats, of whole responses whose reward is 1, or of all others."""
    pairs = [pair for update in zip(log_probs, rewards, strict=True) for pair in zip(*update, strict=True)]
    return mean(float(x.sum()) for x, reward in pairs if (reward == 1) is rewarded)


def compare(
    runs: dict[str, Settings], batches: list[TensorDict], rewards: list[list[float]], folder: Path, kl: float
) -> Iterator[dict[str, Any]]:
    """Figures of the runs by name, after each of them, beside the first one's; also how far log-probs of the first
    update are from fp32."""
    base = next(iter(runs.values()))
    exact = score_all(base, batches[:1], worker_for(replace(base, dtype="fp32"), folder, kl))
    start = weights_of(worker_for(base, folder, kl))
    found, first = dict[str, Any](), list[Any]()
    for name, s in runs.items():
        figures, before, after, weights = train(s, batches, folder, kl)
        first = first or [before, after, weights]
        figures["log_probs_from_fp32"] = difference(before[:1], exact)
        figures["log_probs_apart"] = [difference(x, y) for x, y in zip((before, after), first, strict=False)]
        moved, first_moved = ({n: x - start[n] for n, x in w.items()} for w in (weights, first[2]))
        figures["weights_apart"] = harness.apart(moved, first_moved)
        for kind, rewarded in (("rewarded", True), ("others", False)):
            figures[kind] = [per_answer(x, rewards, rewarded) for x in (before, after)]
        found[name] = figures
        yield found


def main(
    json_to: JsonPath,
    rollouts: Annotated[Path, typer.Option(help="The file that the example wrote.")],
    model: Annotated[str, typer.Option(help="Whose tokens these are: a name or folder.")] = "smollm2",
    updates: Annotated[int, typer.Option(help="Of each run.")] = 20,
    groups: Annotated[int, typer.Option(help="Prompts of an update.")] = 6,
    max_tokens: Annotated[int, typer.Option(help="Of a micro-batch, packed ones with packed groups.")] = 40_000,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, constant.")] = 5e-6,
    kl: Annotated[float, typer.Option(help="Weight of the KL term.")] = 0.05,
    dtype: Annotated[str, typer.Option(help="Of the computation: bf16 or fp32.")] = "bf16",
) -> None:
    """Train on recorded rollouts by veRL's engine and by packed groups, and write how far they part."""
    batches, rewards = read_updates(rollouts, groups, updates)
    record = Record(json_to, one_process())
    runs = runs_for(Path(model).name, batches, groups, max_tokens, learning_rate, dtype)
    with tempfile.TemporaryDirectory() as folder:
        load_model(model, torch.float32, torch.device("cpu"), 0).save_pretrained(folder)
        for found in compare(runs, batches, rewards, Path(folder), kl):
            record.write({"settings": asdict(runs["verl"]) | {"kl": kl}, "runs_of": found}, list(found.items())[-1])
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)

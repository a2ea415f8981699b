"""Two ranks that train as SkyRL does, and packed, and save what each computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integrations.skyrl import runs  # isort: skip

import torch
import torch.distributed as dist

from dualkv.integrations.skyrl.batches import PackedBatchIterator
from dualkv.integrations.skyrl.workers import worker

BUDGET = ["trainer.max_tokens_per_microbatch=90"]
STEPS = ["generator.step_wise_trajectories=true"]
CHECKPOINTED = ["trainer.gradient_checkpointing=true"]
LORA = [f"trainer.{role}.model.lora.{name}" for role in ("policy", "critic") for name in ("rank=4", "alpha=8")]
ENTROPY = ["trainer.algorithm.use_entropy_loss=true", "trainer.algorithm.entropy_loss_coef=0.1"]
CRITIC = ["trainer.algorithm.advantage_estimator=gae", "trainer.algorithm.use_kl_loss=false"]
GSPO = ["trainer.algorithm.policy_loss_type=gspo", "trainer.algorithm.loss_reduction=sequence_mean"]
RUNS = {
    "full, steps, budget": [*STEPS, *BUDGET, *ENTROPY],
    "full, turns, critic, checkpointing": [*CRITIC, *CHECKPOINTED],
    "LoRA, turns, critic, budget": [*LORA, *CRITIC, *BUDGET],
    "LoRA, steps, checkpointing": [*LORA, *STEPS, *GSPO, *CHECKPOINTED],
}


def settings(name: str, folder: str) -> list[str]:
    found = RUNS[name]
    return [*found, f"trainer.critic.model.path={folder}/critic"] if CRITIC[0] in found else found


def main(rank: int, to: str) -> None:
    dist.init_process_group("gloo")
    path, found = str(Path(to) / "model"), {}
    for name in RUNS:
        for kind, classes in (("stock", runs.STOCK), ("packed", runs.PACKED)):
            found[f"{name}, {kind}"] = runs.train(path, classes, *settings(name, to))
    stock = worker.get_microbatch_iterator
    worker.get_microbatch_iterator = _planned
    name = "full, steps, budget"
    without = [word for word in settings(name, to) if word not in ENTROPY]
    found["batches"] = runs.train(path, runs.STOCK, *without, updates=1)
    worker.get_microbatch_iterator = stock
    found["packed"] = runs.train(path, runs.PACKED, *without, updates=1)
    torch.save(found, Path(to) / f"{rank}.pt")


def _planned(data: Any, micro_batch_size: int, max_tokens_per_microbatch: int) -> Any:
    """The micro-batches of packed workers, for SkyRL's."""
    return PackedBatchIterator(data, max_tokens_per_microbatch)

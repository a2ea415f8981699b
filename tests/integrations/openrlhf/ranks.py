"""Two ranks that train as OpenRLHF does, and packed, and save what each computed."""

from __future__ import annotations

import os
from pathlib import Path

from tests.integrations.openrlhf import runs  # isort: skip

import torch
import torch.distributed as dist
from openrlhf.utils.deepspeed import DeepspeedStrategy

from dualkv.integrations.openrlhf import PackedStrategy
from dualkv.integrations.openrlhf.batches import keep_groups_together

DYNAMIC = ["--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "150"]
CHECKPOINTED = ["--actor.gradient_checkpointing_enable"]
LORA = ["--ds.lora.rank", "4", "--ds.lora.alpha", "8"]
GROUPS = ["--algo.advantage.estimator", "group_norm", "--algo.kl.use_loss", "--algo.kl.estimator", "k3"]
CRITIC = ["--algo.advantage.estimator", "gae", "--actor.entropy_coef", "0.01"]
RUNS = {
    "full, ZeRO-2": ["--ds.zero_stage", "2", *CRITIC],
    "full, ZeRO-3": ["--ds.zero_stage", "3", *GROUPS, *DYNAMIC, *CHECKPOINTED],
    "LoRA, ZeRO-2": ["--ds.zero_stage", "2", *LORA, *GROUPS, *DYNAMIC, *CHECKPOINTED],
    "LoRA, ZeRO-3": ["--ds.zero_stage", "3", *LORA, *CRITIC],
}


def main(rank: int, to: str) -> None:
    dist.init_process_group("gloo")
    os.environ["LOCAL_RANK"] = "0"
    path, found = str(Path(to) / "model"), {}
    for name, more in RUNS.items():
        # With ZeRO-2 OpenRLHF's dynamic batches lose gradients; an update of equal batches has all of them.
        plain = [flag for flag in more if flag not in DYNAMIC] if "ZeRO-2" in name else more
        found[f"{name}, stock"] = runs.train(path, DeepspeedStrategy, *plain)
    keep_groups_together()
    found["full, ZeRO-3, batches"] = runs.train(path, DeepspeedStrategy, *RUNS["full, ZeRO-3"])
    for name, more in RUNS.items():
        found[f"{name}, packed"] = runs.train(path, PackedStrategy, *more)
    torch.save(found, Path(to) / f"{rank}.pt")

"""A rank that trains with DDP: `torchrun -m tests.integrations.trl.ranks FOLDER` saves there what each computed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import trl

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

from dualkv.integrations.trl import DPOTrainer, GRPOTrainer, RewardTrainer
from tests.integrations.trl.runs import Padded, train
from tests.integrations.trl.test_pairs import dpo, rewards, scorer, trained

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    runs = {
        cls.__name__: train(cls, folder / rank, ddp_backend="gloo", num_generations=8) for cls in (GRPOTrainer, Padded)
    }
    for name, pair in (("dpo", (DPOTrainer, trl.DPOTrainer)), ("rewards", (RewardTrainer, trl.RewardTrainer))):
        for kind, cls in zip(("packed", "stock"), pair, strict=True):
            make = dpo if name == "dpo" else lambda cls, at, **settings: rewards(cls, at, scorer(), **settings)
            runs[f"{name}, {kind}"] = trained(
                make(cls, folder / rank, ddp_backend="gloo", gradient_accumulation_steps=1)
            )
    torch.save(runs, folder / f"{rank}.pt")

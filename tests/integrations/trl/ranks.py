"""A rank that trains with DDP: `torchrun -m tests.integrations.trl.ranks FOLDER` saves there what each computed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

os.environ["HF_HUB_OFFLINE"] = "1"

from dualkv.integrations.trl import GRPOTrainer
from tests.integrations.trl.runs import Padded, train

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    runs = {
        cls.__name__: train(cls, folder / rank, ddp_backend="gloo", num_generations=8) for cls in (GRPOTrainer, Padded)
    }
    torch.save(runs, folder / f"{rank}.pt")

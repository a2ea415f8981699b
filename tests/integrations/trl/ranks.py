"""A rank that trains with DDP, and saves what it computed."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import trl

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

from dualkv.integrations.trl import DPOTrainer, GRPOTrainer, RewardTrainer
from tests.integrations.trl.runs import Padded, train
from tests.integrations.trl.test_answers import dpo, rewards, scorer, trained
from tests.integrations.trl.test_invariant import SETTINGS, OfGRPO, invariant


def main(number: int, to: str) -> None:
    folder, rank = Path(to), str(number)
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


def equal_bits(number: int, to: str) -> None:
    run = train(invariant(OfGRPO), Path(to) / str(number), ddp_backend="gloo", **SETTINGS | {"beta": 0.04})
    torch.save(run, Path(to) / f"{number}.pt")

"""Trainings by the trainer of ms-swift and by the packed one: log-probs, losses, metrics, gradients, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dualkv.integrations.swift import GRPOTrainer
from tests.integrations.swift.runs import Stock, train
from tests.integrations.trainings import Run

LORA = {"tuner_type": "lora", "target_modules": "all-linear", "init_weights": "gaussian"}
CASES: dict[str, dict[str, Any]] = {
    "right": {},
    "left, LoRA": {"padding_side": "left", **LORA},
    "right, QLoRA": {"quant_method": "bnb", "quant_bits": 4, "bnb_4bit_compute_dtype": "float32", **LORA},
    "padding-free": {"free": True},
    "padding-free, LoRA, checkpointing": {"free": True, "gradient_checkpointing": True, **LORA},
    "right, LoRA, checkpointing, GSPO": {
        "gradient_checkpointing": True,
        "importance_sampling_level": "sequence",
        **LORA,
    },
    "left, checkpointing, DAPO": {"padding_side": "left", "gradient_checkpointing": True, "loss_type": "dapo"},
}
CLOCKS = ("step_time", "runtime", "per_second", "time", "speed")


def of_results(log: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in log.items()
        if not name.startswith("dualkv/")
        and not any(clock in name for clock in CLOCKS)
        and name != "global_step/max_steps"
    }


def _norm(gradients: dict[str, torch.Tensor]) -> float:
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()


def differences(plain: Run, packed: Run) -> dict[str, float]:
    """The largest difference of each kind of value; of gradients the norm, relative to the norm of all."""
    found = {}
    for name in ("logps", "entropies", "losses"):
        pairs = zip(getattr(plain, name), getattr(packed, name), strict=True)
        found[name] = max((a - b).abs().max().item() for a, b in pairs)
    steps = zip(plain.gradients, packed.gradients, strict=True)
    found["gradients"] = max(_norm({n: a[n] - b[n] for n in a | b}) / _norm(a) for a, b in steps)
    both = plain.weights | packed.weights
    found["weights"] = max((plain.weights[n] - packed.weights[n]).abs().max().item() for n in both)
    logs = [[of_results(log) for log in run.logs] for run in (plain, packed)]
    found["metrics"] = max(abs(a[n] - b[n]) for a, b in zip(*logs, strict=True) for n in a | b)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_training_equals_that_of_ms_swift(name: str, folder: Path) -> None:
    plain, packed = (train(cls, folder, **CASES[name]) for cls in (Stock, GRPOTrainer))
    found = differences(plain, packed)
    print(name, {key: f"{value:.1e}" for key, value in found.items()})
    assert len(plain.losses) == 6
    assert len(plain.entropies) == 6
    assert len(plain.logps) == 6 + 4 * 2  # losses; policy and reference of two generation batches
    assert found["logps"] < 1e-5
    assert found["entropies"] < 1e-5
    assert max(found[key] for key in ("losses", "metrics", "weights", "gradients")) < 1e-4
    assert max(log.get("clip_ratio/region_mean", 0.0) for log in plain.logs) > 0
    assert max(log.get("kl", 0.0) for log in plain.logs) > 1e-3
    assert all(log["dualkv/dedup_ratio"] > 1.5 for log in packed.logs if "loss" in log)

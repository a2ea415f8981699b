"""The canary of TRL's trainers: it changes no training, is silent where all is right, and sees a planted fault."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, TaskType

from dualkv.integrations.trl import GRPOTrainer, RLOOTrainer
from tests.integrations.test_canary import row_mean
from tests.integrations.tiny import make_model
from tests.integrations.trl.runs import Turns, having, make_trainer, train

NAME = "dualkv/packed_vs_separate"
LORA = {"task_type": TaskType.CAUSAL_LM, "r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (GRPOTrainer, {"temperature": 0.7, "beta": 0.04}),
        (GRPOTrainer, {"peft": LoraConfig(**LORA, lora_dropout=0.3)}),
        (type("OfTurns", (Turns, GRPOTrainer), {}), {"num_iterations": 2}),
        (RLOOTrainer, {"config": "rloo"}),
    ],
    ids=["temperature and reference", "adapters with dropout", "turns", "rloo"],
)
def test_it_is_silent_and_changes_nothing(tmp_path: Path, cls: type, settings: dict[str, Any]) -> None:
    from tests.integrations.trl.test_trainer import CONFIGS

    settings = settings | {"max_steps": 4}
    if "config" in settings:
        settings["config"] = CONFIGS[settings["config"]]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        watched = train(having(cls, canary=2), tmp_path, **settings)
    assert not [w for w in said if "packed log-probs differ" in str(w.message)]
    plain = train(cls, tmp_path, **settings)
    assert watched.weights.keys() == plain.weights.keys()
    assert all(torch.equal(watched.weights[name], weight) for name, weight in plain.weights.items())
    assert all(torch.equal(a, b) for a, b in zip(watched.completions, plain.completions, strict=True))
    values = [log.get(NAME) for log in watched.logs if "loss" in log]
    assert [value is not None for value in values] == [True, False, True, False]
    assert all(0 < value < 1e-5 for value in values if value is not None)
    assert not any(NAME in log for log in plain.logs)


def test_a_planted_fault_is_seen(tmp_path: Path) -> None:
    trainer = make_trainer(having(GRPOTrainer, canary=1), tmp_path, made=make_model())
    row_mean(trainer.model)
    with pytest.warns(UserWarning, match="packed log-probs differ from those of the rollouts alone by"):
        trainer.train()


def test_a_number_of_steps_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="canary is 0, expected 1 or more"):
        make_trainer(having(GRPOTrainer, canary=0), tmp_path, made=make_model())

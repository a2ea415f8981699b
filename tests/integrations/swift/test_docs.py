"""The command of docs/ms-swift.md trains, with rollouts that the model itself generates."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.trainers import TrainerFactory

from tests.documents import commands, words_of
from tests.integrations.swift.runs import SETTINGS, arguments

THE_PAGES = ["rlhf_type", "num_generations", "per_device_train_batch_size", "tuner_type", "reward_funcs"]


def test_the_command_of_the_page_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [words_of(command) for command, _ in commands("ms-swift.md")]
    (echo,) = [words for words in shown if words[0] == "echo"]
    (swift,) = [words for words in shown if words[0] == "swift"]
    assert [echo[2], swift[1]] == [">", "rlhf"]
    monkeypatch.chdir(tmp_path)
    Path(echo[3]).write_text(echo[1])
    small = {name: value for name, value in SETTINGS.items() if name not in THE_PAGES}
    small |= {"max_steps": 1, "num_iterations": 1, "max_completion_length": 6, "gradient_accumulation_steps": 1}
    monkeypatch.setattr("tests.integrations.swift.runs.SETTINGS", small)
    monkeypatch.setitem(TrainerFactory.TRAINER_MAPPING, "grpo", "swift.rlhf_trainers.GRPOTrainer")
    monkeypatch.delitem(sys.modules, "dualkv.integrations.swift")
    monkeypatch.setattr(sys, "path", [*sys.path])  # ms-swift adds the plugin's folder
    pipeline = SwiftRLHF([*swift[2:], *arguments(folder)])  # of an option given twice the last one counts
    assert TrainerFactory.TRAINER_MAPPING["grpo"] == "dualkv.integrations.swift.GRPOTrainer"
    assert os.getcwd() == str(tmp_path)
    logs = pipeline.main()["log_history"]
    assert logs[0]["dualkv/dedup_ratio"] > 2

"""`dualkv.observe` in a trainer of TRL: an unchanged training, and numbers that are those of the packed trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trl

import dualkv
from dualkv.integrations.trl import GRPOTrainer
from tests.integrations.trl import runs
from tests.integrations.trl.runs import train

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own calls


def test_it_changes_nothing_and_says_what_packing_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Observed(trl.GRPOTrainer):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.observed = dualkv.observe(self.model, 2, labels="roll", report=said.append)
            seen.append(self.observed)

    seen: list[dualkv.observer.Observed] = []
    monkeypatch.setattr(runs, "PROMPTS", [f"{prompt} {runs.PROMPTS[2]}" for prompt in runs.PROMPTS])
    settings = {"per_device_train_batch_size": 4, "max_steps": 1}  # micro-batches of a group, which TRL shuffles
    plain, found, packed = (train(cls, tmp_path, **settings) for cls in (trl.GRPOTrainer, Observed, GRPOTrainer))
    assert len(plain.losses) == 2
    assert all(map(torch.equal, plain.losses, found.losses))
    assert all(torch.equal(weight, found.weights[name]) for name, weight in plain.weights.items())
    apart, together = seen[0].as_they_come(), seen[0].together()
    assert together.gain.rows == 2 * packed.logs[0]["dualkv/tokens_packed"]
    assert together.gain.replicated_rows == 2 * packed.logs[0]["dualkv/tokens_padded"]
    assert apart.gain.rows > together.gain.rows
    assert f"{together.gain.rows:,} rows" in said[0]

"""The code in docs/trl.md and in programs that need TRL runs, and their commands are parsed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trl

from dualkv.integrations.trl import GRPOTrainer, PackedGroups, SFTTrainer
from tests.documents import blocks, parse, shown, words_of
from tests.integrations.tiny import make_model
from tests.integrations.trl.runs import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own calls

OURS = [w for _, c, _ in shown() if (w := words_of(c))[:3] == ["python", "-m", "tools.bench.trl"]]


def test_the_trainer_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("qwen3").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    small = {"max_steps": 1, "use_cpu": True, "bf16": False, "output_dir": str(tmp_path), "report_to": "none"}
    monkeypatch.setattr(trl, "GRPOConfig", partial(trl.GRPOConfig, **small, max_completion_length=6))
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, **small))
    block, *others = blocks("trl.md", {"python"})
    space: dict[str, object] = {}
    exec(block.replace("Qwen/Qwen3-0.6B", str(tmp_path / "model")), space)
    trainer = space["trainer"]
    assert isinstance(trainer, GRPOTrainer)
    assert trainer.state.global_step == 1
    assert trainer.state.log_history[0]["dualkv/dedup_ratio"] > 1
    for other in others:
        exec(other, space)
    assert issubclass(space["PackedGMPOTrainer"], PackedGroups)
    assert space["SFTTrainer"] is SFTTrainer
    rows = space["dataset"]
    assert set(rows["prompt"][::2]) != set(rows["prompt"][1::2])


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_options_are_taken(words: list[str]) -> None:
    needed = ["--json", "figures.json"] if "--json" not in words else []  # left out where a page only names the program
    parse([*words, *needed])

"""The example on real weights through TRL's trainer, in small on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests import small_example

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def test_real_model_learns_the_same_both_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    example = small_example.load("real_model", monkeypatch)
    trainer = small_example.load("real_model_trl", monkeypatch)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(257)}, unk_token="0"))
    tokenizer = SimpleNamespace(from_pretrained=lambda **_: PreTrainedTokenizerFast(tokenizer_object=words))
    monkeypatch.setattr(trainer, "AutoTokenizer", tokenizer)
    monkeypatch.setattr(trainer, "pretrained", lambda _: {})
    common = ["--prefix", "60", "--groups", "2", "--responses", "4", "--response-len", "6", "--held-out", "4", "--lr"]
    common += ["1e-3", "--eval-groups", "2", "--updates", "3", "--warmup", "1", "--dtype", "float32", "--device", "cpu"]
    logs = {}
    for way, program in (("packed", example), ("packed", trainer), ("replicated", trainer)):
        folder = tmp_path / program.__name__ / way
        monkeypatch.setattr(sys, "argv", ["", "--out", str(folder), "--way", way, *common])
        program.main()
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        logs[program, way] = {line["update"]: line for line in lines if "reward" in line}
        held_out = [line for line in lines if "greedy_accuracy" in line]
        assert [line["update"] for line in held_out] == [0, 3]
    replicated = logs[trainer, "replicated"]
    assert replicated[1]["crc"] == logs[example, "packed"][1]["crc"]
    assert replicated[1]["reward"] == pytest.approx(logs[example, "packed"][1]["reward"])
    assert replicated[3]["kl"] > 0
    for update, line in logs[trainer, "packed"].items():
        for name in ("reward", "kl", "entropy", "loss", "grad_norm"):
            assert line[name] == pytest.approx(replicated[update][name], rel=1e-3, abs=1e-5), name
        assert line["rows"] < replicated[update]["rows"] / 1.5

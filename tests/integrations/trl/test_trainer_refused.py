"""Tests of the settings and inputs that the packed GRPO trainer refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import ProcessorMixin

from dualkv.integrations.trl import GRPOTrainer
from tests.integrations.tiny import make_model
from tests.integrations.trl.runs import SETTINGS, make_trainer, tokenizer
from tests.integrations.trl.test_trainer import padded_batch

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own calls


@pytest.mark.parametrize("given", ["path", "model"])
def test_a_model_is_refused_before_trl_makes_anything(
    given: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's constructor loads weights and starts vLLM."""
    monkeypatch.setattr(trl.GRPOTrainer, "__init__", lambda *_, **__: pytest.fail("TRL's constructor ran"))
    wide = make_model("mistral", head_dim=520)
    wide.save_pretrained(folder / "wide")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn \(MistralAttention\) has head dim 520"):
        GRPOTrainer(model=str(folder / "wide") if given == "path" else wide, reward_funcs=[])
    assert wide.config._attn_implementation == "sdpa"


def test_images_that_are_not_packed_are_refused(folder: Path) -> None:
    trainer = make_trainer(GRPOTrainer, folder)
    ids, mask, room = padded_batch()
    for given, message in (
        ({"spatial_shapes": torch.ones(1), "image_sizes": None}, "the batch has spatial_shapes: text and images are"),
        (
            {"mm_token_type_ids": torch.ones_like(ids)},
            r"media\[0\]..pixel_values.. has 0 patches for \d+ placeholder tokens",
        ),
        ({"pixel_values": torch.ones(1)}, rf"pixel_values has 1 entries for {len(ids)} rollouts"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, room, **given)


class _Processor(ProcessorMixin):
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.chat_template = None


def test_processors_are_refused(folder: Path) -> None:
    trainer = make_trainer(GRPOTrainer, folder)
    trainer.model.config.image_token_id = 5
    with pytest.raises(ValueError, match="and images of Qwen3ForCausalLM are not known to run packed"):
        GRPOTrainer(
            trainer.model,
            trainer.reward_funcs[0],
            args=trl.GRPOConfig(output_dir=str(folder / "out"), **SETTINGS),
            train_dataset=trainer.train_dataset,
            processing_class=_Processor(tokenizer()),
        )

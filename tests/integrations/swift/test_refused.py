"""The packed trainer of ms-swift refuses settings before ms-swift makes anything, and inputs that it does not pack."""

from __future__ import annotations

import importlib
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rlhf_trainers import grpo_trainer
from swift.trainers import TrainerFactory
from swift.tuners import NEFTuneConfig, Swift

from dualkv.integrations.swift import GRPOTrainer
from tests.integrations.tiny import make_model


def made(model: Any = None, liger: bool = False, ranks: int = 1, multimodal: bool = False) -> Any:
    model = model or make_model("qwen3")
    model.model_meta = SimpleNamespace(is_multimodal=multimodal)
    args, template = SimpleNamespace(use_liger_kernel=liger), SimpleNamespace(sequence_parallel_size=ranks)
    return GRPOTrainer(model, args=args, template=template)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"liger": True}, "use_liger_kernel is True, .* set it to False, or leave dualkv.integrations.swift out"),
        ({"ranks": 2}, "sequence_parallel_size is 2, .* set it to 1"),
        ({"multimodal": True}, "Qwen3ForCausalLM is a multimodal model"),
        ({"model": "neftune"}, r"the model has a tuner of ms-swift's own \(NEFTuneConfig\)"),
        ({"model": "wide"}, r"layers\.0\.self_attn \(MistralAttention\) has head dim 520"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_it_is_refused_before_ms_swift_makes_anything(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        grpo_trainer.GRPOTrainer, "__init__", lambda *_, **__: pytest.fail("ms-swift's constructor ran")
    )
    if given.get("model") == "wide":
        given = {"model": make_model("mistral", head_dim=520)}
    elif given.get("model") == "neftune":
        given = {"model": Swift.prepare_model(make_model("llama"), NEFTuneConfig())}
    with pytest.raises(ValueError, match=message):
        made(**given)


def test_every_model_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainer.GRPOTrainer, "__init__", lambda *_, **__: None)
    policy, reference, teacher = (make_model("qwen3") for _ in range(3))
    policy.model_meta = SimpleNamespace(is_multimodal=False)
    args, template = SimpleNamespace(use_liger_kernel=False), SimpleNamespace(sequence_parallel_size=1)
    GRPOTrainer(policy, reference, args=args, template=template, teacher_model=teacher)
    assert [m.config._attn_implementation for m in (policy, reference, teacher)] == ["dualkv|sdpa"] * 3


def test_images_are_refused() -> None:
    ids, none = torch.ones(2, 5, dtype=torch.int64), None
    inputs = {"input_ids": ids, "attention_mask": ids, "token_type_ids": none, "pixel_values": ids}
    with pytest.raises(ValueError, match=r"the batch has pixel_values: text alone is packed"):
        GRPOTrainer._get_per_token_logps_and_entropies_single(SimpleNamespace(), None, inputs, None)


@pytest.mark.parametrize(
    ("there", "found"),
    [
        (None, "GRPOTrainer has no method _get_per_token_logps_and_entropies_single"),
        (lambda self, model, batch: None, "does not begin with the arguments self, model, model_inputs"),
    ],
    ids=["absent", "changed"],
)
def test_another_method_in_ms_swift_is_refused_at_the_import(
    there: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer.GRPOTrainer, "_get_per_token_logps_and_entropies_single", there)
    monkeypatch.setitem(TrainerFactory.TRAINER_MAPPING, "grpo", "stock")
    monkeypatch.delitem(sys.modules, "dualkv.integrations.swift")
    says = r"dualkv.integrations.swift cannot run: ms-swift 4.6.0 does not fit \(tried up to 4.6.0: .*"
    with pytest.raises(ImportError, match=says + re.escape(found)):
        importlib.import_module("dualkv.integrations.swift")
    assert TrainerFactory.TRAINER_MAPPING["grpo"] == "stock"

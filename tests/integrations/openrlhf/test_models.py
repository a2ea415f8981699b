"""OpenRLHF's models, packed: values and gradients of one batch are those of its own forward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from openrlhf.models import Actor, get_llm_for_sequence_regression
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from dualkv.integrations.openrlhf import pack_model
from tests.integrations.openrlhf.runs import rollouts
from tests.integrations.tiny import make_vision_language
from tests.integrations.trainings import NF4

LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def batch(side: str = "right", seed: int = 0, untrained: int = -1) -> tuple[torch.Tensor, ...]:
    """sequences, action_mask, attention_mask of eight ragged rollouts, with holes in four masks."""
    samples = rollouts(seed, 2, untrained)
    longest = max(s.sequences.shape[1] for s in samples)
    found = []
    for name, width in (("sequences", longest), ("action_mask", longest - 1), ("attention_mask", longest)):
        own = [getattr(s, name)[0] for s in samples]
        gaps = [(0, width - len(x)) if side == "right" else (width - len(x), 0) for x in own]
        found.append(torch.stack([nn.functional.pad(x, gap) for x, gap in zip(own, gaps, strict=True)]))
    return tuple(found)


def actor(path: Path, **settings: Any) -> Actor:
    torch.manual_seed(1)
    return adapted(Actor(str(path), attn_implementation="sdpa", **settings))


def adapted(model: Any) -> Any:
    """The model, with adapters that add something."""
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn_like(weight) / 10
    return model


def regression(path: Path, kind: str, **settings: Any) -> Any:
    torch.manual_seed(1)
    found = get_llm_for_sequence_regression(
        str(path), kind, attn_implementation="sdpa", init_value_head=True, normalize_reward=True, **settings
    )
    plain = found.get_base_model() if settings else found
    plain.mean, plain.std = torch.tensor([0.3]), torch.tensor([1.7])
    return adapted(found)


def pair(model: Any) -> tuple[Any, Any]:
    ours = copy.deepcopy(model)
    pack_model(ours)
    return ours, model


def assert_equal_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    expected = {name: weight.grad for name, weight in theirs.named_parameters() if weight.grad is not None}
    found = {name: weight.grad for name, weight in ours.named_parameters() if weight.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-7, name
    assert any(grad.norm() > 1e-3 for grad in expected.values())


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_actor(side: str, lora: bool, folder: Path) -> None:
    ours, theirs = pair(actor(folder / "model", temperature=0.7, **(LORA if lora else {})))
    sequences, mask, attention = batch(side)
    weight = torch.randn(mask.shape)
    for model in (ours, theirs):
        model.train()
        model.gradient_checkpointing_enable()
    found, expected = (
        m(sequences, mask, attention_mask=attention, return_output=True, return_entropy=True) for m in (ours, theirs)
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].entropy, expected[1].entropy * mask, rtol=1e-5, atol=1e-5)
    for made, output in (found, expected):
        (made * weight + 0.1 * (output.entropy * mask)).sum().backward()
    assert_equal_gradients(ours, theirs)


def test_a_mask_of_the_last_columns(folder: Path) -> None:
    ours, theirs = pair(actor(folder / "model"))
    sequences, mask, attention = batch("left")
    last = mask[:, -20:]
    torch.testing.assert_close(
        ours(sequences, last, attention), theirs(sequences, last, attention), rtol=1e-5, atol=1e-5
    )


def test_a_batch_without_actions_has_a_graph(folder: Path) -> None:
    """The other ranks wait for its backward."""
    ours = actor(folder / "model")
    pack_model(ours)
    sequences, mask, attention = batch()
    made = ours(sequences, mask & False, attention)
    assert not made.any()
    made.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in ours.parameters())


def test_the_reference_within_a_policy(folder: Path) -> None:
    """A packed policy without its adapters has the log-probs of the model beneath."""
    base, ours = actor(folder / "model"), actor(folder / "model", **LORA)
    pack_model(ours)
    inputs = batch()
    with torch.no_grad():
        assert not torch.allclose(ours(*inputs), base(*inputs), atol=1e-3)
        with ours.model.disable_adapter():
            torch.testing.assert_close(ours(*inputs), base(*inputs), rtol=1e-5, atol=1e-5)


def test_qlora(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nf4 as OpenRLHF loads it, but with products in fp32."""
    # On CPUs that multiply bf16, bitsandbytes packs weights for inference, and takes multiples of 32 rows alone.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=NF4, dtype=torch.float32)
        policy = Actor(get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)))
        policy.packing_samples = False
        made.append(policy)
    ours, theirs = made
    assert any(type(module).__name__ == "Linear4bit" for module in ours.modules())
    pack_model(ours)
    sequences, mask, attention = batch()
    found, expected = (m(sequences, mask, attention) for m in made)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn(mask.shape)
    for values in (found, expected):
        (values * weight).sum().backward()
    assert_equal_gradients(ours, theirs)


def test_the_load_balancing_loss_counts_each_rollout(folder: Path) -> None:
    ours, theirs = pair(actor(folder / "experts"))
    inputs = batch()
    found, expected = (m(*inputs, return_output=True) for m in (ours, theirs))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].aux_loss, expected[1].aux_loss, rtol=1e-5, atol=1e-5)
    for values, output in (found, expected):
        (values.sum() / 100 + output.aux_loss).backward()
    assert_equal_gradients(ours, theirs)


@pytest.mark.parametrize("lora", [False, True])
def test_a_critic(lora: bool, folder: Path) -> None:
    made = regression(folder / "model", "critic", **(LORA if lora else {}))
    ours, theirs = pair(made)
    sequences, mask, attention = batch("left")
    weight = torch.randn(mask.shape)
    found, expected = (
        m(sequences, action_mask=mask, attention_mask=attention, return_output=True) for m in (ours, theirs)
    )
    assert expected[0].abs().max() > 0.1
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for values, _ in (found, expected):
        (values * weight).sum().backward()
    assert_equal_gradients(ours, theirs)


def test_a_reward_model(folder: Path) -> None:
    ours, theirs = pair(regression(folder / "model", "reward"))
    sequences, _, attention = batch()
    for training in (False, True):
        found, expected = (m.train(training)(sequences, attention, pad_sequence=True) for m in (ours, theirs))
        assert found.shape == (8,)
        assert expected.std() > 0.01
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_text_of_a_vision_language_model(tmp_path: Path) -> None:
    make_vision_language().save_pretrained(tmp_path)
    ours, theirs = pair(actor(tmp_path))
    assert ours.is_vlm
    torch.testing.assert_close(ours(*batch()), theirs(*batch()), rtol=1e-5, atol=1e-5)


def test_calls_that_stay_replicated(folder: Path) -> None:
    """All logits of an actor; batches with images, which are said once."""
    ours, theirs = pair(actor(folder / "model"))
    sequences, mask, attention = batch()
    whole = {"attention_mask": attention, "return_output": True}
    torch.testing.assert_close(ours(sequences, **whole).logits, theirs(sequences, **whole).logits)
    with pytest.warns(UserWarning, match="Qwen3ForCausalLM got images"):
        found = ours(sequences, mask, attention, image_grid_thw=torch.ones(1, 3))
    torch.testing.assert_close(found, theirs(sequences, mask, attention))


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear.*get_llm_for_sequence_regression"):
        pack_model(nn.Linear(2, 2))

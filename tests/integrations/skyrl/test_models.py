"""SkyRL's models, packed: values and gradients of one batch are those of its own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from skyrl.backends.skyrl_train.patches.gptoss.patch_transformers import patch_GptOssAttention
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from dualkv.integrations.skyrl import PackedModel
from tests.integrations.skyrl.runs import save, tensors
from tests.integrations.tiny import make_featured, make_model, make_vision_language

LORA = {"lora_rank": 4, "target_modules": "all-linear", "lora_init_method": "gaussian"}


def batch(steps: bool = False) -> tuple[torch.Tensor, int, torch.Tensor]:
    """sequences, num_actions and attention_mask of ragged rollouts."""
    sequences, attention, width, _ = tensors(2, steps)
    return sequences, width, attention


def pair(path: Path, **settings: Any) -> tuple[Any, Any]:
    made = []
    for cls in (PackedModel, HFModelWrapper):
        torch.manual_seed(1)
        model = cls(str(path), bf16=False, **settings)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
        made.append(model.train())
    return made[0], made[1]


@pytest.mark.parametrize(("settings", "steps"), [({}, False), (LORA, True)], ids=["full, turns", "LoRA, steps"])
def test_a_policy(settings: dict[str, Any], steps: bool, folder: Path) -> None:
    """Log-probs of every attended column of actions, entropies, gradients."""
    ours, theirs = pair(folder / "model", **settings)
    ours.remove_microbatch_padding = True  # which packed rows need not
    sequences, width, attention = batch(steps)
    follows = (attention.cumsum(1) > 1)[:, -width:]
    draw = torch.randn(follows.shape) * follows
    made = []
    for model in (ours, theirs):
        asked = {"temperature": 0.7, "return_output": True, "compute_entropy": True}
        logps, output = model(sequences, width, attention, **asked)
        made.append((logps * follows, output["entropy"][:, -width - 1 : -1] * follows))
        (logps * draw + 0.1 * made[-1][1] * draw).sum().backward()
    for found, expected in zip(*made, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pairs = [(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True) if q.requires_grad]
    assert max(float(expected.norm()) for _, expected in pairs) > 1e-3
    for found, expected in pairs:
        assert (found - expected).norm() <= 1e-4 * expected.norm() + 1e-7


def test_entropies_without_a_gradient(folder: Path) -> None:
    ours, _ = pair(folder / "model")
    asked = {"return_output": True, "compute_entropy": True, "entropy_requires_grad": False}
    logps, output = ours(*batch(), **asked)
    assert logps.requires_grad
    assert not output["entropy"].requires_grad
    assert output["entropy"].any()


def test_a_padding_batch_has_a_graph(folder: Path) -> None:
    """The other ranks wait for its backward."""
    ours, _ = pair(folder / "model")
    attention = torch.zeros(1, 60, dtype=torch.long)
    attention[:, 0] = 1
    made = ours(torch.randint(100, (1, 60)), 30, attention)
    assert made.shape == (1, 30)
    assert not made.any()
    made.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in ours.parameters())


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    make_model("qwen3_moe", vocab_size=128).float().save_pretrained(tmp_path)
    ours, theirs = pair(tmp_path)
    sequences, width, attention = batch()
    follows = (attention.cumsum(1) > 1)[:, -width:]
    found, expected = (model(sequences, width, attention) * follows for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_vision_language_model(tmp_path: Path) -> None:
    """Text runs packed; a batch with images does not, which is said once."""
    make_vision_language().save_pretrained(tmp_path)
    ours, theirs = pair(tmp_path)
    assert theirs.is_vlm
    sequences, width, attention = batch()
    follows = (attention.cumsum(1) > 1)[:, -width:]
    found, expected = (model(sequences, width, attention) * follows for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    sequences[0, -4] = theirs.model.config.image_token_id  # an image of one patch behind merging
    images = {"pixel_values": torch.randn(4, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    with pytest.warns(UserWarning, match=r"Qwen2_5_VLForConditionalGeneration got images.* SkyRL"):
        found = ours(sequences, width, attention, **images)
    torch.testing.assert_close(found, theirs(sequences, width, attention, **images))


def test_gpt_oss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL gives it an attention of its own, which no layer of transformers' registry asks for."""
    monkeypatch.setattr(GptOssAttention, "forward", GptOssAttention.forward)  # undone behind this test
    model = make_featured("gpt_oss", 16)
    patch_GptOssAttention()
    with pytest.raises(ValueError, match="GptOssForCausalLM has no causal attention layer"):
        PackedModel(model)


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    ours, _ = pair(folder / "model")
    with pytest.raises(ValueError, match=r"enable_sample_support_replay is True.* set it to False"):
        ours(*batch(), enable_sample_support_replay=True)
    save(tmp_path, head_dim=520)
    with pytest.raises(ValueError, match="head dim 520"):
        PackedModel(str(tmp_path), bf16=False)

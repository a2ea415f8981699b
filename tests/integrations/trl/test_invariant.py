"""Log-probs of TRL's trainers that do not depend on the micro-batch: at equal weights ratios are 1 and KLs 0, exactly.

On a CPU, activations of the last elements of a tensor may be computed by other code, so all lengths are multiples of
16. `tests/gpu/test_trl.py` has ragged ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from peft import LoraConfig, TaskType

from dualkv import Layout, PackedSequences, pack_sequences
from dualkv.integrations.metrics import RATIO, furthest_ratio, log_ratios
from dualkv.integrations.transformers import enable
from dualkv.integrations.trl import GRPOTrainer, RLOOTrainer, common
from dualkv.integrations.trl.common import fix_head, joined, pack_fixed, tokens_of_rows
from tests.integrations.tiny import VOCAB, make_model
from tests.integrations.trl.runs import PackedScreens, having, make_trainer, train
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own calls

PROMPTS = [" ".join(f"t{3 + (11 * i + 5 * j) % 90}" for j in range(n)) for i, n in enumerate((32, 16, 48, 16))]
# Old log-probs are those of the weights in the first half of the steps.
SETTINGS: dict[str, Any] = {
    "prompts": PROMPTS,
    "num_iterations": 2,
    "max_steps": 4,
    "max_completion_length": 48,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 0.01,
}


def paths_of(layout: Layout) -> list[tuple[int, ...]]:
    """The lengths of the segments from the root to each leaf, without empty ones."""
    parents, found = layout.parent.tolist(), list[tuple[int, ...]]()
    for length, parent in zip(layout.offsets.diff().tolist(), parents, strict=True):
        found.append((found[parent] if parent >= 0 else ()) + ((length,) if length else ()))
    return [path for s, path in enumerate(found) if s not in parents]


class Rounded:
    """A mixin before a trainer: completions of 16, 32 or 48 random tokens."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        found = super()._generate_single_turn(prompt_ids, *args, **kwargs)  # type: ignore[misc]
        seen: dict[tuple[int, ...], int] = {}
        made = []
        for prompt in prompt_ids:
            number = seen[tuple(prompt)] = seen.get(tuple(prompt), -1) + 1
            draw = np.random.default_rng([sum(prompt), number])
            made.append(draw.integers(3, VOCAB, 16 * (1 + number % 3)).tolist())
        return (made, *found[1:]) if isinstance(found, tuple) else made


class OfGRPO(Rounded, GRPOTrainer):
    pass


class OfRLOO(Rounded, RLOOTrainer):
    pass


def invariant(cls: type) -> type:
    return having(cls, batch_invariant=True)


def without_fixed_cuts(prompts: Any, prompt_mask: Any, responses: Any, response_mask: Any, _: Any) -> Any:
    """A rollout that is alone in its micro-batch is one segment."""
    parts = tokens_of_rows(prompts, prompt_mask), tokens_of_rows(responses, response_mask)
    return pack_sequences(joined(*parts), [[0] * len(p) + [1] * len(r) for p, r in zip(*parts, strict=True)])


def ratios(run: Any) -> list[float | None]:
    return [log.get(RATIO) for log in run.logs if "loss" in log]


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.04},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": False},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "temperature": 0.7},
        {"beta": 0.04, "peft": LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules="all-linear")},
        {"model": "qwen2", "beta": 0.04, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    ],
    ids=["checkpointing", "one rollout", "all rollouts", "adapters", "two steps a generation"],
)
def test_ratios_at_equal_weights_are_one(folder: Path, settings: dict[str, Any]) -> None:
    settings = SETTINGS | settings
    run = train(invariant(OfGRPO), folder, **settings)
    updates = settings["num_iterations"] * settings.get("steps_per_generation", settings["gradient_accumulation_steps"])
    fresh = [i % (updates // settings["gradient_accumulation_steps"]) == 0 for i in range(4)]
    assert [r is not None for r in ratios(run)] == fresh
    assert {r for r in ratios(run) if r is not None} == {1.0}
    if "beta" in settings:
        kls = [log["kl"] for log in run.logs if "loss" in log]
        assert kls[0] == 0.0
        assert min(kls[1:]) > 0.0
    plain = train(OfGRPO, folder, **settings)
    if settings["per_device_train_batch_size"] == 2:  # old and new micro-batches hold other rollouts
        assert any(r not in (None, 1.0) for r in ratios(plain)), "or the test could not fail"
    for ours, theirs in zip(run.gradients, plain.gradients, strict=True):
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize("cls", [GRPOTrainer, PackedScreens], ids=["of prompts", "of tools"])
def test_images(folder: Path, cls: type) -> None:
    """Ratios are those of tokens that count: not of a tool's answer."""
    settings = {name: value for name, value in SETTINGS.items() if name != "prompts"} | {"beta": 0.04}
    run = train(invariant(cls), folder, **settings | {"model": "images", "max_completion_length": 12, "max_steps": 2})
    assert ratios(run) == [1.0, None]
    assert run.logs[0]["kl"] == 0.0


def test_ratios_of_rloo(folder: Path) -> None:
    invariants, plain = (train(cls, folder, config=trl.RLOOConfig, **SETTINGS) for cls in (invariant(OfRLOO), OfRLOO))
    assert ratios(invariants) == [1.0, None, 1.0, None]
    assert any(r not in (None, 1.0) for r in ratios(plain)), "or the test could not fail"


def test_log_probs_have_the_same_bits_in_all_micro_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(invariant(GRPOTrainer), folder)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCAB, (2, 32), generator=draw)[[0, 1, 0, 0, 1, 0]]
    ids = torch.cat([prompts, torch.randint(3, VOCAB, (6, 480), generator=draw)], 1)
    ids[3] = ids[0]  # an equal rollout
    mask = torch.ones_like(ids)
    mask[1, :16] = 0
    mask[4, :16] = 0
    for row, length in enumerate((480, 16, 32, 480, 0, 480)):
        mask[row, 32 + length :] = 0

    def of_sizes(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        method = trainer._get_per_token_logps_and_entropies
        return [method(trainer.model, ids, mask, 480, size, compute_entropy=True)[:2] for size in sizes]

    found = of_sizes(6, 1, 2, 4)
    for logps, entropies in found[1:]:
        assert torch.equal(logps, found[0][0])
        assert torch.equal(entropies, found[0][1])
    assert (found[0][0] != 0).equal(mask[:, 32:] != 0)

    def cuts(pack: Callable[..., PackedSequences], size: int) -> set[tuple[int, ...]]:
        """The lengths of the segments of the path of each rollout with a response; the one without has 16 tokens."""
        layouts: list[Layout] = []

        def kept(*given: Any) -> PackedSequences:
            batch = pack(*given)
            layouts.append(batch.layout)
            return batch

        monkeypatch.setattr(common, "pack_fixed", kept)
        of_sizes(size)
        return {path for layout in layouts for path in paths_of(layout) if sum(path) > 16}

    assert cuts(pack_fixed, 6) == cuts(pack_fixed, 1)
    # Whether bits differ then is up to the CPU: many add up some hundred keys at once, however they are cut.
    assert cuts(without_fixed_cuts, 6) != cuts(without_fixed_cuts, 1), "cuts do not depend on other rollouts anyway"
    plain = make_trainer(GRPOTrainer, folder)
    want = plain._get_per_token_logps_and_entropies(plain.model, ids, mask, 480, compute_entropy=True)
    for ours, theirs in zip(found[0], want[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_prompts_are_shared_and_cut_where_responses_begin() -> None:
    prompts, responses = torch.tensor([[0, 5, 6], [0, 5, 6], [7, 8, 9]]), torch.tensor([[1, 2], [1, 3], [4, 0]])
    masks = (x != 0 for x in (prompts, responses))
    batch = pack_fixed(prompts, next(masks), responses, next(masks))
    assert batch.layout.offsets.diff().tolist() == [2, 2, 2, 3, 1]
    with pytest.raises(ValueError, match=r"prompt_mask\[1\] is 0 everywhere"):
        pack_fixed(prompts, torch.tensor([[1], [0], [1]]).expand(3, 3), responses, responses != 0)


def test_two_ranks(tmp_path: Path) -> None:
    """DDP: the ratio is that of all ranks, and each rank has rollouts of every prompt."""
    on_ranks(2, "tests.integrations.trl.ranks:equal_bits", str(tmp_path))
    for rank in range(2):
        run = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert ratios(run) == [1.0, None, 1.0, None]
        assert run.logs[0]["kl"] == 0.0


def test_the_ratio_that_is_furthest_from_one() -> None:
    new, old = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -2.5, -2.0], [0.0, -1, -1]])
    counted = torch.tensor([[1, 1, 0], [0, 1, 1]])
    assert furthest_ratio(log_ratios(new, old, counted)) == pytest.approx(np.exp(0.5))
    assert furthest_ratio(log_ratios(new, old, counted), [1.0, 0.1]) == 0.1
    assert furthest_ratio(log_ratios(new, new, counted)) == 1.0
    assert furthest_ratio(log_ratios(new, old, counted * 0)) == 1.0
    assert np.isnan(furthest_ratio(log_ratios(new * float("nan"), old, counted), [3.0]))


@pytest.mark.parametrize(
    ("arguments", "settings", "named"),
    [
        ({"fast": True}, {}, "fast True"),
        ({"walk": 64, "canary": 5}, {}, "canary 5 and walk 64"),
        ({}, {"model": "qwen3_moe"}, "products of its own"),
        ({}, {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
        ({}, {"peft": LoraConfig(task_type=TaskType.CAUSAL_LM, lora_dropout=0.1)}, "dropout of 0.1"),
    ],
)  # fmt: skip
def test_what_is_not_batch_invariant_is_refused(
    folder: Path, arguments: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"batch_invariant is True.*{named}"):
        make_trainer(having(GRPOTrainer, batch_invariant=True, **arguments), folder, **settings)


def test_a_head_that_is_not_batch_invariant_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_invariant is True and the head of Qwen3ForCausalLM is a Linear, whose"):
        fix_head(enable(make_model()), 1.0)

"""The packed GRPO trainer against TRL's own, on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig, TaskType
from trl.experimental import gmpo

from dualkv.integrations import losses
from dualkv.integrations.transformers import enable, fused, recompute_layers
from dualkv.integrations.trl import GRPOTrainer, RLOOTrainer, common
from dualkv.integrations.trl.groups import _seen
from tests.integrations.tiny import VOCAB, assert_close, make_featured, make_model
from tests.integrations.trainings import Run
from tests.integrations.transformers.test_fast import kept
from tests.integrations.transformers.test_recurrent import make as make_recurrent
from tests.integrations.trl.runs import (
    NF4,
    SETTINGS,
    GMPOTrainer,
    PackedScreens,
    Padded,
    PaddedGMPO,
    PaddedRLOO,
    PaddedScreens,
    TheirScreens,
    Turns,
    having,
    make_trainer,
    tokenizer,
    train,
    turns,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own calls

LORA = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
OF_THE_CLOCK = {"step_time", "train_runtime", "eval_runtime"}
TWICE = {"num_iterations": 2, "max_steps": 4}
SEQUENCES = TWICE | {"beta": 0.04, "importance_sampling_level": "sequence"}
ENTROPIES = {"top_entropy_quantile": 0.5, "entropy_coef": 0.01}
MASKED = ENTROPIES | {"mask_truncated_completions": True}
ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
EXPERTS = {"model": "qwen3_moe", "router_aux_loss_coef": 0.5}
IMAGES = {"model": "images", "steps_per_generation": 4, "learning_rate": 0.01}
RUNS: dict[str, dict[str, Any]] = {
    "dapo": {"evaluate": True},
    "grpo, reference model, two iterations, sequences": SEQUENCES | {"loss_type": "grpo", "epsilon_high": 0.28},
    "bnpo, entropy, truncated responses masked, temperature": MASKED | {"loss_type": "bnpo", "temperature": 0.7},
    "dr_grpo, several steps a generation": {"loss_type": "dr_grpo", "steps_per_generation": 4},
    "cispo, one rollout a micro-batch": {"loss_type": "cispo", **ONE_BY_ONE},
    "luspo, sequences": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "mixture of experts": EXPERTS,
    "adapters": {"peft": LORA, "beta": 0.04},
    "QLoRA": {"peft": LORA, "beta": 0.04, "model_init_kwargs": NF4},
    "images": IMAGES | {"beta": 0.04},
    "padded to multiples, no checkpointing": {"pad_to_multiple_of": 16, "gradient_checkpointing": False},
    "RLOO, reference model, two iterations": {"of": "rloo", "beta": 0.1, "learning_rate": 0.01, **TWICE},
    "RLOO, mixture of experts": {"of": "rloo", "evaluate": True, **EXPERTS},
    "RLOO, images": {"of": "rloo", **IMAGES},
    "images of tools": {"of": "screens", **IMAGES},
    "GMPO, reference model, two iterations": {"of": "gmpo", "beta": 0.04, **TWICE},
    "GMPO, entropies": {"of": "gmpo", "top_entropy_quantile": 0.5, "evaluate": True},
}
OF_TURNS: dict[str, dict[str, Any]] = {
    "dapo": {"evaluate": True},
    "reference model, two iterations, sequences": SEQUENCES,
    "entropies, truncated responses masked": MASKED,
    # Larger steps enlarge the rounding of the first update.
    "RLOO, mixture of experts": {"of": "rloo", "learning_rate": 0.01, **EXPERTS},
    "GMPO, adapters": {"of": "gmpo", "peft": LORA},
}


# Trainers by what they are called: packed, TRL's log-probs over the same micro-batches, TRL's.
TRAINERS = {
    "grpo": (GRPOTrainer, Padded, trl.GRPOTrainer),
    "rloo": (RLOOTrainer, PaddedRLOO, trl.RLOOTrainer),
    "gmpo": (GMPOTrainer, PaddedGMPO, gmpo.GMPOTrainer),
    "screens": (PackedScreens, PaddedScreens, TheirScreens),
}
CONFIGS = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig, "gmpo": gmpo.GMPOConfig, "screens": trl.GRPOConfig}


def largest(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    assert len(tensors) == len(others)
    return max((a - b).abs().max().item() for a, b in zip(tensors, others, strict=True))


def assert_equal_metrics(packed: Run, padded: Run) -> None:
    assert len(packed.logs) == len(padded.logs)
    for ours, theirs in zip(packed.logs, padded.logs, strict=True):
        for name, value in theirs.items():
            if not any(name.endswith(clock) for clock in (*OF_THE_CLOCK, "_per_second")):
                assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name


def assert_equal_updates(packed: Run, padded: Run) -> None:
    assert len(packed.gradients) == len(padded.gradients) > 1
    for ours, theirs in zip(packed.gradients, padded.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        assert any(g.norm() > 1e-3 for g in theirs.values())
        together = [torch.cat([g.flatten() for g in gradients.values()]) for gradients in (ours, theirs)]
        assert_close("gradients", *together, 1e-4)
    for name, weight in padded.weights.items():
        assert_close(name, packed.weights[name], weight, 1e-4)


def assert_equal_trainings(packed: Run, padded: Run) -> None:
    assert all(torch.equal(a, b) for a, b in zip(packed.completions, padded.completions, strict=True))
    assert largest(packed.logps, padded.logps) < 1e-5
    assert largest(packed.entropies, padded.entropies) < 1e-5
    assert largest(packed.losses, padded.losses) < 1e-5
    assert_equal_updates(packed, padded)
    assert_equal_metrics(packed, padded)


def test_a_fast_training_is_the_padded_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep attention in every update, though TRL switches checkpointing off and on; there is a reference model.
    The fused pieces are traced; the GPU suite has the compiler's kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    kept = []

    class Watched(having(GRPOTrainer, fast=True)):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            layers = self.accelerator.unwrap_model(model).get_decoder().layers
            kept.extend(layer._gradient_checkpointing_func.keywords.get("context_fn") for layer in layers)
            return loss

    settings: dict[str, Any] = {"beta": 0.04, "steps_per_generation": 4}
    assert_equal_trainings(*(train(cls, folder, **settings) for cls in (Watched, Padded)))
    assert kept
    assert all(kept)


@pytest.mark.parametrize("name", RUNS)
def test_a_training_is_the_padded_one(folder: Path, name: str) -> None:
    settings = dict(RUNS[name])
    of = settings.pop("of", "grpo")
    packed, padded = (train(cls, folder, config=CONFIGS[of], **settings) for cls in TRAINERS[of][:2])
    assert_equal_trainings(packed, padded)
    assert len({int(r) for c in padded.completions for r in (c != 0).sum(1)}) > 3  # ragged
    log = packed.logs[0]
    assert log["dualkv/tokens_packed"] < log["dualkv/tokens_padded"]
    assert name.startswith("cispo") or log["dualkv/dedup_ratio"] > 1.3


@pytest.mark.parametrize(
    ("of", "settings"),
    [
        ("grpo", {}),
        # above the rounding of gradients near zero
        ("grpo", {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}),
        ("grpo", {"learning_rate": 0.1, "beta": 0.04, **TWICE}),
        ("grpo", {"loss_type": "cispo", "evaluate": True}),
        ("grpo", {"model": "qwen3_moe", "router_aux_loss_coef": 0.0}),
        ("rloo", {"learning_rate": 0.01, **TWICE}),
        ("gmpo", {"beta": 0.04}),
        ("screens", {"model": "images", "learning_rate": 0.01}),  # images of prompts and of tools' answers
    ],
)
def test_updates_of_whole_generation_batches_are_those_of_trl(folder: Path, of: str, settings: dict[str, Any]) -> None:
    """The order of rollouts does not matter to an optimizer step that takes all of a generation batch."""
    ours, _, theirs = TRAINERS[of]
    packed, stock = (train(cls, folder, config=CONFIGS[of], **settings) for cls in (ours, theirs))
    assert_equal_updates(packed, stock)
    assert_equal_metrics(packed, stock)  # entropies, KL terms and clip ratios of TRL's micro-batches, not of groups
    assert len({log["entropy"] for log in stock.logs if "entropy" in log}) > 1


def of_turns(cls: type) -> type:
    return type(cls.__name__, (Turns, cls), {})


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the depths of the trees that are packed."""
    found = []

    def keep(*args: Any, own: Callable[..., Any] = common.pack_tree, **kwargs: Any) -> Any:
        batch = own(*args, **kwargs)
        found.append(batch.layout.depth)
        return batch

    monkeypatch.setattr(common, "pack_tree", keep)
    return found


@pytest.mark.parametrize("name", OF_TURNS)
def test_a_training_on_shared_turns_is_the_padded_one(folder: Path, name: str, depths: list[int]) -> None:
    settings = dict(OF_TURNS[name])
    of = settings.pop("of", "grpo")
    packed, padded = (train(of_turns(cls), folder, config=CONFIGS[of], **settings) for cls in TRAINERS[of][:2])
    assert max(depths) > 2
    assert_equal_trainings(packed, padded)


@pytest.mark.parametrize("of", ["grpo", "rloo"])
def test_updates_on_shared_turns_are_those_of_trl(folder: Path, of: str, depths: list[int]) -> None:
    packed, stock = (train(of_turns(cls), folder, config=CONFIGS[of]) for cls in TRAINERS[of][::2])
    assert max(depths) > 2
    assert_equal_updates(packed, stock)
    for ours, theirs in zip(packed.logs, stock.logs, strict=True):
        for name in ("loss", "grad_norm", "reward"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


def test_two_ranks_that_share_groups(tmp_path: Path) -> None:
    """DDP: the rollouts of a prompt are on both ranks, and each rank packs those that it has."""
    on_ranks(2, "tests.integrations.trl.ranks:main", str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for runs in ranks:
        assert largest(runs["GRPOTrainer"].logps, runs["Padded"].logps) < 1e-5
        assert_equal_updates(runs["GRPOTrainer"], runs["Padded"])
    ours, theirs = (r["GRPOTrainer"] for r in ranks)
    assert any(not torch.equal(a, b) for a, b in zip(ours.completions, theirs.completions, strict=True))
    assert all(torch.equal(ours.weights[name], weight) for name, weight in theirs.weights.items())
    assert_equal_metrics(ours, ranks[0]["Padded"])
    for name in ("dpo", "rewards"):
        for runs in ranks:
            (packed, _, weights), (stock, _, expected) = (runs[f"{name}, {kind}"] for kind in ("packed", "stock"))
            assert packed[0]["loss"] == pytest.approx(stock[0]["loss"], rel=1e-5)
            for of, weight in expected.items():
                assert_close(of, weights[of], weight, 1e-5)


# ---------------------------------------------------------------- micro-batches
def test_groups_follow_each_other_and_nothing_is_lost(folder: Path) -> None:
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 1}
    seen: dict[type, list[Any]] = {GRPOTrainer: [], trl.GRPOTrainer: []}
    for cls, batches in seen.items():
        trainer = make_trainer(cls, folder, **settings)

        def keep(model: Any, inputs: Any, own: Any = trainer._compute_loss, into: list[Any] = batches) -> Any:
            columns = (inputs[name].tolist() for name in ("prompt_ids", "completion_ids", "advantages"))
            into.append([(tuple(prompt), *rest) for prompt, *rest in zip(*columns, strict=True)])
            return own(model, inputs)

        trainer._compute_loss = keep
        trainer.train()
    assert [len({prompt for prompt, *_ in batch}) for batch in seen[GRPOTrainer]] == [1, 1, 1, 1]
    assert max(len({prompt for prompt, *_ in batch}) for batch in seen[trl.GRPOTrainer]) > 1
    # TRL's random order is kept: of the groups by their first rollout, and within each.
    grouped, shuffled = (list(chain.from_iterable(batches)) for batches in seen.values())
    first = list(dict.fromkeys(prompt for prompt, *_ in shuffled))
    assert grouped == sorted(shuffled, key=lambda row: first.index(row[0]))


def test_images_of_masked_tokens_are_left_out() -> None:
    """TRL masks completions that were cut."""
    ids, mask = torch.tensor([[5, 9, 6, 9, 7]] * 2), torch.ones(2, 5)
    mask[1, 3:] = 0
    images = [{"pixel_values": torch.arange(8.0)[:, None], "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}] * 2
    of_own = _seen(images, ids, mask, {9: 1}).images
    assert [[image.begin for image in row] for row in of_own] == [[1, 3], [1]]
    assert of_own[1][0].entry["pixel_values"].flatten().tolist() == [0, 1, 2, 3]


# ---------------------------------------------------------------- log-probs of given batches
# Of each rollout its prompt, by number, and the length of its response: interleaved groups, groups of one, a prompt
# that is the end of another one, a prompt of one token, an empty response.
ROLLOUTS = [(0, 5), (2, 7), (0, 0), (1, 3), (3, 6), (0, 9), (2, 1), (1, 9), (4, 4)]
PROMPT_LENS = [6, 1, 6, 11, 10]


def padded_batch() -> tuple[torch.Tensor, torch.Tensor, int]:
    """input_ids and attention_mask [9, 11 + 9]: prompts padded on the left, responses on the right; 9."""
    generator = torch.Generator().manual_seed(5)
    longest = torch.randint(3, VOCAB, (11,), generator=generator)
    prompts = [longest[-n:] if n > 9 else torch.randint(3, VOCAB, (n,), generator=generator) for n in PROMPT_LENS]
    width, room = max(PROMPT_LENS), max(r for _, r in ROLLOUTS)
    ids = torch.zeros(len(ROLLOUTS), width + room, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (p, r) in enumerate(ROLLOUTS):
        n = PROMPT_LENS[p]
        ids[row, width - n : width + r] = torch.cat([prompts[p], torch.randint(3, VOCAB, (r,), generator=generator)])
        mask[row, width - n : width + r] = 1
    return ids, mask, room


LogProbs = Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


def both(trainer: GRPOTrainer) -> tuple[LogProbs, LogProbs]:
    """Packed log-probs and TRL's, of the same model."""
    stock = trl.GRPOTrainer._get_per_token_logps_and_entropies.__get__(trainer)
    return trainer._get_per_token_logps_and_entropies, stock


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("model", ["qwen2", "llama", "granite"])  # granite scales its logits
def test_log_probs_of_ragged_rollouts(folder: Path, model: str, batch_size: int | None) -> None:
    trainer = make_trainer(GRPOTrainer, folder, model=model)
    packed, stock = both(trainer)
    ids, mask, room = padded_batch()
    got, expected = (
        f(trainer.model, ids, mask, room, batch_size=batch_size, compute_entropy=True) for f in (packed, stock)
    )
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        assert ours.shape == theirs.shape == (len(ROLLOUTS), room)
        assert (ours - theirs).abs().max() < 1e-5
        assert (ours[mask[:, -room:] == 0] == 0).all()
    assert got[2] is expected[2] is None
    assert packed(trainer.model, ids, mask, room)[1] is None


def batch_of_turns() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Make a batch like `padded_batch` of rollouts that share turns; one of them ends within others and two are
    equal."""
    prompts = [[1, *range(3, 14)]] * 5 + [[1, *range(20, 28)]] * 4
    tails = [[80], [81, 82, 83], [84] * 4, [], [85, 86], [80], [80], [87, 88], [89] * 3]
    responses = [turns(sum(p), i) + tail for i, (p, tail) in enumerate(zip(prompts, tails, strict=True))]
    width, room = max(map(len, prompts)), max(map(len, responses))
    ids = torch.zeros(len(prompts), width + room, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, width - len(p) : width + len(r)] = torch.tensor(p + r)
        mask[row, width - len(p) : width + len(r)] = 1
    return ids, mask, room


def rows_of(ids: torch.Tensor, mask: torch.Tensor) -> int:
    """Tokens with all before them and the next one; the last token of a sequence goes with any next one."""
    sequences = [row[own].tolist() for row, own in zip(ids, mask.bool(), strict=True)]
    rows = {(*s[: i + 1], "then", *s[i + 1 : i + 2]) for s in sequences for i in range(len(s))}
    ends = {r for r in rows if r[-1] == "then" and any(o[: len(r)] == r and o != r for o in rows)}
    return len(rows - ends)


def assert_equal_values(
    trainer: GRPOTrainer, ids: torch.Tensor, mask: torch.Tensor, room: int, batch_size: int | None = None
) -> None:
    """Compare log-probs, entropies and gradients of a weighted sum of them with those of TRL's code."""
    weights = torch.randn(len(ids), room, generator=torch.Generator().manual_seed(0))
    found = []
    for f in both(trainer):
        logps, entropies, _ = f(trainer.model, ids, mask, room, batch_size=batch_size, compute_entropy=True)
        trainer.model.zero_grad()
        (weights * (logps + 0.3 * entropies) * mask[:, -room:]).sum().backward()
        grads = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
        found.append((logps, entropies, torch.cat(grads)))
    (*values, gradients), (*stock, expected) = found
    assert largest(values, stock) < 1e-5
    assert expected.norm() > 1e-2
    assert_close("gradients", gradients, expected, 1e-4)


# Windows that end within the path, sinks, and recurrent layers, also with experts.
FEATURES = {
    "qwen3": lambda: make_model("qwen3"),
    "gemma3": lambda: make_featured("gemma3", 7),
    "gpt_oss": lambda: make_featured("gpt_oss", 7),
    "qwen3_5": lambda: make_recurrent("qwen3_5_text", vocab_size=VOCAB),
    "qwen3_next": lambda: make_recurrent("qwen3_next", vocab_size=VOCAB),
}


@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize("model", FEATURES)
def test_log_probs_and_gradients_of_shared_turns(folder: Path, model: str, batch_size: int | None) -> None:
    trainer = make_trainer(GRPOTrainer, folder, model=model, made=FEATURES[model](), gradient_checkpointing=False)
    ids, mask, room = batch_of_turns()
    assert_equal_values(trainer, ids, mask, room, batch_size)
    rows = trainer._metrics["eval"]["dualkv/tokens_packed"]
    size = batch_size or len(ids)
    assert rows == [rows_of(i, m) for i, m in zip(ids.split(size), mask.split(size), strict=True)]
    assert sum(rows) < ids.numel() / 2


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("make", [padded_batch, batch_of_turns])
def test_load_balancing_counts_the_padded_batch(folder: Path, make: Any, batch_size: int | None) -> None:
    trainer = make_trainer(GRPOTrainer, folder, model="qwen3_moe")
    ids, mask, room = make()
    got, expected = (
        f(trainer.model, ids, mask, room, batch_size=batch_size, compute_aux_loss=True)[2] for f in both(trainer)
    )
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_batch_without_responses_has_a_gradient_of_zero(folder: Path) -> None:
    trainer = make_trainer(GRPOTrainer, folder)
    ids, mask, room = padded_batch()
    mask[:, -room:] = 0
    logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, room)
    logps.sum().backward()
    assert logps.eq(0).all()
    assert all(p.grad is None or p.grad.eq(0).all() for p in trainer.model.parameters())


def test_autocast(folder: Path) -> None:
    ids, mask, room = padded_batch()
    exact = make_trainer(GRPOTrainer, folder)
    truth = both(exact)[1](exact.model, ids, mask, room)[0]
    trainer = make_trainer(GRPOTrainer, folder, bf16=True)
    ours, theirs = ((f(trainer.model, ids, mask, room)[0] - truth).norm().item() for f in both(trainer))
    assert 0 < ours < 2 * theirs


def test_a_model_that_is_enabled_already(folder: Path) -> None:
    """The reference model is made with the attention that its configuration names."""
    trainer = make_trainer(GRPOTrainer, folder)
    again = GRPOTrainer(
        trainer.model,
        trainer.reward_funcs[0],
        args=trl.GRPOConfig(output_dir=str(folder / "out"), **SETTINGS | {"beta": 0.1}),
        train_dataset=trainer.train_dataset,
        processing_class=tokenizer(),
    )
    ids, mask, room = padded_batch()
    packed, stock = both(again)
    assert (packed(again.ref_model, ids, mask, room)[0] - stock(again.model, ids, mask, room)[0]).abs().max() < 1e-5


def test_continuous_batching_leaves_what_was_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation leaves what layers keep, and `deterministic`; layers are not fused meanwhile."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    trainer = make_trainer(
        having(GRPOTrainer, fast=True), folder, use_transformers_continuous_batching=True, max_steps=3
    )
    enable(trainer.model, deterministic=True, fast=True)
    recompute_layers(trainer.model, "products", layers=1)
    found, kinds = [], []

    def note(*_: Any) -> None:
        if torch.is_grad_enabled():
            kinds.append(kept(trainer.model))

    trainer.model.get_decoder().register_forward_hook(note)

    def generate(self: Any, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        name = self.model.config._attn_implementation
        found.append((name, fused.is_fused(self.model)))
        return [[5, 2] for _ in prompt_ids], None

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", generate)
    trainer.train()
    assert found == [("sdpa", False)] * 3
    assert kinds == [["attention", "products"]] * 6
    assert trainer.model.config._attn_implementation == "dualkv-deterministic|sdpa"
    assert fused.is_fused(trainer.model)


@pytest.mark.parametrize("fast", [False, True])
def test_continuous_batching_generates_as_trl_does(folder: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    settings: dict[str, Any] = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64},
    }
    packed, padded = (train(cls, folder, **settings) for cls in (having(GRPOTrainer, fast=fast), Padded))
    assert all(torch.equal(a, b) for a, b in zip(packed.completions, padded.completions, strict=True))
    assert_equal_updates(packed, padded)


# ---------------------------------------------------------------- what depends on the micro-batch
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"loss_type": "bnpo"}, "loss_type='bnpo' divides by the tokens of a micro-batch"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5 takes the quantile"),
        ({"entropy_coef": 0.01}, "entropy_coef=0.01 averages entropies"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy=True averages entropies"),
        ({"model": "qwen3_moe", "router_aux_loss_coef": 0.5}, "router_aux_loss_coef=0.5 balances the experts"),
    ],
)
def test_a_loss_that_depends_on_micro_batches_is_named(folder: Path, settings: dict[str, Any], names: str) -> None:
    losses._warn.cache_clear()
    with pytest.warns(UserWarning, match=f"^dualkv: {names}.*hold a whole update") as caught:
        make_trainer(GRPOTrainer, folder, **settings)
    assert len([w for w in caught if str(w.message).startswith("dualkv: ")]) == 1


@pytest.mark.parametrize(
    ("of", "settings"),
    [
        ("grpo", {"loss_type": "dapo"}),
        ("grpo", {"loss_type": "bnpo", "steps_per_generation": 1, "per_device_train_batch_size": 12}),
        ("rloo", {}),
    ],
    ids=str,
)
def test_other_losses_are_quiet(folder: Path, of: str, settings: dict[str, Any]) -> None:
    losses._warn.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dualkv: ")
        make_trainer(TRAINERS[of][0], folder, config=CONFIGS[of], **settings)

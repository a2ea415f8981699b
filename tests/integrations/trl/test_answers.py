"""The packed trainers on pairs of answers against TRL's own, on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
import trl
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, TaskType
from trl.experimental import online_dpo as padded_online_dpo
from trl.trainer.utils import add_fused_lm_head

from dualkv.integrations import patching
from dualkv.integrations.transformers import enable, layers, recompute_layers
from dualkv.integrations.trl import DPOTrainer, RewardTrainer
from dualkv.integrations.trl.answers import pack_head, pack_score
from dualkv.integrations.trl.online_dpo import OnlineDPOTrainer
from tests.integrations import states
from tests.integrations.tiny import SIZES, VOCAB, assert_close, make_model
from tests.integrations.trainings import Gradients, Run
from tests.integrations.transformers.test_fast import kept
from tests.integrations.trl.runs import NF4, PROMPTS, SETTINGS, in_fp32, reward, tokenizer
from tests.integrations.trl.test_trainer import OF_THE_CLOCK

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own calls

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
# Answers of several lengths, also empty ones; each prompt has two pairs.
ANSWERS = [" ".join(f"t{3 + (7 * i + 13 * j) % 90}" for j in range(n)) for i, n in enumerate((5, 9, 0, 3, 14, 6, 8, 1))]
PAIRS = {
    "prompt": PROMPTS * 2,
    "chosen": [f" {ANSWERS[i % 8]}" for i in range(12)],
    "rejected": [f" {ANSWERS[(3 * i + 1) % 8]}" for i in range(12)],
}
COMMON = {name: value for name, value in SETTINGS.items() if name not in ("num_generations", "max_completion_length")}
COMMON |= {"learning_rate": 0.01, "seed": 4}


def trained(trainer: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train. Returns the log, the gradients of the last step, and the weights."""
    run = Run()
    trainer.add_callback(Gradients(run))
    trainer.train()
    run.end(trainer)
    return run.logs, run.gradients[-1], run.weights


def assert_same(make: Callable[[type], Any], ours: type, theirs: type, but: tuple[str, ...] = ()) -> dict[str, float]:
    """Train with both, one after the other, as each draws random numbers; returns the first log of the packed one."""
    (logs, gradients, weights), (expected_logs, expected_gradients, expected) = (
        trained(make(c)) for c in (ours, theirs)
    )
    assert len(logs) == len(expected_logs) > 2
    for log, wanted in zip(logs, expected_logs, strict=True):
        for name, value in wanted.items():
            if name not in but and not any(name.endswith(clock) for clock in (*OF_THE_CLOCK, "_per_second")):
                assert log[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name
    assert gradients.keys() == expected_gradients.keys()
    assert_close(
        "gradients",
        *(torch.cat([g.flatten() for g in grads.values()]) for grads in (gradients, expected_gradients)),
        1e-4,
    )
    for name, weight in expected.items():
        assert_close(name, weights[name], weight, 1e-5)
    return logs[0]


# ---------------------------------------------------------------- DPO
def dpo(cls: type, folder: Path, model: str = "qwen3", peft: Any = None, dataset: Any = PAIRS, **settings: Any) -> Any:
    path = folder / model
    if not path.exists():
        make_model(model).save_pretrained(path)
    pairs = Dataset.from_dict(dataset)
    args = trl.DPOConfig(output_dir=str(folder / "out"), **COMMON | {"per_device_train_batch_size": 4} | settings)
    trainer = cls(
        str(path), args=args, train_dataset=pairs, eval_dataset=pairs, processing_class=tokenizer(), peft_config=peft
    )
    return in_fp32(trainer)


def named(given: Any) -> str:
    """Name a test, alike in every process: an adapter's settings hold a set."""
    return "adapters" if isinstance(given, dict) and "peft" in given else str(given)


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_strategy": "steps", "eval_steps": 1},
        {"loss_type": ["sigmoid", "sft", "ipo"], "loss_weights": [1.0, 0.5, 0.1], "ld_alpha": 0.5},
        {"loss_type": "aot", "pad_to_multiple_of": 16, "max_length": 20, "gradient_checkpointing": False},
        {"use_weighting": True, "f_divergence_type": "js_divergence"},
        {"precompute_ref_log_probs": True},
        {"model": "qwen3_moe", "router_aux_loss_coef": 0.5},
        {"peft": LORA},
        {"peft": LORA, "model_init_kwargs": NF4},
    ],
    ids=named,
)
def test_dpo(tmp_path: Path, settings: dict[str, Any]) -> None:
    # At first policy and reference are one model. Computed in batches of other shapes, TRL's differ by rounding.
    but = ("rewards/accuracies",) if settings.get("precompute_ref_log_probs") else ()
    logs = assert_same(partial(dpo, folder=tmp_path, **settings), DPOTrainer, trl.DPOTrainer, but)
    assert logs["dualkv/tokens_packed"] < logs["dualkv/tokens_padded"]


def test_dpo_cut_at_the_start(tmp_path: Path) -> None:
    """Answers can lose their prompts with truncation_mode="keep_end", and then begin without any."""
    settings = {"truncation_mode": "keep_end", "max_length": 12}
    assert_same(partial(dpo, folder=tmp_path, **settings), DPOTrainer, trl.DPOTrainer)


def test_dpo_computes_the_prompt_of_a_pair_once(tmp_path: Path) -> None:
    pairs = {name: [column[2], column[8]] for name, column in PAIRS.items()}  # one prompt, two pairs
    ours = dpo(DPOTrainer, tmp_path, dataset=pairs, per_device_train_batch_size=2, max_steps=1)
    ours.train()
    columns = {name: [len(text.split()) for text in column] for name, column in pairs.items()}
    answers = [n + 1 for name in ("chosen", "rejected") for n in columns[name]]  # with the token that ends each
    assert len(set(pairs["prompt"])) == 1
    rows = ours.state.log_history[0]["dualkv/tokens_packed"]
    assert rows == columns["prompt"][0] - 1 + sum(answers) + len(answers)


BEGIN = " ".join(f"t{3 + (17 * j) % 77}" for j in range(12))
OF_TURNS = PAIRS | {name: [f" {BEGIN}{answer}" for answer in PAIRS[name]] for name in ("chosen", "rejected")}


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_strategy": "steps", "eval_steps": 1},
        {"model": "qwen3_moe", "router_aux_loss_coef": 0.5},
        {"loss_type": "ipo", "ld_alpha": 0.5, "precompute_ref_log_probs": True},
    ],
    ids=named,
)
def test_dpo_of_answers_that_begin_alike(tmp_path: Path, settings: dict[str, Any]) -> None:
    but = ("rewards/accuracies",) if settings.get("precompute_ref_log_probs") else ()
    make = partial(dpo, folder=tmp_path, dataset=OF_TURNS, **settings)
    logs = assert_same(make, DPOTrainer, trl.DPOTrainer, but)
    other = dpo(DPOTrainer, tmp_path, **settings)
    other.train()
    # Two answers each of four prompts in a batch: the tokens that they share, once for each prompt more than without.
    assert logs["dualkv/tokens_packed"] <= other.state.log_history[0]["dualkv/tokens_packed"] + 4 * 12 + 8


def test_what_dpo_refuses(tmp_path: Path) -> None:
    trainer = dpo(DPOTrainer, tmp_path)
    batch = {name: torch.ones(2, 4, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    with pytest.raises(ValueError, match="the batch has pixel_values: text alone is packed"):
        trainer.model(**batch, pixel_values=torch.ones(1), fused_lm_head=True)
    tuning = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    with pytest.raises(ValueError, match=r"the PEFT adapter 'default' \(PROMPT_TUNING\) puts tokens of its own"):
        dpo(DPOTrainer, tmp_path, peft=tuning)
    with pytest.raises(ValueError, match=r"neftune_noise_alpha is 5\.0, noise divided by"):
        dpo(DPOTrainer, tmp_path, neftune_noise_alpha=5.0)
    make_model("mistral", head_dim=520).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="has head dim 520"):
        dpo(DPOTrainer, tmp_path, model="wide")


# ---------------------------------------------------------------- reward models
def scorer(family: str = "Qwen3", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(tf, f"{family}Config")(**SIZES | settings, num_labels=1, attn_implementation="sdpa")
    return getattr(tf, f"{family}ForSequenceClassification")(config)


def rewards(cls: type, folder: Path, model: Any, peft: Any = None, dataset: Any = PAIRS, **settings: Any) -> Any:
    pairs = Dataset.from_dict(dataset)
    args = trl.RewardConfig(output_dir=str(folder / "out"), **COMMON | {"per_device_train_batch_size": 4} | settings)
    return cls(
        model, args=args, train_dataset=pairs, eval_dataset=pairs, processing_class=tokenizer(), peft_config=peft
    )


@pytest.mark.parametrize(
    ("settings", "peft"),
    [
        ({"eval_strategy": "steps", "eval_steps": 1}, None),
        ({"center_rewards_coefficient": 0.1, "pad_token": "<eos>", "gradient_checkpointing": False}, None),
        ({}, LoraConfig(**LORA.to_dict() | {"task_type": TaskType.SEQ_CLS, "modules_to_save": ["score"]})),
    ],
    ids=["evaluated", "centred, padded with the token that ends", "adapters"],
)
def test_rewards(tmp_path: Path, settings: dict[str, Any], peft: Any) -> None:
    pairs = PAIRS | {"margin": [0.1 * (i % 3) for i in range(12)]}

    def make(cls: type) -> Any:
        return rewards(cls, tmp_path, scorer(), copy.deepcopy(peft), pairs, **settings)

    assert assert_same(make, RewardTrainer, trl.RewardTrainer)["dualkv/dedup_ratio"] > 1.2


def test_what_rewards_refuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has head dim 520"):
        rewards(RewardTrainer, tmp_path, scorer("Mistral", head_dim=520))
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification is no GenericForSequenceClassification"):
        rewards(
            RewardTrainer,
            tmp_path,
            tf.GPT2ForSequenceClassification(tf.GPT2Config(n_layer=1, n_embd=12, vocab_size=VOCAB, num_labels=1)),
        )
    trainer = rewards(RewardTrainer, tmp_path, scorer())
    ids = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="the batch has labels"):
        trainer.model(input_ids=ids, attention_mask=ids, labels=ids)
    with pytest.raises(ValueError, match="attention_mask leaves out the last token"):
        trainer.model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 1, 0]] * 2))


# ---------------------------------------------------------------- Online DPO
WITH_PADDING = ("objective/kl", "objective/non_score_reward", "objective/rlhf_reward", "objective/entropy")


def online(cls: type, folder: Path, peft: Any = None, **settings: Any) -> Any:
    model = make_model()
    if settings.pop("ragged", True):
        model.generation_config.eos_token_id = [2, *range(60, VOCAB)]
    settings = {"max_new_tokens": 10, "beta": 0.1, "per_device_train_batch_size": 3} | settings
    args = padded_online_dpo.OnlineDPOConfig(output_dir=str(folder / "out"), **COMMON | settings)
    return cls(
        model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer(),
        peft_config=peft,
    )


@pytest.mark.parametrize(
    ("settings", "but"),
    [
        ({}, WITH_PADDING),
        ({"loss_type": "ipo", "max_length": 24, "missing_eos_penalty": 0.5}, WITH_PADDING),
        ({"peft": LORA}, WITH_PADDING),
        ({"ragged": False}, ()),  # without padding TRL's four metrics are of answers alone
    ],
    ids=named,
)
def test_online_dpo(tmp_path: Path, settings: dict[str, Any], but: tuple[str, ...]) -> None:
    assert_same(partial(online, folder=tmp_path, **settings), OnlineDPOTrainer, padded_online_dpo.OnlineDPOTrainer, but)


def test_what_online_dpo_refuses(tmp_path: Path) -> None:
    ids = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="the batch has images: text alone is packed"):
        online(OnlineDPOTrainer, tmp_path)._forward(None, ids, ids, ids, ids, {"pixel_values": ids})


# ---------------------------------------------------------------- fast
@pytest.mark.parametrize(("of", "keep"), [("dpo", "products"), ("rewards", None), ("online", None)])
def test_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, keep: str | None) -> None:
    """A training is that of TRL. Layers keep attention, or what they were told to, though TRL switches checkpointing on
    anew. The fused pieces are traced."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    made, ours, theirs = {
        "dpo": (dpo, DPOTrainer, trl.DPOTrainer),
        "rewards": (lambda cls, folder: rewards(cls, folder, scorer()), RewardTrainer, trl.RewardTrainer),
        "online": (online, OnlineDPOTrainer, padded_online_dpo.OnlineDPOTrainer),
    }[of]
    kinds = []

    def note(decoder: Any, *_: Any) -> None:
        if torch.is_grad_enabled():
            kinds.append(kept(decoder))

    def make(cls: type) -> Any:
        trainer = made(partial(cls, fast=True) if cls is ours else cls, tmp_path)
        if cls is ours:
            if keep is not None:
                recompute_layers(trainer.model, keep, layers=1)
            (decoder,) = layers.decoders(trainer.model)
            decoder.register_forward_hook(note)
        return trainer

    assert_same(make, ours, theirs, but=WITH_PADDING)
    assert len(kinds) > 0
    assert all(found == ["attention", keep or "attention"] for found in kinds)


# ---------------------------------------------------------------- what is undone
def with_head() -> Any:
    model = make_model()
    add_fused_lm_head(model)
    return model


@pytest.mark.parametrize(
    ("make", "pack"),
    [(with_head, lambda model: pack_head(enable(model), None)), (scorer, lambda model: pack_score(model, None))],
    ids=["head", "score"],
)
def test_trainers_leave_nothing(make: Any, pack: Any) -> None:
    model = make()
    before = states.of_model(model)
    pack(model)
    assert ".forward" in states.differences(before, states.of_model(model))
    patching.undo(model)
    assert states.differences(before, states.of_model(model)) == []

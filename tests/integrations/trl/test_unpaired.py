"""The packed trainers on several answers to a prompt (KTO, SFT) against TRL's own, on the CPU."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.trainer
import trl
from datasets import Dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from dualkv.integrations.transformers import enable
from dualkv.integrations.trl import KTOTrainer, SFTTrainer, group_by_prompt
from dualkv.integrations.trl.answers import pack_head
from tests.integrations.tiny import assert_close, gradients_asked, make_model
from tests.integrations.trl.runs import NF4, PROMPTS, in_fp32, tokenizer
from tests.integrations.trl.test_answers import ANSWERS, COMMON, LORA, assert_same, named

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own calls

STEPS = {"max_steps": 3, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
ACCUMULATED = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
# Four answers of several lengths to each prompt, in no order.
ROWS = [(prompt, f" {ANSWERS[(3 * i + 5 * j) % 8]}") for j in range(4) for i, prompt in enumerate(PROMPTS)]
DATA = {"prompt": [p for p, _ in ROWS], "completion": [a for _, a in ROWS]}
LABELLED = DATA | {"label": [i % 3 > 0 for i in range(len(ROWS))]}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {% generation %}{{ m['content'] }} <eos>"
    "{% endgeneration %}{% else %} t9 {{ m['content'] }} t11{% endif %}{% endfor %}"
)


def messages(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text.strip()}]


CONVERSATIONS = {
    "prompt": [messages("user", p) for p in DATA["prompt"]],
    "completion": [messages("assistant", a) for a in DATA["completion"]],
}
TURNS = {"messages": [
    messages("user", p) + messages("assistant", "t7 t8") + messages("user", "t5 t6") + messages("assistant", a)
    for p, a in ROWS if a.strip()
]}  # fmt: skip


def make(cls: type, folder: Path, dataset: Any, model: str = "qwen3", peft: Any = None, **settings: Any) -> Any:
    path = folder / model
    if not path.exists():
        make_model(model).save_pretrained(path)
    rows = Dataset.from_dict(dataset)
    if "prompt" in dataset:
        rows = group_by_prompt(rows, STEPS["per_device_train_batch_size"])
    config = trl.KTOConfig if "label" in dataset else trl.SFTConfig
    tokens = tokenizer()
    tokens.chat_template = TEMPLATE
    common = COMMON | STEPS | {"train_sampling_strategy": "sequential", "dataloader_pin_memory": False}
    trainer = cls(
        str(path),
        args=config(output_dir=str(folder / "out"), **common | settings),
        train_dataset=rows,
        eval_dataset=rows.select(range(7)),
        processing_class=tokens,
        peft_config=copy.deepcopy(peft),
    )
    return in_fp32(trainer)


QLORA = {"peft": LORA, "model_init_kwargs": NF4}


@pytest.mark.parametrize(
    "settings",
    [
        ACCUMULATED,
        {"gradient_checkpointing": False, "max_length": 20, "pad_to_multiple_of": 16},
        {"loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True},
        {"model": "qwen3_moe", "router_aux_loss_coef": 0.5},
        {"peft": LORA, "precompute_ref_log_probs": True, "gradient_checkpointing": False},
        {"peft": LORA},
        QLORA,
    ],
    ids=named,
)
def test_kto(tmp_path: Path, settings: dict[str, Any]) -> None:
    logs = assert_same(partial(make, folder=tmp_path, dataset=LABELLED, **settings), KTOTrainer, trl.KTOTrainer)
    assert logs["dualkv/dedup_ratio"] > 1.2


ONE_ROW = {"padding_free": True, "max_length": None}
EXPERTS = {"model": "qwen3_moe", "router_aux_loss_coef": 0.5}
SFT = {
    "evaluated": (DATA, ACCUMULATED),
    "all tokens": (DATA, {"completion_only_loss": False, "gradient_checkpointing": False, "pad_to_multiple_of": 16}),
    "one row, dft": (DATA, {"loss_type": "dft", **ONE_ROW}),
    "adapters": (DATA, {"peft": LORA}),
    "QLoRA": (DATA, QLORA),
    "experts": (DATA, {"max_length": 20, "truncation_mode": "keep_end", **EXPERTS}),
    "experts, one row": (DATA, {"pad_to_multiple_of": 16, **EXPERTS, **ONE_ROW}),
    "conversations": (CONVERSATIONS, {}),
    "assistants": (TURNS, {"assistant_only_loss": True}),
    "selective checkpointing": (TURNS, {"gradient_checkpointing_kwargs": {"selective": True}}),
    "packed by TRL": (DATA, {"packing": True, "max_length": 60, "per_device_train_batch_size": 2}),
}


@pytest.mark.filterwarnings("ignore:dualkv. packing is True")
@pytest.mark.parametrize("name", SFT)
def test_sft(tmp_path: Path, name: str) -> None:
    dataset, settings = SFT[name]
    logs = assert_same(partial(make, folder=tmp_path, dataset=dataset, **settings), SFTTrainer, trl.SFTTrainer)
    if "packing" not in settings:
        assert logs["dualkv/dedup_ratio"] > 1.1


@pytest.mark.filterwarnings("ignore:.use_liger_kernel=True. is deprecated:FutureWarning")
def test_kernels_of_liger_in_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL leaves Liger's head out. It comes when training begins, to models that are packed already."""
    changed = []

    def apply(model: Any, config: dict[str, bool]) -> None:
        assert config == {"fused_linear_cross_entropy": False}
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                module.forward = partial(torch.nn.functional.rms_norm, weight=module.weight, eps=1e-6,
                                         normalized_shape=module.weight.shape)  # fmt: skip
                changed.append(module)

    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", apply)
    make_one = partial(make, folder=tmp_path, dataset=LABELLED, use_liger_kernel=True)
    logs = assert_same(make_one, KTOTrainer, trl.KTOTrainer)
    assert len(changed) == 2 * 9
    assert logs["dualkv/dedup_ratio"] > 1.2


def test_adapters_ask_for_their_gradients(tmp_path: Path) -> None:
    """The first layer needs no gradient of its keys."""
    trainer = make(SFTTrainer, tmp_path, DATA, peft=LORA, gradient_checkpointing=False)
    assert gradients_asked(trainer.train) == {"qv", "qkv"}


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("count", ["completions", "all", "holes", "none"])
def test_values_of_tokens(one_row: bool, count: str) -> None:
    """Log-probs, entropies and more of TRL's head, and gradients."""
    prompts = [[5, 9, 2, 7, 4, 8, 3, 6, 11], [3], [12] * 20]
    rows = [torch.tensor([*p, 20 + i, *range(30, 30 + 3 * i), 2]) for p in prompts for i in (1, 2, 4)]
    marks = [torch.arange(len(r)) >= len(p) for r, p in zip(rows, [p for p in prompts for _ in range(3)], strict=True)]
    if count == "all":
        marks = [mark | True for mark in marks]
    elif count != "completions":
        marks = [mark & (torch.arange(len(mark)) % 3 > 0) & (count == "holes") for mark in marks]
    labels = [row.masked_fill(~mark, -100) for row, mark in zip(rows, marks, strict=True)]
    collate = DataCollatorForLanguageModeling(0, padding_free=one_row)
    inputs = collate([{"input_ids": r.tolist(), "labels": y.tolist()} for r, y in zip(rows, labels, strict=True)])
    found = []
    for packed in (True, False):
        model = make_model()
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        if packed:
            metrics: Any = defaultdict(lambda: defaultdict(list))
            pack_head(enable(model), SimpleNamespace(_metrics=metrics, model=model))
        out = model(**inputs, fused_lm_head=True, use_cache=False)
        weight = torch.randn(out.log_probs.shape, generator=torch.Generator().manual_seed(1))
        ((out.log_probs * weight).sum() + out.log_probs.sum() * 0).backward()
        found.append((out, torch.cat([p.grad.flatten() for p in model.parameters()])))
    (ours, grads), (theirs, expected) = found
    assert torch.equal(ours.label_mask, theirs.label_mask)
    assert theirs.label_mask.any() == (count != "none")
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-5)
    assert torch.equal(ours.is_top1, theirs.is_top1)
    assert_close("gradients", grads, expected, 1e-5)
    (ratio,) = metrics["train"]["dualkv/dedup_ratio"]
    assert ratio > 1.4 or count == "none"


def test_the_head_computes_rows_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations of many turns may have few tokens that count."""
    counts = []
    model = make_model()
    monkeypatch.setattr(model, "forward", lambda **given: counts.append((given["shift_labels"] != -100).sum()) or {})
    metrics: Any = defaultdict(lambda: defaultdict(list))
    pack_head(model, SimpleNamespace(_metrics=metrics, model=model))
    ids = torch.randint(3, 90, (2, 16)).index_fill(1, torch.arange(10), 7)
    labels = ids.masked_fill(torch.arange(16) % 5 != 1, -100)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    assert counts == [(labels[:, 1:] != -100).sum() - 2]  # the first two that count are shared


def test_labels_that_are_not_the_next_tokens() -> None:
    """A dataset or a collator may bring labels of its own, which TRL's head compares with."""
    model = make_model()
    add_fused_lm_head(model)
    metrics: Any = defaultdict(lambda: defaultdict(list))
    pack_head(enable(model), SimpleNamespace(_metrics=metrics, model=model))
    ids, mask = torch.randint(3, 90, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    call = partial(model, input_ids=ids, fused_lm_head=True)
    first = ids.clone()
    first[0, 0] = 99
    assert call(attention_mask=mask, labels=first).label_mask.all()  # nothing predicts a first token
    mask[1, :4] = 0
    for row, at, change in ((0, 5, 1), (1, 3, 0), (1, 4, 0)):  # another token, no token, a first token
        labels = torch.full_like(ids, -100)
        labels[row, at] = ids[row, at] + change
        with pytest.raises(ValueError, match=rf"labels\[{row}, {at}\] is \d+, expected -100, or {ids[row, at]} behind"):
            call(attention_mask=mask, labels=labels)
    starts = torch.tensor([0, 5, 12])
    row = {"input_ids": ids[:1], "labels": ids[:1].index_fill(1, torch.tensor([0]), -100)}
    with pytest.raises(ValueError, match=r"labels\[1, 0\] is .* behind another token of its sequence"):
        model(**row, cu_seq_lens_q=starts, fused_lm_head=True)
    with pytest.raises(ValueError, match="neither attention_mask nor cu_seq_lens_q"):
        model(**row, position_ids=torch.arange(12)[None], fused_lm_head=True)


def test_what_sft_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"label_smoothing_factor is given, .* logits of separate sequences"):
        make(SFTTrainer, tmp_path, DATA, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"torch_compile is True, .* which cannot be compiled"):
        make(SFTTrainer, tmp_path, DATA, torch_compile=True, torch_compile_backend="eager")
    make_model().save_pretrained(tmp_path / "qwen3")
    with pytest.raises(ValueError, match=r"compute_loss_func is given, .* logits of separate sequences"):
        make(partial(SFTTrainer, compute_loss_func=print), tmp_path, DATA)
    with pytest.warns(UserWarning, match="packing is True, .* answers to one prompt are apart"):
        make(SFTTrainer, tmp_path, DATA, packing=True)


# ---------------------------------------------------------------- the order of datasets
def test_answers_of_a_prompt_are_in_one_batch() -> None:
    groups = {f"p{i}": n for i, n in enumerate((4, 4, 2, 3, 1, 2))}
    rows = [(prompt, j) for j in range(4) for prompt, n in groups.items() if j < n]
    given = Dataset.from_dict({"prompt": [p for p, _ in rows], "completion": [j for _, j in rows]})
    made = group_by_prompt(given, 8, seed=1)
    assert sorted(zip(made["prompt"], made["completion"], strict=True)) == sorted(rows)
    batches = [made["prompt"][:8], made["prompt"][8:]]
    assert len(set(batches[0]) & set(batches[1])) <= 1  # the prompt at the border
    for batch in batches:  # each row follows one of another prompt, the first one the last
        assert all(a != b for a, b in zip(batch, batch[-1:] + batch[:-1], strict=True))
    assert made["prompt"] != group_by_prompt(given, 8, seed=2)["prompt"]
    labelled = given.add_column("label", [True] * len(given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group_by_prompt(labelled, 8, seed=1)
        group_by_prompt(given, 4)
    with pytest.warns(UserWarning, match=r"more than half of the rows in [1-4] of 4 batches.* than 4$"):
        group_by_prompt(labelled, 4)
    chats = given.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    texts = [prompt[0]["content"] for prompt in group_by_prompt(chats, 8, seed=1)["prompt"]]
    assert texts == made["prompt"]
    with pytest.raises(ValueError, match="dataset has columns text, expected one called prompt"):
        group_by_prompt(Dataset.from_dict({"text": ["a"]}), 8)
    with pytest.raises(TypeError, match=r"dataset is a IterableDataset, expected a datasets\.Dataset"):
        group_by_prompt(given.to_iterable_dataset(), 8)
    with pytest.raises(ValueError, match="dataset has no rows"):
        group_by_prompt(given.select([]), 8)
    with pytest.raises(ValueError, match="batch_size"):
        group_by_prompt(given, 0)

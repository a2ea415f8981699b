"""Short trainings by `swift rlhf` itself: arguments, template, collator, trainer. Only rollouts are made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rewards import ORM, orms
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer as Stock
from swift.trainers import TrainerFactory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.integrations.tiny import make_model
from tests.integrations.trainings import Gradients, Run

PROMPTS = ["Write about tea, and then about rain.", "Rain?", "Name the colour of the sky at noon in May."]
GROUP = 4
SETTINGS = {
    "rlhf_type": "grpo",
    "model_type": "qwen3",
    "template": "qwen",
    "tuner_type": "full",
    "reward_funcs": "of_lengths",
    "num_generations": GROUP,
    "per_device_train_batch_size": 6,  # so that a micro-batch ends within a group
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,  # so that policy and old policy differ
    "max_steps": 3,
    "max_completion_length": 64,
    "learning_rate": 0.3,
    "optim": "sgd",  # AdamW makes steps of the rounding of near-zero gradients
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
    "lora_dropout": 0.0,
    "beta": 0.04,
    "temperature": 0.7,
    "log_entropy": True,
    "torch_dtype": "float32",
    "use_cpu": True,
    "gradient_checkpointing": False,
    "check_model": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "split_dataset_ratio": 0,
    "dataloader_num_workers": 0,
    "dataset_num_proc": 1,
    "disable_tqdm": True,
}


class OfLengths(ORM):  # type: ignore[misc]
    """A reward that differs between the rollouts of a group."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [len(ids[-1]) % 7 / 7 for ids in kwargs["response_token_ids"]]


orms["of_lengths"] = OfLengths


def prepare(folder: Path) -> Path:
    """Write a tiny model with random weights, its tokenizer of bytes, and prompts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    marks = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer.add_special_tokens(marks)
    tokenizer.save_pretrained(folder)
    make_model("qwen3", vocab_size=len(tokenizer)).save_pretrained(folder)
    rows = [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Rollouts:
    """A mixin before a trainer: ragged rollouts of one and of two turns; of four the first two share their first turn
    and a tool's answer, and the last two are equal."""

    def _infer_single_or_multi_turn(self, samples: list[Any], *_: Any, **__: Any) -> list[Any]:
        for i, sample in enumerate(samples):
            draw = torch.Generator().manual_seed(1000 * self._step + i // GROUP)  # type: ignore[attr-defined]
            first = torch.randint(256, (12,), generator=draw).tolist()
            draw.manual_seed(1000 * self._step + min(i % GROUP, 2) + 7 * (i // GROUP))  # type: ignore[attr-defined]
            n = 3 + int(torch.randint(11, (1,), generator=draw))
            last = torch.randint(256, (n,), generator=draw).tolist()
            turns = [first, last] if i % GROUP < 2 else [last]
            sample.messages.append({"role": "assistant", "content": "one"})
            if len(turns) > 1:
                sample.messages += [
                    {"role": "tool", "content": "a tool's answer"},
                    {"role": "assistant", "content": "two"},
                ]
            sample.response_token_ids = turns
            sample.response_loss_mask = [[int(j % 5 != 3) for j in range(len(turn))] for turn in turns]  # holes
            sample.finish_reason = "length" if i % GROUP == 1 else "stop"
        return samples


def arguments(folder: Path, **settings: Any) -> list[str]:
    """The words behind `swift rlhf`."""
    paths = {"model": folder, "dataset": folder / "prompts.jsonl", "output_dir": folder / "out"}
    words: list[str] = []
    for name, value in (paths | SETTINGS | settings).items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def train(cls: type[Stock], folder: Path, free: bool = False, **settings: Any) -> Run:
    """Train by `swift rlhf` with a trainer class; `free`: with padding-free rows, which ms-swift's arguments allow with
    FlashAttention alone."""
    run = Run()

    class Recorded(Rollouts, cls):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["template"].padding_free = free
            super().__init__(*args, **kwargs)
            self.add_callback(Gradients(run))

        def _get_per_token_logps_and_entropies(
            self, model: Any, inputs: Any, batch: Any, *args: Any, **kwargs: Any
        ) -> Any:
            found = super()._get_per_token_logps_and_entropies(model, inputs, batch, *args, **kwargs)
            for values, seen in zip(found, (run.logps, run.entropies), strict=True):
                if values is not None:
                    seen.append(values.detach()[batch.completion_mask])
            return found

        def _compute_loss_and_metrics(self, *args: Any) -> Any:
            loss, metrics = super()._compute_loss_and_metrics(*args)
            run.losses.append(loss.detach())
            return loss, metrics

        def train(self, *args: Any, **kwargs: Any) -> Any:
            result = super().train(*args, **kwargs)
            run.end(self)
            return result

    with mock.patch.object(TrainerFactory, "get_trainer_cls", return_value=Recorded):
        SwiftRLHF(arguments(folder, **settings)).main()
    return run

"""Train a small model in bf16 with TRL's GRPO, and hold the ratios of equal weights to 1 and the KL to 0, exactly.

    python -m tests.gpu.trl_bits            # in one process
    python -m tests.gpu.trl_bits --ranks 2  # two processes with DDP, which share the card by gloo

Layers are recomputed in the backward; prompts and completions are ragged. Without `batch_invariant` the ratios differ
from 1. On a machine without a GPU the program runs on the CPU, where lengths are multiples of 16.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dualkv.integrations.metrics import RATIO
from dualkv.integrations.trl import GRPOTrainer

GPU = torch.cuda.is_available()
UNIT = 1 if GPU else 16  # lengths are multiples of it
WORDS = 500  # in prompts and completions
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "vocab_size": 151_936}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 512}
PROMPTS = [" ".join(f"w{(11 * i + 5 * j) % WORDS}" for j in range(n * UNIT)) for i, n in
           enumerate((700, 45, 333, 129) if GPU else (6, 2, 4, 3))]  # fmt: skip
# Two iterations of four micro-batches: old log-probs are those of the weights in the first one.
SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "num_iterations": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "max_completion_length": 400,
    "beta": 0.04,
    "learning_rate": 1e-4,
    "bf16": True,
    "use_cpu": not GPU,
    "gradient_checkpointing": True,
    "model_init_kwargs": {"dtype": "bfloat16"},
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


class Completed(GRPOTrainer):
    """Completions are random tokens of ragged lengths."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        draw = np.random.default_rng(
            [sum(map(len, prompt_ids)), self.state.global_step, self.accelerator.process_index]
        )
        longest = 400 // UNIT if GPU else 3
        lengths = UNIT * draw.integers(1, longest, len(prompt_ids))
        return [draw.integers(0, WORDS, n).tolist() for n in lengths], None


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(np.mean(ids)) / WORDS for ids in completion_ids]


def trained(folder: Path, batch_invariant: bool) -> list[dict[str, float]]:
    """The logs of each step."""
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = Qwen3Config(**(SIZES if GPU else SMALL), **heads, initializer_range=0.05, eos_token_id=WORDS + 1)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)} | {"<pad>": WORDS, "<eos>": WORDS + 1}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    more = {"ddp_backend": "gloo"} if "RANK" in os.environ else {}
    trainer = Completed(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=trl.GRPOConfig(output_dir=str(folder), **SETTINGS, **more),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        batch_invariant=batch_invariant,
    )
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


def check() -> None:
    """Raises AssertionError if a ratio is not 1 with `batch_invariant`, or if none differs without it."""
    with tempfile.TemporaryDirectory() as folder:
        invariant, plain = (trained(Path(folder), asked) for asked in (True, False))
    ratios = [log.get(RATIO) for log in invariant]
    print("ratios", ratios, "without", [log.get(RATIO) for log in plain], "KLs", [log["kl"] for log in invariant])
    assert ratios == [1.0, None, 1.0, None], ratios
    assert invariant[0]["kl"] == 0.0, invariant[0]["kl"]
    assert invariant[1]["kl"] > 0.0
    if GPU:  # a CPU's products in bf16 have equal bits
        assert any(log.get(RATIO) not in (None, 1.0) for log in plain), "the check cannot fail"


def on_ranks(count: int) -> None:
    """Run :func:`check` in so many processes on one card."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # One local rank: accelerate chooses the card by it.
    shared = {"WORLD_SIZE": count, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.trl_bits"],
            env=os.environ | {name: str(value) for name, value in shared.items()} | {"RANK": str(rank)},
        )
        for rank in range(count)
    ]
    assert [process.wait() for process in started] == [0] * count


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks"]:
        on_ranks(int(sys.argv[2]))
    else:
        check()

"""TRL's asynchronous GRPO on DualKV against TRL's own, and against every path of its trees alone."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, packing
from trl.experimental.async_grpo import async_grpo_trainer as theirs
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from dualkv.integrations.trl import probe
from dualkv.integrations.trl.async_grpo import AsyncGRPOTrainer
from tests.integrations.tiny import VOCAB, make_featured, make_model
from tests.integrations.transformers.test_recurrent import make as make_recurrent
from tests.integrations.trl.runs import NF4, SETTINGS, in_fp32, of_images, tokenizer
from tools.bench.trl_async import Alone

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own calls

OURS = {"steps": 3, "groups": 24, "responses": 4}
METRICS = ("loss", "grad_norm", "kl", "entropy", "ratio", "batch/packing_ratio")
CLIPS = tuple(f"clip_ratio/{name}" for name in ("region_mean", "low_mean", "high_mean", "low_min", "high_max"))


def varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, causal: bool,
           window_size: tuple[int, int]) -> torch.Tensor:  # fmt: skip
    """Stands for FlashAttention-3's function, whose sequences of queries end where their keys do."""
    assert causal
    out = []
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        queries, keys, values = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        behind = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
        seen = (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
        given = {"attn_mask": seen, "scale": softmax_scale, "enable_gqa": True}
        out.append(torch.nn.functional.scaled_dot_product_attention(queries, keys, values, **given).transpose(0, 1))
    return torch.cat(out)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put PyTorch in the place of FlashAttention-3, and no figure in that of a GPU's speed."""
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen))
    monkeypatch.setattr(theirs, "get_peak_flops_per_device", lambda *_: None)


class Worker:
    """Stands for vLLM: a queue of samples of two turns, the first one shared in every other group; no weights move."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        draw = torch.Generator().manual_seed(0)

        def tokens(n: int) -> torch.Tensor:
            return torch.randint(3, VOCAB, (n,), generator=draw)

        system = tokens(9)
        for group in range(OURS["groups"]):
            prompt, turn, tool = torch.cat([system, tokens(5 + group % 3)]), tokens(7), tokens(6)
            for i in range(OURS["responses"]):
                parts = [prompt, turn if group % 2 else tokens(3 + i), tool, tokens(4 + i)]
                ids = torch.cat(parts)
                trained = torch.cat([torch.full((len(p),), j % 2) for j, p in enumerate(parts)])
                old = -5.0 + 0.3 * torch.randn(len(ids), generator=draw)
                advantage = float(torch.randn((), generator=draw))
                arrays = (ids.numpy(), trained.numpy(), old.numpy())
                self.rollout_buffer.put(RolloutSample([], [], *arrays, advantage, 0, group, {}, time.time()))

    def send_weights(self, pairs: Any) -> None:
        assert len(list(pairs)) > 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def make(cls: Any, folder: Path, model: Any, peft: Any = None, **settings: Any) -> Any:
    model.save_pretrained(folder / "model")
    common = {n: x for n, x in SETTINGS.items() if n != "max_completion_length"} | {"max_steps": OURS["steps"]}
    common |= {"num_generations": OURS["responses"], "dtype": "float32", "token_budget": -1, "max_staleness": 100}
    common["learning_rate"] = 0.005  # larger steps make more of rounding than 1e-5 nats
    worker = Worker()
    trainer = cls(
        str(folder / "model"),
        reward_funcs=[],
        args=AsyncGRPOConfig(str(folder / "out"), **common | settings),
        train_dataset=Dataset.from_dict({"prompt": ["t3"] * OURS["groups"]}),
        processing_class=tokenizer(),
        rollout_worker=worker,
        weight_transfer=worker,
        peft_config=peft,
    )
    return in_fp32(trainer)


def train(cls: Any, folder: Path, model: Any, **settings: Any) -> Any:
    """Log-probs of the rows of each micro-batch, what was logged, and weights."""
    kept: list[torch.Tensor] = []

    class Recorded(cls):  # type: ignore[misc,valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                stock = torch.exp

                def exp(ratio: torch.Tensor) -> torch.Tensor:  # what TRL does with its log-probs first
                    kept.append(ratio.detach() + inputs["old_log_probs"][inputs["token_index"] >= 0])
                    return stock(ratio)

                patch.setattr(theirs, "torch", SimpleNamespace(**vars(torch) | {"exp": exp}))
                return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = make(Recorded, folder, model, **settings)
    trainer.train()
    logs = [x for x in trainer.state.log_history if "loss" in x]
    return kept, logs, {n: p.detach() for n, p in trainer.model.named_parameters()}


def compare(cls: Any, folder: Path, model: Any, **settings: Any) -> None:
    expected, logs, weights = train(cls, folder / "expected", model, **settings)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    got, own, after = train(AsyncGRPOTrainer, folder / "got", model, **settings)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert len(logs) == len(own) == OURS["steps"]
    for names, atol in ((METRICS, 1e-4), (CLIPS, 1e-4)):
        values = [[[log[n] for n in names] for log in run] for run in (own, logs)]
        torch.testing.assert_close(*(torch.tensor(x) for x in values), rtol=1e-4, atol=atol)
    assert own[0]["batch/packing_ratio"] > 1.2
    torch.testing.assert_close(after, weights, rtol=1e-5, atol=1e-5)
    moved = [float((weights[n] - p).abs().max()) for n, p in start.items() if n in weights]
    assert settings.get("peft") or max(moved) > 1e-4, moved


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_trains_as_trl(peft: Any, checkpointing: bool, folder: Path, tmp_path: Path) -> None:
    compare(theirs.AsyncGRPOTrainer, tmp_path, make_model("qwen3"), peft=peft, gradient_checkpointing=checkpointing)


def test_qlora(tmp_path: Path) -> None:
    compare(theirs.AsyncGRPOTrainer, tmp_path, make_model("qwen3"), peft=LORA, model_init_kwargs=NF4)


def test_windows_and_a_budget_of_tokens(tmp_path: Path) -> None:
    model = make_featured("qwen2", 11)
    compare(theirs.AsyncGRPOTrainer, tmp_path, model, token_budget=150, gradient_checkpointing=False)


def test_the_load_balancing_loss_counts_rows_as_trl(tmp_path: Path) -> None:
    compare(theirs.AsyncGRPOTrainer, tmp_path, make_model("qwen3_moe"), router_aux_loss_coef=1.0)


def test_the_text_of_a_model_with_images(tmp_path: Path) -> None:
    compare(theirs.AsyncGRPOTrainer, tmp_path, of_images()[0])


REFUSED = {
    "sinks and windows": (lambda: make_featured("gpt_oss", 11), "uses attention sinks"),
    "hybrid": (lambda: make_recurrent("qwen3_next", vocab_size=VOCAB), r"has \['linear_attention'\] layers"),
}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_trl_refuses(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    model, said = REFUSED[kind][0](), REFUSED[kind][1]
    with pytest.raises(ValueError, match=said):
        make(theirs.AsyncGRPOTrainer, tmp_path / "refused", model)
    own = make(AsyncGRPOTrainer, tmp_path / "own", model).model
    assert own.config.layer_types == model.config.layer_types
    assert [n for n, _ in own.named_parameters()] == [n for n, _ in model.named_parameters()]
    compare(Alone, tmp_path, model, gradient_checkpointing=checkpointing, router_aux_loss_coef=0.0)


def test_neftune_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neftune_noise_alpha is 5, noise divided by"):
        make(AsyncGRPOTrainer, tmp_path, make_model("qwen3"), neftune_noise_alpha=5)


@pytest.mark.parametrize("fault", ["parents", "names"])
def test_other_trees_are_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROVED", set())
    pack = packing.TreeRow.pack

    def other(row: Any) -> dict[str, torch.Tensor]:
        found = pack(row)
        if fault == "parents":  # every segment begins anew
            found["tree_cu_seqlens_k"] = found["tree_cu_seqlens_q"]
            found["tree_kv_index"] = torch.arange(len(found["input_ids"]))
        else:
            found["tree_paths"] = found.pop("tree_kv_index")
        return found

    monkeypatch.setattr(packing.TreeRow, "pack", other)
    said = {"parents": r"a small model raises ValueError: position_ids\[", "names": "a small model raises KeyError"}
    with pytest.raises(ImportError, match=rf"AsyncGRPOTrainer cannot run: trl .* does not fit .*: {said[fault]}"):
        make(AsyncGRPOTrainer, tmp_path, make_model("qwen3"))

"""Rollouts by colocated vLLM, for which a model of transformers stands in.

TRL's own code makes the requests, reads the answers and sends the weights. The stand-in samples from the weights that
it was sent and from nothing else, so the log-probs of its samples tell whether these are the policy's of that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.generation import vllm_generation

from tests.integrations.tiny import make_model
from tests.integrations.trl.runs import train
from tests.integrations.trl.test_trainer import CONFIGS, TRAINERS, assert_equal_updates

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own calls


class Engine:
    """Samples of a tiny Qwen3 that has zeros for weights until it is sent others."""

    def __init__(self) -> None:
        self.model = make_model("qwen3").eval().requires_grad_(False)
        for weight in self.model.parameters():
            weight.zero_()
        self.draw = torch.Generator().manual_seed(0)
        self.prompts: list[int] = []  # of each call
        self.updates = 0  # of weights: the prefix cache is reset after each

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in named:
            self.model.get_parameter(name).copy_(value.detach())

    def reset_prefix_cache(self) -> None:
        self.updates += 1

    @torch.no_grad()
    def sample(self, prompt: list[int], count: int, asked: Any) -> Iterator[tuple[list[int], list[float]]]:
        """Token ids and their log-probs of `count` responses; asked: max_tokens, temperature."""
        for _ in range(count):
            ids, logprobs = list(prompt), []
            while len(logprobs) < asked["max_tokens"] and (not logprobs or not ids[-1] >= 80):
                row = (self.model(torch.tensor([ids])).logits[0, -1] / asked["temperature"]).log_softmax(-1)
                ids.append(int(row.exp().multinomial(1, generator=self.draw)))
                logprobs.append(float(row[ids[-1]]))
            yield ids[len(prompt) :], logprobs


class Colocated:
    """The methods of `vllm.LLM` that TRL calls."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.reset_prefix_cache = engine, engine.reset_prefix_cache
        runner = SimpleNamespace(model=engine)
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=worker)

    def generate(self, prompts: list[Any], sampling_params: dict[str, Any], use_tqdm: bool) -> list[Any]:
        self.engine.prompts.append(len(prompts))
        return [self._answer(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    def _answer(self, prompt: list[int], asked: dict[str, Any]) -> Any:
        outputs = []
        for ids, logprobs in self.engine.sample(prompt, asked["n"], asked):
            each = [{i: SimpleNamespace(logprob=x, rank=1)} for i, x in zip(ids, logprobs, strict=True)]
            outputs.append(SimpleNamespace(token_ids=ids, logprobs=each))
        return SimpleNamespace(prompt_token_ids=prompt, outputs=outputs)


@pytest.mark.parametrize("of", ["grpo", "rloo"])
def test_a_training_is_that_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda *_, **__: True)
    monkeypatch.setattr(vllm_generation, "SamplingParams", dict, raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # so that what TRL sets ends with the test
        monkeypatch.delenv(name)
    ours, _, stock = TRAINERS[of]
    settings = {"config": CONFIGS[of], "use_vllm": True, "vllm_mode": "colocate", "temperature": 0.9}
    runs, engines = [], []
    for cls in (ours, stock):
        engines.append(Engine())
        monkeypatch.setattr(vllm_generation, "LLM", lambda engine=engines[-1], **_: Colocated(engine), raising=False)
        runs.append(train(cls, tmp_path, **settings))
    packed, padded = runs
    assert_equal_updates(packed, padded)
    assert engines[0].prompts == engines[1].prompts
    for engine in engines:
        assert len(engine.prompts) == engine.updates == 2  # both steps sample, with their own weights
    for log, other in zip(packed.logs[:2], padded.logs[:2], strict=True):
        assert log["dualkv/dedup_ratio"] > 1.3
        for name, value in other.items():
            if name.startswith(("loss", "grad_norm", "reward", "completions/", "sampling/")):
                assert log[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        # Only GRPO compares with the log-probs that vLLM gave.
        assert of == "rloo" or log["sampling/sampling_logp_difference/max"] < 1e-4

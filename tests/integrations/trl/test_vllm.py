"""Rollouts by vLLM, colocated and as a server, where a model of transformers stands in for vLLM.

TRL's own code makes the requests, reads the answers and sends the weights. The stand-in samples from the weights that
it was sent and from nothing else, so the log-probs of its samples tell whether these are the policy's of that step.
NCCL, by which TRL sends weights to a server, is a queue here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.generation import vllm_client, vllm_generation

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


def answer(engine: Engine, sent: Queue[Any], path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Answer TRL's client as a server of vLLM does, with its development endpoints."""
    if path == "/v1/models":
        return {"data": [{"id": "tiny"}]}
    if path.startswith("/server_info"):
        settings = {
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
        return {"vllm_config": settings}
    if path == "/update_weights":
        info = asked["update_info"]
        named = [sent.get(timeout=900) for _ in info["names"]]
        assert [(n, list(w.shape)) for n, w in named] == list(zip(info["names"], info["shapes"], strict=True))
        engine.load_weights(named)
    elif path == "/reset_prefix_cache":
        engine.reset_prefix_cache()
        return {"success": True}
    elif path == "/v1/completions":
        engine.prompts.append(len(asked["prompt"]))
        choices = []
        for prompt in asked["prompt"]:
            for ids, logprobs in engine.sample(prompt, asked["n"], asked):
                names = [f"token_id:{i}" for i in ids]
                each = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": [None] * len(ids)}
                choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": each})
        return {"choices": choices}
    else:
        assert path in ("/health", "/start_weight_update", "/finish_weight_update"), path
    return {}


@contextmanager
def server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Serves the engine; the settings by which TRL finds it."""
    sent: Queue[Any] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data = json.dumps(answer(engine, sent, self.path, json.loads(body or b"{}"))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    def send(iterator: Iterable[Any], **_: Any) -> None:
        for named in iterator:
            sent.put(named)

    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda client, device: client.get_server_info())
    by_nccl = {  # of vLLM before 0.28, as where none is installed, and from 0.28 on
        "NCCLWeightTransferEngine": SimpleNamespace(trainer_send_weights=send),
        "NCCLTrainerSendWeightsArgs": dict,
        "packed_nccl_broadcast_producer": send,
    }
    for name, value in by_nccl.items():
        monkeypatch.setattr(vllm_client, name, value, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield {"vllm_mode": "server", "vllm_server_base_url": f"http://127.0.0.1:{serving.server_port}"}
        serving.shutdown()
        thread.join()


@contextmanager
def colocated(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # so that what TRL sets ends with the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(vllm_generation, "LLM", lambda **_: Colocated(engine), raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", dict, raising=False)
    yield {"vllm_mode": "colocate"}


@pytest.mark.parametrize(("mode", "of"), [(server, "grpo"), (server, "rloo"), (colocated, "grpo")])
def test_a_training_is_that_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Callable[..., Any], of: str
) -> None:
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda *_, **__: True)
    ours, _, stock = TRAINERS[of]
    runs, engines = [], []
    for cls in (ours, stock):
        engine = Engine()
        with mode(engine, monkeypatch) as settings:
            runs.append(train(cls, tmp_path, config=CONFIGS[of], use_vllm=True, temperature=0.9, **settings))
        engines.append(engine)
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

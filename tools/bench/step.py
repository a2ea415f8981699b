"""`python -m tools.bench.step --json step.json`: forward and backward of one group, packed and replicated.

Both ways recompute every layer in the backward. Only rows that predict response tokens reach the head. The way `fast`
is packed with all settings that save time: fused layers, what `--keep` says kept, compiled log-probs, kept logits.
With `--megatron` the model is megatron-core's (:mod:`tools.bench.megatron`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer

from dualkv.bench import trees
from dualkv.bench.run import in_words
from dualkv.data.rollouts import Rollouts
from dualkv.integrations.transformers import enable, head, recompute_layers
from dualkv.integrations.transformers.batches import ModelBatch, packed_batches, replicated_batches
from dualkv.logprobs import response_logprobs
from dualkv.models import CONFIGS
from tools.bench import harness, stock_attention
from tools.bench.record import JsonPath, Record

WAYS = "packed", "fast", "replicated"


@dataclass(frozen=True)
class Sizes:
    """The model and the group."""

    model: harness.Model = "qwen3-8b"
    layers: harness.Layers = 8
    responses: harness.Responses = 32
    prompt_len: harness.PromptLen = 8192
    response_len: harness.ResponseLen = 2048
    micro_batch: harness.MicroBatch = 8
    repeats: harness.Repeats = 3
    chunk_size: harness.ChunkSize = 4096
    dtype: harness.Dtype = "bfloat16"

    @property
    def length(self) -> int:
        """The tokens of a sequence."""
        return self.prompt_len + self.response_len

    def batches(self, device: torch.device) -> dict[str, list[ModelBatch]]:
        """Make the micro-batches of the group by way."""
        rollouts = make_rollouts(self)
        return {
            "packed": packed_batches(rollouts, self.prompt_len + self.responses * self.response_len, device),
            "replicated": replicated_batches(rollouts, self.micro_batch * self.length, device),
        }


@dataclass(frozen=True)
class Update(Sizes):
    """A group, and whether the optimizer makes a step."""

    optimizer: Annotated[bool, typer.Option("--optimizer", help="With a step of AdamW, states in this dtype.")] = False
    keep: Annotated[str, typer.Option(help="What the way fast keeps: see `recompute_layers`.")] = "products"
    kept_chunks: Annotated[int, typer.Option(help="Chunks of the head whose logits the way fast keeps.")] = 0


def make_config(sizes: Sizes) -> Any:
    """Make the model's configuration; experts run transformers' fastest products, for both ways."""
    config = harness.make_config(sizes.model, sizes.layers)
    if experts_of(config):
        config._experts_implementation = "grouped_mm"
    return config


def make_model(sizes: Sizes, device: torch.device) -> Any:
    """Make the model with random weights."""
    return harness.make_model(make_config(sizes), sizes.dtype, device)


def experts_of(config: Any) -> int:
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0


def kinds_of(config: Any) -> list[tuple[int | None, bool]]:
    """(window, whether there are sinks) of each layer that has attention."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [
        (config.sliding_window if t == "sliding_attention" else None, config.model_type == "gpt_oss")
        for t in types
        if t != "linear_attention"
    ]


def make_rollouts(sizes: Sizes) -> Rollouts:
    vocabulary = CONFIGS[sizes.model]["vocab_size"]
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(vocabulary, (length,), generator=generator)

    responses = [tokens(sizes.response_len) for _ in range(sizes.responses)]
    return Rollouts([tokens(sizes.prompt_len)], [responses], [[0.0] * sizes.responses])


def loss_weights(tokens: int, device: torch.device) -> torch.Tensor:
    """Draw the weights of log-probs in the loss, [tokens]."""
    return torch.randn(tokens, generator=torch.Generator().manual_seed(1)).to(device) / max(tokens, 1)


def flops(sizes: Sizes, packed: bool) -> float:
    """Count the FLOP of a forward and a backward without recomputation, as :func:`dualkv.bench.trees.flops` does for
    whole models, with windows."""
    n, p, r = sizes.responses, sizes.prompt_len, sizes.response_len
    prompts, kinds = 1 if packed else n, kinds_of(make_config(sizes))

    def seen(length: int, window: int | None) -> int:
        """Count the pairs of one sequence."""
        inside = min(length, window or length)
        return inside * inside // 2 + (length - inside) * inside

    pairs = sum(prompts * seen(p, w) + n * (seen(p + r, w) - seen(p, w)) for w, _ in kinds) // len(kinds)
    part = sizes.layers / CONFIGS[sizes.model]["num_hidden_layers"]
    layers = trees.flops(sizes.model, prompts * p + n * r, pairs, 0) * part
    return layers + trees.flops(sizes.model, 0, 0, n * r)


def step(
    model: Any, batches: list[ModelBatch], weights: torch.Tensor, chunk_size: int, compiled: bool = False,
    kept_chunks: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Run forward and backward of every micro-batch; returns the log-probs [M]."""

    def logprobs(one: ModelBatch) -> torch.Tensor:
        hidden = model.get_decoder()(**one.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        return response_logprobs(
            hidden, head(model), one.batch, compiled=compiled, chunk_size=chunk_size, kept_chunks=kept_chunks
        )[0]

    return step_of(batches, weights, logprobs)


def step_of(
    batches: list[ModelBatch], weights: torch.Tensor, logprobs: Callable[[ModelBatch], torch.Tensor]
) -> torch.Tensor:
    """Run forward and backward of every micro-batch, whose log-probs `logprobs` computes; returns those [M]."""
    found = torch.empty_like(weights)
    for one in batches:
        logp = torch.cat(one.batch.unpack(logprobs(one)))
        (logp * weights[one.places]).sum().backward()
        found[one.places] = logp.detach()
    return found


def measure(
    sizes: Update, ways: list[str], device: torch.device, stocks: Iterable[str] = stock_attention.QUICK,
    megatron: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the figures after each way; a way that fails says why, and the others run."""
    weights, config = loss_weights(sizes.responses * sizes.response_len, device), make_config(sizes)
    stock, tried = "math", dict[str, float | str]()
    if device.type == "cuda" and "replicated" in ways:
        heads = config.num_attention_heads, config.num_key_value_heads, getattr(config, "head_dim", 128)
        kinds = list(dict.fromkeys(kinds_of(config)))
        stock, tried = stock_attention.fastest(sizes.micro_batch, sizes.length, *heads, kinds, stocks)
    figures: dict[str, Any] = {"stock_attention": stock, "stock_attention_seconds": tried, "rows": {}}
    yield figures
    first: torch.Tensor | None = None
    for way in ways:
        gc.collect()
        try:
            model, logprobs = (of_megatron if megatron else of_transformers)(way, sizes, stock, device)
            logp, found = run_way(way, sizes, model, weights, logprobs)
        except Exception as error:
            figures["rows"][way] = {"error": in_words(error)}
        else:
            first = logp if first is None else first
            figures["rows"][way] = {**found, "logp_rms_from_first_row": harness.rms(logp, first)}
        yield figures


Step = Callable[[list[ModelBatch], torch.Tensor], torch.Tensor]  # micro-batches and weights [M] -> log-probs [M]


def of_transformers(way: str, sizes: Update, stock: str, device: torch.device) -> tuple[Any, Step]:
    """Make the model of a way, and its forward and backward."""
    model, fast = make_model(sizes, device), way == "fast"
    if way in ("packed", "fast"):
        enable(model, fast=fast)
    else:
        model.config._attn_implementation = {"": stock_attention.register(stock, sizes.length)}
    recompute_layers(model, sizes.keep if fast else "nothing")
    kept = sizes.kept_chunks if fast else 0
    return model, lambda batches, weights: step(model, batches, weights, sizes.chunk_size, fast, kept)


def of_megatron(way: str, sizes: Update, stock: str, device: torch.device) -> tuple[Any, Step]:
    """Make megatron-core's model of a way, and its forward and backward."""
    from tools.bench import megatron

    model = megatron.make_model(make_config(sizes), getattr(torch, sizes.dtype), device)
    if way == "replicated":
        megatron.set_attention(model, stock)
    logprobs = partial(megatron.logprobs, model, chunk_size=sizes.chunk_size)
    return model, lambda batches, weights: step_of(batches, weights, logprobs)


def run_way(
    way: str, sizes: Update, model: Any, weights: torch.Tensor, step: Step
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Measure a way; returns its log-probs [M] and its figures."""
    packed = way in ("packed", "fast")
    batches = sizes.batches(weights.device)["packed" if packed else way]
    # A learning rate of 0: both ways and all repeats have the same weights.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True) if sizes.optimizer else None

    def run(some: list[ModelBatch]) -> torch.Tensor:
        logp = step(some, weights)
        if optimizer:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return logp

    begun, _ = harness.seconds_of(lambda: run(batches[:1]))
    run(batches[:1])  # what is compiled may be compiled again for what the first backward leaves
    found: dict[str, Any] = {"first_micro_batch": begun, "micro_batches": len(batches)}
    timed, logp = harness.repeated(lambda: run(batches), sizes.repeats if packed else 1)
    done, nominal = (flops(sizes, packed) / 1e12 / timed["median"] for packed in (packed, False))
    return logp, found | timed | {"tflops_done": done, "tflops_nominal": nominal}


@harness.takes(Update)
def main(
    json_to: JsonPath,
    sizes: Update,
    stock: Annotated[
        str, typer.Option(help=f"Attention to try for replicated rows, of {', '.join(stock_attention.CALLS)}.")
    ] = ",".join(stock_attention.QUICK),
    ways: Annotated[str, typer.Option(help=f"Of {', '.join(WAYS)}, by commas.")] = "packed,replicated",
    megatron: Annotated[bool, typer.Option(help="megatron-core's model in the place of transformers'.")] = False,
) -> None:
    """Measure forward and backward of one group, or an update; figures are written after each way."""
    device = harness.best_device()
    record = Record(json_to, device.type == "cuda")
    for figures in measure(sizes, ways.split(","), device, stock.split(","), megatron):
        record.write({"sizes": asdict(sizes), **figures}, [*figures.items(), *figures["rows"].items()][-1])


if __name__ == "__main__":
    typer.run(main)

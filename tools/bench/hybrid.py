"""`python -m tools.bench.hybrid --json hybrid.json`: a hybrid model packed and replicated, by the same kernels.

Qwen3.5-9B's shape, cut to some layers (three of four are gated delta nets), with random weights. Both ways run
flash-linear-attention's scans and its convolution, and checkpoint every layer. Parts:

- step: forward and backward of one group; the head runs on the rows that predict response tokens, in both ways.
- decoder: the same without the head.
- mixer: one recurrent layer on the packed row, against one call on sequences of the segments' lengths with states of
  zero: what is added by waves, gathers of states and convolutions across segments.
- shares: one recurrent layer of one of 2 and 4 ranks, which scans all rows for its share of the heads, against the
  whole layer over the ranks. Rows are put in order for the ranks' exchanges here, and not sent.
- short groups: many of short prompts and responses, with the head.
- distance: how far log-probs and gradients in bf16 lie from the replicated model in fp32 on PyTorch's functions. Takes
  models without recurrent layers too; the replicated sequences run transformers' own choice of attention.

On a machine without a GPU the same runs on PyTorch's functions, for example with `--model tiny-hybrid --layers 4 -n 3
-p 40 -r 20 --micro-batch 2 --repeats 1 --short 3,2,16,8 --near 1,2,16,8`.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import typer

from dualkv.bench.run import in_words
from dualkv.data.rollouts import Rollouts
from dualkv.integrations import patching
from dualkv.integrations.recurrent import kernels, rules, waves
from dualkv.integrations.transformers import disable, enable, recompute_layers
from dualkv.integrations.transformers.batches import ModelBatch, packed_batches, replicated_batches
from dualkv.integrations.transformers.recurrent import install, mixers, on_reference
from dualkv.layout import Layout
from tools.bench import harness, stock_attention
from tools.bench.record import JsonPath, Record
from tools.bench.shares import alone, share_of
from tools.bench.step import Sizes, loss_weights, make_model, step


@dataclass(frozen=True)
class Groups:
    """The sizes of groups for parts that have other groups than the command line's; lengths are drawn from 1/4 to all
    of these."""

    groups: int
    responses: int
    prompt_len: int
    response_len: int

    def rollouts(self, vocabulary: int) -> Rollouts:
        draw = np.random.default_rng(0)

        def tokens(longest: int) -> torch.Tensor:
            return torch.from_numpy(draw.integers(vocabulary, size=draw.integers(longest // 4, longest + 1)))

        prompts = [tokens(self.prompt_len) for _ in range(self.groups)]
        responses = [[tokens(self.response_len) for _ in range(self.responses)] for _ in range(self.groups)]
        return Rollouts(prompts, responses, [[0.0] * self.responses] * self.groups)


@contextmanager
def convolutions_of_the_library(model: Any) -> Iterator[None]:
    """Calls without a layout run the convolution that packed calls run, where transformers would run PyTorch's."""
    install(model)
    modeling: Any = sys.modules[type(model).__module__]
    if (before := getattr(modeling, "causal_conv1d_fn", None)) is None:  # no recurrent layers
        yield
        return

    def conv(
        hidden_states: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None, **kwargs: Any
    ) -> Any:
        own = kernels.convolution(activation, hidden_states.device)
        if own is None or kwargs.get("dualkv") is not None:
            return before(hidden_states, weight, bias, activation=activation, **kwargs)
        return own(hidden_states, weight, bias, activation=activation)

    with mock.patch.object(modeling, "causal_conv1d_fn", patching.marked(conv)):
        yield


# ---------------------------------------------------------------- time and memory
def timed(model: Any, run: Callable[[list[ModelBatch]], Any], batches: list[ModelBatch], repeats: int) -> Any:
    """Seconds of all micro-batches and the peak of memory in them, after one untimed pass over micro-batches that
    differ in size: Triton's kernels are compiled and tuned in it."""
    for batch in {batch.tokens: batch for batch in batches}.values():
        run([batch])
    model.zero_grad(set_to_none=True)
    rows = sum(batch.tokens for batch in batches)
    found, _ = harness.repeated(lambda: run(batches), repeats, model.zero_grad)
    return {"rows": rows, "micro_batches": len(batches)} | found


def decoder_step(model: Any, batches: list[ModelBatch]) -> None:
    for batch in batches:
        model.get_decoder()(**batch.inputs, use_cache=False).last_hidden_state.sum().backward()


def both_ways(
    model: Any, batches: dict[str, list[ModelBatch]], attention: str, sizes: Sizes, tokens: int, head: bool
) -> Iterator[dict[str, Any]]:
    """The figures of packed, then of both ways and their ratio."""
    weights = loss_weights(tokens, model.device)

    def run(some: list[ModelBatch]) -> None:
        step(model, some, weights, sizes.chunk_size) if head else decoder_step(model, some)

    found: dict[str, Any] = {}
    enable(model)
    found["packed"] = timed(model, run, batches["packed"], sizes.repeats)
    yield found
    disable(model)
    model.config._attn_implementation = {"": attention}
    found["replicated"] = timed(model, run, batches["replicated"], 1)
    model.config._attn_implementation = {"": "sdpa"}
    yield found | {"times_as_fast": found["replicated"]["median"] / found["packed"]["median"]}


# ---------------------------------------------------------------- one recurrent layer
def mixer(model: Any, sizes: Sizes) -> dict[str, Any]:
    """Forward and backward of a recurrent layer, in turns with one call of the same segment lengths."""
    config, device = model.config, model.device
    layer = mixers(model)[0][1]
    layout = Layout.from_lengths([sizes.prompt_len], [[sizes.response_len] * sizes.responses], device)
    roots = Layout.from_segments(layout.offsets.tolist(), [-1] * (sizes.responses + 1), device)
    alone = waves.order(roots, device).waves[0]
    shape = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    zeros = torch.zeros(sizes.responses + 1, *shape, device=device)
    x = torch.randn(1, layout.num_tokens, config.hidden_size, device=device, dtype=model.dtype, requires_grad=True)
    gradient = torch.randn_like(x)

    def one_call(_: Any, rows: Any, run: Any) -> torch.Tensor:
        out: torch.Tensor = run(rows, zeros, alone)[0]
        return out

    def one_row(conv: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        return conv(*args, **kwargs)

    def call() -> float:
        return seconds_of(layer, x, layout, gradient)

    def call_alone() -> float:
        with mock.patch.multiple(rules, scan=one_call, convolve=one_row, convolve_at_once=one_row):
            return call()

    packed, single = in_turns([call, call_alone], sizes)
    ratio = statistics.median(a / b for a, b in zip(packed, single, strict=True))
    return {"rows": layout.num_tokens, "packed": packed, "one_call": single, "packed_over_one_call": ratio}


def seconds_of(layer: Any, x: torch.Tensor, dualkv: Any, gradient: torch.Tensor) -> float:
    """Seconds of a forward and backward of a layer."""
    seconds, _ = harness.seconds_of(lambda: layer(x, dualkv=dualkv).backward(gradient))
    layer.zero_grad(set_to_none=True)
    x.grad = None
    return seconds


def in_turns(calls: list[Callable[[], float]], sizes: Sizes) -> list[list[float]]:
    """The seconds that each of the calls returns, in turns, after two untimed ones."""
    turns = [[call() for call in calls] for _ in range(2 + 5 * sizes.repeats)]
    return [list(some) for some in zip(*turns[2:], strict=True)]


DEGREES = (2, 4)


def shares(model: Any, sizes: Sizes) -> dict[str, Any]:
    """Forward and backward of a recurrent layer, whole and of one rank of some, in turns."""
    layer, device = mixers(model)[0][1], model.device
    layout = Layout.from_lengths([sizes.prompt_len], [[sizes.response_len] * sizes.responses], device)

    def of(rows: int, dualkv: Any) -> Callable[[], float]:
        x = torch.randn(1, rows, model.config.hidden_size, device=device, dtype=model.dtype, requires_grad=True)
        gradient = torch.randn_like(x)
        return lambda: seconds_of(layer, x, dualkv, gradient)

    of_ranks = [share_of(layout, 1, ranks) for ranks in DEGREES]
    calls = [of(layout.num_tokens, layout), *(of(shard.num_tokens, shard) for shard in of_ranks)]
    with alone():
        whole, *parts = in_turns(calls, sizes)
    found: dict[str, Any] = {"rows": layout.num_tokens, "whole": whole}
    for ranks, part in zip(DEGREES, parts, strict=True):
        over = statistics.median(ranks * a / b for a, b in zip(part, whole, strict=True))
        found[f"of {ranks}"] = {"seconds": part, "share_over_whole_by_ranks": over}
    return found


# ---------------------------------------------------------------- distance from fp32
def distance(model: Any, rollouts: Rollouts, attention: str, sizes: Sizes) -> dict[str, Any]:
    """Root mean square of log-probs and norm of gradients, as differences from fp32 relative to fp32's."""
    device, total = model.device, rollouts.trained_lens
    weights = loss_weights(sum(total), device).float()
    budget = sizes.micro_batch * (max(map(len, rollouts.flat_prompts)) + max(total))

    def of(some: Any, batches: list[ModelBatch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logp = step(some, batches, weights, sizes.chunk_size)
        gradients = harness.gradients_of(some)
        some.zero_grad(set_to_none=True)
        return logp, gradients

    replicated = replicated_batches(rollouts, budget, device)
    wide = copy.deepcopy(model).float()
    with on_reference(wide):
        truth, expected = of(wide, replicated)
    del wide
    found: dict[str, Any] = {}
    for way in ("packed", "replicated"):
        if way == "packed":
            logp, gradients = of(enable(model), packed_batches(rollouts, budget, device))
            disable(model)
        else:
            model.config._attn_implementation = {"": attention}
            logp, gradients = of(model, replicated)
        found[way] = {"logp_rms": harness.rms(logp, truth), "gradients": harness.apart(gradients, expected)}
        del gradients
    pairs = {name: (found["packed"][name], found["replicated"][name]) for name in found["packed"]}
    found["packed_over_replicated"] = {name: a / b if b else math.nan for name, (a, b) in pairs.items()}
    return found


# ---------------------------------------------------------------- the command
PARTS = ("mixer", "shares", "step", "decoder", "short groups", "distance")


def measure(
    sizes: Sizes, short: Groups, near: Groups, parts: list[str], device: torch.device
) -> Iterator[dict[str, Any]]:
    """The figures after each part; a part that fails says why, and the others run."""
    figures: dict[str, Any] = {}
    model: Any = recompute_layers(make_model(sizes, device))
    heads = model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim
    stock, tried = "math", dict[str, float | str]()
    if device.type == "cuda":
        stock, tried = stock_attention.fastest(sizes.micro_batch, sizes.length, *heads)
    figures |= {"stock_attention": stock, "stock_attention_seconds": tried}
    registered, own = stock_attention.register(stock, sizes.length), model.config._attn_implementation

    def run(part: str) -> Iterator[dict[str, Any]]:
        if part == "mixer":
            yield mixer(model, sizes)
        elif part == "shares":
            yield shares(model, sizes)
        elif part == "distance":
            yield distance(model, near.rollouts(model.config.vocab_size), own, sizes)
        elif part == "short groups":
            budget, rollouts = sizes.micro_batch * sizes.length, short.rollouts(model.config.vocab_size)
            ways = {
                "packed": packed_batches(rollouts, budget, device),
                "replicated": replicated_batches(rollouts, budget, device),
            }
            yield from both_ways(model, ways, "sdpa", sizes, sum(rollouts.trained_lens), True)
        else:
            tokens = sizes.responses * sizes.response_len
            yield from both_ways(model, sizes.batches(device), registered, sizes, tokens, part == "step")

    with convolutions_of_the_library(model):
        for part in parts:
            try:
                for found in run(part):
                    figures[part] = found
                    yield figures
            except Exception as error:
                figures[part] = {"error": in_words(error)}
                yield figures
            disable(model)
            model.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Hybrid(Sizes):
    """A group of a hybrid model."""

    model: Annotated[str, typer.Option(help="Of dualkv.models.CONFIGS; random weights.")] = "qwen3.5-9b"


@harness.takes(Hybrid)
def main(
    json_to: JsonPath,
    sizes: Hybrid,
    short: Annotated[str, typer.Option(help="Groups, responses, longest prompt, longest response.")] = "64,8,512,256",
    near: Annotated[str, typer.Option(help="The same, for the distance from fp32.")] = "2,8,1024,256",
    only: Annotated[str | None, typer.Option(help=f"Of {', '.join(PARTS)}, with semicolons between.")] = None,
) -> None:
    """Measure a hybrid model packed and replicated; figures are written after each part."""
    device = harness.best_device()
    record = Record(json_to, device.type == "cuda")
    many, few = (Groups(*map(int, some.split(","))) for some in (short, near))
    for figures in measure(sizes, many, few, only.split(";") if only else list(PARTS), device):
        settings = {"sizes": asdict(sizes), "short": asdict(many), "near": asdict(few)}
        record.write({**settings, **figures}, list(figures.items())[-1])


if __name__ == "__main__":
    typer.run(main)

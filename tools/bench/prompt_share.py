"""`python -m tools.bench.prompt_share --json docs/results/prompt-share-h200.json`: speed-up over the prompt's share.

One group of N sequences, all of the same length: P of the prompt's tokens and R of a response's. The share P / (P + R)
varies, the length does not. Forward and backward of the group run in turns: the N sequences replicated, with the
attention that `--stock` names, and the group packed. Both ways recompute every layer in the backward, as trainers do.
Only rows that predict response tokens reach the head.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer

from dualkv.integrations.transformers import enable, recompute_layers
from dualkv.integrations.transformers.batches import ModelBatch
from tools.bench import harness, stock_attention
from tools.bench.record import JsonPath, Record
from tools.bench.step import Sizes, flops, loss_weights, make_model, step

SHARES = 0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95
WHOLE = 16  # prompts are multiples of so many tokens


def measure(
    sizes: Sizes, shares: Sequence[float], rounds: int, seconds: float, stock: str, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield the figures after each pair of turns: all shares of the prompt in the length of a sequence, prompt_len +
    response_len, once, then all shares again, `rounds` times. `stock` is the attention of the replicated way."""
    models = {way: make_model(sizes, device) for way in ("replicated", "packed")}
    enable(models["packed"])
    models["replicated"].config._attn_implementation = {"": stock_attention.register(stock, sizes.length)}
    for model in models.values():
        recompute_layers(model, "nothing")

    def run(model: Any, batches: list[ModelBatch], weights: torch.Tensor) -> torch.Tensor:
        logp = step(model, batches, weights, sizes.chunk_size)
        model.zero_grad(set_to_none=True)
        return logp

    points = [point(sizes, share) for share in shares]
    found: list[dict[str, Any]] = [{} for _ in points]
    for _ in range(rounds):
        for group, figures in zip(points, found, strict=True):
            weights, batches = loss_weights(group.responses * group.response_len, device), group.batches(device)
            runs = {way: partial(run, models[way], batches[way], weights) for way in models}
            if not figures:
                logp = {way: call() for way, call in runs.items()}  # and all that is made at a first call
                work = [flops(group, packed) for packed in (False, True)]
                rows = {way: sum(batch.tokens for batch in batches[way]) for way in models}
                figures |= {"prompt_len": group.prompt_len, "response_len": group.response_len, "rows": rows}
                figures |= {"flop_ratio": work[0] / work[1], "logp_rms": harness.rms(*logp.values())}
                figures |= {"seconds": {way: [] for way in models}}
            else:
                runs["packed"]()  # memory of another size before it
            for way, call in runs.items():
                figures["seconds"][way].append(statistics.median(harness.turn(call, seconds)))
            replicated, packed = (statistics.median(figures["seconds"][way]) for way in models)
            figures["speed_up"] = replicated / packed
            yield {"points": [each for each in found if each]}


def point(sizes: Sizes, share: float) -> Sizes:
    """Return the group whose prompt has nearest to `share` of every sequence's tokens.

    Raises:
        ValueError: the prompt or the responses would be empty.
    """
    prompt = round(share * sizes.length / WHOLE) * WHOLE
    if not 0 < prompt < sizes.length:
        raise ValueError(
            f"got a share of {share:g} of {sizes.length} tokens, expected at least {WHOLE} tokens of each part"
        )
    return replace(sizes, prompt_len=prompt, response_len=sizes.length - prompt)


def main(
    json_to: JsonPath,
    model: harness.Model = "qwen3-8b",
    layers: harness.Layers = 8,
    responses: harness.Responses = 16,
    length: Annotated[int, typer.Option(help="Tokens of the prompt and a response together.")] = 8192,
    shares: Annotated[str, typer.Option(help="Of the prompt in these tokens.")] = ",".join(map(str, SHARES)),
    micro_batch: harness.MicroBatch = 8,
    rounds: Annotated[int, typer.Option(help="Turns of each way for each share.")] = 2,
    seconds: Annotated[float, typer.Option(help="Of a turn, at least.")] = 2.0,
    chunk_size: harness.ChunkSize = 4096,
    dtype: harness.Dtype = "bfloat16",
    stock: Annotated[
        str, typer.Option(help=f"Attention of replicated rows, of {', '.join(stock_attention.CALLS)}.")
    ] = "fa4",
) -> None:
    """Measure forward and backward of one group, replicated and packed; write the figures after each pair of turns."""
    sizes = Sizes(model, layers, responses, length - WHOLE, WHOLE, micro_batch, rounds, chunk_size, dtype)
    settings = {
        "model": model, "layers": layers, "responses": responses, "length": length, "micro_batch": micro_batch,
        "chunk_size": chunk_size, "dtype": dtype, "rounds": rounds, "turn_seconds": seconds, "stock_attention": stock,
    }  # fmt: skip
    device = harness.best_device()
    record = Record(json_to, device.type == "cuda")
    asked = [float(share) for share in shares.split(",")]
    for figures in measure(sizes, asked, rounds, seconds, stock, device):
        record.write({"settings": settings, **figures}, {p["prompt_len"]: p["speed_up"] for p in figures["points"]})


if __name__ == "__main__":
    typer.run(main)

"""`python -m tools.bench.step --json step.json`: forward and backward of one group, with other settings around
attention.

Attention is a part of an update; norms, rotary embeddings, activations, log-probs and what gradient checkpointing
computes again are others. Each row of :data:`ROWS` changes one of them: the model's layers as transformers has them,
with Liger's kernels, or compiled; what layers keep, and how many of them; log-probs eager or compiled; how many chunks
of logits are kept. Only rows that predict response tokens reach the head, in all of them.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer

from dualkv.bench.run import in_words
from dualkv.data.rollouts import Rollouts
from dualkv.integrations.transformers import enable, head, recompute_layers
from dualkv.integrations.transformers.batches import ModelBatch, packed_batches, replicated_batches
from dualkv.logprobs import response_logprobs
from dualkv.models import CONFIGS
from tools.bench import stock_attention
from tools.bench.record import JsonPath, Record
from tools.bench.repeats import repeated, wait


@dataclass(frozen=True)
class Row:
    """Attributes:
    way: "packed" or "replicated".
    layers: "eager", "liger", "compiled pieces" (norms, rotary embedding, MLP), "compiled" (whole layers) or "fast"
        (`enable(fast=True)`).
    keep, kept_layers: what layers keep, `keep` and `layers` of `recompute_layers`.
    logprobs: "eager" or "compiled".
    kept_chunks: chunks of the head whose logits are kept for the backward.
    """

    way: str
    layers: str
    keep: str
    logprobs: str
    kept_layers: int | None = None
    kept_chunks: int = 0


ROWS = {
    "packed": Row("packed", "eager", "nothing", "eager"),
    "packed, log-probs": Row("packed", "eager", "nothing", "compiled"),
    "packed, log-probs, attention": Row("packed", "eager", "attention", "compiled"),
    "packed, log-probs, Liger": Row("packed", "liger", "nothing", "compiled"),
    "packed, log-probs, Liger, attention": Row("packed", "liger", "attention", "compiled"),
    "packed, log-probs, Liger, products": Row("packed", "liger", "products", "compiled"),
    "replicated, log-probs, Liger": Row("replicated", "liger", "nothing", "compiled"),
    "replicated": Row("replicated", "eager", "nothing", "eager"),
    "packed, log-probs, pieces, attention": Row("packed", "compiled pieces", "attention", "compiled"),
    "packed, log-probs, compiled": Row("packed", "compiled", "all", "compiled"),
    "packed, fast, attention": Row("packed", "fast", "attention", "compiled"),
    "packed, fast, products of 3": Row("packed", "fast", "products", "compiled", 3),
    "packed, fast, products of 3, logits of 8": Row("packed", "fast", "products", "compiled", 3, 8),
    "packed, fast, products": Row("packed", "fast", "products", "compiled"),
    "packed, fast, products, logits of 16": Row("packed", "fast", "products", "compiled", None, 16),
    "packed, fast, all of 3": Row("packed", "fast", "all", "compiled", 3),
}


@dataclass(frozen=True)
class Sizes:
    """The model and the group: the options of the command line, which explains them."""

    model: str
    layers: int
    responses: int
    prompt_len: int
    response_len: int
    micro_batch: int
    repeats: int
    chunk_size: int
    dtype: str
    optimizer: bool = False


def make_config(sizes: Sizes) -> Any:
    """Make the configuration of the named model, cut to some layers."""
    from transformers import AutoConfig

    settings = CONFIGS[sizes.model] | {"num_hidden_layers": sizes.layers}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if experts_of(config):
        config._experts_implementation = "grouped_mm"  # the fastest in transformers, for both ways
    return config


def make_model(sizes: Sizes, device: torch.device) -> Any:
    """The model with random weights made on the device."""
    from transformers import AutoModelForCausalLM

    config = make_config(sizes)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sizes.dtype))
    return model.to(device).train()


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


@contextmanager
def changed_layers(model: Any, how: str) -> Iterator[None]:
    """The layers as a row has them; what Liger and compilation put into transformers' module goes at the end."""
    decoder = model.get_decoder()
    modeling = sys.modules[type(decoder).__module__]
    before = dict(vars(modeling))
    try:
        if how == "liger":
            from liger_kernel.transformers import monkey_patch

            monkey_patch._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
        elif how == "compiled":
            for layer in decoder.layers:
                layer.compile(dynamic=True)
        elif how == "compiled pieces":
            modeling.apply_rotary_pos_emb = torch.compile(modeling.apply_rotary_pos_emb, dynamic=True)  # type: ignore[attr-defined]
            for name, module in decoder.named_modules():
                if "norm" in name.rpartition(".")[2] or name.endswith(".mlp"):
                    module.compile(dynamic=True)
        yield
    finally:
        vars(modeling).update(before)


def make_rollouts(sizes: Sizes) -> Rollouts:
    vocabulary = CONFIGS[sizes.model]["vocab_size"]
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(vocabulary, (length,), generator=generator)

    responses = [tokens(sizes.response_len) for _ in range(sizes.responses)]
    return Rollouts([tokens(sizes.prompt_len)], [responses], [[0.0] * sizes.responses])


def flops(model: Any, sizes: Sizes, packed: bool) -> float:
    """Count the FLOP of a forward and a backward without recomputation: 6 for a weight and row (of a mixture of
    experts, the weights that a row is routed to), 12 for a pair and head dim."""
    config, n, p, r = model.config, sizes.responses, sizes.prompt_len, sizes.response_len
    prompts = 1 if packed else n
    rows = prompts * p + n * r

    def seen(length: int, window: int | None) -> float:
        """Pairs of one sequence."""
        inside = min(length, window or length)
        return inside * inside / 2 + (length - inside) * inside

    pairs = sum(prompts * seen(p, w) + n * (seen(p + r, w) - seen(p, w)) for w, _ in kinds_of(config))
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    share = config.num_experts_per_tok / experts_of(config) if experts_of(config) else 1.0
    weights = sum(
        w.numel() * (share if ".experts." in name else 1.0)
        for name, w in model.get_decoder().layers.named_parameters()
        if w.dim() > 1
    )
    attention = 12 * pairs * config.num_attention_heads * head_dim
    return 6 * (weights * rows + model.get_output_embeddings().weight.numel() * n * r) + attention


def step(
    model: Any, batches: list[ModelBatch], weights: torch.Tensor, compiled: bool, chunk_size: int, kept_chunks: int = 0
) -> torch.Tensor:
    """Forward and backward of every micro-batch; the log-probs [M]."""
    found = torch.empty_like(weights)
    options: dict[str, Any] = {"compiled": compiled, "chunk_size": chunk_size, "kept_chunks": kept_chunks}
    for batch in batches:
        hidden = model.get_decoder()(**batch.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        logp, _ = response_logprobs(hidden, head(model), batch.batch, **options)
        logp = torch.cat(batch.batch.unpack(logp))
        (logp * weights[batch.places]).sum().backward()
        found[batch.places] = logp.detach()
    return found


def measure(
    sizes: Sizes, names: list[str], device: torch.device, stocks: Iterable[str] = stock_attention.QUICK
) -> Iterator[dict[str, Any]]:
    """The figures after each row; a row that fails says why, and the others run."""
    cuda = device.type == "cuda"
    rollouts = make_rollouts(sizes)
    length, total = sizes.prompt_len + sizes.response_len, sizes.responses * sizes.response_len
    weights = torch.randn(total, generator=torch.Generator().manual_seed(1)).to(device) / total
    stock, tried = "math", dict[str, float | str]()
    if cuda and any(ROWS[name].way == "replicated" for name in names):
        config = make_config(sizes)
        heads = config.num_attention_heads, config.num_key_value_heads, getattr(config, "head_dim", 128)
        kinds = list(dict.fromkeys(kinds_of(config)))
        stock, tried = stock_attention.fastest(sizes.micro_batch, length, *heads, kinds, stocks)
    figures: dict[str, Any] = {"stock_attention": stock, "stock_attention_seconds": tried, "rows": {}}
    yield figures
    first: torch.Tensor | None = None
    for name in names:
        row = ROWS[name]
        gc.collect()
        torch._dynamo.reset()
        try:
            model = make_model(sizes, device)
            with changed_layers(model, row.layers):
                logp, found = run_row(row, sizes, model, rollouts, weights, stock)
        except Exception as error:
            figures["rows"][name] = {"error": in_words(error)}
        else:
            first = logp if first is None else first
            apart = (logp - first).double().square().mean().sqrt()
            figures["rows"][name] = {**asdict(row), **found, "logp_rms_from_first_row": float(apart)}
        model = None
        yield figures


def run_row(
    row: Row, sizes: Sizes, model: Any, rollouts: Rollouts, weights: torch.Tensor, stock: str
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Log-probs [M] and figures of a row."""
    device, length = weights.device, sizes.prompt_len + sizes.response_len
    if row.way == "packed":
        enable(model, fast=row.layers == "fast")
        rows = sizes.prompt_len + sizes.responses * sizes.response_len
        batches = packed_batches(rollouts, rows, device)
    else:
        model.config._attn_implementation = {"": stock_attention.register(stock, length)}
        batches = replicated_batches(rollouts, sizes.micro_batch * length, device)
    recompute_layers(model, row.keep, layers=row.kept_layers)
    # A learning rate of 0: all rows and repeats have the same weights.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True) if sizes.optimizer else None

    def run(some: list[ModelBatch]) -> torch.Tensor:
        logp = step(model, some, weights, row.logprobs == "compiled", sizes.chunk_size, row.kept_chunks)
        if optimizer:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return logp

    start = time.perf_counter()
    run(batches[:1])
    wait()
    found: dict[str, Any] = {"first_micro_batch": time.perf_counter() - start, "micro_batches": len(batches)}
    timed, logp = repeated(lambda: run(batches), sizes.repeats if row.way == "packed" else 1)
    done, nominal = (flops(model, sizes, packed) / 1e12 / timed["median"] for packed in (row.way == "packed", False))
    return logp, found | timed | {"tflops_done": done, "tflops_nominal": nominal}


def main(
    json_to: JsonPath,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}; random weights.")] = "qwen3-8b",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 8,
    responses: Annotated[int, typer.Option("--responses", "-n", help="Of the one prompt.")] = 32,
    prompt_len: Annotated[int, typer.Option("--prompt-len", "-p", help="Tokens.")] = 8192,
    response_len: Annotated[int, typer.Option("--response-len", "-r", help="Tokens of each response.")] = 2048,
    micro_batch: Annotated[int, typer.Option(help="Replicated sequences at once; packed, the group is.")] = 8,
    repeats: Annotated[int, typer.Option(help="Packed; replicated it is one, after one micro-batch.")] = 3,
    chunk_size: Annotated[int, typer.Option(help="Rows of the head at a time.")] = 4096,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="With a step of AdamW, states in this dtype.")] = False,
    stock: Annotated[
        str, typer.Option(help=f"Attention to try for replicated rows, of {', '.join(stock_attention.CALLS)}.")
    ] = ",".join(stock_attention.QUICK),
    only: Annotated[str | None, typer.Option(help="Rows, by their names with semicolons between.")] = None,
) -> None:
    """Measure forward and backward of one group, or an update; figures are written after each row."""
    sizes = Sizes(
        model, layers, responses, prompt_len, response_len, micro_batch, repeats, chunk_size, dtype, optimizer
    )
    names = only.split(";") if only else list(ROWS)
    cuda = torch.cuda.is_available()
    record = Record(json_to, cuda)
    for figures in measure(sizes, names, torch.device("cuda" if cuda else "cpu"), stock.split(",")):
        record.write({"sizes": asdict(sizes), **figures})
        rows = list(figures["rows"].items())
        print(*(rows[-1] if rows else figures.items()), flush=True)


if __name__ == "__main__":
    typer.run(main)

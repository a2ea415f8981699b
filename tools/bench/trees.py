"""`python -m tools.bench.trees --json trees.json`: updates on traces of agents, their sequences one by one and packed.

Traces are those of `dualkv trees`, drawn from published statistics. An update is forward, backward and a step of AdamW.
Every update plans and packs its rollouts anew; this host work is timed apart. Kernels' plans are made in the update.
Ways:

- replicated: sequences end to end in one row, without padding, FlashAttention-4's call for ragged lengths.
- gathered: the packed rows with the attention of TRL's tree packing: keys and values of each segment's path gathered,
  one call of FlashAttention-4 (TRL's own runs FlashAttention-3).
- packed: `plan_sequences`, `pack_sequences` and `dualkv.attention`.

The FLOP ratio counts layers, attention and head of the sequences as they are, and of each token once. Where the tree is
cut into micro-batches, *done* has the FLOP of what was computed.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from dualkv.bench import traces
from dualkv.bench.run import in_words
from dualkv.bench.trees import Found, flops
from dualkv.data.gain import Gain
from dualkv.data.planning import ALONE
from dualkv.data.trees import PackedSequences, pack_sequences, plan_sequences
from dualkv.integrations.transformers import disable, enable, recompute_layers
from dualkv.integrations.transformers.batches import ModelBatch
from dualkv.models import CONFIGS
from tools.bench import harness, ragged
from tools.bench.record import JsonPath, Record
from tools.bench.step import Update, loss_weights, make_model, step

WAYS = "replicated", "gathered", "packed"
WARM_ROWS = 32768  # tokens of the sequences that each way runs first, to compile and load what it needs
# NAME@ROWS=WAY,WAY of :class:`Job`, in order of worth.
JOBS = (
    "trace-swe-dropped-0-n16-t8@196608=packed,replicated,gathered",
    *(f"trace-{name}=packed,replicated" for name in ("grpo-0", "swe-kept-0-n2-t32-x0.4", "swe-kept-0-n4-t8")),
    "trace-tau2-0=packed,replicated",
    *(f"trace-{name}=packed,replicated,gathered" for name in ("search-0-n40", "treepo-2")),
    "trace-swe-dropped-0-n16-t16=packed,replicated",
    "trace-swe-dropped-0-n1-t64=packed,replicated",
)


# ---------------------------------------------------------------- micro-batches
class Rollouts(NamedTuple):
    """The rollouts of a batch, by sequence: tokens, and the mask of those that count."""

    tokens: list[Any]
    masks: list[Any]

    @classmethod
    def of_trace(cls, trace: traces.Trace, vocabulary: int) -> Rollouts:
        return cls(trace.token_sequences(vocabulary), trace.loss_masks())

    def first(self, rows: int) -> Rollouts:
        """The first sequences with at most so many tokens together, but two of them at least."""
        count = max(2, int(np.searchsorted(np.cumsum([len(t) for t in self.tokens]), rows, "right")))
        return Rollouts(*(listed[:count] for listed in self))


def batches(way: str, rollouts: Rollouts, budget: int, device: torch.device) -> list[ModelBatch]:
    """Make the batches of an update: the host work of a trainer."""
    if way not in WAYS:
        raise ValueError(f"way is {way!r}, expected one of {', '.join(WAYS)}")
    tokens, masks = rollouts
    min_shared = ALONE if way == "replicated" else 1
    starts = np.append(0, np.cumsum([m.sum() for m in masks]))
    found = []
    for chosen in plan_sequences(tokens, budget, min_shared=min_shared):
        batch = pack_sequences(
            [tokens[i] for i in chosen], [masks[i] for i in chosen], min_shared=min_shared, device=device
        )
        places = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
        found.append(ModelBatch(_inputs(way, batch), batch, torch.from_numpy(places).to(device)))
    return found


def _inputs(way: str, batch: PackedSequences) -> dict[str, Any]:
    ids = {"input_ids": batch.input_ids}
    if way == "packed":
        return ids | {"dualkv": batch.layout}
    batch.layout.mark_used()  # by attention that is not DualKV's
    offsets = batch.layout.offsets.tolist()
    ends, keys = offsets, None
    if way != "replicated":
        paths: list[np.ndarray[Any, Any]] = []
        for up, (a, b) in zip(batch.layout.parent.tolist(), itertools.pairwise(offsets), strict=True):
            paths.append(np.concatenate([paths[up] if up >= 0 else np.zeros(0, np.int64), np.arange(a, b)]))
        ends, keys = np.append(0, np.cumsum([len(path) for path in paths])).tolist(), np.concatenate(paths)
    return ids | {"position_ids": batch.position_ids, "ragged": ragged.Ragged.of(offsets, ends, batch.device, keys)}


def prepared(model: Any, way: str) -> None:
    disable(model)
    if way == "packed":
        enable(model)
    else:
        model.config._attn_implementation = {"": ragged.NAME}


def done_flops(model: str, some: list[ModelBatch]) -> float:
    """Count the FLOP that micro-batches compute; the head on the rows that predict."""
    rows = sum(b.tokens for b in some)
    pairs = sum(int((b.batch.layout._segments.position + 1).sum()) for b in some)
    return flops(model, rows, pairs, sum(len(b.batch._tokens_of_row) for b in some))


# ---------------------------------------------------------------- measuring
class Job(NamedTuple):
    """The budget and the ways to measure on a trace."""

    name: str
    budget: int
    ways: list[str]

    @classmethod
    def parse(cls, text: str, budget: int, ways: list[str]) -> Job:
        """Parse NAME, NAME@ROWS, NAME=WAY,WAY or NAME@ROWS=WAY,WAY.

        Raises:
            typer.BadParameter: other texts.
        """
        rest, _, own = text.partition("=")
        name, _, rows = rest.partition("@")
        if traces.parse(name) is None:
            raise typer.BadParameter(f"{name!r} is no trace")
        if rows and not rows.isdigit():
            raise typer.BadParameter(f"{rows!r} of {text!r} is no number of rows")
        return cls(name, int(rows or budget), own.split(",") if own else ways)


def measure(sizes: Update, jobs: list[Job], limit: float, device: torch.device) -> Iterator[dict[str, Any]]:
    """The figures after each way of each trace; a way that fails says why, and the others run. After `limit` seconds
    nothing is begun."""
    begun = time.monotonic()
    cut = f"{sizes.model}, {sizes.layers} layers"
    CONFIGS[cut] = CONFIGS[sizes.model] | {"num_hidden_layers": sizes.layers}
    vocabulary = CONFIGS[sizes.model]["vocab_size"]
    model = make_model(sizes, device)
    recompute_layers(model, "nothing")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True) if sizes.optimizer else None
    figures: dict[str, Any] = {"traces": {}}

    def update(some: list[ModelBatch], weights: torch.Tensor) -> torch.Tensor:
        logp = step(model, some, weights, sizes.chunk_size, compiled=device.type == "cuda")
        if optimizer:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return logp

    def one(
        way: str, rollouts: Rollouts, budget: int, weights: torch.Tensor
    ) -> tuple[list[float], list[ModelBatch], dict[str, Any], torch.Tensor]:
        """(seconds of planning, micro-batches, timing, log-probs) of a way."""
        prepared(model, way)
        update(batches(way, rollouts.first(WARM_ROWS), budget, device), weights)
        planning: list[float] = []
        some: list[ModelBatch] = []

        def plan() -> None:
            some.clear()
            took, made = harness.seconds_of(lambda: batches(way, rollouts, budget, device))
            some.extend(made)
            planning.append(took)

        plan()
        if way == "packed":  # the whole tree may ask for other kernels than those sequences, which are compiled here
            update(some, weights)
            plan()
        repeats = sizes.repeats if way == "packed" else 1
        timed, logp = harness.repeated(lambda: update(some, weights), repeats, between=plan)
        return planning, some, timed, logp

    for name, budget, ways in jobs:
        if time.monotonic() - begun > limit:
            break
        trace = traces.parse(name)
        assert trace is not None
        found, rollouts = Found.of_trace(trace), Rollouts.of_trace(trace, vocabulary)
        gain, layout = Gain.of(found.shared), trace.layout()
        asked = found.trained or 0
        total = [
            flops(cut, rows, pairs, asked)
            for rows, pairs in ((gain.replicated_rows, gain.replicated_pairs), (gain.rows, gain.pairs))
        ]
        of_trace: dict[str, Any] = {
            "trace": name, "budget": budget, "sequences": len(found.shared), "tokens": gain.replicated_rows,
            "packed_tokens": gain.rows, "share_ratio": gain.ratio, "depth": layout.depth,
            "segments": layout.num_segments, "trained": asked, "pays": gain.pays, "saved": gain.saved,
            "flops": total, "flop_ratio": total[0] / total[1], "ways": {},
        }  # fmt: skip
        figures["traces"][f"{name}@{budget}"] = of_trace
        weights = loss_weights(asked, device)
        first = None
        for way in ways:
            if time.monotonic() - begun > limit:
                break
            gc.collect()
            try:
                planning, some, timed, logp = one(way, rollouts, budget, weights)
            except Exception as error:
                model.zero_grad(set_to_none=True)
                of_trace["ways"][way] = {"error": in_words(error)}
                yield figures
                continue
            first = logp if first is None else first
            done = done_flops(cut, some)
            of_trace["ways"][way] = {
                "planning": planning, "micro_batches": len(some), "rows": sum(b.tokens for b in some), **timed,
                "done_flops": done, "done_tflops": done / timed["median"] / 1e12,
                "logp_rms_from_first_way": harness.rms(logp, first),
            }  # fmt: skip
            medians = {way: made["median"] for way, made in of_trace["ways"].items() if "median" in made}
            if {"replicated", "packed"} <= medians.keys():
                of_trace["speed_up"] = medians["replicated"] / medians["packed"]
                of_trace["of_flop_ratio"] = of_trace["speed_up"] / of_trace["flop_ratio"]
            yield figures


def line(name: str, made: dict[str, Any]) -> str:
    """A trace's figures, short."""
    ways = "; ".join(
        f"{way} {found['median']:.2f} s"
        + (f" {found['peak_gib']:.0f} GiB" if "peak_gib" in found else "")
        + f", planning {statistics.median(found['planning']) / found['median']:.1%}"
        if "median" in found
        else f"{way} {found['error'][:120]}"
        for way, found in made["ways"].items()
    )
    speed = f" speed-up {made['speed_up']:.2f} = {made['of_flop_ratio']:.2f} of it;" if "speed_up" in made else ""
    return f"{name}: share {made['share_ratio']:.2f}, FLOP {made['flop_ratio']:.2f};{speed} {ways}"


def main(
    json_to: JsonPath,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}; random weights.")] = "qwen3-8b",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 8,
    budget: Annotated[int, typer.Option(help="Rows of a micro-batch, in every way.")] = 65536,
    repeats: Annotated[
        int, typer.Option(help="Of our ways, after one that is not measured; others run once, after some sequences.")
    ] = 2,
    chunk_size: Annotated[int, typer.Option(help="Rows of the head at a time.")] = 4096,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    ways: Annotated[str, typer.Option(help=f"Of {', '.join(WAYS)}, by commas.")] = ",".join(WAYS),
    time_limit: Annotated[float, typer.Option(help="Seconds after which no way of a trace is begun.")] = 1e9,
    trace: Annotated[
        list[str] | None,
        typer.Option("--trace", "-t", help="Traces in order: NAME, NAME@ROWS of a micro-batch, NAME@ROWS=WAY,WAY."),
    ] = None,
) -> None:
    """Measure updates; figures are written after each way of each trace."""
    sizes = Update(model, layers, 0, 0, 0, 0, repeats, chunk_size, dtype, optimizer=True)
    jobs = [Job.parse(text, budget, ways.split(",")) for text in trace or JOBS]
    device = harness.best_device()
    record, about = Record(json_to, device.type == "cuda"), {"model": model, "layers": layers, "dtype": dtype}
    for figures in measure(sizes, jobs, time_limit, device):
        record.write(about | figures)
        *_, (name, made) = figures["traces"].items()
        print(line(name, made), flush=True)


if __name__ == "__main__":
    typer.run(main)

"""`python -m tools.bench.walk --json walk.json`: groups and trees past a micro-batch, walked and cut.

Each job is run in several ways in turn, with every layer checkpointed:

- cut: micro-batches of a budget of rows, which repeat what they share (`plan_sequences`); or one packed row.
- walked: :func:`dualkv.walk` in a limit of memory, a multiple of the peak of the way before, weights and gradients
  included. Layers keep all where there is room.

With `--megatron` the model is megatron-core's (:mod:`tools.bench.megatron`).

`layers` is forward and backward of the layers, with a loss that sums hidden states of the rows that predict trained
tokens; `update` has the head and log-probs too. Costs of rows are measured first (:func:`dualkv.measure_rows`).
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, NamedTuple

import torch
import typer

from dualkv.bench import traces
from dualkv.bench.run import in_words
from dualkv.data.memory import Memory
from dualkv.data.parts import Fitting, fitting
from dualkv.data.trees import PackedSequences, pack_sequences
from dualkv.models import CONFIGS
from dualkv.row_costs import Peak
from tools.bench import harness
from tools.bench.record import JsonPath, Record
from tools.bench.walk_ways import Runner

JOBS = (
    "24576x16x2048@32768:1.1",
    "28672x16x2048@32768:1.1",
    "65536x8x4096@whole:0.6",
    "trace-tau2-0-n8-t2@1/3:1.1",
    "trace-swe-dropped-0-n16-t8@1/3:1.1",
)
PARTS = "layers", "update"


class Job(NamedTuple):
    """A group or a trace, and the budgets.

    Attributes:
        name: as it was given.
        sequences, masks: rollouts and their masks.
        rows: of a micro-batch of the cut way.
        limit: of the walk's peak memory, over that of the cut way.
    """

    name: str
    sequences: list[torch.Tensor]
    masks: list[Any]
    rows: int
    limit: float

    @classmethod
    def parse(cls, text: str, vocabulary: int) -> Job:
        """Parse PxNxR@ROWS:LIMIT (prompt, responses, tokens of each) or TRACE@ROWS:LIMIT; ROWS may be a part of the
        packed rows (1/3) or "whole".

        Raises:
            typer.BadParameter: other texts.
        """
        found = re.fullmatch(r"([^@:]+)@(whole|\d+(?:/\d+)?):([\d.]+)", text)
        if found is None:
            raise typer.BadParameter(f"{text!r} is no NAME@ROWS:LIMIT")
        name, rows, limit = found.groups()
        if shape := re.fullmatch(r"(\d+)x(\d+)x(\d+)", name):
            prompt, responses, length = map(int, shape.groups())
            sequences, masks = _group(prompt, responses, length, vocabulary)
        elif (trace := traces.parse(name)) is not None:
            sequences = [torch.as_tensor(tokens) for tokens in trace.token_sequences(vocabulary)]
            masks = trace.loss_masks()
        else:
            raise typer.BadParameter(f"{name!r} of {text!r} is neither PxNxR nor a trace")
        total = pack_sequences(sequences, masks).layout.num_tokens
        asked = total if rows == "whole" else int(Fraction(rows) * (total if "/" in rows else 1))
        return cls(name, sequences, masks, max(asked, *map(len, sequences)), float(limit))

    def pack(self, chosen: list[int], device: torch.device) -> PackedSequences:
        return pack_sequences([self.sequences[i] for i in chosen], [self.masks[i] for i in chosen], device=device)


def _group(prompt: int, responses: int, length: int, vocabulary: int) -> tuple[list[torch.Tensor], list[Any]]:
    draw = torch.Generator().manual_seed(0)
    shared = torch.randint(vocabulary, (prompt,), generator=draw)
    own = [torch.randint(vocabulary, (length,), generator=draw) for _ in range(responses)]
    for i, tokens in enumerate(own):
        tokens[0] = i  # so that no two begin alike
    return [torch.cat([shared, tokens]) for tokens in own], [[0] * prompt + [1] * length] * responses


@dataclass(frozen=True)
class Sizes:
    """The model and its runs."""

    model: harness.Model = "qwen3-8b"
    layers: harness.Layers = 8
    repeats: Annotated[int, typer.Option(help="Of each way, after two that are not timed.")] = 3
    chunk_size: harness.ChunkSize = 1024
    dtype: harness.Dtype = "bfloat16"


def measure(
    sizes: Sizes, names: list[str], parts: list[str], device: torch.device, runner: Any = None
) -> Iterator[Any]:
    """The figures after each way of each job; a way that fails says why, and the others run.

    runner: with the methods of :class:`Runner`, which is the default.
    """
    cuda, runner = device.type == "cuda", runner or Runner(sizes, device)
    vocabulary = CONFIGS[sizes.model]["vocab_size"]
    figures: dict[str, Any] = {"jobs": {}}
    for text in names:
        job = Job.parse(text, vocabulary)
        begun = time.perf_counter()
        batch = job.pack(list(range(len(job.sequences))), device)
        planned = time.perf_counter() - begun
        costs = runner.costs(job)
        of_job: dict[str, Any] = {
            "rows": batch.layout.num_tokens, "budget": job.rows, "limit": job.limit, "packing": planned,
            "bytes_a_row": costs._asdict(), "parts": {},
        }  # fmt: skip
        figures["jobs"][text] = of_job
        for part in parts:
            ways: dict[str, Any] = {}
            of_job["parts"][part] = ways
            static = sum(2 * p.nbytes for p in runner.model.parameters())
            done = _timed(ways, "cut", runner.cut(part, job), sizes.repeats, device)
            yield figures
            if done is None:
                continue
            limit = job.limit * (static + done) - static
            of_part = costs if part == "update" else costs._replace(head=0.0)
            memory = Memory(int(limit), of_part)
            plan = fitting(batch, memory)
            if plan is None:
                ways["walked"] = {"error": f"{limit:,.0f} bytes do not hold the smallest parts"}
            else:
                ways["walked"] = _of_plan(plan)
                _timed(ways, "walked", runner.walked(part, batch, plan.parts), sizes.repeats, device)
            if "median" in (walked := ways["walked"]):
                walked["speed_up"] = ways["cut"]["median"] / walked["median"]
                walked["memory"] = (static + walked["bytes"]) / (static + ways["cut"]["bytes"])
            yield figures
        if cuda:
            torch.cuda.empty_cache()


def _timed(
    ways: dict[str, Any], name: str, run: Callable[[], list[torch.Tensor]], repeats: int, device: torch.device
) -> float | None:
    """Note seconds, bytes beside weights and gradients, and the sum of values; return the bytes."""
    made = ways.setdefault(name, {})
    gc.collect()
    try:
        run()  # what is compiled or tuned
        with Peak(device) as peak:
            values = torch.stack(run()).sum()
        timed, _ = harness.repeated(run, repeats)
    except Exception as error:
        made["error"] = in_words(error)
        return None
    made |= timed | {"bytes": peak.bytes, "sum": float(values)}
    return float(peak.bytes)


def _of_plan(plan: Fitting) -> dict[str, Any]:
    parts = plan.parts
    return {
        "planned_bytes": plan.bytes, "part_rows": plan.rows, "parts": len(parts),
        "trunk_rows": sum(len(p.rows) for p in parts if p.is_trunk), "keep_all": sum(p.keeps == 1 for p in parts),
        "planned_time": plan.time,
    }  # fmt: skip


@harness.takes(Sizes)
def main(
    json_to: JsonPath,
    sizes: Sizes,
    parts: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}, by commas.")] = ",".join(PARTS),
    job: Annotated[list[str] | None, typer.Option("--job", "-j", help="PxNxR@ROWS:LIMIT or TRACE@ROWS:LIMIT.")] = None,
    megatron: Annotated[bool, typer.Option(help="megatron-core's model in the place of transformers'.")] = False,
) -> None:
    """Measure walks beside cut micro-batches; figures are written after each way."""
    device, runner = harness.best_device(), None
    record = Record(json_to, device.type == "cuda")
    about = {name: getattr(sizes, name) for name in ("model", "layers", "dtype")}
    if megatron:
        about["library"] = "megatron-core"
        from tools.bench.megatron import MegatronRunner

        runner = MegatronRunner(sizes, device)
    for figures in measure(sizes, list(job or JOBS), parts.split(","), device, runner):
        *_, (name, made) = figures["jobs"].items()
        record.write(about | figures, {name: list(made["parts"].items())[-1]})


if __name__ == "__main__":
    typer.run(main)

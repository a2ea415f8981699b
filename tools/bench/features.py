"""`python -m tools.bench.features`: what sinks and softcapping cost, and how exact softcapping is.

A cost is the time of calls with the feature over the time of the same calls without it, sustained: batches of calls
back to back, in turns, so that the GPU waits for no host. Errors are measured on a small group, against attention in
fp64.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

import torch
import typer

import dualkv
from dualkv.bench import run, sides
from dualkv.bench.inputs import Inputs
from dualkv.bench.run import PEER_CACHES, difference, in_words
from dualkv.bench.show import DIRECTIONS, markdown_table
from dualkv.bench.timing import cold_ms, timed
from dualkv.bench.workloads import MAIN, Workload, parse
from tools.bench.before import speed
from tools.bench.record import JsonPath, Record

SIDES = "dualkv", "fa4-prompt-copied"
# with the feature, without
PAIRS = {
    "sinks, window": (f"{MAIN}-w128-d64-sinks", f"{MAIN}-w128-d64"),
    "sinks": (f"{MAIN}-d64-sinks", f"{MAIN}-d64"),
    "softcap 50, window": (f"{MAIN}-w4096-d256-cap", f"{MAIN}-w4096-d256"),
}
EXACT = "1024:4x512"  # of the errors, with the head dim and window of the last pair
# (softcap, standard deviation of the scores): the other kernels' error; scores small against the cap, and as large
CAPS = (None, 1.0), (50.0, 1.0), (50.0, 50.0)
NAMES = "out", "dq", "dk", "dv"
BATCH_MS = 20.0  # of calls that are timed together


def in_turns(calls: tuple[Callable[[], Any], Callable[[], Any]], pairs: int) -> tuple[float, list[float]]:
    """Milliseconds of the second call, and the first one's time over it, of `pairs` pairs of batches.

    A batch is calls back to back for about BATCH_MS, as many of either; each is first in every other pair. The host
    queues a pair while the GPU runs the one before, of which the first is not counted.
    """
    count = max(1, round(BATCH_MS / cold_ms(calls[1])))
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []

    def batch(call: Callable[[], Any]) -> None:
        for _ in range(count):
            call()

    for i in range(pairs + 1):
        order = (0, 1) if i % 2 == 0 else (1, 0)
        of_call = {which: timed(lambda which=which: batch(calls[which])) for which in order}  # type: ignore[misc]
        events.append([of_call[0], of_call[1]])
        if i:
            for _, end in events[i - 1]:
                end.synchronize()
    torch.cuda.synchronize()
    times = [[begin.elapsed_time(end) / count for begin, end in pair] for pair in events[1:]]
    return statistics.median(without for _, without in times), [with_it / without for with_it, without in times]


@torch.no_grad()
def cost(side: str, direction: str, names: tuple[str, str], pairs: int) -> dict[str, float]:
    """The sustained time with the feature over the time without it, and the milliseconds of a call without it."""
    calls = []
    for name in names:
        made = sides.SIDES[side](Inputs(parse(name)), direction)
        run.run_checked(made, None)
        calls.append(made.call)
    without, ratios = in_turns((calls[0], calls[1]), pairs)
    found = speed(ratios)
    return {"ms_without": without, "cost": found.pop("speed"), **found}


def errors(side: str, spread: float, cap: float | None, device: str = "cuda") -> dict[str, float]:
    """||x - exact|| / ||exact|| of out and gradients, for scores of some standard deviation."""
    shape = parse(PAIRS["softcap 50, window"][1])
    workload: Workload = replace(shape, name=EXACT, prompt_lens=(1024,), response_lens=((512,) * 4,), softcap=cap)
    made = Inputs(replace(workload, window=700), device)
    made.q *= spread
    wide = q, k, v = [x.double().requires_grad_() for x in (made.q, made.k, made.v)]
    out = dualkv.attention(q, k, v, made.layout, made.scale, **made.features._asdict())
    exact = dict(zip(NAMES, (out, *torch.autograd.grad(out, wide, made.dout.double())), strict=True))
    with torch.no_grad():
        results: list[torch.Tensor] = []
        for direction in ("fwd", "bwd"):
            one = sides.SIDES[side](made, direction)
            one.call()
            results += one.results()
        return {
            name: difference((x.double(),), (y.detach(),)) for (name, y), x in zip(exact.items(), results, strict=True)
        }


def measure(pairs: int, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """The figures after each of them; what fails says why."""
    figures: dict[str, Any] = {"pairs": pairs, "batch_ms": BATCH_MS, "errors": [], "costs": []}
    for (cap, spread), side in product(CAPS, SIDES):
        found = _tried(lambda cap=cap, spread=spread, side=side: errors(side, spread, cap, device))  # type: ignore[misc]
        figures["errors"].append({"softcap": cap, "spread": spread, "side": side, **found})
        yield figures
    for (what, names), direction, side in product(PAIRS.items(), ("fwd", "bwd"), SIDES):
        found = _tried(lambda side=side, way=direction, names=names: cost(side, way, names, pairs))  # type: ignore[misc]
        figures["costs"].append({"what": what, "direction": direction, "side": side, **found})
        yield figures
        torch.cuda.empty_cache()


def _tried(call: Callable[[], dict[str, float]]) -> dict[str, Any]:
    try:
        return dict(call())
    except Exception as error:
        return {"error": in_words(error)}


def costs(record: dict[str, Any]) -> str:
    """Tabulate the time that each feature adds, in per cent, a row for each feature and direction."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for c in record["costs"]:
        cell = "not measured"
        if "cost" in c:
            cell = f"{100 * (c['cost'] - 1):+.1f} %"
        rows.setdefault((c["what"], c["direction"]), {})[c["side"]] = cell
    body = [[f"{what}: {DIRECTIONS[way]}", *(cells.get(s, "") for s in SIDES)] for (what, way), cells in rows.items()]
    return markdown_table(["feature", "DualKV", "FlashAttention-4"], body)


def main(
    json_to: JsonPath, pairs: Annotated[int, typer.Option(help="Of batches, with the feature and without.")] = 30
) -> None:
    """Measure what sinks and softcapping cost, and their errors; figures are written after each."""
    os.environ.update(dict.fromkeys(PEER_CACHES, "1"))
    record = Record(json_to)
    for figures in measure(pairs):
        record.write(figures, (figures["costs"] or figures["errors"])[-1])
    print(costs(figures))


if __name__ == "__main__":
    typer.run(main)

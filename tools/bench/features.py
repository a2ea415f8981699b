"""`python -m tools.bench.features`: what sinks and softcapping cost, and how exact softcapping is.

A cost is the time of a call with the feature over that of the same call without it: pairs of single calls, each first in
every other pair. Errors are those of a small group against attention in fp64.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

import dualkv
from dualkv.bench import run, sides
from dualkv.bench.inputs import Inputs
from dualkv.bench.run import difference
from dualkv.bench.show import DIRECTIONS, markdown_table
from dualkv.bench.timing import cold_ms
from dualkv.bench.workloads import Workload, parse
from tools.bench.attention import PEER_CACHES
from tools.bench.before import ratios, speed
from tools.bench.record import JsonPath, Record
from tools.tables import MAIN

SIDES = "dualkv", "fa4-prompt-copied"
# with the feature, without
PAIRS = {
    "sinks, window": (f"{MAIN}-w128-d64-sinks", f"{MAIN}-w128-d64"),
    "sinks": (f"{MAIN}-d64-sinks", f"{MAIN}-d64"),
    "softcap 50, window": (f"{MAIN}-w4096-d256-cap", f"{MAIN}-w4096-d256"),
}
EXACT = "1024:4x512"  # of the errors, with the head dim and window of the last pair
SPREADS = 1.0, 50.0  # standard deviations of the scores: small against the cap, and as large


def cost(side: str, direction: str, names: tuple[str, str], pairs: int) -> dict[str, float]:
    """The time with the feature over that without it, and the milliseconds without it."""
    calls = []
    for name in names:
        made = sides.SIDES[side](Inputs(parse(name)), direction)
        run.run_checked(made, None)
        calls.append(made.call)
    without = cold_ms(calls[1])
    found = speed(ratios((calls[0], calls[1]), pairs, 0.005))
    return {"ms_without": without, "cost": found.pop("speed"), **found}


def errors(side: str, spread: float, cap: float | None, device: str = "cuda") -> dict[str, float]:
    """||x - exact|| / ||exact|| of out and gradients, for scores of some standard deviation."""
    shape = parse(PAIRS["softcap 50, window"][1])
    workload: Workload = replace(shape, name=EXACT, prompt_lens=(1024,), response_lens=((512,) * 4,), softcap=cap)
    made = Inputs(replace(workload, window=700), device)
    made.q *= spread
    wide = [x.double().requires_grad_() for x in (made.q, made.k, made.v)]
    out = dualkv.attention(*wide, made.layout, made.scale, **made.features)
    exact = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, wide, made.dout.double())), strict=True))
    with torch.no_grad():
        results: list[torch.Tensor] = []
        for direction in ("fwd", "bwd"):
            one = sides.SIDES[side](made, direction)
            one.call()
            results += one.results()
        return {
            name: difference((x.double(),), (y.detach(),))
            for (name, y), x in zip(exact.items(), results, strict=True)
        }

"""`python -m tools.bench.composition --json FILE`: the composition of PyTorch's calls, beside what its users have.

These are an earlier composition (`--before FILE`, the module as `git show COMMIT:dualkv/ops/composition.py` prints it),
every sequence replicated through FlashAttention-2, and FlexAttention as the backend has it, compiled for any lengths.
All run in turns, as in `dualkv bench`.

On a Hopper GPU Triton makes FlexAttention's products by instructions that FlashAttention-2 does not have, and that no
Ampere or Ada card has. `--ampere` takes both away: the instructions, and PyTorch's tiles for Hopper.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from dualkv import Layout
from dualkv.bench import run, sides
from dualkv.bench.inputs import Inputs, Side
from dualkv.bench.show import markdown_table
from dualkv.bench.workloads import DIRECTIONS, NAMED, parse
from tools.bench.record import JsonPath, Record

NOW, BEFORE, REPLICATED, FLEX = "dualkv-flash", "before", "torch-flash-replicated", "dualkv-flex"


def load(path: Path) -> ModuleType:
    """An earlier `dualkv.ops.composition`, under a name of its own."""
    found = importlib.util.spec_from_file_location("earlier_composition", path)
    if found is None or found.loader is None or not path.is_file():
        raise ValueError(f"--before is {str(path)!r}, expected a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look there for the module's names
    found.loader.exec_module(module)
    return module


def before(module: ModuleType, inputs: Inputs, direction: str) -> Side:
    """The side that calls an earlier composition, without autograd."""
    inputs.check_plain()
    qkv = inputs.q, inputs.k, inputs.v
    # Of its own: both versions keep what they plan with a layout, under the same name.
    segments = Layout.from_segments(inputs.layout.offsets, inputs.layout.parent)._segments

    def forward() -> Any:
        return module.forward(*qkv, segments, inputs.scale)

    def backward(saved: Any) -> tuple[torch.Tensor, ...]:
        return module.backward(inputs.dout, *qkv, *saved, segments, inputs.scale, False)[:3]

    saved = forward()
    calls = {"fwd": lambda: forward()[:1], "bwd": lambda: backward(saved), "both": lambda: backward(forward())}
    last: list[torch.Tensor] = []

    def call() -> None:
        last[:] = calls[direction]()

    return Side(call, lambda: tuple(last))


def as_ampere() -> None:
    """Make Triton compile products for warps, not warp groups, and PyTorch take its tiles for an A100, from here on."""
    import torch._inductor.config
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic

    os.environ["DISABLE_MMA_V3"] = "1"  # Triton's
    torch._inductor.config.force_disable_caches = True  # a kept graph has Hopper's tiles and instructions
    for name in ("get_flex_attn_fwd_configs", "get_flex_attn_bwd_configs"):
        chosen = getattr(CUDAConfigHeuristic, name)

        def of_a100(*given: Any, chosen: Callable[..., Any] = chosen) -> Any:
            with mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)):
                return chosen(*given)

        setattr(CUDAConfigHeuristic, name, of_a100)


def milliseconds(result: dict[str, Any], side: str) -> float | None:
    found: float | None = result["sides"].get(side, {}).get("sustained_ms")
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each workload and direction: the composition's time, the share of its merges, others over it."""
    rows = []
    for result in results:
        now = result["sides"].get(NOW, {})
        ms = now.get("sustained_ms")
        merge = now.get("parts", {}).get("merge", {}).get("cold_ms")
        others = [milliseconds(result, name) for name in (REPLICATED, FLEX)]
        shares = f"{merge / now['cold_ms']:.1%}" if merge else ""
        ratios = [f"{other:.2f}: {other / ms:.2f}" if ms and other else "" for other in others]
        name = f"{result['workload']['name']}, {result['direction']}"
        rows.append([name, f"{ms:.2f}" if ms else now.get("error", ""), shares, *ratios])
    head = ["ms", "composition", "its merges", "replicated: over it", "FlexAttention: over it"]
    return markdown_table(head, rows)


def main(
    json_to: JsonPath,
    earlier: Annotated[Path | None, typer.Option("--before", help="An earlier composition.")] = None,
    workload: Annotated[list[str] | None, typer.Option("-w", help="By name or lengths. Default: the main one.")] = None,
    ampere: Annotated[bool, typer.Option("--ampere", help="FlexAttention as on an Ampere card.")] = False,
    seconds: Annotated[float, typer.Option(help="Of a turn.")] = 0.5,
    rounds: Annotated[int, typer.Option(help="Turns of a side.")] = 3,
) -> None:
    """Time forward, backward and both; figures are written after each."""
    names = [NOW, *([BEFORE] if earlier else []), REPLICATED, FLEX]
    if ampere:
        as_ampere()
    known = dict(sides.SIDES)
    if earlier:
        module = load(earlier)
        sides.SIDES[BEFORE] = lambda inputs, direction: before(module, inputs, direction)
    record = Record(json_to)
    workloads = [parse(text) for text in workload or [next(iter(NAMED))]]
    results: list[dict[str, Any]] = []
    try:
        for report in run.report(workloads, DIRECTIONS, names, seconds, rounds):
            results = report["results"]
            record.write({name: report[name] for name in ("schema", "settings", "results")} | {"ampere": ampere})
            print(table(results[-1:]), flush=True)
    finally:
        sides.SIDES.clear()
        sides.SIDES.update(known)
    print(table(results))


if __name__ == "__main__":
    typer.run(main)

"""`python -m tools.bench.update NAME`: a recorded run of the demonstration, as JSON with machine and versions.

The figures of updates in README and docs come from here. `dualkv demo` runs the same with any settings, unrecorded.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console

from dualkv.cli.output import tracked
from dualkv.demo.report import render
from dualkv.demo.run import run_demo
from dualkv.demo.settings import DemoSettings
from dualkv.ops import cudnn, hopper
from tools.bench.record import JsonPath, Record

ONE_UPDATE: dict[str, Any] = {"groups": 1, "steps": 1}
QWEN = ONE_UPDATE | {"model": "qwen3-0.6b", "dtype": "bfloat16", "device": "cuda", "gradient_checkpointing": True}
OF_A_WAY = ("tokens", "seconds", "peak_bytes")  # that is filed
RUNS = {
    "cpu": ONE_UPDATE | {"device": "cpu", "prompt_len": 2048, "responses": 16, "response_len": 128},
    "h200-p4096": QWEN | {"prompt_len": 4096, "responses": 8, "response_len": 512},
    "h200-p8192": QWEN | {"prompt_len": 8192, "responses": 32, "response_len": 512},
}


def _none(device: torch.device) -> str:
    """Replace a backend's check of devices, so that none is served (a Mock would keep its arguments)."""
    return "this run"


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(RUNS)}.")],
    json_to: JsonPath,
    composition: Annotated[
        bool, typer.Option("--composition", help="What runs without Hopper's kernels and cuDNN's.")
    ] = False,
) -> None:
    """Run one of the recorded updates and write its figures."""
    if name not in RUNS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(RUNS)}")
    record = Record(json_to, torch.cuda.is_available())
    settings, console = DemoSettings(**RUNS[name]), Console()
    with ExitStack() as without, tracked(console) as track:
        for module in (hopper, cudnn) if composition else ():
            without.enter_context(mock.patch.object(module, "device_unsupported", _none))
        result = run_demo(settings, track)
    console.print(render(result))
    whole = asdict(result)
    ways = {
        way: {name: costs[name] for name in OF_A_WAY} | {"total_seconds": sum(costs["seconds"].values())}
        for way, costs in whole["ways"].items()
    }
    figures: dict[str, Any] = {
        "name": name,
        "attention": "default without kernels" if composition else "default of the device",
        **{name: whole[name] for name in ("settings", "device", "to_truth", "exact", "verdict")},
        "ways": ways,
    }
    record.write(figures)


if __name__ == "__main__":
    typer.run(main)

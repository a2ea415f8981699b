"""`python -m tools.bench_update NAME`: a recorded run of the demonstration, as JSON with machine and versions.

The figures of updates in README and docs come from here. `dualkv demo` runs the same with any settings, unrecorded.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console

from dualkv import hopper
from dualkv.cli import tracked
from dualkv.demo import run_demo
from dualkv.report import render
from dualkv.settings import DemoSettings
from tools.bench import Meter, environment

ONE_UPDATE: dict[str, Any] = {"groups": 1, "steps": 1}
QWEN = ONE_UPDATE | {
    "model": "qwen3-0.6b",
    "dtype": "bfloat16",
    "device": "cuda",
    "learning_rate": 1e-6,
    "gradient_checkpointing": True,
    "check": True,
}
RUNS = {
    "cpu": ONE_UPDATE | {"device": "cpu", "prompt_len": 2048, "responses": 16, "response_len": 128},
    "h200-p4096": QWEN | {"prompt_len": 4096, "responses": 8, "response_len": 512},
    "h200-p8192": QWEN | {"prompt_len": 8192, "responses": 32, "response_len": 512},
}


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(RUNS)}.")],
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")],
    composition: Annotated[
        bool, typer.Option("--composition", help="PyTorch's attention composed, as on a GPU without kernels.")
    ] = False,
) -> None:
    """Run one of the recorded updates and write its figures."""
    if name not in RUNS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(RUNS)}")
    settings, console = DemoSettings(**RUNS[name]), Console()
    without = mock.patch.object(hopper, "unsupported", return_value="this run") if composition else nullcontext()
    with without, tracked(console) as track:
        result = run_demo(settings, track)
    console.print(render(result))
    figures: dict[str, Any] = {
        "name": name,
        "attention": "PyTorch composition" if composition else "default of the device",
        **environment(Meter() if torch.cuda.is_available() else None),
        **result.as_dict(),
    }
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

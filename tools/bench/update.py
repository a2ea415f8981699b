"""`python -m tools.bench.update NAME`: a recorded run of the demonstration, as JSON with machine and versions.

The figures of updates in README and docs come from here. `dualkv demo` runs the same with any settings, unrecorded.
"""

from __future__ import annotations

import json
import random
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console

from dualkv.cli.output import tracked
from dualkv.data.rollouts import ByteTokenizer, topic_prompts
from dualkv.demo.report import render
from dualkv.demo.run import run_demo
from dualkv.demo.settings import DemoSettings
from dualkv.ops import cudnn, hopper
from tools.bench.record import JsonPath, Record

ONE_UPDATE: dict[str, Any] = {"groups": 1, "steps": 1}
QWEN = ONE_UPDATE | {
    "model": "qwen3-0.6b",
    "dtype": "bfloat16",
    "device": "cuda",
    "learning_rate": 1e-6,
    "gradient_checkpointing": True,
    "check": True,
}
OF_A_WAY = ("tokens", "seconds", "total_seconds", "peak_bytes")  # that is filed
RUNS = {
    "cpu": ONE_UPDATE | {"device": "cpu", "prompt_len": 2048, "responses": 16, "response_len": 128},
    "h200-p4096": QWEN | {"prompt_len": 4096, "responses": 8, "response_len": 512},
    "h200-p8192": QWEN | {"prompt_len": 8192, "responses": 32, "response_len": 512},
}


def _none(device: torch.device) -> str:
    """Replace a backend's check of devices, so that none is served (a Mock would keep its arguments)."""
    return "this run"


def write_random_responses(settings: DemoSettings, path: Path) -> Path:
    """A rollouts file of the settings' sizes: prompts as for live rollouts, random bytes, random rewards."""
    draw = random.Random(settings.seed)
    with path.open("w") as file:
        for prompt in topic_prompts(ByteTokenizer(), settings.prompt_len, settings.groups, settings.seed):
            responses = [list(draw.randbytes(settings.response_len)) for _ in range(settings.responses)]
            rewards = [draw.random() for _ in responses]
            file.write(json.dumps({"prompt": prompt.tolist(), "responses": responses, "rewards": rewards}) + "\n")
    return path


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(RUNS)}.")],
    json_to: JsonPath,
    composition: Annotated[
        bool, typer.Option("--composition", help="What runs without Hopper's kernels and cuDNN's.")
    ] = False,
    random_responses: Annotated[
        bool, typer.Option("--random-responses", help="Random bytes as responses, which spares the time of sampling.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Compare with a wider dtype too, where the run has it.")] = True,
) -> None:
    """Run one of the recorded updates and write its figures."""
    if name not in RUNS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(RUNS)}")
    record = Record(json_to, torch.cuda.is_available())
    settings, console = DemoSettings(**RUNS[name] | ({} if check else {"check": False})), Console()
    with ExitStack() as without, tempfile.TemporaryDirectory() as folder, tracked(console) as track:
        for module in (hopper, cudnn) if composition else ():
            without.enter_context(mock.patch.object(module, "device_unsupported", _none))
        given = settings
        if random_responses:
            given = replace(settings, rollouts=str(write_random_responses(settings, Path(folder) / "rollouts.jsonl")))
        result = run_demo(given, track)
    console.print(render(result))
    whole = replace(result, settings=settings).as_dict()
    ways = {way: {name: figures[name] for name in OF_A_WAY} for way, figures in whole["ways"].items()}
    figures: dict[str, Any] = {
        "name": name,
        "attention": "default without kernels" if composition else "default of the device",
        "responses": "random bytes" if random_responses else "sampled by the model",
        **{name: whole[name] for name in ("settings", "device", "to_truth", "exact", "verdict")},
        "ways": ways,
    }
    record.write(figures)


if __name__ == "__main__":
    typer.run(main)

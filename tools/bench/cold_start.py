"""`python -m tools.bench.cold_start --json FILE`: from the start of a process to its first finished attention calls.

Four ways, in turns, each in processes of its own: PyTorch's attention alone (the least time that any way can take),
kernels compiled ahead (DUALKV_KERNEL_DIR, DUALKV_JIT=0), from the user's cache, and compiled there and then. The files
involved are in the page cache, because a turn reads what the turn before has read.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dualkv.bench.show import markdown_table
from tools.bench.record import JsonPath, Record
from tools.process import ROOT

WAYS = ("pytorch", "artefacts", "cache", "compiling")
SHAPE = {"heads": 32, "kv_heads": 8, "head_dim": 128, "prompt": 1024, "responses": 4, "response": 256}

CHILD = """
import json, os, time
marks, (way, shape) = {}, json.loads(os.environ["COLD_START"])

def mark(name):
    marks[name] = time.monotonic() - float(os.environ["COLD_START_AT"])

mark("python")
import torch
mark("torch")
if way != "pytorch":
    import dualkv
mark("dualkv")
heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
rows = shape["prompt"] + shape["responses"] * shape["response"]
q, k, v = (torch.randn(rows, h, dim, device="cuda", dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))
q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
torch.cuda.synchronize()
mark("tensors")
if way == "pytorch":
    one = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
else:
    layout = dualkv.Layout.from_lengths([shape["prompt"]], [[shape["response"]] * shape["responses"]], device="cuda")
    out = dualkv.attention(q, k, v, layout)
torch.cuda.synchronize()
mark("forward")
out.sum().backward()
torch.cuda.synchronize()
mark("backward")
if way != "pytorch":
    from codegen import store
    marks["kernels"] = dict(store.counts)
print(json.dumps(marks))
"""


def once(way: str, kernels: Path, cache: Path) -> dict[str, Any]:
    """Marks of one process: seconds since its start at which each step was done."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DUALKV_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if way == "artefacts":
        environment |= {"DUALKV_KERNEL_DIR": str(kernels), "DUALKV_JIT": "0"}
    with tempfile.TemporaryDirectory() as empty:
        environment["DUALKV_CACHE_DIR"] = str(cache) if way == "cache" else empty
        environment |= {"COLD_START": json.dumps([way, SHAPE]), "COLD_START_AT": repr(time.monotonic())}
        done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr.strip()[-2000:]}")
    marks: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return marks


def steps(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each step, from one mark to the next."""
    names = [name for name in runs[0] if name != "kernels"]
    took = {name: [run[name] - (run[before] if before else 0) for run in runs] for before, name in _pairs(names)}
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def _pairs(names: list[str]) -> Iterator[tuple[str | None, str]]:
    return zip([None, *names], names, strict=False)


def markdown(recorded: dict[str, Any]) -> str:
    """The table of docs/deployment.md."""
    rows = []
    for way, runs in recorded["runs"].items():
        took, totals = steps(runs), sorted(run["forward"] for run in runs)
        spread = f"{totals[0]:.1f}" if len(runs) == 1 else f"{totals[0]:.1f} to {totals[-1]:.1f}"
        ours = [took["dualkv"] if way != "pytorch" else None, took["forward"], took["backward"]]
        rows.append([way, spread, *("" if seconds is None else f"{seconds:.2f}" for seconds in ours)])
    head = ("seconds", "process start to first forward", "import dualkv", "first forward", "first backward")
    return markdown_table(head, rows)


def main(
    json_to: JsonPath,
    repeat: Annotated[int, typer.Option(min=1, help="Processes of every way but the compiling one.")] = 5,
    compiling: Annotated[int, typer.Option(min=0, help="Processes that compile.")] = 1,
) -> None:
    """Measure cold starts on this machine's GPU."""
    import torch

    from dualkv.cli import precompile

    if not torch.cuda.is_available():
        sys.exit("a cold start is measured on a GPU, and PyTorch finds none here")
    runs: dict[str, list[dict[str, Any]]] = {}
    record = Record(json_to)
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder) / "kernels"
        heads = SHAPE["heads"] // SHAPE["kv_heads"]
        specs = precompile.requested(head_dims=[SHAPE["head_dim"]], gqa=[heads])
        precompile.precompile(specs, kernels, precompile.usable_cpus())
        kernels.chmod(0o700)  # the same folder is the warm cache
        for turn in range(max(repeat, compiling)):
            for way in WAYS:
                if turn < (compiling if way == "compiling" else repeat):
                    runs.setdefault(way, []).append(once(way, kernels, kernels))
                    record.write({"shape": SHAPE, "runs": runs}, {way: runs[way][-1]})


if __name__ == "__main__":
    typer.run(main)

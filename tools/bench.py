"""The forward against the peers installed: `python -m tools.bench --json docs/results/forward.json`.

All sides run in one process, in turns. Power, not the clock rate, limits an H200, so every round runs one side back to
back for at least two seconds (*sustained*) before the next; the median over rounds counts. *Cold* is one call at a time
after a pause. TFLOP/s are counted on deduplicated work, the prompt once, whatever a side repeats.
"""

from __future__ import annotations

import datetime
import gc
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from codegen import toolchain
from tools import peers
from tools.workloads import NAMED, Workload, parse

SCHEMA = 1
REFERENCE = "fa4-3-calls"  # the peer that our speed is given against
COLD_CALLS, HOST_CALLS, PAUSE = 5, 20, 0.4


class TimeUp(Exception):
    """The time limit is reached."""


class Clock:
    """Raises TimeUp once `limit` seconds have passed since it was made."""

    def __init__(self, limit: float | None) -> None:
        self.begin, self.limit = time.monotonic(), limit

    def check(self) -> None:
        if self.limit is not None and time.monotonic() - self.begin > self.limit:
            raise TimeUp(f"not measured: the time limit of {self.limit:g} s was reached")


class Meter:
    """Energy, clock and power of the current GPU through NVML. `absent` says why there is none."""

    def __init__(self) -> None:
        self.absent: str | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self.nvml, self.gpu = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.joules()
        except Exception as e:  # a missing package, driver or right: figures go without energy
            self.absent = f"{type(e).__name__}: {e}"

    def joules(self) -> float:
        return 0.0 if self.absent else self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu) / 1e3

    def state(self) -> dict[str, float]:
        if self.absent:
            return {}
        return {
            "sm_clock_mhz": self.nvml.nvmlDeviceGetClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM),
            "power_w": self.nvml.nvmlDeviceGetPowerUsage(self.gpu) / 1e3,
            "temperature_c": self.nvml.nvmlDeviceGetTemperature(self.gpu, self.nvml.NVML_TEMPERATURE_GPU),
        }

    def driver(self) -> str:
        return "unknown" if self.absent else str(self.nvml.nvmlSystemGetDriverVersion())


# ---------------------------------------------------------------- one side
def _timed(call: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    return begin, end


def cold_ms(call: Callable[[], Any]) -> float:
    """Median of single calls, the GPU idle before the first."""
    torch.cuda.synchronize()
    time.sleep(PAUSE)
    times = []
    for _ in range(COLD_CALLS):
        begin, end = _timed(call)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def host_us(call: Callable[[], Any]) -> float:
    """Median time that a call holds the host, microseconds, of calls one after another."""
    times = []
    torch.cuda.synchronize()
    for _ in range(HOST_CALLS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def sustained(call: Callable[[], Any], expected_ms: float, seconds: float, meter: Meter) -> dict[str, Any]:
    """Back to back for `seconds`: median ms of the last three quarters, joules a call, clock and power at the end."""
    batch = max(1, min(50, round(200 / expected_ms)))
    events = []
    torch.cuda.synchronize()
    begin, joules = time.monotonic(), meter.joules()
    while time.monotonic() - begin < seconds:
        events += [_timed(call) for _ in range(batch)]
        state = meter.state()
        events[-1][1].synchronize()
    joules = meter.joules() - joules
    late = [a.elapsed_time(b) for a, b in events[len(events) // 4 :]]
    energy = {} if meter.absent else {"joules": joules / len(events)}
    return {"ms": statistics.median(late), "calls": len(events), **energy, **state}


def summary(cold: float, host: float, rounds: list[dict[str, Any]], flops: int) -> dict[str, Any]:
    """The figures of one side: medians over rounds."""
    figures: dict[str, Any] = {"cold_ms": cold, "cold_tflops": flops / cold / 1e9, "host_us": host, "rounds": rounds}
    if rounds:
        middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0] if name != "calls"}
        figures |= {"sustained_ms": middle.pop("ms"), **middle}
        figures["sustained_tflops"] = flops / figures["sustained_ms"] / 1e9
    return figures


# ---------------------------------------------------------------- one workload
def bench(
    workload: Workload, names: list[str], seconds: float, rounds: int, clock: Clock, meter: Meter,
    progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """All sides in turns. A side that fails is reported with its error; so is what the time limit leaves out."""
    sides: dict[str, peers.Side] = {}
    figures: dict[str, dict[str, Any]] = {name: {} for name in names}
    cold: dict[str, float] = {}
    host: dict[str, float] = {}
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    inputs = peers.Inputs(workload)
    reference = None

    def attempt(name: str, what: str, step: Callable[[], None]) -> None:
        progress(f"{workload.name}: {name} {what}")
        if "error" in figures[name]:
            return
        try:
            clock.check()
            step()
        except Exception as e:
            figures[name]["error"] = str(e) if isinstance(e, TimeUp) else f"{type(e).__name__}: {e}"[:500]
            sides.pop(name, None)

    with torch.no_grad():
        for name in names:

            def prepare(name: str = name) -> None:
                nonlocal reference
                side = peers.SIDES[name](inputs)
                difference = peers.run_checked(side, reference)
                if reference is None:
                    reference = side.output().clone()
                    figures[name]["compared_with"] = name
                else:
                    figures[name]["max_difference"] = difference
                sides[name] = side

            def single(name: str = name) -> None:
                side = sides[name]
                host[name], cold[name] = host_us(side.call), cold_ms(side.call)
                figures[name]["parts"] = {
                    part: {"cold_ms": cold_ms(call), "in_total": part not in side.extra}
                    for part, call in side.parts.items()
                }

            attempt(name, "set up", prepare)
            attempt(name, "cold", single)
        for i in range(rounds):
            for name in names:

                def turn(name: str = name) -> None:
                    measured[name].append(sustained(sides[name].call, cold[name], seconds, meter))

                attempt(name, f"round {i + 1}", turn)

    flops = workload.forward_flops()
    for name in names:
        if name in cold:
            figures[name] |= summary(cold[name], host[name], measured[name], flops)
    theirs = figures.get(REFERENCE, {}).get("sustained_ms")
    for mine in figures.values():
        if theirs and "sustained_ms" in mine:
            mine["speed_against_reference"] = theirs / mine["sustained_ms"]
    layout = workload.layout()
    shape = {"tokens": layout.num_tokens, "dedup_ratio": layout.dedup_ratio, "forward_flops": flops}
    return {"workload": asdict(workload) | shape, "reference": REFERENCE, "sides": figures}


# ---------------------------------------------------------------- where and with what
def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def environment(meter: Meter | None) -> dict[str, Any]:
    """GPU, driver, versions, commit and date of a run."""
    gpu: dict[str, Any] = {"name": "none"}
    if meter is not None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {"name": properties.name, "multiprocessors": properties.multi_processor_count, "driver": meter.driver()}
        gpu |= {"memory_gib": properties.total_memory / 2**30, "nvml": meter.absent or "present"}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": _git("status", "--porcelain", "--untracked-files=no").splitlines(),
        "gpu": gpu,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {package: toolchain.version(package) for package in peers.PACKAGES},
    }


COLUMNS = (
    ("ms", "sustained_ms", ".3f"),
    ("TFLOP/s", "sustained_tflops", ".0f"),
    (f"vs {REFERENCE}", "speed_against_reference", ".3f"),
    ("cold ms", "cold_ms", ".3f"),
    ("cold TFLOP/s", "cold_tflops", ".0f"),
    ("J a call", "joules", ".2f"),
    ("MHz", "sm_clock_mhz", ".0f"),
    ("host µs", "host_us", ".0f"),
)


def table(result: dict[str, Any]) -> Table:
    workload = result["workload"]
    heads = f"H={workload['heads']} Hk={workload['kv_heads']} D={workload['head_dim']} {workload['dtype']}"
    title = f"{workload['name']}  {heads}  {workload['tokens']} tokens, {workload['forward_flops'] / 1e12:.2f} TFLOP"
    shown = Table("side", *(column for column, _, _ in COLUMNS), "", title=title, title_justify="left")
    for name, figures in result["sides"].items():
        numbers = [format(figures[key], spec) if key in figures else "" for _, key, spec in COLUMNS]
        parts = [
            f"{'' if part['in_total'] else '+ '}{label} {part['cold_ms']:.3f}"
            for label, part in figures.get("parts", {}).items()
        ]
        shown.add_row(name, *numbers, figures.get("error") or ", ".join(parts))
    return shown


# ---------------------------------------------------------------- command line
def main(
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="A name, or lengths such as '8192:32x2048;700:130,911'. Default: all."),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads, instead of the workload's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads, likewise.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=8, help="Head dim, likewise.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp16, likewise.")] = None,
    side: Annotated[list[str] | None, typer.Option("--side", "-s", help="Sides to run. Default: all.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of a sustained turn.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every side.")] = 3,
    time_limit: Annotated[float | None, typer.Option(min=1, help="Seconds after which nothing new is begun.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the workloads and their work, run nothing.")] = False,
) -> None:
    """Time the attention forward against its peers on this GPU."""
    console = Console()
    try:
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
        workloads = [parse(text).with_shape(**shape) for text in workload or NAMED]
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    names = side or list(peers.SIDES)
    unknown = [name for name in names if name not in peers.SIDES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(peers.SIDES)}", param_hint="--side")
    if listing:
        shown = Table("workload", "heads", "tokens", "dedup", "forward TFLOP")
        for w in workloads:
            layout, kind = w.layout(), f"{w.heads}/{w.kv_heads} x {w.head_dim} {w.dtype}"
            row = f"{layout.num_tokens}", f"{layout.dedup_ratio:.2f}", f"{w.forward_flops() / 1e12:.3g}"
            shown.add_row(w.name, kind, *row)
        console.print(shown)
        return
    if not torch.cuda.is_available():
        console.print("[red]tools.bench measures on a CUDA GPU and this machine has none[/] (--list works without)")
        raise typer.Exit(1)

    meter, clock = Meter(), Clock(time_limit)
    settings = {"seconds": seconds, "rounds": rounds, "time_limit": time_limit, "sides": names}
    report = {"schema": SCHEMA, **environment(meter), "settings": settings, "results": []}
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(workloads) * len(names) * (2 + rounds))
        for w in workloads:
            result = bench(
                w, names, seconds, rounds, clock, meter, lambda text: bar.update(task, advance=1, description=text)
            )
            report["results"].append(result)
            console.print(table(result))
            if json_path is not None:
                json_path.parent.mkdir(parents=True, exist_ok=True)
                json_path.write_text(json.dumps(report, indent=1) + "\n")
            gc.collect()
            torch.cuda.empty_cache()
    failed = {name for result in report["results"] for name, f in result["sides"].items() if "error" in f}
    if failed:
        console.print(f"[yellow]not (all) measured: {', '.join(sorted(failed))}; see the errors in the table[/]")


if __name__ == "__main__":
    typer.run(main)

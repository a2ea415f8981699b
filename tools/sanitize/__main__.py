"""Run the tools over all cases and file what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from time import monotonic
from typing import Annotated, Any

import typer

from codegen import KernelError, cubin, folders, store
from codegen.spec import KernelSpec
from tools.bench.record import OptionalJsonPath, Record
from tools.process import ToolError, find_program, run_limited
from tools.sanitize import controls, known, show
from tools.sanitize.cases import HEAD_DIMS, Case, cases
from tools.sanitize.reading import Place, parse, short
from tools.sanitize.show import CONTROLS

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OPTIONS = ["--print-limit", "20000", "--show-backtrace", "no", "--destroy-on-device-error", "kernel"]
RACES = 10**8  # reports that racecheck keeps in a process; its false positives are tens of millions
ELSEWHERE = "/usr/local/cuda/bin/compute-sanitizer"


def specs(head_dims: list[int]) -> list[KernelSpec]:
    """All kernels of all cases."""
    return list(dict.fromkeys(spec for d in head_dims for t in TOOLS for case in cases(d, t) for spec in case.specs()))


def check(sanitizer: str, tool: str, what: str, limit: float) -> dict[str, Any]:
    """One tool over the cases of a head dim, or over the controls, in a process of its own.

    Every tensor is an allocation of its own, so that a tool knows where it ends.
    """
    begin = monotonic()
    command = [sanitizer, "--tool", tool, *OPTIONS, sys.executable, "-m", "tools.sanitize.target", tool, what]
    environ = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONUNBUFFERED": "1",
        "NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": str(RACES),
    }
    code, text = run_limited(command, limit, environ)
    return read(tool, what, text, monotonic() - begin, code, f"stopped after {limit:g} s" if code is None else "")


def read(tool: str, what: str, text: str, seconds: float, code: int | None = 0, ended_by: str = "") -> dict[str, Any]:
    """Read the output of a process that exited with `code`, or was ended."""
    found = parse(text)
    wrong = found.failures + [ended_by] * bool(ended_by)
    if found.not_printed:
        wrong.append(f"{found.not_printed} more reports were not printed")
    if tool == "racecheck" and found.reports.total() >= RACES:
        wrong.append(f"{RACES:,} reports, which are all that racecheck keeps: it saw nothing of what came after")
    if not wrong and (not found.begun or found.begun != found.ended):
        wrong.append(f"exit code {code}: " + " ".join(text.split())[-300:])
    return {
        "tool": tool,
        "cases_of": what,
        "seconds": round(seconds, 1),
        "cases": found.ended,
        "unfinished": "; ".join(wrong),
        "reports": list(found.reports.items()),
    }


# ---------------------------------------------------------------- what the reports mean
@cache
def _sass(spec: KernelSpec) -> tuple[str, dict[int, str]]:
    """The kernel's symbol, and its instructions by offset where a disassembler is at hand."""
    folder = store.entry(spec)
    symbol = cubin.resources((folder / "kernel.cubin").read_bytes()).function
    try:
        text = cubin.sass(folder / "kernel.cubin")
    except (KernelError, OSError, subprocess.SubprocessError):
        text = ""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text)
    return symbol, {int(offset, 16): text for offset, text in code}


def instruction(case: Case | None, place: Place) -> str:
    """Find the instruction at a place of one of a case's kernels; the result is the offset where that cannot be
    told."""
    symbol, offset = place
    for spec in case.specs() if case else ():
        name, code = _sass(spec)
        if name == symbol:
            return " ".join(code.get(offset, f"+{offset:#x}").split())
    return f"+{offset:#x}"


def explained(runs: list[dict[str, Any]], shown: dict[str, int]) -> list[dict[str, Any]]:
    """A tool's reports by kernel and kind of instruction, with what the controls show of them."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        by_name = {case.name: case for case in cases(int(run["cases_of"]), run["tool"])}
        for report, count in run["reports"]:
            texts = [instruction(by_name.get(report.case), place) for place in report.places]
            kinds = list(dict.fromkeys(_kind(text) for text in texts))
            kernel = ", ".join(dict.fromkeys(short(symbol) for symbol, _ in report.places))
            entry = merged.setdefault(
                (report.what, kernel, tuple(kinds)),
                {"what": report.what, "kernel": kernel, "instructions": kinds, "count": 0, "cases": set()},
            )
            entry["count"] += count
            entry["cases"].add(report.case)
    found = []
    for entry in merged.values():
        unpaced = any("deterministic" in case or "gradients of kv" in case for case in entry["cases"])
        entry |= {"cases": len(entry["cases"]), "unpaced": unpaced}
        found.append(entry | {"false_positive": known.why(runs[0]["tool"], entry, shown)})
    return found


def _kind(text: str) -> str:
    """`LDS.128` of `@!P0 LDS.128 R20, [R17+0x33000]`; of a barrier also its number."""
    words = re.sub(r"^@!?U?P\w+\s+", "", text).replace(",", " ").split()
    return " ".join(words[: 1 + words[0].startswith("BAR.")])


# ---------------------------------------------------------------- command line
def summary(runs: list[dict[str, Any]], plan: list[tuple[str, str]]) -> dict[str, Any]:
    """Summarize the runs by tool of the plan: cases, what the controls showed, reports, and what is missing."""
    tools: dict[str, Any] = {}
    for name in dict.fromkeys(tool for tool, _ in plan):
        mine = [run for run in runs if run["tool"] == name]
        missing = {what for tool, what in plan if tool == name} - {run["cases_of"] for run in mine}
        shown = dict.fromkeys([*controls.CORRECT, *controls.RACY, controls.PLANTED[name][0]], 0)
        for run in mine:
            if run["cases_of"] == CONTROLS:
                for report, count in run["reports"]:
                    shown[report.case] = shown.get(report.case, 0) + count
        rest = [run for run in mine if run["cases_of"] != CONTROLS]
        tools[name] = {
            "cases": sum(len(run["cases"]) for run in rest),
            "seconds": round(sum(run["seconds"] for run in mine), 1),
            CONTROLS: shown,
            "reports": explained(rest, shown),
            "unfinished": [
                *(f"{run['cases_of']}: {run['unfinished']}" for run in mine if run["unfinished"]),
                *(f"{what}: not run" for what in sorted(missing)),
            ],
        }
    return tools


def main(
    json_to: OptionalJsonPath = None,
    tool: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TOOLS)}. Default: all.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Head dims. Default: all families.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes at a time.")] = 4,
    limit: Annotated[float, typer.Option(min=1, help="Seconds of a process.")] = 600,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of all together; what is left out is said.")] = 3600,
) -> None:
    """Run compute-sanitizer's tools over edge shapes of every family of kernels, forward and backward.

    The exit code is 1 unless everything was checked and is clean."""
    tools, dims = tool or list(TOOLS), head_dim or list(HEAD_DIMS)
    for given, allowed, name in ((tools, TOOLS, "--tool"), (dims, HEAD_DIMS, "--head-dim")):
        wrong = [value for value in given if value not in allowed]
        if wrong:
            raise typer.BadParameter(f"{wrong[0]!r} is none of {', '.join(map(str, allowed))}", param_hint=name)
    try:
        sanitizer = find_program("compute-sanitizer", ELSEWHERE, install="the CUDA toolkit's compute-sanitizer")
    except ToolError as e:
        print(f"sanitize: {e}", file=sys.stderr)
        raise typer.Exit(1) from None
    missing = [spec for spec in specs(dims) if store.where(spec) is None]
    if missing:
        folders.make_cache_dir()
        print(f"compiling {len(missing)} kernels", flush=True)
        list(store.fill(missing, store.cache_dir(), os.cpu_count() or 1))
    plan = [(t, what) for what in (CONTROLS, *map(str, dims[::-1])) for t in tools]
    version = (
        subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout.split("Version")[-1].strip()
    )
    record = Record(json_to)
    runs: list[dict[str, Any]] = []
    deadline = monotonic() + seconds

    def in_time(tool: str, what: str) -> dict[str, Any] | None:
        left = deadline - monotonic()
        return check(sanitizer, tool, what, min(limit, left)) if left >= 1 else None

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(in_time, *each) for each in plan]):
            if (run := done.result()) is None:
                continue
            state = run["unfinished"] or f"{len(run['reports'])} different reports"
            about = f"{run['tool']} {run['cases_of']}: {len(run['cases'])} cases, {run['seconds']} s, {state}"
            print(about, flush=True)
            runs = sorted([*runs, run], key=lambda run: plan.index((run["tool"], run["cases_of"])))
            record.write({"compute_sanitizer": version, "tools": summary(runs, plan)})
    made = summary(runs, plan)
    print("\n".join([show.table(made), "", *show.findings(made)]))
    errors = any(report["false_positive"] is None for one in made.values() for report in one["reports"])
    blind = any(not one[CONTROLS].get(controls.PLANTED[name][0]) for name, one in made.items())
    if errors or blind or any(one["unfinished"] for one in made.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

"""A table of `docs/trust.md`: what was tried to break DualKV and how much of it failed, by the records of all runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dualkv.bench.show import markdown_table
from tools.bench.record import NO_MEMORY, commit_of

Runs = Sequence[dict[str, Any]]


def table(fuzzed: Runs, suites: Runs, sanitized: Runs, soaked: Runs) -> str:
    """One row for each kind of check, over all of its runs."""
    rows = []
    if fuzzed:
        said = [f"largest error {max(run['worst_part_of_bound'] for run in fuzzed):.2f} of its bound"]
        if left_out := sum(run["tried"].get(NO_MEMORY, 0) for run in fuzzed):
            said.append(f"{left_out} {NO_MEMORY}")
        many = [run["tried"]["cases"] for run in fuzzed]
        rows.append(_row("random calls", fuzzed, many, sum(run["failed"] for run in fuzzed), said))
    if suites:
        outcomes: list[Counter[str]] = [sum(map(Counter, run["modules"].values()), Counter()) for run in suites]
        failed = sum(found["failed"] + found["error"] for found in outcomes)
        said = [note for run in suites for note in run["notes"] if not note[0].isdecimal()]  # others: what was skipped
        said += [f"{skipped} skipped"] if (skipped := sum(found["skipped"] for found in outcomes)) else []
        many = [found.total() - found["skipped"] for found in outcomes]
        rows.append(_row("GPU tests", suites, many, failed, said))
    if sanitized:
        tools = [(name, tool, run) for run in sanitized for name, tool in run["tools"].items()]
        errors = [report for _, tool, _ in tools for report in tool["reports"] if report["false_positive"] is None]
        said = list(dict.fromkeys(report["what"].partition(". ")[0] for report in errors))
        said += [f"{name} not finished: {why}" for name, tool, _ in tools for why in tool["unfinished"]]
        what = f"compute-sanitizer: {', '.join(dict.fromkeys(name for name, _, _ in tools))}"
        runs, many = [run for *_, run in tools], [tool["cases"] for _, tool, _ in tools]
        rows.append(_row(what, runs, many, sum(report["count"] for report in errors), said))
    if soaked:
        said = [problem for run in soaked for problem in run["problems"]]
        many = [sum(run["steps"].values()) for run in soaked]
        rows.append(_row("steps of long runs", soaked, many, len(said), said))
    return markdown_table(["check", "tried", "failed", "", "newest run"], rows)


def _row(what: str, runs: Runs, many: Sequence[int], failed: int, said: Sequence[str]) -> list[str]:
    """Runs of one kind; `many` says of each run how much it tried."""
    devices: Counter[str] = Counter()
    for run, number in zip(runs, many, strict=True):
        gpu = run["gpu"]["name"]
        devices["CPU" if gpu == "none" else gpu.removeprefix("NVIDIA ").partition(" ")[0]] += number
    newest = max(runs, key=lambda run: str(run["date"]))
    tried = ", ".join(f"{number:,} on {device}" for device, number in devices.most_common())
    return [what, tried, f"{failed:,}", "; ".join(said), f"{newest['date'][:10]}, {commit_of(newest)}"]

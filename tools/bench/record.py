"""Record a run: its figures after date, commit, changed files, GPU and versions, laid out by `tools.filed`.

Every program of this folder is called `python -m tools.bench.NAME ... --json FILE`. A machine that has the checkout
in which git does not know the commit needs its stamp too (`python -m tools.stamp`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dualkv.bench.run import environment
from dualkv.bench.timing import Meter
from tools import filed
from tools.filed import RUNS

_OPTION = typer.Option("--json", help="Record the run in this file.")
JsonPath = Annotated[Path, _OPTION]
OptionalJsonPath = Annotated[Path | None, _OPTION]
NO_MEMORY = "not tried: out of memory"  # calls of the fuzzer, counted beside those that it tried
FOUND = "date", "seed", "seconds", "failed", "worst_part_of_bound", "tried"


class Record:
    """The record of one run, which begins now; without a path nothing is written."""

    def __init__(self, path: Path | None, gpu: bool = True) -> None:
        """gpu: the run uses this machine's GPU.

        Raises:
            ValueError: the stamp of this checkout is of other sources.
        """
        self.path = path
        self.about = environment(Meter() if gpu else None) if path else {}

    def write(self, figures: Mapping[str, Any], new: Any = None) -> dict[str, Any]:
        """Write all figures, and print those that are `new`; return the record.

        It is called after each result, so that a run that is cut keeps them."""
        whole = {**self.about, **figures}
        if new is not None:
            print(json.dumps(new, default=str), flush=True)
        if self.path:
            _replace(self.path, whole)
        return whole

    def append(self, figures: Mapping[str, Any]) -> None:
        """Add the run to the list of runs that the file holds; runs of one commit on one machine become one.

        Raises:
            ValueError: the file holds something else.
        """
        if self.path:
            before = filed.read(self.path) if self.path.exists() else {RUNS: []}
            if before.keys() != {RUNS}:
                raise ValueError(f"{self.path} holds {', '.join(before)}, expected a list of runs under {RUNS!r}")
            _replace(self.path, {RUNS: together([*before[RUNS], {**self.about, **figures}])})


def together(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join runs that differ only in their seed, date and findings: sums, the worst, the last date."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        whole = found.setdefault(json.dumps({name: value for name, value in run.items() if name not in FOUND}), {})
        added = Counter(whole.get("tried", {})) + Counter(run["tried"])
        whole |= run | {
            "seed": ", ".join([*([whole["seed"]] if whole else []), run["seed"]]),
            "seconds": round(whole.get("seconds", 0) + run["seconds"], 1),
            "failed": whole.get("failed", 0) + run["failed"],
            "worst_part_of_bound": max(whole.get("worst_part_of_bound", 0.0), run["worst_part_of_bound"]),
            "tried": dict(sorted(added.items())),
        }
    return list(found.values())


def commit_of(record: Mapping[str, Any]) -> str:
    changed = len(record.get("changed_files") or ())
    return f"commit {record['commit'][:7]}" + (f" and {changed} changed files" if changed else "")


def recorded(*records: Mapping[str, Any]) -> str:
    """Write the line behind a table that says when and of which commits its records are."""
    dates = dict.fromkeys(f"{record['date'][:10]} at {commit_of(record)}" for record in records)
    return f"\n\nRecorded {'; '.join(dates)}."


def runs_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of a list of runs, or the record of one run."""
    return list(record[RUNS]) if record.keys() == {RUNS} else [record]


def _replace(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(filed.text(record))
    part.replace(path)

"""`python -m tools.bench.real_model --json docs/results/real-model-h200.json --commit COMMIT --date DATE RUN...`

Record runs of a real model: RUNs are folders that `examples/real_model.py --out RUN` wrote, the first one replicated.
Their logs come from another machine, so commit and date are given. Responses of runs with one seed are drawn with the
same random numbers. How many are equal, update for update, tells how far a run has parted from the first one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from dualkv.bench.show import markdown_table
from tools import filed
from tools.bench.record import JsonPath

HELD_OUT = "update", "questions", "greedy_accuracy", "sampled_accuracy", "distinct_answers", "constant_accuracy"
SETTINGS = "task", "task_settings", "way", "lora", "lr", "kl", "seed", "groups", "responses", "response_len", "budget"
SERIES = "reward", "kl", "entropy", "response_len", "update_s", "generate_s", "step_s"
ALONE = "replicated-0", "packed-0"  # runs that shared their GPU with no other, whose times are shown
COLUMNS = ["way", "seed", "likeliest answers", "sampled answers", "update, s", "sampling, s", "step, s", "peak memory"]
Lines = list[dict[str, Any]]


def log(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(lines: Lines) -> dict[str, Any]:
    """Settings, held-out accuracies, and one number an update of each of SERIES."""
    head, steps = lines[0], [line for line in lines if "reward" in line]
    return {
        "settings": {name: head["settings"][name] for name in SETTINGS} | {"prompt_len": head["prefix"]},
        "updates": len(steps),
        "rows": round(sum(line["rows"] for line in steps) / len(steps)),
        "peak_gib": max(line.get("peak_gib", 0.0) for line in steps),
        "held_out": [{name: line[name] for name in HELD_OUT} for line in lines if "greedy_accuracy" in line],
        **{name: [float(f"{line[name]:.4g}") for line in steps] for name in SERIES},
    }


def alike(lines: Lines, base: Lines) -> list[float]:
    """Share of responses that are equal to those of another run, of each update that both made."""
    others = {line["update"]: line["crc"] for line in base if "crc" in line}
    pairs = [(line["crc"], others[line["update"]]) for line in lines if line.get("update") in others and "crc" in line]
    return [round(sum(a == b for a, b in zip(*pair, strict=True)) / len(pair[0]), 3) for pair in pairs]


def record(
    folders: Sequence[Path], candidates: Sequence[Path], screened: Path | None, times: Path | None
) -> dict[str, Any]:
    """The figures of all runs."""
    logs = {folder.name: log(folder / "log.jsonl") for folder in folders}
    base = next(iter(logs.values()))
    runs = {name: figures(lines) for name, lines in logs.items()}
    for name, lines in logs.items():
        if lines is not base and lines[0]["settings"]["seed"] == base[0]["settings"]["seed"]:
            runs[name]["alike"] = alike(lines, base)
    short = [{k: v for k, v in figures(log(path)).items() if k not in SERIES} for path in candidates]
    made: dict[str, Any] = {
        "gpu": {"name": base[0]["device"]},
        "versions": {"torch": base[0]["torch"]},
        "runs_of": runs,
    }
    made |= {"candidates": short} if short else {}
    if screened:
        shown = [line for line in screened.read_text(errors="replace").splitlines() if line.startswith('{"task"')]
        kept = ("task", *HELD_OUT[1:4], "prefix", "question_len", "answer_len")
        made["screened"] = [{name: json.loads(line)[name] for name in kept} for line in shown]
    return made | ({"times": json.loads(times.read_text())} if times else {})


def markdown(made: dict[str, Any]) -> str:
    """Tabulate the runs: accuracy before and after, time and memory."""
    rows = []
    for name, run in made["runs_of"].items():
        before, after = run["held_out"][0], run["held_out"][-1]
        if after["update"] == 0:
            continue
        way = run["settings"]["way"] + (f", LoRA of rank {run['settings']['lora']}" if run["settings"]["lora"] else "")
        accuracy = [f"{100 * before[kind]:.1f} to {100 * after[kind]:.1f} %" for kind in HELD_OUT[2:4]]
        seconds = [f"{median(run[kind]):.2f}" if name in ALONE else "" for kind in ("update_s", "generate_s", "step_s")]
        rows.append([way, str(run["settings"]["seed"]), *accuracy, *seconds, f"{run['peak_gib']:.1f} GiB"])
    return markdown_table(COLUMNS, rows)


def main(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    json_to: JsonPath,
    commit: Annotated[str, typer.Option(help="The commit that ran, all 40 digits.")],
    date: Annotated[str, typer.Option(help="When it ran.")],
    candidates: Annotated[list[Path] | None, typer.Option(help="Logs of short runs of other tasks.")] = None,
    screened: Annotated[Path | None, typer.Option(help="What --screen printed.")] = None,
    times: Annotated[Path | None, typer.Option(help="What --time wrote.")] = None,
) -> None:
    """Record runs of examples/real_model.py."""
    if len(commit) != 40:
        raise typer.BadParameter(f"commit is {commit!r}, expected 40 digits")
    about = {"date": date, "commit": commit, "changed_files": []}
    json_to.write_text(filed.text(about | record(runs, candidates or [], screened, times)))


if __name__ == "__main__":
    typer.run(main)

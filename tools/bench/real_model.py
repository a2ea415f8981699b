"""`python -m tools.bench.real_model --json docs/results/real-model-trainers-h200.json RUN...`

Record runs of a real model: RUNs are folders that `examples/real_model.py --out RUN` or `examples/real_model_trl.py`
wrote. Their logs name the machine, the commit and the date. Responses of runs with one seed are drawn with the same
random numbers. How many are equal, update for update, tells how far a run has parted from the first one.
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
# Runs that shared their GPU with no other, whose times are shown.
ALONE = "replicated-0", "packed-0", "trl-replicated-0", "trl-packed-0"
ABOUT = "date", "commit", "changed_files", "gpu", "python", "cuda", "versions"
COLUMNS = ["way", "seed", "likeliest answers", "sampled answers", "update, s", "sampling, s", "step, s", "peak memory"]
VERL_COLUMNS = [
    "run",
    "update, s",
    "peak memory",
    "log-probs before, from fp32",
    "log-probs after, from veRL's",
    "movement of weights, from veRL's",
    "right answers",
    "other answers",
]
Lines = list[dict[str, Any]]


def log(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(lines: Lines) -> dict[str, Any]:
    """Settings, held-out accuracies, and one number an update of each of SERIES."""
    head, steps = lines[0], [line for line in lines if "reward" in line]
    return {
        "trainer": head["trainer"],
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
    """The figures of all runs; date, commit and machine of the first one, and of others what differs."""
    logs = {folder.name: log(folder / "log.jsonl") for folder in folders}
    base = next(iter(logs.values()))
    about = {name: base[0][name] for name in ABOUT}

    def differs(head: dict[str, Any]) -> dict[str, Any]:
        return {name: head[name] for name in ABOUT if head[name] != about[name]}

    runs = {name: differs(lines[0]) | figures(lines) for name, lines in logs.items()}
    for name, lines in logs.items():
        if lines is not base and lines[0]["settings"]["seed"] == base[0]["settings"]["seed"]:
            runs[name]["alike"] = alike(lines, base)
    short = [{k: v for k, v in figures(log(path)).items() if k not in SERIES} for path in candidates]
    made: dict[str, Any] = about | {"runs_of": runs}
    made |= {"candidates": short} if short else {}
    if screened:
        shown = [line for line in screened.read_text(errors="replace").splitlines() if line.startswith('{"task"')]
        kept = ("task", *HELD_OUT[1:4], "prefix", "question_len", "answer_len")
        made["screened"] = [{name: json.loads(line)[name] for name in kept} for line in shown]
    if times:
        timed = json.loads(times.read_text())
        made["times"] = differs(timed) | {name: value for name, value in timed.items() if name not in ABOUT}
    return made


def markdown(made: dict[str, Any], of_trainers: dict[str, Any]) -> str:
    """Tabulate the runs, and those of other trainers in a second record: accuracy before and after, time and memory."""
    rows = []
    theirs = {name: run for name, run in of_trainers["runs_of"].items() if run["trainer"] != "real_model.py"}
    for name, run in (made["runs_of"] | theirs).items():
        before, after = run["held_out"][0], run["held_out"][-1]
        if after["update"] == 0:
            continue
        way = run["settings"]["way"] + (f", LoRA of rank {run['settings']['lora']}" if run["settings"]["lora"] else "")
        way = f"{run['trainer']}, {way}" if name in theirs else way
        accuracy = [f"{100 * before[kind]:.1f} to {100 * after[kind]:.1f} %" for kind in HELD_OUT[2:4]]
        seconds = [f"{median(run[kind]):.2f}" if name in ALONE else "" for kind in ("update_s", "generate_s", "step_s")]
        rows.append([way, str(run["settings"]["seed"]), *accuracy, *seconds, f"{run['peak_gib']:.1f} GiB"])
    return markdown_table(COLUMNS, rows)


def verl_markdown(made: dict[str, Any]) -> str:
    """Tabulate a record of tools.bench.recorded_verl."""
    rows = []
    for name, run in made["runs_of"].items():
        exact, (_, after) = run["log_probs_from_fp32"], run["log_probs_apart"]
        first = name == next(iter(made["runs_of"]))
        answers = [f"{run[kind][0]:.2f} to {run[kind][1]:.2f}" for kind in ("rewarded", "others")]
        rows.append(
            [
                {"verl": "veRL's engine", "dualkv": "packed"}.get(name, name.replace("verl", "veRL's engine")),
                f"{run['median_s']:.2f}",
                f"{run['peak_gib']:.1f} GiB",
                f"{exact['mean']:.4f}",
                "" if first else f"{after['mean']:.4f}",
                "" if first else f"{100 * run['weights_apart']:.0f} %",
                *answers,
            ]
        )
    return markdown_table(VERL_COLUMNS, rows)


def main(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    json_to: JsonPath,
    candidates: Annotated[list[Path] | None, typer.Option(help="Logs of short runs of other tasks.")] = None,
    screened: Annotated[Path | None, typer.Option(help="What --screen printed.")] = None,
    times: Annotated[Path | None, typer.Option(help="What --time wrote.")] = None,
) -> None:
    """Record runs of examples/real_model.py and examples/real_model_trl.py."""
    json_to.write_text(filed.text(record(runs, candidates or [], screened, times)))


if __name__ == "__main__":
    typer.run(main)

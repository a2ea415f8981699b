"""The output of `dualkv bench` for a report: tables for the terminal, Markdown, a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from dualkv.bench.run import REFERENCE
from dualkv.bench.sides import SIDES

COLUMNS = (
    ("ms", "sustained_ms", ".3f"),
    ("TFLOP/s", "sustained_tflops", ".0f"),
    ("GB/s", "sustained_gbs", ".0f"),
    (f"vs {REFERENCE}", "speed_against_reference", ".3f"),
    ("cold ms", "cold_ms", ".3f"),
    ("cold TFLOP/s", "cold_tflops", ".0f"),
    ("J a call", "joules", ".2f"),
    ("MHz", "sm_clock_mhz", ".0f"),
    ("W", "power_w", ".0f"),
    ("host µs", "host_us", ".0f"),
)
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "both": "forward and backward"}
# of all sides
COLORS = (
    "#1f6feb", "#79b8ff", "#d97706", "#f2b66d", "#2da44e", "#a371f7", "#b4d455", "#76b900", "#cf222e", "#0a3069",
    "#bf3989", "#57606a", "#c3c7cc",
)  # fmt: skip


def _title(result: dict[str, Any]) -> str:
    w = result["workload"]
    dims = "/".join(str(w[name]) for name in ("head_dim", "head_dim_v") if name in w)
    heads = f"H={w['heads']} Hk={w['kv_heads']} D={dims} {w['dtype']}"
    work = f"{w['tokens']} tokens, {result['flops'] / 1e12:.2f} TFLOP"
    if result["executed"]:
        work += f", executed {result['executed']:.2f} times"
    return f"{w['name']}, {DIRECTIONS[result['direction']]}: {heads}, {work}"


def _rows(result: dict[str, Any]) -> Iterable[list[str]]:
    for name, figures in result["sides"].items():
        numbers = [format(figures[key], spec) if key in figures else "" for _, key, spec in COLUMNS]
        parts = ", ".join(
            f"{'' if part['in_total'] else '+ '}{label} {part['cold_ms']:.3f}"
            for label, part in figures.get("parts", {}).items()
        )
        yield [name, *numbers, figures.get("error") or parts]


def folded(*names: str) -> list[Column]:
    """Columns whose cells a narrow terminal breaks and does not cut."""
    return [Column(name, overflow="fold") for name in names]


def table(result: dict[str, Any]) -> Table:
    """One result for the terminal."""
    names = (column for column, _, _ in COLUMNS)
    side = Column("side", no_wrap=True)  # to be copied behind -s
    others = folded(*names, "parts, cold ms (+: not in the total)")
    shown = Table(side, *others, title=_title(result), title_justify="left")
    for row in _rows(result):
        shown.add_row(*row)
    return shown


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(report: dict[str, Any]) -> str:
    """A whole report: where it was made, then a table for each result."""
    gpu, settings = report["gpu"], report["settings"]
    limits = "".join(
        f", {text.format(gpu[key])}"
        for key, text in (("max_sm_clock_mhz", "{} MHz at most"), ("power_limit_w", "held to {:.0f} W"))
        if key in gpu
    )
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"{gpu['name']}{limits}; {versions}; commit {report['commit']}, {report['date']}.",
        f"Sustained: back to back for {settings['seconds']:g} s, in turns, median of {settings['rounds']} rounds.",
    ]
    head = ["side", *(column for column, _, _ in COLUMNS), "parts, cold ms (+: not in the total)"]
    for result in report["results"]:
        lines += ["", f"{_title(result)}", "", markdown_table(head, _rows(result))]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: str | Path) -> None:
    """Sustained TFLOP/s on deduplicated work: a row of bars for each direction, a group of them for each workload.

    Raises:
        OSError: a file that cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    results = report["results"]
    directions = [d for d in DIRECTIONS if any(r["direction"] == d for r in results)]
    measured = {name for r in results for name, side in r["sides"].items() if "sustained_tflops" in side}
    color = {name: color for name, color in zip(SIDES, COLORS, strict=True) if name in measured}
    names = list(color)
    workloads = list(dict.fromkeys(r["workload"]["name"] for r in results))
    width = max(7.0, 1.5 + 0.22 * len(names) * len(workloads))
    figure = Figure(figsize=(width, 1.2 + 2.3 * len(directions)), layout="constrained")
    for axes, direction in zip(figure.subplots(len(directions), 1, squeeze=False)[:, 0], directions, strict=True):
        of = {r["workload"]["name"]: r["sides"] for r in results if r["direction"] == direction}
        for i, name in enumerate(names):
            speeds = [of.get(w, {}).get(name, {}).get("sustained_tflops", 0.0) for w in workloads]
            places = [x + (i - (len(names) - 1) / 2) * 0.8 / len(names) for x in range(len(workloads))]
            bars = axes.bar(places, speeds, 0.8 / len(names), color=color[name])
            axes.bar_label(bars, [f"{speed:.0f}" if speed else "" for speed in speeds], fontsize=7)
        axes.set_ylabel(f"{DIRECTIONS[direction]}\nTFLOP/s")
        axes.set_xticks(range(len(workloads)), workloads, rotation=20 if len(workloads) > 3 else 0, ha="center")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report['gpu']['name']}, sustained, on deduplicated work", fontsize=10)
    figure.legend(
        handles=[Patch(color=color[name], label=name) for name in names],
        loc="outside lower center", ncols=4, frameon=False, fontsize=8,
    )  # fmt: skip
    figure.savefig(path, dpi=150)

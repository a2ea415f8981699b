"""The tables of `dualkv bench`, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Column, Table

from dualkv.bench.run import REFERENCE
from dualkv.bench.workloads import Workload

COLUMNS = (
    ("ms", "sustained_ms", ".3f"),
    ("TFLOP/s", "sustained_tflops", ".0f"),
    (f"vs {REFERENCE}", "speed_against_reference", ".3f"),
    ("cold ms", "cold_ms", ".3f"),
    ("cold TFLOP/s", "cold_tflops", ".0f"),
    ("J a call", "joules", ".2f"),
    ("MHz", "sm_clock_mhz", ".0f"),
    ("W", "power_w", ".0f"),
)
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "both": "forward and backward"}


def _title(result: dict[str, Any]) -> str:
    w = result["workload"]
    dims = "/".join(str(w[name]) for name in ("head_dim", "head_dim_v") if name in w)
    heads = f"H={w['heads']} Hk={w['kv_heads']} D={dims} {w['dtype']}"
    work = f"{w['tokens']} tokens, {result['flops'] / 1e12:.2f} TFLOP"
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


def listing(workloads: Sequence[Workload]) -> Table:
    name = Column("workload", no_wrap=True)  # to be copied behind -w
    shown = Table(name, *folded("heads", "tokens", "dedup", "forward TFLOP", "backward TFLOP"))
    for w in workloads:
        layout, dims = w.layout(), "/".join(map(str, dict.fromkeys(w.head_dims)))
        kind = f"{w.heads}/{w.kv_heads} x {dims} {w.dtype}"
        work = (f"{w.flops(direction) / 1e12:.3g}" for direction in ("fwd", "bwd"))
        shown.add_row(w.name, kind, str(layout.num_tokens), f"{layout.dedup_ratio:.2f}", *work)
    return shown


def failures(report: dict[str, Any]) -> list[str]:
    """A sentence for each side that was not measured everywhere, and one for what the time limit left out."""
    errors: dict[str, list[str]] = {}
    for result in report["results"]:
        for name, figures in result["sides"].items():
            if "error" in figures:
                errors.setdefault(name, []).append(figures["error"])
    said = [f"{name} was not measured {len(whys)} times: {whys[0]}" for name, whys in errors.items()]
    done, asked = len(report["results"]), report["asked"]
    if done < asked:
        said.append(
            f"the time limit of {report['settings']['time_limit']:g} s left out {asked - done} of {asked} results"
        )
    return said


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""The tables of `dualkv bench`, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Column, Table

from dualkv.bench.run import REFERENCE

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


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

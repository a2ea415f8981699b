"""Tables of profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dualkv.bench.show import markdown_table
from tools.ncu.lines import Hot
from tools.ncu.metrics import FIGURES, STALLS, Figure, Kernel, Profile

STALLS_SHOWN = 6
NOISE = 0.005  # of a ratio, that is given no colour


def caption(filed: Mapping[str, Any]) -> str:
    """What ran, where, of a profile's `to_dict`."""
    w = filed["workload"]
    heads = f"H={w['heads']} Hk={w['kv_heads']} D={w['head_dim']} {w['dtype']}"
    options = [f"{name}={value}" for name, value in filed["tile"].items()]
    options += ["deterministic"] if filed["deterministic"] else []
    return ", ".join([f"{w['name']} {filed['direction']}  {heads}", *options, filed["gpu"]["name"]])


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def report(filed: Mapping[str, Any]) -> Table:
    """A line a figure, a column a kernel; then what warps wait for. Of a profile's `to_dict`."""
    table = Table(title=caption(filed), title_justify="left")
    table.add_column("")
    kernels = filed["kernels"]
    for kernel in kernels:
        table.add_column(kernel["operation"] or kernel["symbol"][:40], justify="right")
    for figure in FIGURES:
        values = [kernel["figures"].get(figure.name) for kernel in kernels]
        if any(value is not None for value in values):
            table.add_row(figure.name, *(number(value, figure.form) for value in values))
    table.add_section()
    stalls = [sorted(kernel["stalls"].items(), key=lambda item: -item[1])[:STALLS_SHOWN] for kernel in kernels]
    for place in range(STALLS_SHOWN):
        row = [f"{some[place][0]} {some[place][1]:.0%}" if place < len(some) else "" for some in stalls]
        table.add_row("warps wait for" if place == 0 else "", *row)
    return table


def markdown(table: Table) -> str:
    """A table for a document."""
    head = [str(column.header) for column in table.columns]
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    text = markdown_table(head, [[cell.replace("|", "\\|") for cell in row] for row in rows])
    return f"{table.title}\n\n{text}" if table.title else text


def compare(a: Profile, b: Profile) -> Table:
    """Two profiles side by side: kernels of the same operation, in order."""
    table = Table(title=f"A: {caption(a.to_dict())}\nB: {caption(b.to_dict())}", title_justify="left")
    for column in ("kernel", "", a.name + " (A)", b.name + " (B)", "B / A"):
        table.add_column(column, justify="left" if column in ("kernel", "") else "right")
    for left, right in pairs(a, b):
        first = True
        for figure in FIGURES:
            x, y = figure.of(left), figure.of(right)
            if x is None and y is None:
                continue
            shown = _ratio(figure, x, y)
            name = left.name if first else ""
            table.add_row(name, figure.name, number(x, figure.form), number(y, figure.form), shown)
            first = False
        shares = dict(left.stalls()), dict(right.stalls())
        for reason in sorted(STALLS, key=lambda name: -max(share.get(name, 0) for share in shares))[:STALLS_SHOWN]:
            x, y = (share.get(reason, 0.0) for share in shares)
            table.add_row("", f"wait for {reason}, %", f"{100 * x:.1f}", f"{100 * y:.1f}", f"{y / x:.3f}" if x else "")
        table.add_section()
    return table


def _ratio(figure: Figure, x: float | None, y: float | None) -> str:
    """y / x, green where that is better."""
    if x is None or y is None or x == 0:
        return ""
    text = f"{y / x:.3f}"
    if not figure.better or abs(y / x - 1) < NOISE:
        return text
    return f"[{'green' if (y > x) == (figure.better > 0) else 'red'}]{text}[/]"


def pairs(a: Profile, b: Profile) -> list[tuple[Kernel, Kernel]]:
    """Kernels of the same operation.

    Raises:
        ValueError: there are none.
    """
    found = []
    rest = list(b.kernels)
    for left in a.kernels:
        right = next((kernel for kernel in rest if kernel.operation == left.operation), None)
        if right is not None:
            rest.remove(right)
            found.append((left, right))
    if not found:
        ran = [", ".join(kernel.name for kernel in profile.kernels) for profile in (a, b)]
        raise ValueError(f"{a.name} and {b.name} have no kernel in common: {ran[0]} against {ran[1]}")
    return found


def hot(name: str, places: Sequence[Hot], why_not: str | None) -> Table:
    """Where a kernel's warps were found, most often first; `why_not`: why by instruction rather than by line."""
    title = f"{name}: samples of warps by {'instruction' if why_not else 'source line'}"
    table = Table(title=title + (f" (no source lines: {why_not})" if why_not else ""), title_justify="left")
    for column in ("samples", "%", "where", "mostly for", "instruction", "source"):
        table.add_column(column, justify="right" if column in ("samples", "%") else "left", overflow="fold")
    for place in places:
        reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in place.reasons)
        cells = f"{place.samples}", f"{place.share:.1%}", place.where, reasons, place.instruction, place.source
        table.add_row(*map(Text, cells))  # brackets in code are no markup
    return table

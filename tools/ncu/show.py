"""Tables of profiles."""

from __future__ import annotations

from rich.table import Table

from dualkv.bench.show import markdown_table
from tools.ncu.metrics import FIGURES, Profile

STALLS_SHOWN = 6


def caption(profile: Profile) -> str:
    """Say which job ran, with which tile, and on which GPU."""
    job, w = profile.job, profile.job.workload
    heads = f"H={w.heads} Hk={w.kv_heads} D={w.head_dim} {w.dtype}"
    options = [f"{name}={value}" for name, value in job.tile.items()] + ["deterministic"] * job.deterministic
    return ", ".join([f"{w.name} {job.direction}  {heads}", *options, profile.about["gpu"]["name"]])


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def report(profile: Profile) -> Table:
    """A line a figure, a column a kernel; then what warps wait for."""
    table = Table(title=caption(profile), title_justify="left")
    table.add_column("")
    kernels = profile.kernels
    for kernel in kernels:
        table.add_column(kernel.name, justify="right")
    for figure in FIGURES:
        values = [figure.of(kernel) for kernel in kernels]
        if any(value is not None for value in values):
            table.add_row(figure.name, *(number(value, figure.form) for value in values))
    table.add_section()
    stalls = [kernel.stalls() for kernel in kernels]
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

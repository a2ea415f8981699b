"""Tables and the roofline of profiles."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dualkv.bench.show import markdown_table
from tools.ncu.lines import Hot
from tools.ncu.metrics import FIGURES, STALLS, Figure, Kernel, Profile

STALLS_SHOWN = 6
NOISE = 0.005  # of a ratio, that is given no colour
COLORS = ("#1f6feb", "#d1495b", "#2a9d8f", "#8a8f98", "#e9a23b", "#7b5ea7")


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
    stalls = [list(kernel["stalls"].items())[:STALLS_SHOWN] for kernel in kernels]
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


def roofline(profiles: Sequence[Profile], path: Path) -> None:
    """Kernels with products: useful FLOP/s over FLOP for each byte from DRAM (filled) and from L2 (hollow).

    Raises:
        ValueError: no kernel has products.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points = [(p, k) for p in profiles for k in p.kernels if k.need.flops and k.dram_bytes and k.l2_bytes]
    if not points:
        raise ValueError(f"no kernel of {', '.join(p.name for p in profiles)} has products and measured bytes to draw")
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=90)
    lowest, highest = 10.0, 1e5
    x = [lowest * (highest / lowest) ** (i / 200) for i in range(201)]
    peaks = points[0][1].peaks
    for level, style in (("dram", "-"), ("l2", "--")):
        bytes_a_second, tensor = peaks[level], peaks["tensor"]
        if bytes_a_second and tensor:
            y = [min(tensor, bytes_a_second * at) / 1e12 for at in x]
            label = f"{level.upper()} {bytes_a_second / 1e12:.1f} TB/s, tensor cores {tensor / 1e12:.0f} TFLOP/s"
            axes.plot(x, y, style, color="#555", linewidth=1, label=label)
    for (profile, kernel), color in zip(points, itertools.cycle(COLORS), strict=False):
        rate = kernel.need.flops / kernel.seconds / 1e12
        name = f"{kernel.name} D={profile.job.workload.head_dim}: {rate:.0f} TFLOP/s"
        for moved, fill in ((kernel.dram_bytes, color), (kernel.l2_bytes, "none")):
            at = kernel.need.flops / (moved or 1)
            shown = name if fill == color else None
            axes.scatter([at], [rate], s=46, facecolors=fill, edgecolors=color, label=shown, zorder=3)
    axes.set(xscale="log", yscale="log", xlim=(lowest, highest), ylim=(50, 1500))
    axes.set_xlabel("useful FLOP a byte (filled: DRAM, hollow: L2)")
    axes.set_ylabel("useful TFLOP/s")
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=8, loc="lower right")
    axes.set_title("Roofline at the clocks of the profiled runs", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)

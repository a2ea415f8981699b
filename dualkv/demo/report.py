"""The tables that `dualkv demo` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dualkv.data.forms import BYTES
from dualkv.demo.run import DemoResult


def render(result: DemoResult) -> RenderableType:
    """Tables of cost and of differences, and the verdict."""
    settings, (replicated, other) = result.settings, result.ways.values()
    model = f"{settings.model} ({result.parameters / 1e6:.3g} M parameters, {settings.dtype}, {result.device})"
    costs = Table("", *result.ways, "saving", title=f"{settings.steps} x GRPO update of {model}", title_justify="left")
    slow, fast = (sum(way.seconds.values()) for way in (replicated, other))
    most, least = (way.peak_bytes and way.peak_bytes / 2**20 for way in (replicated, other))
    rows: list[tuple[str, Any, Any, str]] = [
        ("tokens computed in a pass, with padding", replicated.tokens, other.tokens, ",d"),
        ("micro-batches", replicated.micro_batches, other.micro_batches, "d"),
        *((f"{phase}, s", replicated.seconds[phase], other.seconds[phase], ".2f") for phase in replicated.seconds),
        ("total time, s", slow, fast, ".2f"),
        ("peak memory above the weights, MiB", most, least, ",.0f"),
    ]
    for name, a, b, form in rows:
        if a is not None and b:
            costs.add_row(name, f"{a:{form}}", f"{b:{form}}", f"{a / b:.2f}x")
    first, *later = result.updates
    apart = Table("", "first update", *["updates after it"] * bool(later), title="largest difference from replicated")
    for name, text in (
        ("logp", "log-probs, absolute"),
        ("loss", "loss, absolute"),
        ("gradients", "gradients, relative"),
    ):
        worst = [max(getattr(update, name) for update in span) for span in ([first], later) if span]
        apart.add_row(text, *(f"{x:.1e}" for x in worst))
    word, style = ("EXACT TO ROUNDING", "bold green") if result.exact else ("DIFFERENT", "bold red")
    said = [BYTES] if result.unit == "bytes" and settings.rollouts is not None else []
    if other.ratio is not None:
        ratio = "ratio of the first update to old log-probs of the smallest micro-batches, furthest from 1"
        said.append(f"{ratio}: {other.ratio!r}")
    verdict = Text.assemble((word, style), f": {result.verdict}; packed runs at {slow / fast:.2f}x the speed")
    return Group(costs, apart, *map(Text, said), verdict)

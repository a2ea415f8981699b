"""The output of `dualkv demo`: a table for people, a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dualkv.data.files import BYTES
from dualkv.demo.run import DemoResult, Differences, WayResult

GROUPS = (
    ("old + reference log-probs", ("old log-probs", "reference log-probs")),
    ("forward", ("forward",)),
    ("backward", ("backward",)),
    ("packing + optimizer step", ("packing", "optimizer")),
)
COLORS = {"replicated": "#8a8f98", "packed": "#1f6feb", "tree": "#2da44e"}


def grouped_seconds(way: WayResult) -> dict[str, float]:
    """Seconds by the rows of the table."""
    return {name: sum(way.seconds.get(phase, 0.0) for phase in phases) for name, phases in GROUPS}


def render(result: DemoResult) -> RenderableType:
    """Tables of cost and of differences, rewards, and the verdict."""
    parts: list[RenderableType] = [_cost(result), _differences(result)]
    if result.to_truth:
        parts.append(_truth(result))
    if result.unit == "bytes":
        parts.append(Text(BYTES))
    parts += [*_rewards(result), _verdict(result)]
    return Group(*parts)


def _cost(result: DemoResult) -> Table:
    settings, ways = result.settings, list(result.ways.values())
    where = f"CPU, {result.threads} threads" if result.device == "CPU" else result.device
    updates = f"{settings.steps} update{'s' * (settings.steps > 1)}"
    table = Table(
        title=f"{settings.algorithm.upper()}, {updates} of {settings.model} "
        f"({result.parameters / 1e6:.3g} M parameters, {settings.dtype}, {where}{', packed fast' * settings.fast})",
        title_justify="left",
    )
    table.add_column("")
    others = list(result.updates)
    savings = ["saving"] if len(others) == 1 else [f"{way} saves" for way in others]
    for name in (*result.ways, *savings):
        table.add_column(name, justify="right")

    def row(name: str, values: list[float], form: str, unit: str = "") -> None:
        savings = [f"{values[0] / value:.2f}x" if value else "" for value in values[1:]]
        table.add_row(name, *(f"{value:{form}}{unit}" for value in values), *savings)

    row("tokens computed, a pass over an update", [way.tokens[0] for way in ways], ",d")
    table.add_row("micro-batches", *(str(way.micro_batches[0]) for way in ways), end_section=True)
    seconds = [grouped_seconds(way) for way in ways]
    for name, _ in GROUPS:
        row(name, [of[name] for of in seconds], ".2f", " s")
    table.add_section()
    row("total time", [way.total_seconds for way in ways], ".2f", " s")
    peaks = [way.peak_bytes for way in ways if way.peak_bytes is not None]
    if len(peaks) == len(ways):
        row("peak memory", [peak / 2**20 for peak in peaks], ",.0f", " MiB")
    table.caption = f"peak memory, above the weights: {ways[0].memory_method}"
    table.caption_justify = "left"
    return table


def _worst(updates: list[Differences], name: str) -> str:
    return f"{max(getattr(update, name) for update in updates):.1e}"


def _differences(result: DemoResult) -> Table:
    table = Table(title="largest difference from replicated", title_justify="left")
    table.add_column("")
    spans = []
    for way, updates in result.updates.items():
        table.add_column(f"{way}: first update, from equal weights", justify="right")
        spans.append(updates[:1])
        if len(updates) > 1:
            table.add_column(f"{way}: updates 2 to {len(updates)}, from their own", justify="right")
            spans.append(updates[1:])
    for text, name in (
        ("log-probs, absolute", "logp"),
        ("loss, absolute", "loss"),
        ("gradients, relative", "gradients"),
        ("  worst tensor", "gradients_worst_tensor"),
        ("updated weights, relative", "weights"),
        ("  worst tensor", "weights_worst_tensor"),
    ):
        table.add_row(text, *(_worst(span, name) for span in spans))
    return table


def _truth(result: DemoResult) -> Table:
    wider = "float64" if result.settings.dtype in ("float32", "float64") else "float32"
    table = Table(title=f"distance from {wider}, first update", title_justify="left")
    table.add_column("")
    for way in result.to_truth:
        table.add_column(way, justify="right")
    for text, name in (
        ("log-probs, root mean square", "logp_rms"),
        ("log-probs, largest", "logp"),
        ("loss, absolute", "loss"),
        ("gradients, relative", "gradients"),
    ):
        table.add_row(text, *(f"{getattr(d, name):.1e}" for d in result.to_truth.values()))
    return table


def _rewards(result: DemoResult) -> list[Text]:
    if result.same_samples is None:
        return []
    same, count = result.same_samples
    lines = [f"reward, {name}: " + " -> ".join(f"{r:.3f}" for r in way.rewards) for name, way in result.ways.items()]
    lines.append(f"{same} of {count} responses sampled after an update are the same tokens under both policies")
    return [Text(line) for line in lines]


def _verdict(result: DemoResult) -> Text:
    word, style = {
        True: ("EXACT TO ROUNDING", "bold green"),
        False: ("DIFFERENT", "bold red"),
        None: ("NOT JUDGED", "bold yellow"),
    }[result.exact]
    base = result.ways["replicated"].total_seconds
    speeds = [f"{way} runs at {base / result.ways[way].total_seconds:.2f}x the speed" for way in result.updates]
    return Text.assemble((word, style), f": {result.verdict}; {', '.join(speeds)}")


def plot(result: DemoResult, path: str | Path) -> None:
    """Reward (or loss, for rollouts from a file) per step, time and memory of each way, as a picture.

    Raises:
        ValueError: a file type that matplotlib does not write.
        OSError: a file that cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    curve, time, memory = figure.subplots(1, 3, width_ratios=(5, 4, 2))
    live = result.same_samples is not None
    for (name, way), style, width in zip(result.ways.items(), ("-", "--", ":"), (5, 2, 3), strict=False):
        values = way.rewards if live else way.losses
        curve.plot(range(len(values)), values, style, marker="o", color=COLORS[name], linewidth=width, label=name)
    curve.set_xlabel("optimizer updates")
    curve.set_ylabel("mean reward" if live else "loss")
    curve.set_xticks(range(len(values)))
    curve.legend(frameon=False)

    names = list(result.ways)
    bottom = [0.0] * len(names)
    seconds = {name: grouped_seconds(way) for name, way in result.ways.items()}
    for i, (phase, _) in enumerate(GROUPS):
        heights = [seconds[name][phase] for name in names]
        shade = 0.35 + 0.65 * (i + 1) / len(GROUPS)
        time.bar(names, heights, bottom=bottom, color=[COLORS[n] for n in names], alpha=shade, label=phase)
        for x, (height, base) in enumerate(zip(heights, bottom, strict=True)):
            if height > 0.05 * max(way.total_seconds for way in result.ways.values()):
                time.text(x, base + height / 2, phase, ha="center", va="center", fontsize=8)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    time.set_ylabel("seconds, all updates")
    seconds_of_all = [way.total_seconds for way in result.ways.values()]
    speeds = [f"{seconds_of_all[0] / s:.2f}x" for s in seconds_of_all[1:]]
    time.set_title(f"{', '.join(speeds)} the speed", fontsize=10)

    peaks = [result.ways[name].peak_bytes for name in names]
    if None not in peaks:
        gib = [(peak or 0) / 2**30 for peak in peaks]
        bars = memory.bar(names, gib, color=[COLORS[n] for n in names])
        memory.bar_label(bars, fmt="%.2f")
        parts = [f"1/{gib[0] / x:.2f}" for x in gib[1:] if x]
        memory.set_title(f"{', '.join(parts)} of the memory" if parts else "", fontsize=10)
    else:
        memory.text(0.5, 0.5, "not measured", ha="center", transform=memory.transAxes)
    memory.set_ylabel("peak memory, GiB")
    for axes in (curve, time, memory):
        axes.spines[["top", "right"]].set_visible(False)
    settings = result.settings
    tokens = " / ".join(f"{result.ways[name].tokens[0]:,} {name}" for name in names)
    figure.suptitle(
        f"{settings.algorithm.upper()} on {settings.model}, {settings.dtype}, {result.device}: {tokens} tokens"
    )
    figure.savefig(path, dpi=150)

"""The table that `dualkv demo` prints."""

from __future__ import annotations

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
    parts += [*_rewards(result), *_ratios(result), _verdict(result)]
    return Group(*parts)


def _cost(result: DemoResult) -> Table:
    settings, ways = result.settings, list(result.ways.values())
    where = f"CPU, {result.threads} threads" if result.device == "CPU" else result.device
    updates = f"{settings.steps} update{'s' * (settings.steps > 1)}"
    model = f"{settings.model} ({result.parameters / 1e6:.3g} M parameters, {settings.dtype}, {where})"
    table = Table(title=f"GRPO, {updates} of {model}", title_justify="left")
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


def _ratios(result: DemoResult) -> list[Text]:
    said = "ratio of the first update to old log-probs of the smallest micro-batches, furthest from 1"
    ratios = {name: way.ratio for name, way in result.ways.items() if way.ratio is not None}
    return [Text(f"{said}, {name}: {ratio!r}") for name, ratio in ratios.items()]


def _verdict(result: DemoResult) -> Text:
    word, style = {
        True: ("EXACT TO ROUNDING", "bold green"),
        False: ("DIFFERENT", "bold red"),
        None: ("NOT JUDGED", "bold yellow"),
    }[result.exact]
    base = result.ways["replicated"].total_seconds
    speeds = [f"{way} runs at {base / result.ways[way].total_seconds:.2f}x the speed" for way in result.updates]
    return Text.assemble((word, style), f": {result.verdict}; {', '.join(speeds)}")

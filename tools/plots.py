"""Plots of recorded figures, drawn by matplotlib as pictures of README and docs (`python -m tools.drawings`).

Letters are text, in a font that is at most as wide as the one that matplotlib lays out. A picture has its own ground,
light or dark as the reader's browser is: colours of :data:`DARK` are exchanged by its style sheet.
"""

from __future__ import annotations

import io
import itertools
import re
from typing import TYPE_CHECKING, Any, Literal

from dualkv.bench.show import DIRECTIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
INK, QUIET, GRID, GROUND = "#1f2328", "#59636e", "#d0d7de", "#ffffff"
DARK = {INK: "#e6edf3", QUIET: "#9198a1", GRID: "#3d444d", GROUND: "#0d1117"}
BLUE, ORANGE, GREEN = "#2f81f7", "#e16f24", "#3fa34d"  # readable on both grounds
SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # which matplotlib brings
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "dualkv",  # names inside the file are the same at every run
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": GROUND,
    "figure.facecolor": GROUND,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "grid.color": GRID,
}


def _drawn(width: float, height: float, title: str, *draw: Any) -> str:
    """Return the SVG of pairs of axes side by side, each filled by one of `draw`; sizes in inches of 72 pixels.

    Raises:
        ValueError: something would be cut off at the edge of the picture.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        beside = figure.subplots(1, len(draw), squeeze=False)[0]
        for axes, fill in zip(beside, draw, strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(length=0)
            fill(axes)
        beside[0].set_title(title, loc="left", fontsize=10, fontweight="bold")
        figure.draw_without_rendering()  # lays the parts out
        box = figure.get_tightbbox()
        if min(box.x0, box.y0, width - box.x1, height - box.y1) < 0:
            raise ValueError(f"{title!r} has parts outside of the picture of {width} x {height} inches: {box}")
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    rules = [
        f"[style*='{kind}: {light}'] {{ {kind}: {dark} !important; }}"
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    ]
    style = "\n".join(["<style>", "@media (prefers-color-scheme: dark) {", *rules, "}", "</style>"])
    text = re.sub(r"<\?xml.*?\?>\s*<!DOCTYPE.*?>\s*|<metadata>.*?</metadata>\s*", "", file.getvalue(), flags=re.DOTALL)
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', sans-serif")
    text = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", text)  # of a pixel
    return re.sub(r"(<svg [^>]*>)", rf"\1\n{style}", text, count=1)


def _label(axes: Axes, at: tuple[float, float], text: str, color: str, move: tuple[float, float], side: str) -> None:
    axes.annotate(text, at, xytext=move, textcoords="offset points", color=color, ha=side, va="center")


def _legend(axes: Axes, colors: dict[str, str], place: Literal["upper left", "upper right", "lower right"]) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=color, marker="o", linestyle="", label=name) for name, color in colors.items()]
    axes.legend(handles=marks, loc=place, frameon=False)


def prompt_share(record: Record, *others: Record) -> str:
    """Draw the speed-up of a step over the prompt's share of the tokens, of runs of `tools.bench.prompt_share`."""
    settings, points = (
        record["settings"],
        sorted((p for run in (record, *others) for p in run["points"]), key=lambda p: float(p["prompt_len"])),
    )
    n, length = settings["responses"], settings["length"]
    shares = [100 * p["prompt_len"] / length for p in points]
    faster = [p["speed_up"] for p in points]
    fewer = [p["rows"]["replicated"] / p["rows"]["packed"] for p in points]

    def draw(axes: Axes) -> None:
        axes.axhline(1, color=QUIET, linewidth=1)
        axes.plot(shares, fewer, color=QUIET, linestyle=(0, (4, 3)), linewidth=1.3)
        axes.plot(shares, faster, color=BLUE, linewidth=2.2, marker="o", markersize=5)
        for share, figure in zip(shares, faster, strict=True):
            _label(axes, (share, figure), f"{figure:.1f}x", BLUE, (7, -11), "left")
        _label(axes, (shares[-1], fewer[-1]), "tokens computed: N (P + R) over P + N R", QUIET, (-12, 0), "right")
        middle = len(shares) // 2
        _label(
            axes, (shares[middle], faster[middle]), "measured time: replicated over packed", BLUE, (-14, 18), "right"
        )
        axes.set_xlim(0, 104)
        axes.set_ylim(0, 1.08 * max(*faster, *fewer))
        axes.set_xlabel("prompt's share of every sequence's tokens, P / (P + R), %")
        axes.set_ylabel("times as fast")
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)

    card = record["gpu"]["name"].removeprefix("NVIDIA ")
    title = f"Forward and backward of {n} responses to one prompt, P + R = {length:,}\n"
    title += f"{settings['layers']} layers of Qwen3-8B, {card}; replicated with FlashAttention-4"
    return _drawn(9.2, 4.4, title, draw)


def attention(*records: Record) -> str:
    """Draw FlashAttention-4's time over DualKV's, forward and backward: a row for each workload of the records."""
    found: dict[str, dict[str, float]] = {}
    for result in (result for record in records for result in record["results"]):
        ours, peer = (result["sides"].get(side, {}).get("sustained_ms") for side in ("dualkv", "fa4-3-calls"))
        if ours and peer:
            found.setdefault(result["workload"]["name"], {})[DIRECTIONS[result["direction"]]] = peer / ours
    names = [name for name, ratios in found.items() if len(ratios) == 2 and not name.endswith(("gqa1", "gqa8"))][::-1]

    def draw(axes: Axes) -> None:
        for direction, color in (("forward", BLUE), ("backward", ORANGE)):
            ratios = [found[name][direction] for name in names]
            axes.plot(ratios, range(len(names)), "o", color=color, markersize=7)
            other = [found[name]["forward" if direction == "backward" else "backward"] for name in names]
            for y, (ratio, beside) in enumerate(zip(ratios, other, strict=True)):
                right = ratio >= beside
                _label(axes, (ratio, y), f"{ratio:.2f}", color, (8 if right else -8, 0), "left" if right else "right")
        axes.axvline(1, color=QUIET, linewidth=1.3)
        axes.set_yticks(range(len(names)), [re.sub(r"-d(\d+)-gqa4$", r", head dim \1", name) for name in names])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.set_xlim(0.93, 1.06 * max(max(ratios.values()) for ratios in found.values()))
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.set_xlabel("FlashAttention-4's time over DualKV's (1: as fast)")
        axes.grid(axis="x", linewidth=0.8)
        axes.set_axisbelow(True)
        _legend(axes, {"forward": BLUE, "backward": ORANGE}, "upper right")

    title = "Attention on an H200, bf16, against FlashAttention-4 in three calls"
    return _drawn(9.2, 1.3 + 0.27 * len(names), title, draw)


def agents(updates: Record, micro_batches: Record) -> str:
    """Draw what packing trees makes of each trace's share ratio: veRL's updates, TRL's forward and backward."""
    seconds: dict[str, dict[str, float]] = {}
    shared: dict[str, float] = {}
    for row in updates["rows"]:
        if "error" not in row:
            trace, engine = row["settings"]["trace"], row["settings"]["engine"]
            seconds.setdefault(trace, {})[engine] = row["seconds"]["median"]
            if engine == "dualkv":
                shared[trace] = row["metrics"]["dualkv/dedup_ratio"]
    verl = [(shared[trace], of["verl"] / of["dualkv"]) for trace, of in seconds.items() if len(of) == 2]
    padded, tree = (
        [
            (made["share_ratio"], made["ways"][way]["seconds"]["median"] / made["ways"]["packed"]["seconds"]["median"])
            for made in micro_batches["traces"].values()
        ]
        for way in ("padded", "tree")
    )
    lines = {
        "veRL: updates, over veRL's engine": (verl, BLUE, (7, -9), "left"),
        "TRL: forward and backward, over padded batches": (padded, ORANGE, (-7, 8), "right"),
        "TRL: forward and backward, over TRL's own prefix tree": (tree, GREEN, (0, 10), "center"),
    }

    def draw(axes: Axes) -> None:
        most = 1.35 * max(x for points, *_ in lines.values() for point in points for x in point)
        axes.loglog([1, most], [1, most], color=QUIET, linestyle=(0, (4, 3)), linewidth=1.3)
        _label(axes, (10.5, 10.5), "dashed: times as fast as tokens are fewer", QUIET, (14, -26), "left")
        for points, color, move, side in lines.values():
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=color, linewidth=1.8, markersize=6)
            for ratio, figure in points:
                if ratio > 2:
                    _label(axes, (ratio, figure), f"{figure:.1f}x", color, move, side)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(_at(1, 2, 5, 10, 20))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(_at())
        axes.set_xlim(0.95, most)
        axes.set_ylim(0.85, most * 1.3)
        axes.set_xlabel("share ratio: tokens of the sequences one by one over packed tokens")
        axes.set_ylabel("times as fast")
        axes.grid(linewidth=0.8)
        axes.set_axisbelow(True)
        _legend(axes, {name: color for name, (_, color, *_) in lines.items()}, "upper left")

    return _drawn(9.2, 4.8, "Rollouts of agents, trained as trees: 8 layers of Qwen3-8B on an H200", draw)


def learning(record: Record) -> str:
    """Draw a real model's rewards over updates and over time, and how runs part: a record of tools.bench.real_model."""
    runs = record["runs_of"]
    colors = {name: GREEN if run["settings"]["lora"] else BLUE for name, run in runs.items()}
    colors |= {name: ORANGE for name, run in runs.items() if run["settings"]["way"] == "replicated"}
    base, *others = runs
    first_packed = next(name for name in others if colors[name] == BLUE)
    names = {BLUE: "packed", ORANGE: "replicated", GREEN: "packed, LoRA"}

    def smooth(values: list[float]) -> list[float]:
        return [sum(some) / len(some) for some in (values[max(0, i - 9) : i + 1] for i in range(len(values)))]

    def over(axes: Axes, label: str) -> None:
        axes.set_xlabel(label)
        axes.set_ylim(0, 1)
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)

    def updates(axes: Axes) -> None:
        for name, run in runs.items():
            if run["updates"] == runs[base]["updates"]:
                rewards = smooth(run["reward"])
                front: dict[str, Any] = {"linewidth": 1.8, "zorder": 3} if name == base else {"linewidth": 1.2}
                axes.plot(range(1, len(rewards) + 1), rewards, color=colors[name], **front)
        over(axes, "updates")
        axes.set_ylabel("reward, mean of 10 updates")
        _legend(axes, {names[color]: color for color in dict.fromkeys(colors.values())}, "lower right")

    def time(axes: Axes) -> None:
        for name in (base, first_packed):
            run = runs[name]
            axes.plot(
                list(itertools.accumulate(run["step_s"])), smooth(run["reward"]), color=colors[name], linewidth=1.8
            )
        over(axes, "seconds of sampling and updates")

    def apart(axes: Axes) -> None:
        for name in others:
            if "alike" in runs[name] and colors[name] != GREEN:
                alike = smooth(runs[name]["alike"])
                axes.plot(range(1, len(alike) + 1), alike, color=colors[name], linewidth=1.8)
        over(axes, "updates")
        axes.set_ylabel("responses equal to the replicated run's")

    card = record["gpu"]["name"].removeprefix("NVIDIA ")
    title = f"GRPO on SmolLM2-135M-Instruct, {card}: reverse a list of two or three words"
    return _drawn(9.2, 3.6, title, updates, time, apart)


def _at(*places: float) -> Any:
    from matplotlib.ticker import FixedLocator

    return FixedLocator(places)

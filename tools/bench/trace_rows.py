"""Tables of `docs/agents.md`: the traces that are drawn, and what was recorded on them."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Any

from dualkv.bench.show import markdown_table
from dualkv.bench.traces import FIGURES, KINDS, draw
from dualkv.bench.trees import Found, Summary
from dualkv.bench.workloads import MAIN
from dualkv.models import CONFIGS
from tools.bench.record import recorded

MODEL = "qwen3-8b"
PEERS = {
    "cudnn-intervals": "cuDNN, intervals",
    "fa4-prompt-copied": "FlashAttention-4, paths copied",
    "fa4-replicated": "FlashAttention-4, replicated",
    "flex": "FlexAttention",
}
WAYS = {
    "replicated": "one by one",
    "merged": "by rollout",
    "gathered": "paths gathered",
    "packed": "packed",
    "planned": "by the rule",
    "walked": "walked",
}
ATTENTION = "traces-backward", "traces", "traces-flex"  # records: the first with a figure counts
UPDATES = "trees-updates-h200"  # a record
Load = Callable[[str], dict[str, Any]]


def shapes() -> str:
    """Tabulate the shapes of every kind of trace, seed 0, by counting alone."""
    rows = []
    for kind, (what, _, _) in KINDS.items():
        s = Summary.of(Found.of_trace(draw(kind)), MODEL)
        counts = (f"{n:,}" for n in (s.sequences, s.tokens, s.packed_tokens))
        lengths = f"{s.shortest}, {s.median:g}, {s.longest}"
        ratios = f"{s.share_ratio:.2f}", str(s.depth), f"{s.segments:,}", lengths, f"{s.flop_ratio:.2f}"
        rows.append([f"`{kind}`", what, *counts, *ratios, f"{s.saved:.0%}" if s.pays else "stays as it is"])
    head = [
        "trace",
        "",
        "sequences",
        "tokens",
        "packed",
        "share ratio",
        "levels",
        "segments",
        "their tokens: least, median, most",
    ]
    return markdown_table(
        [*head, f"FLOP ratio, {CONFIGS[MODEL]['num_hidden_layers']} layers", "saved, by the rule"], rows
    )


def sources() -> str:
    """Numbers that someone publishes, at least in part."""
    used: dict[str, list[str]] = {}
    for kind, (_, figures, _) in KINDS.items():
        used.setdefault(figures, []).append(f"`{kind}`")
    rows = [
        [", ".join(kinds), name, f"{value:g}", source]
        for figures, kinds in used.items()
        for name, (value, source) in FIGURES[figures].items()
        if not source.startswith("assumed") or ": " in source
    ]
    return markdown_table(["trace", "number", "value", "source"], rows)


def attention(load: Load) -> str:
    """Tabulate DualKV's TFLOP/s, and each peer's time over DualKV's in the same run."""
    ours: dict[tuple[str, str], dict[str, Any]] = {}
    peers: dict[tuple[str, str], dict[str, str]] = {}
    for record in ATTENTION:
        with contextlib.suppress(FileNotFoundError):
            for result in load(record)["results"]:
                key, mine = (result["workload"]["name"], result["direction"]), result["sides"]["dualkv"]
                if "sustained_ms" in mine:
                    ours.setdefault(key, mine)
                    times = {peer: _times(side, mine["sustained_ms"]) for peer, side in result["sides"].items()}
                    peers[key] = times | peers.get(key, {})
    rows = []
    traces = list(dict.fromkeys(name for name, _ in ours))
    for name, direction in sorted(ours, key=lambda key: (traces.index(key[0]), key[1] != "fwd")):
        mine, two_levels = ours[name, direction], ours.get((MAIN, direction))
        rate = mine["sustained_tflops"]
        rows.append([f"{name}, {direction}", f"{mine['sustained_ms']:.2f} ms ({rate:.0f})"])
        rows[-1].append(f"{rate / two_levels['sustained_tflops']:.2f}" if two_levels else "not measured")
        rows[-1] += [peers[name, direction].get(peer, "not measured") for peer in PEERS]
    return markdown_table(["trace, direction", "DualKV (TFLOP/s)", f"of its rate on `{MAIN}`", *PEERS.values()], rows)


def _times(side: dict[str, Any], ours: float) -> str:
    if "sustained_ms" not in side:
        return "failed"
    apart = [f" + {part} {f['cold_ms']:.1f} ms" for part, f in side.get("parts", {}).items() if not f["in_total"]]
    return f"{side['sustained_ms'] / ours:.2f}x{''.join(apart)}"


def updates(load: Load) -> str:
    """Seconds and memory of each way, speed-up of packing and its part of the FLOP ratio, planning's part of a step."""
    run, rows = load(UPDATES), []
    for made in sorted(run["traces"].values(), key=lambda made: (made["share_ratio"], made["budget"])):
        ways = [_way(made["ways"].get(way)) for way in WAYS]
        speed = f"{made['speed_up']:.2f}x" if "speed_up" in made else "not measured"
        part = f"{made['of_flop_ratio']:.2f}" if "of_flop_ratio" in made else "not measured"
        rows.append([made["trace"], f"{made['budget']:,}", f"{made['share_ratio']:.2f}", f"{made['flop_ratio']:.2f}"])
        rows[-1] += [*ways, speed, part, _planning(made["ways"].get("packed"))]
    ways = [f"{what}: s, GiB" for what in WAYS.values()]
    head = ["trace", "rows a micro-batch", "share ratio", "FLOP ratio", *ways, "speed-up of packed"]
    return markdown_table([*head, "of the FLOP ratio", "planning, of packed's time"], rows) + recorded(run)


def _planning(made: dict[str, Any] | None) -> str:
    if made is None or "median" not in made:
        return "not measured"
    return f"{statistics.median(made['planning']) / made['median']:.1%}"


def _way(made: dict[str, Any] | None) -> str:
    if made is None:
        return "not measured"
    if "median" not in made:
        return "failed"
    return f"{made['median']:.2f}" + (f", {made['peak_gib']:.0f}" if "peak_gib" in made else "")

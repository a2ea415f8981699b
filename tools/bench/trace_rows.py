"""Tables of `docs/agents.md`: the traces that are drawn, and what was recorded on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from dualkv.bench.show import markdown_table
from dualkv.bench.traces import KINDS, draw
from dualkv.bench.trees import Found, Summary
from tools.bench.record import recorded

MODEL = "qwen3-8b"
PEERS = {
    "cudnn-intervals": "cuDNN, intervals",
    "fa4-prompt-copied": "FA4, paths copied",
    "fa4-replicated": "FA4, replicated",
    "flex": "FlexAttention",
}
NONE = ""  # a cell of what was not measured
ATTENTION = "traces-backward", "traces", "traces-flex"  # records: the first with a figure counts
Load = Callable[[str], dict[str, Any]]


def shapes() -> str:
    """Tabulate the shapes of every kind of trace, seed 0, by counting alone."""
    rows = []
    for kind, (what, _, _) in KINDS.items():
        s = Summary.of(Found.of_trace(draw(kind)), MODEL)
        ratios = f"{s.share_ratio:.2f}", f"{s.flop_ratio:.2f}"
        rows.append([f"`{kind}`", what, f"{s.tokens:,}", *ratios, f"{s.saved:.0%}" if s.pays else "not packed"])
    head = ["trace", "", "tokens", "share ratio", "FLOP ratio", "saved"]
    return markdown_table(head, rows)


def attention(load: Load) -> str:
    """Tabulate DualKV's TFLOP/s, and each peer's time over DualKV's in the same run: forward and backward in a cell."""
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
    for name in dict.fromkeys(name for name, _ in ours):
        keys = (name, "fwd"), (name, "bwd")
        rates = [f"{ours[key]['sustained_tflops']:.0f}" if key in ours else NONE for key in keys]
        times_of = [[peers.get(key, {}).get(peer, NONE) for key in keys] for peer in PEERS]
        rows.append([name, *(NONE if set(cells) == {NONE} else ", ".join(cells) for cells in (rates, *times_of))])
    return markdown_table(["trace: forward, backward", "DualKV, TFLOP/s", *PEERS.values()], rows)


def _times(side: dict[str, Any], ours: float) -> str:
    return f"{side['sustained_ms'] / ours:.2f}x" if "sustained_ms" in side else "failed"


# ---------------------------------------------------------------- veRL and TRL
Pair = tuple[dict[str, Any] | None, dict[str, Any] | None]
VERL, TRL, TRL_ASYNC = "verl-h200-traces", "trl-h200-traces", "trl-async-h200"  # records of times
TRL_WAYS = {"padded": "TRL, padded", "tree": "TRL's tree", "packed": "DualKV"}


def verl_pairs(rows: list[dict[str, Any]]) -> dict[str, Pair]:
    """Pair the rows of veRL's own engine and DualKV's by trace, as far as they ran."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "error" not in row:
            found.setdefault(row["settings"]["trace"], {})[row["settings"]["engine"]] = row
    return {trace: (of.get("verl"), of.get("dualkv")) for trace, of in found.items()}


def verl(load: Load) -> str:
    """Tabulate updates of both engines: seconds, GiB, speed-up."""
    rows = []
    for trace, (stock, ours) in verl_pairs(load(VERL)["rows"]).items():
        ratio = f"{ours['metrics']['dualkv/dedup_ratio']:.2f}" if ours else NONE
        speed = f"{stock['seconds']['median'] / ours['seconds']['median']:.2f}x" if stock and ours else NONE
        seconds = [
            f"{row['seconds']['median']:.2f}, {max(row['peak_gib']):.0f}" if row else NONE for row in (stock, ours)
        ]
        rows.append([trace, ratio, *seconds, speed])
    head = ["trace", "tokens / packed", "veRL", "DualKV", "speed-up"]
    return markdown_table(head, rows) + recorded(load(VERL))


def trl(load: Load) -> str:
    """Tabulate forward and backward of a micro-batch in TRL's ways: seconds, GiB."""
    rows = [
        [trace, f"{made['share_ratio']:.2f}", *(_trl_way(made["ways"].get(way)) for way in TRL_WAYS)]
        for trace, made in load(TRL)["traces"].items()
    ]
    head = ["trace", "share ratio", *TRL_WAYS.values()]
    return markdown_table(head, rows) + recorded(load(TRL))


def trl_async(load: Load) -> str:
    """Tabulate forward and backward of a micro-batch in TRL's asynchronous trainer and DualKV's: seconds, speed-up."""
    rows = []
    for trace, made in load(TRL_ASYNC)["traces"].items():
        stock, ours = (made[way]["median"] for way in ("trl", "dualkv"))
        rows.append([trace, f"{made['share_ratio']:.2f}", f"{stock:.3f}", f"{ours:.3f}", f"{stock / ours:.2f}x"])
    head = ["trace", "share ratio", "TRL's", "DualKV's", "speed-up"]
    return markdown_table(head, rows) + recorded(load(TRL_ASYNC))


def _trl_way(made: dict[str, Any] | None) -> str:
    if made is None:
        return NONE
    return "failed" if "error" in made else f"{made['seconds']['median']:.2f}, {made['peak_gib']:.0f}"

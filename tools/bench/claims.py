"""Compare what others claim about training on trees, with its conditions, with measurements on the nearest shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from dualkv.bench.show import markdown_table
from dualkv.bench.traces import NAME
from tools.bench.record import recorded
from tools.bench.trace_rows import UPDATES, Load


class Claim(NamedTuple):
    """Read in November 2026 at the source.

    Attributes:
        conditions: as far as stated.
        nearest: here, in words.
        kinds: of traces, or "two levels", "hybrid", "gathered": the records to look into.
    """

    who: str
    claim: str
    conditions: str
    source: str
    nearest: str
    kinds: tuple[str, ...]


CLAIMS = (
    Claim(
        "AReaL-DTA",
        "up to 8.31x the training throughput of dense training, 1.70x of sparse",
        "τ²-bench; walks the tree depth-first. Its configuration: Qwen3-8B, airline, 8 samples a task, "
        "32,768 tokens, every turn exported by itself",
        "arXiv 2602.00482v2; AReaL, `examples/tau2/dta`",
        "`tau2`",
        ("tau2",),
    ),
    Claim(
        "Tree Training (Kwai)",
        "6.2x training speed-up",
        "agentic trajectories, dense and MoE models; branches of think mode, parallel tools, context management",
        "arXiv 2511.00413v3 (v1 and v2: 3.9x)",
        "`swe-dropped`",
        ("swe-dropped",),
    ),
    Claim(
        "Forge (MiniMax)",
        "up to 40x",
        "merging of prefix trees of M2.5's agents, contexts up to 200,000 tokens; no shapes",
        "minimax.io, 2026-02-13; arXiv 2605.26494",
        "`swe-dropped`, whose share ratio is 21",
        ("swe-dropped",),
    ),
    Claim(
        "schedule-level reuse",
        "up to 4.395x, 2.930x against a compiled baseline; 59.1 % less memory",
        "one shared prompt; Llama3-8B, Qwen3-8B, Qwen3-30B-A3B",
        "arXiv 2606.01143",
        "two levels",
        ("two levels",),
    ),
    Claim(
        "veRL, draft of prefix trees (pull request 6689)",
        "updates of 82 to 21 s, 133 to 82 s, and 170 to 252 s",
        "MagiAttention on Megatron; LongReason, a search workload with 35 % shared, TreeGRPO. A draft; "
        "the figures as they were read in it",
        "github.com/verl-project/verl/pull/6689",
        "`search`, `treepo`",
        ("search", "treepo"),
    ),
    Claim(
        "veRL, PrefixGrouper",
        "1.26x at 4K, 1.56 to 1.70x at 8K",
        "Qwen3-4B, 4 H800s, prompts alone",
        "verl-project/verl, issue 6401",
        "two levels",
        ("two levels",),
    ),
    Claim(
        "Castform",
        "7.5x at a prompt of 16K and 64 tokens out, 1.7x at 8K and 4K",
        "Qwen3.5-4B, prompts alone",
        "provide.ai",
        "two levels, hybrid model",
        ("hybrid",),
    ),
    Claim(
        "TRL, tree packing",
        "none",
        "asynchronous GRPO, FlashAttention-3",
        "trl 1.16.0, `trl.experimental.async_grpo`",
        "*paths gathered*, `swe-dropped`",
        ("gathered",),
    ),
    Claim(
        "prime-rl, tree training",
        "none",
        "supervised; reasoning as side leaves, FlexAttention",
        "PrimeIntellect-ai/prime-rl, pull request 2405",
        "`swe-dropped`",
        ("swe-dropped",),
    ),
)


def table(load: Load) -> str:
    rows = [
        [c.who, c.claim, c.conditions, c.source, c.nearest, "; ".join(_ours(c, load)) or "not measured"] for c in CLAIMS
    ]
    head = ["who", "claim", "conditions, as far as stated", "source", "nearest here", "measured on it"]
    return markdown_table(head, rows)


def _ours(claim: Claim, load: Load) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        if "two levels" in claim.kinds:
            run, ours = load("step-h200-fa4"), load("step-h200")["rows"]["packed"]
            yield _two_levels(
                run["rows"]["replicated"], ours, run["sizes"], "Qwen3-8B, 8 layers, over FlashAttention-4"
            )
        if "hybrid" in claim.kinds:
            run = load("hybrid-step-h200")
            yield _two_levels(
                run["step"]["replicated"],
                run["step"]["packed"],
                run["sizes"],
                "Qwen3.5-9B, 8 layers, over cuDNN's attention",
            )
    with contextlib.suppress(FileNotFoundError):
        for made in load(UPDATES)["traces"].values():
            if "gathered" in claim.kinds:
                yield from _over(made, "gathered")
            elif _kind(made["trace"]) in claim.kinds:
                yield from _over(made, "replicated")
    with contextlib.suppress(FileNotFoundError):
        for trace, (stock, ours) in verl_pairs(load(VERL)["rows"]).items():
            if _kind(trace) in claim.kinds and stock is not None and ours is not None:
                speed = stock["seconds"]["median"] / ours["seconds"]["median"]
                yield f"{speed:.2f}x in veRL (`{trace}`)"


def _kind(trace: str) -> str:
    found = NAME.fullmatch(trace)
    return found[1] if found else ""


def _two_levels(replicated: dict[str, Any], packed: dict[str, Any], sizes: dict[str, Any], what: str) -> str:
    speed = replicated["median"] / packed["median"]
    return f"{speed:.2f}x ({what}; {sizes['prompt_len']}, {sizes['responses']} x {sizes['response_len']})"


def _over(made: dict[str, Any], way: str) -> Iterator[str]:
    medians = {name: found["median"] for name, found in made["ways"].items() if "median" in found}
    if {way, "packed"} <= medians.keys():
        yield f"{medians[way] / medians['packed']:.2f}x (`{made['trace']}`, share ratio {made['share_ratio']:.2f})"


# ---------------------------------------------------------------- veRL and TRL
def _there(load: Load, *names: str) -> list[dict[str, Any]]:
    """The records of these names that there are."""
    found = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            found.append(load(name))
    return found


Pair = tuple[dict[str, Any] | None, dict[str, Any] | None]
VERL, TRL = "verl-h200-traces", "trl-h200-traces"  # records of times
NEAR = "-near"  # behind those names: records of gradients on smaller traces, whose times are not used
TRL_WAYS = {"padded": "TRL, padded", "tree": "TRL's tree", "packed": "DualKV"}


def verl_pairs(rows: list[dict[str, Any]]) -> dict[str, Pair]:
    """Pair the rows of veRL's own engine and DualKV's by trace, as far as they ran."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "error" not in row:
            found.setdefault(row["settings"]["trace"], {})[row["settings"]["engine"]] = row
    return {trace: (of.get("verl"), of.get("dualkv")) for trace, of in found.items()}


def verl(load: Load) -> str:
    """Updates of both engines: seconds and memory."""
    rows = []
    for trace, (stock, ours) in verl_pairs(load(VERL)["rows"]).items():
        ratio = f"{ours['metrics']['dualkv/dedup_ratio']:.2f}" if ours else "not measured"
        speed = f"{stock['seconds']['median'] / ours['seconds']['median']:.2f}x" if stock and ours else "not measured"
        seconds = [
            f"{row['seconds']['median']:.2f}, {max(row['peak_gib']):.0f}" if row else "not measured"
            for row in (stock, ours)
        ]
        rows.append([trace, ratio, *seconds, speed])
    head = ["trace", "tokens over packed", "veRL: s, GiB", "DualKV: s, GiB", "speed-up"]
    return markdown_table(head, rows) + recorded(load(VERL))


def trl(load: Load) -> str:
    """Forward and backward of a micro-batch in TRL's ways: seconds and memory."""
    rows = [
        [trace, f"{made['share_ratio']:.2f}", *(_way(made["ways"].get(way)) for way in TRL_WAYS)]
        for trace, made in load(TRL)["traces"].items()
    ]
    head = ["trace", "share ratio", *(f"{name}: s, GiB" for name in TRL_WAYS.values())]
    return markdown_table(head, rows) + recorded(load(TRL))


def distances(load: Load) -> str:
    """Tabulate the distances of gradients from those in fp32, in veRL and in TRL."""
    of_verl: dict[str, Pair] = {}
    of_trl: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        of_verl = verl_pairs(load(VERL + NEAR)["rows"])
    with contextlib.suppress(FileNotFoundError):
        of_trl = load(TRL + NEAR)["traces"]
    traces = list(dict.fromkeys([*of_verl, *of_trl]))
    if not traces:
        raise FileNotFoundError(VERL + NEAR)
    rows = [
        [
            trace,
            f"{of_trl[trace]['share_ratio']:.2f}" if trace in of_trl else "",
            *map(_distance, of_verl.get(trace, (None, None))),
            *(_distance(of_trl.get(trace, {"ways": {}})["ways"].get(way)) for way in TRL_WAYS),
        ]
        for trace in traces
    ]
    head = ["trace", "share ratio", "veRL", "DualKV in veRL", *TRL_WAYS.values()]
    return markdown_table(head, rows) + recorded(*_there(load, VERL + NEAR, TRL + NEAR))


def _distance(made: dict[str, Any] | None) -> str:
    return f"{made['gradients_from_fp32']:.4f}" if made and "gradients_from_fp32" in made else "not measured"


def _way(made: dict[str, Any] | None) -> str:
    if made is None:
        return "not measured"
    return "failed" if "error" in made else f"{made['seconds']['median']:.2f}, {made['peak_gib']:.0f}"

"""`python -m tools.tables`: lay out the figures in docs/results/, and write the tables of README and docs from them.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; a test holds the documents to what this writes.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from codegen import manifest
from codegen.spec import KernelSpec, backward_specs, forward_spec
from codegen.tiles import HEAD_DIMS
from dualkv.bench.show import DIRECTIONS, markdown_table
from dualkv.bench.sides import SIDES
from dualkv.bench.workloads import MAIN, parse
from tools import filed, matrix_rows, trust_rows, zoo_rows
from tools.bench import (
    cold_start,
    composition,
    features,
    host_time,
    megatron_costs,
    trace_rows,
    tune_rows,
    verl_rows,
)
from tools.bench.record import commit_of, runs_of
from tools.ncu import show as ncu
from tools.sanitize import show as sanitize

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
MANIFEST = ROOT / "tests" / "codegen" / "manifest.json"
DOCUMENTS = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "agents",
            "compare",
            "performance",
            "deployment",
            "profiling",
            "sanitizers",
            "transformers",
            "trust",
            "tuning",
        )
    ),
)
UPDATES = {
    "update-cpu": "tiny Qwen3, fp32, 2 CPU cores",
    "update-h200-p4096": "Qwen3-0.6B, bf16, H200, kernels",
    "update-h200": "Qwen3-0.6B, bf16, H200, kernels",
    "update-h200-composition": "Qwen3-0.6B, bf16, H200, FlexAttention in place of kernels",
}
HYBRIDS = "hybrid-step-h200", "hybrid-h200", "hybrid-decoder-h200", "hybrid-distance-h200"
OURS, FIXED, PEER, CUDNN = "dualkv", "dualkv-deterministic", "fa4-3-calls", "cudnn-intervals"
STOCK = {
    "fa4": "FlashAttention-4",
    "flex": "FlexAttention",
    "cudnn": "cuDNN's attention",
}  # names of tools.bench.stock_attention
VALUES_PEERS = {CUDNN: "cuDNN, intervals", PEER: "FlashAttention-4, 3 calls"}  # of another head dim
COMPARED = (  # records, peers and their names
    ("cudnn", CUDNN, "cuDNN, intervals"),
    ("slow", PEER, "FlashAttention-4, 3 calls"),
    ("slow", "flex", "FlexAttention"),
    ("magi", "magi-ranges", "MagiAttention"),
)
WINDOW_PEERS = "fa4-prompt-copied", CUDNN  # of windows and chunks
CARD = "NVIDIA H200"  # of records that name no other
AIMED = {  # FlashAttention-4's time over ours: forward, backward
    MAIN: (1.22, 1.10),
    "n28-p4096-r2048": (1.28, 1.14),
    "n28-p16384-r2048": (1.22, 1.10),
    "n28-p32768-r2048": (1.17, 1.07),
    "n16-p32768-r2048": (1.17, 1.07),
    "n64-p4096-r256": (1.28, 1.14),
    "n32-p8192-uniform": (1.22, 1.10),
    "g64-n8": (1.35, 1.30),
}
TWO_LEVELS = {  # the rollouts of trees with their prompts shared alone, as lengths for `dualkv bench -w`
    "binary-p4096-r1024": "4096:16x4096",
    "agent-t10-r512": "512:32x4608",
}


def _load(name: str, folder: Path | None = None) -> Any:
    return filed.read((folder or RESULTS) / f"{name}.json")


def updates() -> str:
    """One GRPO update each: tokens, seconds and peak memory, replicated and packed.

    Last: how far log-probs and gradients of the packed way are from a wider dtype, in units of the replicated way's.
    """
    rows = []
    for name, what in UPDATES.items():
        run = _load(name)
        a, b, s = run["ways"]["replicated"], run["ways"]["packed"], run["settings"]
        row = [what, f"{s['prompt_len']}, {s['responses']} x {s['response_len']}"]
        row.append(f"{a['tokens'][0]:,} / {b['tokens'][0]:,}")
        ratio = a["total_seconds"] / b["total_seconds"]
        row.append(f"{a['total_seconds']:.2f} / {b['total_seconds']:.2f} s ({ratio:.1f}x)")
        memory = f"{a['peak_bytes'] / 2**30:.1f} / {b['peak_bytes'] / 2**30:.1f} GiB"
        row.append(f"{memory} ({a['peak_bytes'] / b['peak_bytes']:.1f}x)")
        away = run["to_truth"]
        ratios = [away["packed"][what] / away["replicated"][what] for what in ("logp_rms", "gradients") if away]
        row.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        rows.append(row)
    head = ["one update", "P, N x R", "tokens", "time", "peak memory above the weights"]
    return markdown_table([*head, "distance from fp32*"], rows)


def _steps() -> dict[str, list[str]]:
    """Rows of what packing saves in updates and in parts of them: what, lengths, peer, time, memory."""

    def measured(
        what: str, peer: str, sizes: dict[str, Any], ways: list[Any], seconds: str, whole: bool = True, least: str = ""
    ) -> list[str]:
        a, b = (way["seconds"]["median"] if seconds == "seconds" else way[seconds] for way in ways)
        gib = [way["peak_bytes"] / 2**30 if "peak_bytes" in way else way["peak_gib"] for way in ways]
        c, d = (max(each) if isinstance(each, list) else each for each in gib)
        memory = f"{c:.1f} / {d:.1f} GiB " + ("in all" if whole else f"above the weights ({c / d:.1f}x)")
        lens = f"{sizes['prompt_len']}, {sizes['responses']} x {least}{sizes['response_len']}"
        return [what, lens, peer, f"{a:.2f} / {b:.2f} s (**{a / b:.1f}x**)", memory]

    rows = {}
    for name, what in (("update-cpu", "tiny Qwen3, fp32, 2 CPU cores"), ("update-h200", "Qwen3-0.6B, H200")):
        run = _load(name)
        ways = [run["ways"][way] for way in ("replicated", "packed")]
        what = f"GRPO update, {what}"
        rows[name] = measured(what, "PyTorch's SDPA", run["settings"], ways, "total_seconds", whole=False)
    run = _load("trl-h200-fa4")
    ways = [run["ways"][way] for way in ("padded", "packed")]
    what = "TRL, forward and backward of a micro-batch, Qwen3-0.6B, H200"
    rows["trl"] = measured(what, "FlashAttention-4", run["settings"], ways, "seconds", whole=False, least="256 to ")
    run = _load("step-h200-fa4")
    ways = [run["rows"]["replicated"], _load("step-h200")["rows"]["packed"]]
    what = "forward and backward of a group, 8 layers of Qwen3-8B, H200"
    rows["step"] = measured(what, "FlashAttention-4", run["sizes"], ways, "median")
    run = _load("step-h200-gpt-oss")
    ways = [run["rows"][way] for way in ("replicated", "packed")]
    what = "forward, backward and optimizer of a group, 8 layers of gpt-oss-20b, H200"
    rows["gpt-oss"] = measured(what, STOCK[run["stock_attention"]], run["sizes"], ways, "median")
    run = _load("hybrid-step-h200")
    ways = [run["step"][way] for way in ("replicated", "packed")]
    what = "forward and backward of a group, 8 layers of Qwen3.5-9B, H200"
    rows["hybrid"] = measured(what, STOCK[run["stock_attention"]], run["sizes"], ways, "median")
    run = _load("images-h200")
    ways = [run["rows"][way] for way in ("replicated", "packed")]
    what = "forward and backward of a group with four images, 8 layers of Qwen3-VL-8B and its vision tower, H200"
    tokens = run["sizes"]["images"] * run["sizes"]["side"] ** 2 + run["sizes"]["text"]
    rows["images"] = measured(what, "PyTorch's SDPA", run["sizes"] | {"prompt_len": tokens}, ways, "median")
    whole_grpo = [r for r in _verl("4gpu") if (r["settings"]["layers"], r["settings"]["algorithm"]) == (None, "grpo")]
    ways = [
        min((r for r in whole_grpo if r["settings"]["engine"] == engine), key=lambda r: float(r["seconds"]["median"]))
        for engine in ("verl", "dualkv")
    ]
    what = "veRL update, Qwen3-8B, 4 H200s"
    rows["verl"] = measured(what, "cuDNN's attention", ways[0]["settings"], ways, "seconds")
    return rows


STEPS = ["measured", "P, N x R", "replicated prompts run with", "time, replicated / packed", "peak memory"]


def replicated() -> str:
    """Tabulate what packing saves, with the attention that the replicated prompts ran with."""
    return markdown_table(STEPS, list(_steps().values()))


def headline() -> str:
    """Tabulate the README's three rows: the strongest attention that replicated prompts were measured with."""
    rows = _steps()
    return markdown_table(STEPS[:-1], [rows[name][:-1] for name in ("step", "trl", "verl")])


def speeds() -> str:
    """The kernels against the peer, from the slowest workload of each record to the fastest."""

    def span(name: str, figure: Callable[[dict[str, Any]], float], form: str) -> str:
        run = _load(name)
        figures = [figure(result) for result in _measured(run["results"])]
        card = "" if _card(run) == CARD else f" ({_card(run).split()[1]})"
        return f"{min(figures):{form}} to {max(figures):{form}}{card}"

    dims = sorted({result["workload"]["head_dim"] for result in _load("forward-head-dims")["results"]})
    rows = [
        [what, *(span(name.format(direction), figure, form) for direction in ("forward", "backward"))]
        for what, name, figure, form in (
            ("head dim 128, eight workloads: TFLOP/s", "{}", _rate, ".0f"),
            ("the same: times as fast", "{}", _over, ".2f"),
            (f"head dims {', '.join(map(str, dims))}: times as fast", "{}-head-dims", _over, ".2f"),
            ("random shapes: times as fast", "random-{}", _over, ".2f"),
        )
    ]
    return markdown_table(["attention on an H200", "forward", "backward"], rows)


def _card(run: dict[str, Any]) -> str:
    return str(run.get("gpu", {}).get("name", CARD))


def _rate(result: dict[str, Any]) -> float:
    return float(result["sides"][OURS]["sustained_tflops"])


def _speed(side: dict[str, Any]) -> str:
    return f"{side['sustained_ms']:.2f} ({side['sustained_tflops']:.0f})"


def _recorded(run: dict[str, Any], part: str = "") -> str:
    """A line on when and how a table, or a `part` of it, was made, and on what there was no time for."""
    turns = f"turns of {run['settings']['seconds']:g} s, {run['settings']['rounds']} rounds"
    if _card(run) != CARD:
        turns = f"{_card(run)}, {turns}"
    said = f"\n\n{part}Recorded {run['date'][:10]} at {commit_of(run)}: {turns}."
    done, asked = len(run["results"]), run.get("asked", len(run["results"]))
    return said + (f" The time of that run ended after {done} of {asked}." if done < asked else "")


def _measured(results: Sequence[dict[str, Any]], peer: str = PEER) -> list[dict[str, Any]]:
    """Select the results in which DualKV and a peer were measured."""
    return [r for r in results if all("sustained_ms" in r["sides"].get(name, {}) for name in (OURS, peer))]


def _over(result: dict[str, Any], peer: str = PEER) -> float:
    """The time of a peer over ours."""
    ours, theirs = (result["sides"][side]["sustained_ms"] for side in (OURS, peer))
    return float(theirs / ours)


def _against_peer(name: str, first: str = "workload") -> str:
    """Tabulate DualKV and the peer, a row for each workload; `first` heads the column of their names."""
    run = _load(name)
    results = _measured(run["results"])
    more = {FIXED: "deterministic: time ratio", CUDNN: "cuDNN, intervals: ratio"}
    more = {side: title for side, title in more.items() if any(side in result["sides"] for result in results)}
    rows = []
    for result in results:
        sides = result["sides"]
        ours, peer = sides[OURS], sides[PEER]
        row = [result["workload"]["name"].removeprefix(f"{MAIN}-"), _speed(ours), _speed(peer)]
        row += [f"{_over(result):.2f}", f"{ours['joules']:.1f} / {peer['joules']:.1f}"]
        row += [f"{_over(result, side):.2f}" if _measured([result], side) else "" for side in more]
        rows.append(row)
    head = [first, "DualKV, ms (TFLOP/s)", "FlashAttention-4, 3 calls", "ratio", "J a call"]
    return markdown_table([*head, *more.values()], rows) + _recorded(run)


def aimed() -> str:
    """FlashAttention-4's time over ours, and the last rows' figures, beside targets; what misses its target is bold."""

    def cell(figure: float, least: float, form: str) -> str:
        text = format(figure, form)
        return f"{text if figure >= least else f'**{text}**'} of {least:g}"

    runs = [_load(direction) for direction in ("forward", "backward")]
    forward, backward = ({r["workload"]["name"]: r["sides"] for r in _measured(run["results"])} for run in runs)
    rows = []
    for name, aims in AIMED.items():
        both = zip((forward[name], backward[name]), aims, strict=True)
        rows.append([name, *(cell(_over({"sides": sides}), aim, ".3f") for sides, aim in both)])
    row, fewer = [f"{MAIN}: TFLOP/s"], [f"{MAIN}: fewer joules, %"]
    for sides, rate, less in ((forward[MAIN], 725, 20), (backward[MAIN], 625, 10)):
        row.append(cell(sides[OURS]["sustained_tflops"], rate, ".0f"))
        fewer.append(cell(100 * (1 - sides[OURS]["joules"] / sides[PEER]["joules"]), less, ".1f"))
    slowest = max(s[FIXED]["sustained_ms"] / s[OURS]["sustained_ms"] for s in backward.values() if FIXED in s)
    text = f"{slowest:.2f}" if slowest <= 1.10 else f"**{slowest:.2f}**"
    rows += [row, fewer, ["deterministic over any order", "", f"{text} of at most 1.10"]]
    return markdown_table(["reached of target", "forward", "backward"], rows)


def tuned() -> str:
    runs = {"forward": _load("tune-fwd-h200"), "backward": _load("tune-bwd-h200")}
    said = (_recorded(run, f"{direction.title()}. ") for direction, run in runs.items())
    return tune_rows.tiles(runs) + "".join(said)


def drawn() -> str:
    """Drawn workloads: how fast ours is against its peers, for each head dim, and what was not measured."""
    runs = {direction: _load(f"random-{direction}") for direction in ("forward", "backward")}
    results = [result for run in runs.values() for result in run["results"]]
    measured, rows = _measured(results), []
    named = {"FlashAttention-4": PEER, "cuDNN": CUDNN}
    head = [f"{way} over {peer}" for way, peer in itertools.product(runs, named)]
    for head_dim in sorted({r["workload"]["head_dim"] for r in measured}):
        row = [str(head_dim)]
        for run, peer in itertools.product(runs.values(), named.values()):
            some = [r for r in _measured(run["results"], peer) if r["workload"]["head_dim"] == head_dim]
            x = sorted(_over(r, peer) for r in some)
            row.append(f"{len(x)}: {x[0]:.2f}, {statistics.median(x):.2f}, {x[-1]:.2f}" if x else "")
        rows.append(row)
    slower = [
        f"{_drawn(r)} {_over(r, peer):.2f} over {name}"
        for name, peer in named.items()
        for r in _measured(results, peer)
        if _over(r, peer) < 1
    ]
    said = f"Slower than a peer: {'; '.join(slower)}." if slower else "Never slower than a peer that was measured."
    missing = len(results) - len(measured)
    said += f" Not measured: {missing} of {len(results)}." if missing else ""
    recorded = (_recorded(run, f"{direction.title()}. ") for direction, run in runs.items())
    return markdown_table(["head dim", *head], rows) + f"\n\n{said}" + "".join(recorded)


def _drawn(result: dict[str, Any]) -> str:
    """A drawn workload in a line."""
    w = parse(result["workload"]["name"])
    [prompt], [lens] = w.prompt_lens, w.response_lens
    shape = f"D={w.head_dim} H={w.heads} Hk={w.kv_heads} P={prompt}"
    return f"{w.name} {result['direction']} ({shape} N={len(lens)} R={min(lens)}..{max(lens)})"


def tensor_parallel() -> str:
    """Rates of fewer heads against the rates of all heads."""
    run = _load("backward-tensor-parallel")
    whole, *_ = [r for r in _load("backward")["results"] if r["workload"]["name"] == MAIN]
    rows = []
    for result in [whole, *_measured(run["results"])]:
        w, ours, peer = result["workload"], result["sides"][OURS], result["sides"][PEER]
        rate = f"{ours['sustained_tflops'] / whole['sides'][OURS]['sustained_tflops']:.2f}"
        rows.append((f"{w['heads']} / {w['kv_heads']}", _speed(ours), rate, _speed(peer)))
    head = ("heads, KV heads", "DualKV, ms (TFLOP/s)", "rate over that of all heads", "FlashAttention-4, 3 calls")
    return markdown_table(head, rows) + _recorded(run)


def windows(direction: str) -> str:
    """Tabulate DualKV against FlashAttention-4 and cuDNN, and what its plans execute over what is visible."""
    run, rows = _load("windows"), []
    for result in run["results"]:
        if result["direction"] != direction:
            continue
        sides = [result["sides"].get(name, {}) for name in (OURS, *WINDOW_PEERS)]
        ms = [side.get("sustained_ms") for side in sides]
        theirs = [x for x in ms[1:] if x]
        row = [
            f"{x:.2f} ({side['sustained_tflops']:.0f}; {result['bytes'] / x / 1e6:,.0f})" if x else "not measured"
            for x, side in zip(ms, sides, strict=True)
        ]
        row.append(f"{min(theirs) / ms[0]:.2f}" if ms[0] and theirs else "")
        rows.append([result["workload"]["name"], *row, f"{result['executed']:.2f}"])
    head = ["workload", "DualKV, ms (TFLOP/s; GB/s)", "FlashAttention-4, tails copied", "cuDNN, intervals"]
    return markdown_table([*head, "speed over the better", "executed over useful"], rows) + _recorded(run)


def beside(name: str, peers: dict[str, str]) -> str:
    """Tabulate DualKV and peers, whose columns `peers` names; the last column is the speed over the better peer."""
    run, rows = _load(name), []
    for result in run["results"]:
        sides = [result["sides"].get(side, {}) for side in (OURS, *peers)]
        ours, *theirs = [side.get("sustained_ms") for side in sides]
        best = min(filter(None, theirs), default=None)
        cells = [_speed(side) if "sustained_ms" in side else "not measured" for side in sides]
        cells.append(f"{best / ours:.2f}" if ours and best else "")
        rows.append([f"{result['workload']['name']}, {DIRECTIONS[result['direction']]}", *cells])
    last = f"speed over {({1: 'it', 2: 'the better'}).get(len(peers), 'the best')}"
    return markdown_table(["workload", "DualKV, ms (TFLOP/s)", *peers.values(), last], rows) + _recorded(run)


def hybrid() -> str:
    """A hybrid model packed and replicated, by parts of `tools.bench.hybrid`."""
    runs, rows = sorted(map(_load, HYBRIDS), key=lambda run: str(run["date"]), reverse=True), []

    def found(part: str) -> tuple[Any, str]:
        """Find a part in the newest record that has it, and that record's commit."""
        run = next(run for run in runs if part in run)
        return run[part], run["commit"][:7]

    for part in ("step", "decoder", "short groups"):
        made, commit = found(part)
        ways = [made[way] for way in ("packed", "replicated")]
        seconds, memory = (
            " / ".join(f"{way[name]:.{n}f}" for way in ways) for name, n in (("median", 2), ("peak_gib", 1))
        )
        rows.append([part, f"{seconds} s", f"{made['times_as_fast']:.2f}", f"{memory} GiB", commit])
    mixer, commit = found("mixer")
    both = (statistics.median(mixer[name]) * 1e3 for name in ("packed", "one_call"))
    over = f"{1 / mixer['packed_over_one_call']:.2f}"
    rows.append(["one recurrent layer / one call", "{:.1f} / {:.1f} ms".format(*both), over, "", commit])
    near, commit = found("distance")
    for name, what in (("logp_rms", "log-probs"), ("gradients", "gradients")):
        apart = " / ".join(f"{near[way][name]:.3g}" for way in ("packed", "replicated"))
        over = f"{1 / near['packed_over_replicated'][name]:.2f}"
        rows.append([f"{what}, distance from fp32", apart, over, "", commit])
    head = ["", "packed / replicated", "replicated over packed", "peak memory", "commit"]
    (card,) = {run["gpu"]["name"] for run in runs}
    return f"{markdown_table(head, rows)}\n\nOn an {card}."


def trees(folder: Path | None = None) -> str:
    """Trees against FlexAttention, sequences replicated, and the rates of our own kernels on layouts of two levels."""
    run, others = _load("trees", folder), []
    with contextlib.suppress(FileNotFoundError):  # not recorded yet
        others = _load("trees-two-levels", folder)["results"]
    rates = {(r["workload"]["name"], r["direction"]): r["sides"][OURS] for r in others}
    rows = []
    for result in run["results"]:
        name, direction, sides = result["workload"]["name"], result["direction"], result["sides"]
        ours = sides[OURS]
        row = [f"{name}, {DIRECTIONS[direction]}", _speed(ours)]
        for peer in (CUDNN, "flex", "fa4-replicated"):
            measured = _measured([result], peer)
            row.append(f"{_speed(sides[peer])}: {_over(result, peer):.2f}" if measured else "")
        for other in (TWO_LEVELS[name], MAIN):
            rate = rates.get((other, direction), {}).get("sustained_tflops")
            row.append(f"{rate:.0f}: {ours['sustained_tflops'] / rate:.2f}" if rate else "")
        rows.append(row)
    others_of = ("cuDNN, intervals", "FlexAttention", "FlashAttention-4, replicated")
    head = ["tree", "DualKV, ms (TFLOP/s)", *(f"{peer}: speed-up over it" for peer in others_of)]
    head += ["two levels, same rollouts, TFLOP/s: ratio to it", f"{MAIN}, TFLOP/s: ratio to it"]
    return markdown_table(head, rows) + _recorded(run)


def peers(name: str, row: Callable[[dict[str, Any]], str]) -> str:
    """Every side, a row for each, with what its total leaves out; a column for each result, named by `row`."""
    run = _load(name)
    known = [side for side in SIDES if any("sustained_ms" in r["sides"].get(side, {}) for r in run["results"])]
    rows = [[side, *(_peer(result["sides"].get(side, {})) for result in run["results"])] for side in known]
    return markdown_table(["ms (TFLOP/s), J a call", *map(row, run["results"])], rows) + _recorded(run)


def _peer(side: dict[str, Any]) -> str:
    if "sustained_ms" not in side:
        return ""
    apart = [f" + {part} {f['cold_ms']:.1f}" for part, f in side["parts"].items() if not f["in_total"]]
    return f"{_speed(side)}, {side['joules']:.1f}{''.join(apart)}"


def compared() -> str:
    """Tabulate peers' times over DualKV's on several workloads: the least and the greatest of each direction."""
    rows = []
    for name, peer, what in COMPARED:
        run = _load(name)
        row = [f"{what} (`{name}`)", str(len({result["workload"]["name"] for result in run["results"]}))]
        for direction in ("fwd", "bwd"):
            times = [_over(r, peer) for r in _measured(run["results"], peer) if r["direction"] == direction]
            row.append(f"{min(times):.2f} to {max(times):.2f}" if times else "not measured")
        rows.append([*row, f"{run['date'][:10]}, {commit_of(run)}"])
    return markdown_table(["peer (record)", "shapes", "forward", "backward", "recorded"], rows)


def kernels() -> str:
    """The main kernels of each head dim, by the manifest: tile, registers (producer/MMA) and shared memory in KiB."""
    described = manifest.read(MANIFEST)["kernels"]

    def cells(spec: KernelSpec[Any]) -> list[str]:
        kernel, tile = described[str(spec)], asdict(spec.tile)
        budgets = sorted(int(n.split()[-1], 16) for n in kernel["instructions"] if n.startswith("USETMAXREG"))
        numbers = [value for name, value in tile.items() if name != "deterministic"]
        return [*("/".join(map(str, x)) for x in (numbers, budgets)), f"{kernel['shared_memory'] / 1024:.1f}"]

    rows = [[str(d), *cells(forward_spec("bf16", d, 4)), *cells(backward_specs("bf16", d).main)] for d in HEAD_DIMS]
    head = ["head dim", "forward: tile_n/warp_groups/stages/cluster", "registers", "KiB"]
    return markdown_table([*head, "backward: tile_m/tile_n/stages/cluster", "registers", "KiB"], rows)


def sanitizers() -> str:
    """Report what the sanitizers checked and found: errors in words, false positives counted by reason."""
    filed = _load("sanitizer-h200")
    where = f"compute-sanitizer {filed['compute_sanitizer'].split()[0]}, {filed['gpu']['name']}, {filed['date'][:10]}"
    said = sanitize.errors(filed["tools"]) or ["No errors."]
    excused = "; ".join(f"{why} {n:,}" for why, n in sanitize.reasons(filed["tools"]).items())
    said += [f"False positives: {excused}."]
    return "\n".join([f"{where}:", "", ncu.markdown(sanitize.table(filed["tools"])), "", *said])


def trust() -> str:
    """Tabulate what was tried to break it, over the records of all runs."""
    fuzzed = [run for path in RESULTS.glob("fuzz-*.json") for run in runs_of(_load(path.stem))]
    others = ([_load(path.stem) for path in RESULTS.glob(f"{kind}-*.json")] for kind in ("suite", "sanitizer", "soak"))
    return trust_rows.table(fuzzed, *others)


def _verl(*names: str) -> list[verl_rows.Row]:
    return [row for name in names for row in _load(f"verl-h200-{name}")["rows"]]


TABLES: dict[str, Callable[[], str]] = {
    "trust": trust,
    "matrix": lambda: matrix_rows.table(_load("matrix")),
    "zoo": lambda: zoo_rows.table(_load("zoo")),
    "zoo-newest": lambda: zoo_rows.newer(_load("zoo"), _load("zoo-newest")),
    "updates": updates,
    "headline": headline,
    "replicated": replicated,
    "speeds": speeds,
    "aimed": aimed,
    "forward": lambda: _against_peer("forward"),
    "backward": lambda: _against_peer("backward"),
    "forward-head-dims": lambda: _against_peer("forward-head-dims", "head dim, GQA"),
    "backward-head-dims": lambda: _against_peer("backward-head-dims", "head dim, GQA"),
    "random": drawn,
    "tensor-parallel": tensor_parallel,
    "windows-forward": lambda: windows("fwd"),
    "windows-backward": lambda: windows("bwd"),
    "values": lambda: beside("values", VALUES_PEERS),
    "d512": lambda: beside("d512", {"flex": "FlexAttention"}),
    "feature-costs": lambda: features.costs(_load("features")),
    "feature-errors": lambda: features.exactness(_load("features")),
    "trees": trees,
    "trace-shapes": trace_rows.shapes,
    "trace-attention": lambda: trace_rows.attention(_load),
    "trace-verl": lambda: trace_rows.verl(_load),
    "trace-trl": lambda: trace_rows.trl(_load),
    "hybrid": hybrid,
    "context-parallel": megatron_costs.table,
    "both": lambda: peers("both", lambda result: result["workload"]["name"]),
    "compared": compared,
    "peers": lambda: peers("peers", lambda result: DIRECTIONS[result["direction"]]),
    "composition": lambda: composition.table((run := _load("composition-h200"))["results"]) + _recorded(run),
    "composition-ampere": lambda: composition.table((run := _load("composition-ampere"))["results"]) + _recorded(run),
    "flex-backend": lambda: composition.table((run := _load("flex-backend"))["results"]) + _recorded(run),
    "kernels": kernels,
    "tuned": tuned,
    "sanitizers": sanitizers,
    "host": lambda: host_time.markdown(_load("host-h200")),
    "verl-updates": lambda: verl_rows.updates(_verl("4gpu", "4gpu-2", "4gpu-moe", "moe")),
    "verl-updates-before": lambda: verl_rows.updates(_verl("4gpu-before")),
    "verl-megatron": lambda: verl_rows.megatron(*map(_load, ("verl-megatron-h200", "verl-megatron-h200-2gpu"))),
    "verl-scaling": lambda: verl_rows.scaling(_verl("1gpu", "4gpu-2")),
    "cold-start": lambda: cold_start.markdown(_load("cold-start-h200")),
}


def _table(name: str) -> str:
    try:
        return TABLES[name]()
    except FileNotFoundError:
        return "Not recorded yet."


def filled(text: str) -> str:
    """A document with its tables as the figures give them."""
    return re.sub(
        r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{_table(match[2])}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for path in RESULTS.glob("*.json"):
        path.write_text(filed.laid_out(path))
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text()))

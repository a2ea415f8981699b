"""`python -m tools.tables`: lay out the figures in docs/results/, and write the tables of README and docs from them.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; a test holds the documents to what this writes.
"""

from __future__ import annotations

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
from tools import filed, trust_rows, zoo_rows
from tools.bench import cold_start, features, host_time, real_layers, real_model, trace_rows
from tools.bench.record import commit_of, recorded, runs_of
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
            "real-model",
            "sanitizers",
            "transformers",
            "trees",
            "trust",
            "tuning",
        )
    ),
)
HYBRIDS = "hybrid-step-h200", "hybrid-h200", "hybrid-decoder-h200", "hybrid-distance-h200"
OURS, FIXED, PEER, CUDNN = "dualkv", "dualkv-deterministic", "fa4-3-calls", "cudnn-intervals"
STOCK = {
    "fa4": "FlashAttention-4",
    "flex": "FlexAttention",
    "cudnn": "cuDNN's attention",
}  # names of tools.bench.stock_attention
VALUES_PEERS = CUDNN, PEER  # of another head dim
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


def _load(name: str) -> Any:
    return filed.read(RESULTS / f"{name}.json")


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

    fa4, sdpa, rows = "FlashAttention-4", "PyTorch's SDPA", dict[str, list[str]]()
    for name, what in (("update-cpu", "tiny Qwen3, fp32, 2 CPU cores"), ("update-h200", "Qwen3-0.6B, H200")):
        run = _load(name)
        ways = [run["ways"][way] for way in ("replicated", "packed")]
        rows[name] = measured(f"GRPO update, {what}", sdpa, run["settings"], ways, "total_seconds", whole=False)
    run = _load("trl-h200-fa4")
    ways = [run["ways"][way] for way in ("padded", "packed")]
    what = "TRL, forward and backward of a micro-batch, Qwen3-0.6B, H200"
    rows["trl"] = measured(what, fa4, run["settings"], ways, "seconds", whole=False, least="256 to ")
    packed = {"step": _load("step-h200")["rows"]["packed"]}
    for name, record, part, what in (
        ("step", "step-h200-fa4", "rows", "forward and backward of a group, 8 layers of Qwen3-8B"),
        ("gpt-oss", "step-h200-gpt-oss", "rows",
         "forward, backward and optimizer of a group, 8 layers of gpt-oss-20b"),
        ("hybrid", "hybrid-step-h200", "step", "forward and backward of a group, 8 layers of Qwen3.5-9B"),
        ("images", "images-h200", "rows",
         "forward and backward of a group with four images, 8 layers of Qwen3-VL-8B and its vision tower"),
        ("agent", "images-turns-h200", "rows",
         "the same of an agent with a screenshot in each of 12 turns, 6 of them shared"),
    ):  # fmt: skip
        run = _load(record)
        ways, sizes = [run[part]["replicated"], packed.get(name) or run[part]["packed"]], run["sizes"]
        if "images" in sizes:
            image = sizes["side"] ** 2
            sizes = sizes | {"prompt_len": sizes["images"] * image + sizes["text"]}
            if sizes.get("turns"):
                sizes["response_len"] = sizes["turns"] * (image + sizes["response_len"])
        rows[name] = measured(f"{what}, H200", STOCK.get(run.get("stock_attention"), sdpa), sizes, ways, "median")
    run = _load("real-model-h200")
    ways = [run["times"][way] for way in ("replicated", "packed")]
    sizes = run["runs_of"]["packed-0"]["settings"]
    what = f"GRPO update of {sizes['groups']} prompts, SmolLM2-135M, H200"
    rows["real"] = measured(what, sdpa, sizes, ways, "median_s", least="up to ")
    whole_grpo = [
        r
        for r in _load("verl-h200-4gpu")["rows"]
        if (r["settings"]["layers"], r["settings"].get("algorithm", "grpo")) == (None, "grpo")
    ]
    ways = [
        min((r for r in whole_grpo if r["settings"]["engine"] == engine), key=lambda r: float(r["seconds"]["median"]))
        for engine in ("verl", "dualkv")
    ]
    rows["verl"] = measured("veRL update, Qwen3-8B, 4 H200s", "cuDNN's attention", ways[0]["settings"], ways, "seconds")
    return rows


STEPS = ["measured", "P, N x R", "replicated prompts run with", "time, replicated / packed", "peak memory"]


def replicated() -> str:
    """Tabulate what packing saves, with the attention that the replicated prompts ran with."""
    return markdown_table(STEPS, list(_steps().values()))


def headline() -> str:
    """Tabulate the README's rows: the strongest attention that replicated prompts were measured with."""
    rows = _steps()
    return markdown_table(STEPS[:-1], [rows[name][:-1] for name in ("step", "trl", "real", "verl")])


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


def _fastest(result: dict[str, Any], peers: Sequence[str]) -> str:
    """Return the time of the fastest peer that was measured over ours; "" where none was."""
    ratios = [_over(result, peer) for peer in peers if _measured([result], peer)]
    return f"{min(ratios):.2f}" if ratios else ""


def _by_workload(*names: str) -> dict[str, list[dict[str, Any]]]:
    """List the results of each workload in records of DualKV and FlashAttention-4, in the order of the records."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        for result in _measured(_load(name)["results"]):
            found.setdefault(result["workload"]["name"], []).append(result)
    return found


def main_shapes() -> str:
    """Tabulate DualKV and FlashAttention-4 at head dim 128, and the price of a fixed order of sums."""
    rows = []
    for name, results in _by_workload("forward", "backward").items():
        row = [name]
        for result in results:
            rates = (result["sides"][side]["sustained_tflops"] for side in (OURS, PEER))
            row += ["/".join(f"{rate:.0f}" for rate in rates), f"{_over(result):.2f}"]
        rows.append([*row, f"{_over(results[-1], FIXED):.2f}"])
    head = ["workload", "forward: DualKV/FA4, TFLOP/s", "speed", "backward: DualKV/FA4, TFLOP/s", "speed"]
    return markdown_table([*head, "deterministic: time ratio"], rows)


def head_dims() -> str:
    """Tabulate the lowest figures of each head dim over its workloads: TFLOP/s, and the speed over each peer."""
    results = {way: [*_load(f"{way}-head-dims")["results"]] for way in ("forward", "backward")}
    for name in ("values", "d512"):
        for result in _load(name)["results"]:
            results[DIRECTIONS[result["direction"]]].append(result)
    rows: dict[str, list[str]] = {}
    for at, some in zip((1, 4), results.values(), strict=True):
        of_dims: dict[str, list[dict[str, Any]]] = {}
        for result in some:
            dims = parse(result["workload"]["name"]).head_dims
            of_dims.setdefault("/".join(map(str, dict.fromkeys(dims))), []).append(result)
        for dims_named, mine in of_dims.items():
            others = [[_over(result, peer) for result in _measured(mine, peer)] for peer in (PEER, CUDNN, "flex")]
            fa4, cudnn, flex = (f"{min(speeds):.2f}" if speeds else "" for speeds in others)
            row = rows.setdefault(dims_named, [dims_named, *[""] * 6])
            row[at : at + 3] = [f"{min(map(_rate, mine)):.0f}", f"{flex} (FlexAttention)" if flex else fa4, cudnn]
    head = ["TFLOP/s", "over FA4", "over cuDNN"]
    return markdown_table(["head dim", *(f"{way}: {what}" for way in results for what in head)], rows.values())


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
    """Tabulate the speed of other tiles over the table's entry, which is the first side of each result, by GQA ratio: a
    row for each direction and head dim."""
    runs = {"forward": _load("tune-fwd-h200"), "backward": _load("tune-bwd-h200")}
    results = [(direction, result) for direction, run in runs.items() for result in run["results"]]
    ratios = sorted({result["gqa"] for _, result in results})
    rows: dict[str, dict[str, dict[int, str]]] = {}
    for direction, result in results:
        (_, entry), *others = result["sides"].items()
        dims = "/".join(str(result[name]) for name in ("head_dim", "head_dim_v") if name in result)
        row = rows.setdefault(f"{direction} {dims}", {})
        for name, side in others:
            if "sustained_ms" in entry and "sustained_ms" in side:
                row.setdefault(name, {})[result["gqa"]] = f"{entry['sustained_ms'] / side['sustained_ms']:.3f}"
    cells = [
        [what, "; ".join(f"{tile} {'/'.join(x.get(ratio, '-') for ratio in ratios)}" for tile, x in row.items())]
        for what, row in rows.items()
        if row
    ]
    head = ["head dim", f"other tiles: speed at GQA {'/'.join(map(str, ratios))}"]
    said = (_recorded(run, f"{direction.title()}. ") for direction, run in runs.items())
    return markdown_table(head, cells) + "".join(said)


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
            row.append(f"{x[0]:.2f}/{statistics.median(x):.2f}/{x[-1]:.2f}" if x else "")
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
    return markdown_table(["head dim", *head], rows) + f"\n\n{said}"


def _drawn(result: dict[str, Any]) -> str:
    """A drawn workload in a line."""
    w = parse(result["workload"]["name"])
    [prompt], [lens] = w.prompt_lens, w.response_lens
    shape = f"D={w.head_dim} H={w.heads} Hk={w.kv_heads} P={prompt}"
    return f"{w.name} {result['direction']} ({shape} N={len(lens)} R={min(lens)}..{max(lens)})"


def windows() -> str:
    """Tabulate the speed over the better of FlashAttention-4 and cuDNN, without prompts of 32,768 tokens."""
    rows: dict[str, list[str]] = {}
    for result in _load("windows")["results"]:
        name = result["workload"]["name"]
        if not name.startswith("n16-p32768"):
            row, at = rows.setdefault(name, [name, "", "", "", ""]), 1 + 2 * (result["direction"] == "bwd")
            row[at : at + 2] = [f"{_rate(result):.0f}", _fastest(result, WINDOW_PEERS)]
    head = ["forward: TFLOP/s", "speed", "backward: TFLOP/s", "speed"]
    return markdown_table(["workload", *head], rows.values())


def hybrid() -> str:
    """A hybrid model packed and replicated, by parts of `tools.bench.hybrid`."""
    runs, rows = sorted(map(_load, HYBRIDS), key=lambda run: str(run["date"]), reverse=True), []

    def found(part: str) -> Any:
        """Find a part in the newest record that has it, and that record's commit."""
        return next(run[part] for run in runs if part in run)

    for part in ("step", "decoder", "short groups"):
        made = found(part)
        ways = [made[way] for way in ("packed", "replicated")]
        seconds, memory = (
            " / ".join(f"{way[name]:.{n}f}" for way in ways) for name, n in (("median", 2), ("peak_gib", 1))
        )
        rows.append([part, f"{seconds} s", f"{made['times_as_fast']:.2f}", f"{memory} GiB"])
    mixer = found("mixer")
    both = (statistics.median(mixer[name]) * 1e3 for name in ("packed", "one_call"))
    over = f"{1 / mixer['packed_over_one_call']:.2f}"
    rows.append(["one recurrent layer / one call", "{:.1f} / {:.1f} ms".format(*both), over, ""])
    near = found("distance")
    for name, what in (("logp_rms", "log-probs"), ("gradients", "gradients")):
        apart = " / ".join(f"{near[way][name]:.3g}" for way in ("packed", "replicated"))
        over = f"{1 / near['packed_over_replicated'][name]:.2f}"
        rows.append([f"{what}, distance from fp32", apart, over, ""])
    return markdown_table(["", "packed / replicated", "replicated over packed", "peak memory"], rows)


def trees() -> str:
    """Tabulate trees: TFLOP/s, and the speed over cuDNN, FlexAttention, and sequences replicated."""
    rows = []
    for result in _load("trees")["results"]:
        row = [f"{result['workload']['name']}, {DIRECTIONS[result['direction']]}", f"{_rate(result):.0f}"]
        rows.append([*row, *(_fastest(result, [peer]) for peer in (CUDNN, "flex", "fa4-replicated"))])
    head = ["tree", "TFLOP/s", "over cuDNN", "over FlexAttention", "over FA4, replicated"]
    return markdown_table(head, rows)


def walks() -> str:
    """Tabulate seconds and peak GiB of each job cut and walked; a job that did not fit as planned has parts of fixed
    rows in its place."""
    records, rows = [_load(f"walk-{job}-h200") for job in ("24576", "28672", "65536", "traces")], []
    for record in records:
        for job, made in record["jobs"].items():
            what, _, limit = job.partition("@")
            for part, ways in made["parts"].items():
                walked = next(way for name, way in ways.items() if name != "cut" and "error" not in way)
                cells = [f"{way['median']:.2f}, {way['peak_gib']:.1f}" for way in (ways["cut"], walked)]
                rows.append([what, limit.partition(":")[0], part, *cells, f"{walked['speed_up']:.2f}x"])
    head = ["P x N x R, or trace", "rows of a micro-batch", "part", "micro-batches", "walk", "speed-up"]
    return markdown_table(head, rows) + recorded(*records)


def other_gpus() -> str:
    """Tabulate forward and backward without our kernels, over PyTorch's FlashAttention calls, merged."""
    flash, flex, replicated = "dualkv-flash", "dualkv-flex", "torch-flash-replicated"
    rows: dict[str, list[str]] = {}
    for place, names in enumerate((("composition-h200", "flex-backend"), ("composition-ampere",))):
        for result in (result for name in names for result in _load(name)["results"] if result["direction"] == "both"):
            ms = {side: result["sides"].get(side, {}).get("sustained_ms") for side in (flash, flex, replicated)}
            row = rows.setdefault(name := result["workload"]["name"], [name, "", "", ""])
            row[1 + place] = f"{ms[flex] / ms[flash]:.2f}"
            if ms[replicated]:
                row[3] = f"{ms[replicated] / ms[flash]:.2f}"
    head = ["time over `flash`", "`flex`, Hopper's instructions", "`flex`, Ampere's", "replicated, FlashAttention-2"]
    return markdown_table(head, rows.values())


def peers() -> str:
    """Tabulate every side on the main shape, a row for each, with what its total leaves out."""
    run = _load("peers")
    known = [side for side in SIDES if any("sustained_ms" in r["sides"].get(side, {}) for r in run["results"])]
    rows = [[side, *(_peer(result["sides"].get(side, {})) for result in run["results"])] for side in known]
    ways = (DIRECTIONS[result["direction"]] for result in run["results"])
    return markdown_table(["ms (TFLOP/s), J a call", *ways], rows) + _recorded(run)


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
    return "\n".join([f"{where}:", "", sanitize.table(filed["tools"]), "", *said])


def trust() -> str:
    """Tabulate what was tried to break it, over the records of all runs."""
    fuzzed = [run for path in RESULTS.glob("fuzz-*.json") for run in runs_of(_load(path.stem))]
    others = ([_load(path.stem) for path in RESULTS.glob(f"{kind}-*.json")] for kind in ("suite", "sanitizer", "soak"))
    return trust_rows.table(fuzzed, *others)


TABLES: dict[str, Callable[[], str]] = {
    "trust": trust,
    "matrix": lambda: zoo_rows.matrix(_load("matrix")),
    "zoo": lambda: zoo_rows.table(_load("zoo")),
    "zoo-newest": lambda: zoo_rows.newer(_load("zoo"), _load("zoo-newest")),
    "headline": headline,
    "replicated": replicated,
    "aimed": aimed,
    "main-shapes": main_shapes,
    "head-dims": head_dims,
    "random": drawn,
    "windows": windows,
    "feature-costs": lambda: features.costs(_load("features")),
    "trees": trees,
    "trace-shapes": trace_rows.shapes,
    "trace-attention": lambda: trace_rows.attention(_load),
    "trace-verl": lambda: trace_rows.verl(_load),
    "trace-trl": lambda: trace_rows.trl(_load),
    "trace-trl-async": lambda: trace_rows.trl_async(_load),
    "walks": walks,
    "hybrid": hybrid,
    "real-layers": lambda: real_layers.markdown(_load("real-layers-h200")),
    "real-model": lambda: real_model.markdown(_load("real-model-h200"), _load("real-model-trainers-h200")),
    "real-model-verl": lambda: real_model.verl_markdown(_load("real-model-verl-h200")),
    "compared": compared,
    "peers": peers,
    "other-gpus": other_gpus,
    "kernels": kernels,
    "tuned": tuned,
    "sanitizers": sanitizers,
    "host": lambda: host_time.markdown(_load("host-h200")),
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

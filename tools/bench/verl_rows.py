"""Tables of what `tools.bench.verl` recorded: updates of either engine, and of packed groups on 1, 2 and 4 GPUs."""

from __future__ import annotations

from typing import Any

from dualkv.bench.show import markdown_table
from tools.bench.record import recorded

Row = dict[str, Any]
PARALLEL = {"tensor_parallel": "TP", "context_parallel": "CP", "pipeline_parallel": "PP"}
# Of both engines' rows that compute the same.
WORK = ("model", "layers", "responses", "prompt_len", "response_len", "algorithm")


def _work(row: Row) -> tuple[Any, ...]:
    s = row["settings"]
    return row["ranks"], s["groups"] / s["sequence_parallel"], *(s[name] for name in WORK)  # groups a GPU


def _packed(row: Row) -> bool:
    return bool(row["settings"]["engine"] == "dualkv")


def _hardware(row: Row) -> float:
    """MFU of the rows that ran: effective MFU, less what packing left out."""
    part = row["metrics"]["dualkv/mfu_hardware"] / row["metrics"]["dualkv/mfu_effective"] if _packed(row) else 1.0
    return float(row["mfu_effective"] * part)


def _name(row: Row) -> str:
    s = row["settings"]
    layers = f"{s['layers']} layers" if s["layers"] else "whole"
    gpus = f"{row['ranks']} GPU" + "s" * (row["ranks"] > 1)
    return f"{s['model']}, {layers}, {gpus}; {s['algorithm'].upper()}, {s['responses']} responses"


def _size(row: Row) -> str:
    s = row["settings"]
    size = f"{s['micro_batch']} responses" if s["micro_batch"] else "whole groups" if _packed(row) else "by tokens"
    if s["sequence_parallel"] > 1:
        size += f" on {s['sequence_parallel']} GPUs"
    if not s.get("hold_gradients", True):
        size += ", gradients reduced after each"
    return f"{'packed' if _packed(row) else 'veRL'}, {size}"


def _figures(row: Row, recorded: list[Row]) -> list[str]:
    if "error" in row:
        return [row["error"].partition(":")[0], *[""] * 5]
    seconds = row["seconds"]["median"]
    others = [r for r in recorded if "error" not in r and not _packed(r) and _work(r) == _work(row)]
    fastest = min((r["seconds"]["median"] for r in others), default=None)
    return [
        f"{seconds:.2f}",
        f"{row['replicated_tokens_per_second']:,.0f}",
        f"{row['mfu_effective']:.0%}",
        f"{_hardware(row):.0%}",
        f"{max(row['peak_gib']):.0f}",
        f"{fastest / seconds:.2f}x" if fastest and _packed(row) else "",
    ]


def updates(recorded: list[Row]) -> str:
    """Every row, rows of the same work together; packed groups have the speed-up over veRL's fastest row among
    these."""
    together: dict[str, list[Row]] = {}
    for row in sorted(recorded, key=_packed):
        together.setdefault(_name(row), []).append(row)
    lines = [
        [name if i == 0 else "", _size(row), *_figures(row, recorded)]
        for name, rows in together.items()
        for i, row in enumerate(rows)
    ]
    head = ["", "micro-batches", "seconds", "tokens/s", "effective MFU", "hardware MFU", "peak, GiB", "speed-up"]
    return markdown_table(head, lines)


def scaling(recorded: list[Row]) -> str:
    """Packed groups on each number of GPUs, every GPU with as much work, where more than one number was measured."""
    found: dict[Any, list[Row]] = {}
    for row in recorded:
        if "error" not in row and _packed(row):
            found.setdefault((_work(row)[1:], _size(row)), []).append(row)
    lines = []
    for rows in found.values():
        one, *more = sorted(rows, key=lambda row: row["ranks"])
        for row in (one, *more) if more else ():
            seconds = row["seconds"]["median"]
            speed = f"{row['replicated_tokens_per_second']:,.0f}"
            lines.append([str(row["ranks"]), f"{seconds:.3f}", speed, f"{one['seconds']['median'] / seconds:.0%}"])
    return markdown_table(["GPUs", "seconds", "tokens/s", "efficiency"], lines)


def megatron(*runs: dict[str, Any]) -> str:
    """Updates of both engines with veRL's Megatron strategy, each by itself."""
    rows = []
    for row in (row for run in runs for row in run["rows"]):
        s = row["settings"]
        size = f"{s['micro_batch']} responses" if s["micro_batch"] else "whole groups"
        shape = ", ".join(f"{short} {s[name]}" for name, short in PARALLEL.items() if s[name] > 1)
        what = [f"{'packed' if _packed(row) else 'veRL'}, {size}", f"{row['ranks']}{shape and f' ({shape})'}"]
        what.append(str(s["groups"]))
        if "error" in row:
            rows.append([*what, row["error"].partition(":")[0], "", ""])
            continue
        each = ", ".join(f"{seconds:.2f}" for seconds in row["seconds"]["each"])
        rows.append([*what, each, f"{max(row['peak_gib']):.0f}", f"{row['metrics']['grad_norm']:.3f}"])
    head = ["micro-batches", "GPUs", "groups", "seconds of each update", "peak, GiB", "norm of the gradient, mean"]
    return markdown_table(head, rows) + recorded(*runs)

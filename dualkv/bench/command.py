"""The meaning of the options of `dualkv bench`; the options themselves are in :mod:`dualkv.cli.commands`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Column, Table

from dualkv.bench.show import folded
from dualkv.bench.sides import SIDES
from dualkv.bench.workloads import DIRECTIONS, Workload, of_rollouts, parse
from dualkv.data.files import Source


def chosen(
    texts: Sequence[str] | None, rollouts: Source | None, tokenizer: str | None, budget: int | None
) -> list[Workload]:
    """The workloads asked for by name or lengths, and from a file.

    Raises:
        ValueError: what is no workload, options of a file without one.
        OSError: a file that cannot be read.
    """
    found = [parse(text) for text in texts or ()]
    if rollouts is not None:
        found += of_rollouts(rollouts, tokenizer, budget)
    elif tokenizer is not None or budget is not None:
        raise ValueError("--tokenizer and --budget go with --rollouts FILE, which is missing")
    return found


def directions(text: str) -> list[str]:
    """Parse a comma-separated part of `fwd,bwd,both`; the result is in this order."""
    given = [part.strip() for part in text.split(",")]
    for part in given:
        if part not in DIRECTIONS:
            raise ValueError(f"--direction is {text!r}, expected some of {','.join(DIRECTIONS)}")
    return [d for d in DIRECTIONS if d in given]


def sides(names: Sequence[str] | None) -> list[str]:
    """The sides asked for, all by default."""
    for name in names or ():
        if name not in SIDES:
            raise ValueError(f"--side is {name!r}, expected one of {', '.join(SIDES)}")
    return list(dict.fromkeys(names or SIDES))


def listing(workloads: Sequence[Workload]) -> Table:
    name = Column("workload", no_wrap=True)  # to be copied behind -w
    shown = Table(name, *folded("heads", "tokens", "dedup", "forward TFLOP", "backward TFLOP"))
    for w in workloads:
        layout, dims = w.layout(), "/".join(map(str, dict.fromkeys(w.head_dims)))
        kind = f"{w.heads}/{w.kv_heads} x {dims} {w.dtype}"
        work = (f"{w.flops(direction) / 1e12:.3g}" for direction in ("fwd", "bwd"))
        shown.add_row(w.name, kind, str(layout.num_tokens), f"{layout.dedup_ratio:.2f}", *work)
    return shown


def check_gpu() -> None:
    """
    Raises:
        ValueError: there is nothing to measure.
    """
    if not torch.cuda.is_available():
        raise ValueError("dualkv bench measures on a CUDA GPU and PyTorch sees none here (--list works without one)")


def failures(report: dict[str, Any]) -> list[str]:
    """A sentence for each side that was not measured everywhere, and one for what the time limit left out."""
    errors: dict[str, list[str]] = {}
    for result in report["results"]:
        for name, figures in result["sides"].items():
            if "error" in figures:
                errors.setdefault(name, []).append(figures["error"])
    said = [f"{name} was not measured {len(whys)} times: {whys[0]}" for name, whys in errors.items()]
    done, asked = len(report["results"]), report["asked"]
    if done < asked:
        said.append(
            f"the time limit of {report['settings']['time_limit']:g} s left out {asked - done} of {asked} results"
        )
    return said

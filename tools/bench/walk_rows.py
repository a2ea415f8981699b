"""The table of `docs/trees.md` of what was recorded of walks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualkv.bench.show import markdown_table
from tools.bench.record import recorded

RECORDS = [f"walk-{job}-h200" for job in ("24576", "28672", "65536", "traces")]


def walks(load: Callable[[str], dict[str, Any]]) -> str:
    """Tabulate seconds and peak GiB of each job cut and walked; a job that did not fit as planned has parts of fixed
    rows in its place."""
    records, rows = [load(name) for name in RECORDS], []
    for record in records:
        for job, made in record["jobs"].items():
            what, _, limit = job.partition("@")
            for part, ways in made["parts"].items():
                walked = next(way for name, way in ways.items() if name != "cut" and "error" not in way)
                cells = [f"{way['median']:.2f}, {way['peak_gib']:.1f}" for way in (ways["cut"], walked)]
                rows.append([what, limit.partition(":")[0], part, *cells, f"{walked['speed_up']:.2f}x"])
    head = ["P x N x R, or trace", "rows of a micro-batch", "part", "micro-batches", "walk", "speed-up"]
    return markdown_table(head, rows) + recorded(*records)

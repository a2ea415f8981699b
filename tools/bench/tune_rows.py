"""The table of tile configurations, from records of `python -m tools.bench.tune`."""

from __future__ import annotations

from typing import Any

from dualkv.bench.show import markdown_table


def tiles(runs: dict[str, dict[str, Any]]) -> str:
    """Speed of other tiles over the table's entry, by GQA ratio: a row for each direction and head dim.

    A run is of one workload. Its first side is the entry as it is.
    """
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
    cells = {what: "; ".join(_of(tile, x, ratios) for tile, x in row.items()) for what, row in rows.items()}
    head = ["head dim", f"other tiles: speed at GQA {'/'.join(map(str, ratios))}"]
    return markdown_table(head, [[what, cell] for what, cell in cells.items() if cell])


def _of(tile: str, speeds: dict[int, str], ratios: list[int]) -> str:
    return f"{tile} {'/'.join(speeds.get(ratio, '-') for ratio in ratios)}"

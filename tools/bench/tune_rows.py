"""Rows of the tables of tile configurations, from records of `python -m tools.bench.tune`."""

from __future__ import annotations

from typing import Any

from codegen.spec import forward_spec
from dualkv.bench.show import markdown_table
from dualkv.bench.workloads import parse
from dualkv.ops.plan.forward import cost_walked
from dualkv.segments import segments_of


def tiles(run: dict[str, Any]) -> str:
    """Milliseconds at each GQA ratio, and the speed over that of the table's entry, a row for each head dim and tile.

    The run is of one workload.
    """
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for result in run["results"]:
        stands = next(iter(result["sides"].values())).get("sustained_ms")  # the entry as it is comes first
        for name, side in result["sides"].items():
            ms, row = side.get("sustained_ms"), rows.setdefault((_head_dims(result), name), {})
            speed = f" ({stands / ms:.3f})" if ms and stands and ms != stands else ""
            row[result["gqa"]] = f"{ms:.2f}{speed}" if ms else ""
    return _by_ratio(["head dim", "tile"], rows, run)


def without_clusters(run: dict[str, Any]) -> str:
    """Cost of clusters of two by the plan, and the speed of CTAs without clusters over theirs, at each GQA ratio."""
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for result in run["results"]:
        of_two, alone = (side["sustained_ms"] for side in result["sides"].values())
        cost = cost_of_clusters(result["workload"], result["head_dim"], result.get("head_dim_v"), result["gqa"])
        row = rows.setdefault((result["workload"], _head_dims(result)), {})
        row[result["gqa"]] = f"{cost:.2f}, {of_two / alone:.3f}"
    return _by_ratio(["workload", "head dim"], rows, run)


def _head_dims(result: dict[str, Any]) -> str:
    return "/".join(str(result[name]) for name in ("head_dim", "head_dim_v") if name in result)


def _by_ratio(head: list[str], rows: dict[tuple[str, ...], dict[int, str]], run: dict[str, Any]) -> str:
    ratios = sorted({result["gqa"] for result in run["results"]})
    body = [[*key, *(cells.get(ratio, "") for ratio in ratios)] for key, cells in rows.items()]
    return markdown_table([*head, *(f"GQA {ratio}" for ratio in ratios)], body)


def cost_of_clusters(workload: str, head_dim: int, head_dim_v: int | None, ratio: int) -> float:
    """Time of the forward's clusters of two over that of CTAs without clusters, by the plan."""
    layout = parse(workload).layout()
    specs = [forward_spec("bf16", head_dim, ratio, head_dim_v=head_dim_v, few_keys=few) for few in (False, True)]
    segments = segments_of(layout.offsets, layout.parent)
    of_two, alone = (cost_walked(segments, spec.tile, spec.packed_heads) for spec in specs)
    return of_two / alone

"""Rows of the tables of tile configurations, from records of `python -m tools.bench.tune`."""

from __future__ import annotations

from typing import Any

from codegen.spec import forward_spec
from dualkv.bench.show import markdown_table
from dualkv.bench.workloads import parse
from dualkv.layout import segments_of
from dualkv.ops.plan.forward import cost_walked


def tiles(run: dict[str, Any]) -> str:
    """Milliseconds at each GQA ratio, and the speed over that of the table's entry."""
    ratios = list(dict.fromkeys(result["gqa"] for result in run["results"]))
    rows: dict[tuple[int, str], dict[int, str]] = {}
    for result in run["results"]:
        stands = next(iter(result["sides"].values())).get("sustained_ms")  # the entry as it is comes first
        for name, side in result["sides"].items():
            ms, cells = side.get("sustained_ms"), rows.setdefault((result["head_dim"], name), {})
            speed = f" ({stands / ms:.3f})" if ms and stands and ms != stands else ""
            cells[result["gqa"]] = f"{ms:.2f}{speed}" if ms else ""
    head = ["head dim", "tile", *(f"GQA {ratio}" for ratio in ratios)]
    body = [[str(d), name, *(cells.get(ratio, "") for ratio in ratios)] for (d, name), cells in rows.items()]
    return markdown_table(head, body)


def without_clusters(run: dict[str, Any]) -> str:
    """Cost of clusters of two by the plan, and the speed of CTAs without clusters over theirs, at each GQA ratio."""
    ratios = sorted({result["gqa"] for result in run["results"]})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for result in run["results"]:
        of_two, alone = (side["sustained_ms"] for side in result["sides"].values())
        head_dims = result["head_dim"], result.get("head_dim_v")
        cost = cost_of_clusters(result["workload"], *head_dims, result["gqa"])
        row = rows.setdefault((result["workload"], "/".join(str(d) for d in head_dims if d)), {})
        row[result["gqa"]] = f"{cost:.2f}, {of_two / alone:.3f}"
    head = ["workload", "head dim", *(f"GQA {ratio}" for ratio in ratios)]
    return markdown_table(head, [[*key, *(row.get(ratio, "") for ratio in ratios)] for key, row in rows.items()])


def cost_of_clusters(workload: str, head_dim: int, head_dim_v: int | None, ratio: int) -> float:
    """Time of the forward's clusters of two over that of CTAs without clusters, by the plan."""
    layout = parse(workload).layout()
    specs = [forward_spec("bf16", head_dim, ratio, head_dim_v=head_dim_v, few_keys=few) for few in (False, True)]
    segments = segments_of(layout.offsets, layout.parent)
    of_two, alone = (cost_walked(segments, spec.tile, spec.packed_heads) for spec in specs)
    return of_two / alone

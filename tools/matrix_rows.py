"""A table of `docs/trust.md`: every exact model type times every way to run it, by the record of `tools.matrix`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dualkv.bench.show import markdown_table
from tools.zoo_rows import OUTCOMES, names, recorded

WAYS = {
    "plain": "packed groups and trees",
    "walk": "`walk`, parts of 6 rows",
    "head": "the decoder, then `head(model)`",
    "ulysses": "two ranks, `Shard`",
    "context": "two ranks, `ContextShard`",
    "checkpointing": "layers recomputed",
    "products": "layers recomputed, products kept",
    "lora": "LoRA at linear layers",
}


def table(run: dict[str, Any]) -> str:
    """Types by way and outcome. Ways with the same figures share a row; types that are not exact have their names."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for way, words in WAYS.items():
        kinds: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
        for kind, cells in run["types"].items():
            if way in cells:
                kinds[cells[way]["outcome"]].append(kind)
        worst = max((cells[way].get("error", 0.0) for cells in run["types"].values() if way in cells), default=0.0)
        others = [*kinds["wrong"], *kinds["not built"]], kinds["refused"]
        cells_of_way = str(len(kinds["exact"])), f"{worst:.0e}", *map(_named, others)
        rows.setdefault(cells_of_way, []).append(words)
    lines = [["; ".join(ways), *cells] for cells, ways in rows.items()]
    missing = [kind for kind, cells in run["types"].items() if not cells.keys() & WAYS.keys()]
    about = f"{recorded(run)}, {len(run['types']) - len(missing)} types"
    later = Counter(at["commit"] for at in run.get("later", {}).values())
    about += "".join(f", {number} of them at commit {commit[:7]}" for commit, number in later.items())
    about += f". Not run: {names(missing)}" if missing else ""
    header = ["way", "exact", "largest difference", "wrong", "refused"]
    return f"{about}:\n\n{markdown_table(header, lines)}"


def _named(kinds: list[str]) -> str:
    return f"{len(kinds)}: {names(kinds)}" if kinds else "0"

"""A table of `docs/trust.md`: every exact model type times every way to run it, by the record of `tools.matrix`."""

from __future__ import annotations

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
    """Types by way and outcome, the types that are refused by name."""
    rows = []
    for way, words in WAYS.items():
        kinds: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
        for kind, cells in run["types"].items():
            if way in cells:
                kinds[cells[way]["outcome"]].append(kind)
        worst = max((cells[way].get("error", 0.0) for cells in run["types"].values() if way in cells), default=0.0)
        wrong = [*kinds["wrong"], *kinds["not built"]]
        rows.append([words, str(len(kinds["exact"])), f"{worst:.0e}", str(len(wrong)), names(kinds["refused"])])
    header = ["way", "exact", "largest difference", "wrong", "refused"]
    return f"{recorded(run)}:\n\n{markdown_table(header, rows)}"

"""Tables of model types: by the records of `tools.zoo` and of `tools.matrix`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dualkv.bench.show import markdown_table

OUTCOMES = ["exact", "wrong", "refused", "not built"]  # of tools.zoo, which needs transformers


def table(run: dict[str, Any]) -> str:
    """List the exact model types, folded, and count the refused ones by reason; the record has each by name."""
    exact, reasons = [], Counter[str]()
    for kind, result in run["types"].items():
        if result["outcome"] == "exact":
            exact.append(kind)
        elif result["outcome"] == "refused":
            reasons[result["reason"].partition(" (")[0]] += 1
    most = sorted(reasons.items(), key=lambda found: (-found[1], found[0]))[:5]
    most.append(("others", reasons.total() - sum(number for _, number in most)))
    why = "; ".join(f"{reason} ({number})" for reason, number in most)
    folded = f'<details markdown="1">\n<summary>{len(exact)} exact</summary>\n\n{names(exact)}\n\n</details>'
    return f"transformers {run['transformers']}: {counts(run)}.\n\n{folded}\n\nRefused: {why}."


def newer(known: dict[str, Any], run: dict[str, Any]) -> str:
    """Count the types of a newer transformers by outcome, and list those that are no longer exact."""
    before, now = ({kind for kind, r in record["types"].items() if r["outcome"] == "exact"} for record in (known, run))
    lost = f" Exact in {known['transformers']} alone: {names(sorted(before - now))}." if before - now else ""
    return f"transformers {run['transformers']}: {counts(run)}.{lost}"


def counts(run: dict[str, Any]) -> str:
    return ", ".join(f"{run['counts'].get(outcome, 0)} {outcome}" for outcome in OUTCOMES)


def recorded(run: dict[str, Any]) -> str:
    processes = "one process" if run["workers"] == 1 else f"{run['workers']} processes"
    where = f"transformers {run['transformers']}, {run['date'][:10]}, commit {run['commit'][:7]}"
    return f"{where}, {run['seconds'] / 60:.0f} minutes in {processes}"


def names(kinds: Iterable[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


# ---------------------------------------------------------------- types times ways
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


def matrix(run: dict[str, Any]) -> str:
    """Tabulate types by way and outcome. Ways with the same figures share a row; types that are not exact are named."""
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

"""Tables of `docs/transformers.md`: what became of each model type, by the records of `tools.zoo`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

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

"""Tables of `docs/transformers.md`: what became of each model type, by the records of `tools.zoo`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dualkv.bench.show import markdown_table

OUTCOMES = ["exact", "wrong", "refused", "not built"]  # of tools.zoo, which needs transformers


def table(run: dict[str, Any]) -> str:
    """Model types by outcome and reason."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for kind, result in run["types"].items():
        kinds.setdefault((result["outcome"], result.get("reason", "")), []).append(kind)
    order = sorted(kinds, key=lambda key: (OUTCOMES.index(key[0]), -len(kinds[key]), key[1]))
    rows = [[*key, str(len(kinds[key])), names(kinds[key])] for key in order]
    return f"{recorded(run)}:\n\n{markdown_table(['', 'reason', 'number', 'model types'], rows)}"


def newer(known: dict[str, Any], run: dict[str, Any]) -> str:
    """Count the types of a newer transformers by outcome, and list the types that are new or have another outcome."""
    before, version = known["types"], known["transformers"]
    counts = ", ".join(f"{run['counts'].get(outcome, 0)} {outcome}" for outcome in OUTCOMES)
    changes: dict[tuple[str, str, str], list[str]] = {}
    for kind, result in run["types"].items():
        was = before[kind]["outcome"] if kind in before else "not there"
        if was != result["outcome"]:
            changes.setdefault((was, result["outcome"], result.get("reason", "")), []).append(kind)
    for kind in sorted(before.keys() - run["types"].keys()):
        changes.setdefault((before[kind]["outcome"], "not there", ""), []).append(kind)
    rows = [[*key, names(kinds)] for key, kinds in sorted(changes.items())]
    header = [f"in {version}", f"in {run['transformers']}", "reason", "model types"]
    return f"{recorded(run)}: {counts}. What differs:\n\n{markdown_table(header, rows)}"


def with_features(run: dict[str, Any]) -> str:
    """The types with windows, chunks, sinks or softcapping."""
    return names(kind for kind, found in run["types"].items() if found.get("features"))


def recorded(run: dict[str, Any]) -> str:
    processes = "one process" if run["workers"] == 1 else f"{run['workers']} processes"
    where = f"transformers {run['transformers']}, {run['date'][:10]}, commit {run['commit'][:7]}"
    return f"{where}, {run['seconds'] / 60:.0f} minutes in {processes}"


def names(kinds: Iterable[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)

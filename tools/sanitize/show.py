"""Show the findings of the tools, as a table and in words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dualkv.bench.show import markdown_table
from tools.sanitize import controls, known

CONTROLS = "controls"


def table(tools: dict[str, Any]) -> str:
    """Tabulate the findings, a line a tool."""
    rows = []
    for name, tool in tools.items():
        errors, fine = ([r for r in tool["reports"] if (r["false_positive"] is None) == bad] for bad in (True, False))
        counts = [f"{sum(report['count'] for report in some):,}" for some in (errors, fine)]
        seen = "found" if tool[CONTROLS].get(controls.PLANTED[name][0]) else "NOT FOUND"
        rows.append([name, str(tool["cases"]), *counts, seen])
    return markdown_table(["tool", "cases", "errors", "false positives", "planted fault"], rows)


def findings(tools: dict[str, Any]) -> list[str]:
    """One line for each kind of report, reports of one verdict together, and for each thing that was not finished."""
    by_verdict: dict[str, list[str]] = {}
    unfinished = []
    for name, tool in tools.items():
        for report in tool["reports"]:
            what = f"{report['count']:,} x {report['what'].removesuffix('.')}"
            where = f" in {report['kernel']} ({', '.join(report['instructions'])})" if report["kernel"] else ""
            verdict = known.REASONS.get(report["false_positive"], "AN ERROR")
            by_verdict.setdefault(f"{name}: {verdict}", []).append(f"{what}{where}, {report['cases']} cases")
        unfinished += [f"{name}: not finished: {why}" for why in tool["unfinished"]]
    return [f"{verdict}: {'; '.join(lines)}" for verdict, lines in by_verdict.items()] + unfinished


def errors(tools: dict[str, Any]) -> list[str]:
    """The lines of :func:`findings` on errors and on what was not finished."""
    return findings(
        {
            name: tool | {"reports": [report for report in tool["reports"] if report["false_positive"] is None]}
            for name, tool in tools.items()
        }
    )


def reasons(tools: dict[str, Any]) -> Counter[str]:
    """Count the false positives of each reason, by its name in `known.REASONS`."""
    counts: Counter[str] = Counter()
    for tool in tools.values():
        for report in tool["reports"]:
            if report["false_positive"] is not None:
                counts[report["false_positive"]] += report["count"]
    return counts

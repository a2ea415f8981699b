"""Reports that are a tool's error, and why."""

from __future__ import annotations

from typing import Any


def why(tool: str, report: dict[str, Any], shown: dict[str, int]) -> str | None:
    """Why a report is a false positive, None where it is an error.

    Args:
        tool: that reported it.
        report: its `what`, `kernel` and `instructions`.
        shown: reports of the tool about each of the controls.
    """
    return None

"""How records lie in docs/results/: JSON whose short parts stand on one line. `python -m tools.tables` lays them so.

That is a quarter less to carry along than with indents alone, and a change of a figure is still a change of one line.
"""

from __future__ import annotations

import json
from typing import Any

WIDTH = 1000  # characters of a part that stays on one line: what a side of a benchmark made, say
DIGITS = 9  # of numbers: more than any clock here is good for, so that tables round to what they did


def text(record: Any) -> str:
    """JSON, numbers rounded to DIGITS significant digits."""
    return _laid_out(_rounded(record), "") + "\n"


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.{DIGITS}g}")
    if isinstance(x, dict):
        return {str(key): _rounded(value) for key, value in x.items()}
    return [_rounded(value) for value in x] if isinstance(x, list | tuple) else x


def _laid_out(x: Any, margin: str) -> str:
    line = json.dumps(x)
    if len(line) <= WIDTH or not isinstance(x, dict | list):
        return line
    further = margin + " "
    if isinstance(x, dict):
        parts = [f"{json.dumps(key)}: {_laid_out(value, further)}" for key, value in x.items()]
    else:
        parts = [_laid_out(value, further) for value in x]
    opening, closing = "{}" if isinstance(x, dict) else "[]"
    return f"{opening}\n{further}" + f",\n{further}".join(parts) + f"\n{margin}{closing}"

"""Lay records out in docs/results/: JSON that names the fields of equal entries once, short parts on one line.

Entries with the same fields, in a list or under names, are stored as `{"columns": FIELDS, "rows": VALUES}` where that
is shorter. FIELDS has the shape of one entry: null for a value that is stored as it is, a dict for the values of
further fields in its order, a list of one such shape for entries that follow one another; "-" is a field that an entry
lacks.
:func:`read` gives the entries back. A change of a figure is still a change of one line.
`python -m tools.tables` lays all records out so. Machines and versions that many records share have a file of their own
in `environments/` beside them, which the records name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WIDTH = 1000  # characters of a part that stays on one line: what a side of a benchmark made, say
DIGITS = 6  # of numbers: more than any clock here is good for, so that tables round to what they did
COLUMNS, ROWS, ABSENT = "columns", "rows", "-"
RUNS, ENVIRONMENT = "runs", "environment"


def text(record: Any) -> str:
    """JSON, numbers rounded to DIGITS significant digits.

    Raises:
        ValueError: a field or a value means something else in this layout.
    """
    return _laid_out(_packed(_rounded(record)), "") + "\n"


def read(path: Path) -> Any:
    """The record in a file, entries as they were."""
    known = _environments(path)

    def spelled(run: Any) -> Any:
        found: dict[str, Any] = {}
        for name, value in run.items():
            found |= known[value] if name == ENVIRONMENT else {name: value}
        return found

    return _of_runs(parse(path.read_text()), spelled)


def laid_out(path: Path) -> str:
    """The text of a record anew, its machine and versions by their name if they have one."""
    known = _environments(path)

    def named(run: Any) -> Any:
        for name, environment in known.items():
            if environment.items() <= run.items():
                first, *rest = environment
                shorter = {field: value for field, value in run.items() if field not in rest}
                return {ENVIRONMENT if f == first else f: name if f == first else v for f, v in shorter.items()}
        return run

    return text(_of_runs(read(path), named))


def _environments(path: Path) -> dict[str, Any]:
    return {each.stem: json.loads(each.read_text()) for each in sorted((path.parent / "environments").glob("*.json"))}


def _of_runs(record: Any, change: Callable[[Any], Any]) -> Any:
    """A record of one run, or of a list of runs, with each run changed."""
    return {RUNS: [change(run) for run in record[RUNS]]} if record.keys() == {RUNS} else change(record)


def parse(text: str) -> Any:
    """The record of a text, entries as they were."""
    return _unpacked(json.loads(text))


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.{DIGITS}g}")
    if isinstance(x, dict):
        return {str(key): _rounded(value) for key, value in x.items()}
    return [_rounded(value) for value in x] if isinstance(x, list | tuple) else x


# ---------------------------------------------------------------- fields named once
def _packed(x: Any) -> Any:
    if isinstance(x, dict) and x.keys() == {COLUMNS, ROWS}:
        raise ValueError(f"an entry has the fields {COLUMNS} and {ROWS}, which stand for other entries in a record")
    plain = _each(x, _packed)
    if not isinstance(x, dict | list) or len(x) < 2:
        return plain
    shape = _shape(list(x.values()) if isinstance(x, dict) else x)
    if not isinstance(shape, dict):
        return plain
    packed = {COLUMNS: shape, ROWS: _each(x, lambda entry: _values(shape, entry))}
    return min(plain, packed, key=lambda form: len(json.dumps(form)))


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """A list or dict with its members changed; anything else as it is."""
    if isinstance(x, dict):
        return {key: change(value) for key, value in x.items()}
    return [change(value) for value in x] if isinstance(x, list) else x


def _shape(entries: Sequence[Any]) -> Any:
    """The fields of entries that are dicts, or of their members where they are lists of dicts; else None."""
    if entries and all(isinstance(x, dict) for x in entries):
        fields = dict.fromkeys(field for x in entries for field in x)
        return {field: _shape([x[field] for x in entries if field in x]) for field in fields} or None
    if entries and all(isinstance(x, list) for x in entries):
        inner = _shape([y for x in entries for y in x])
        return inner if inner is None else [inner]
    return None


def _values(shape: Any, x: Any) -> Any:
    if x == ABSENT:
        raise ValueError(f"a value is {ABSENT!r}, which stands for a field that an entry lacks")
    if isinstance(shape, dict):
        return [_values(inner, x[field]) if field in x else ABSENT for field, inner in shape.items()]
    return _packed(x) if shape is None else [_values(shape[0], y) for y in x]


def _unpacked(x: Any) -> Any:
    if isinstance(x, dict) and x.keys() == {COLUMNS, ROWS}:
        return _each(x[ROWS], lambda row: _entry(x[COLUMNS], row))
    return _each(x, _unpacked)


def _entry(shape: Any, row: Any) -> Any:
    if isinstance(shape, dict):
        cells = zip(shape.items(), row, strict=True)
        return {field: _entry(inner, value) for (field, inner), value in cells if value != ABSENT}
    return _unpacked(row) if shape is None else [_entry(shape[0], value) for value in row]


# ---------------------------------------------------------------- lines
def _laid_out(x: Any, margin: str) -> str:
    line = json.dumps(x)
    numbers = isinstance(x, list) and not any(isinstance(y, dict | list | str) for y in x)
    if len(line) <= WIDTH or numbers or not isinstance(x, dict | list):
        return line
    further = margin + " "
    if isinstance(x, dict):
        parts = [f"{json.dumps(key)}: {_laid_out(value, further)}" for key, value in x.items()]
    else:
        parts = [_laid_out(value, further) for value in x]
    opening, closing = "{}" if isinstance(x, dict) else "[]"
    return f"{opening}\n{further}" + f",\n{further}".join(parts) + f"\n{margin}{closing}"

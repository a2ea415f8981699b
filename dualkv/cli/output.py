"""The output of a command: tables, progress, JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

WIDE = 200  # columns of a table that no terminal shows: a file or another program


def console_of(json_to: str | None) -> Console:
    """Standard output, unless the JSON goes there; its folder is there. Text is printed as it is, brackets too."""
    if json_to not in (None, "-"):
        folder = Path(str(json_to)).resolve().parent
        if not folder.is_dir():  # before the work
            raise ValueError(f"{json_to}: there is no folder {folder} to write it to")
    return wide_enough(Console(stderr=json_to == "-", markup=False, highlight=False))


def wide_enough(console: Console) -> Console:
    """The console; where no terminal shows it and nobody says how wide it is, tables do not break words."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDE
    return console


@contextmanager
def tracked(console: Console, first: str = "starting", line_of: Callable[[Any], str] | None = None) -> Iterator[Any]:
    """Progress bars of loops, one line at a time, while something runs; `first` runs before the first loop. Where no
    terminal shows the console, `line_of` each item is printed instead, None for none."""
    what = TextColumn("{task.description}", markup=False)
    columns = SpinnerColumn(), what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True)
    # Elsewhere a progress bar would leave an empty line before what follows it: with rich 14.0 a disabled one too.
    with progress if console.is_interactive else nullcontext():
        task = progress.add_task(first, total=None)

        def track(items: Iterable[Any], what: str, total: int) -> Iterator[Any]:
            progress.reset(task, description=what, total=total)
            for number, item in enumerate(items, start=1):
                if line_of is not None and not console.is_interactive:
                    console.print(f"{what} {number}/{total}: {line_of(item)}", markup=False, soft_wrap=True)
                yield item
                progress.advance(task)

        yield track


def write_json(result: dict[str, Any], json_to: str | None) -> None:
    if json_to is None:
        return
    text = json.dumps(result, indent=2)
    if json_to == "-":
        print(text)
    else:
        Path(json_to).write_text(text + "\n", encoding="utf-8")

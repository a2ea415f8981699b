"""Progress of loops, with and without a terminal; brackets in what is printed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from dualkv.cli.output import console_of, tracked


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_for_each_item_where_no_terminal_is(terminal):
    out = io.StringIO()
    with tracked(Console(file=out, force_terminal=terminal, width=200), line_of=str) as track:
        for item in track("ab", "compiling", 2):
            assert terminal or out.getvalue().endswith(f"{item}\n"), "while it runs"
    if not terminal:
        assert out.getvalue() == "compiling 1/2: a\ncompiling 2/2: b\n"
    assert "loading the model" not in out.getvalue()
    silent = io.StringIO()
    with tracked(Console(file=silent)) as track:
        assert list(track("ab", "measuring", 2)) == ["a", "b"]
    assert silent.getvalue() == ""


def test_brackets_are_printed(capsys):
    """A side that lacks a package says how to install it, in a cell of the table of `dualkv bench`."""
    table = Table("dualkv[bench]", title="r[old].jsonl")
    table.add_row("not installed: pip install 'dualkv[cudnn]'")
    console_of(None).print(table)
    with tracked(Console(file=io.StringIO(), force_terminal=True, width=200)) as track:
        list(track("a", "r[/old].jsonl", 1))
    out = capsys.readouterr().out
    assert all(text in out for text in ("dualkv[bench]", "r[old].jsonl", "pip install 'dualkv[cudnn]'"))

"""Progress of loops, with and without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dualkv.cli.output import tracked


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

"""Read the commands and blocks of code in README, docs and programs, and parse a command without running it."""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.core

ROOT = Path(__file__).parent.parent
PAGES = {
    page.name: page
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").glob("**/*.md")),
    ]
}
PROGRAMS = sorted([*(ROOT / "examples").iterdir(), *(ROOT / "tools").glob("*.py")])  # which say how they are run
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = {"", "bash", "sh"}  # languages of blocks that are typed into a shell
LINE = re.compile(r"^[# ]*((?:python|torchrun|bash|pip) .*)$", re.MULTILINE)  # of what a program says of itself
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:(?:\.venv/bin/)?dualkv [a-z]+ -|python -m |torchrun |make |pip )[^`]*)`")


def blocks(page: str, languages: set[str]) -> list[str]:
    """Fenced blocks of a page, of some languages, in their order."""
    return [block for language, block in FENCE.findall(PAGES[page].read_text()) if language in languages]


def _lines(text: str) -> Iterator[str]:
    """The commands of a shell block, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        if command := re.sub(r"(^|\s)#.*", "", line).strip():
            yield command


def commands(page: str) -> Iterator[tuple[str, bool]]:
    """The lines of a page's shell blocks (True), and commands with options that its running text names (False)."""
    for block in blocks(page, COMMANDS):
        yield from ((command, True) for command in _lines(block))
    for command in INLINE.findall(" ".join(FENCE.sub("", PAGES[page].read_text()).split())):
        yield command, False


def shown() -> Iterator[tuple[str, str, bool]]:
    """(where, command, whether it is a line of its own) of all pages and programs."""
    for page in PAGES:
        yield from ((page, *command) for command in commands(page))
    for path in PROGRAMS:
        if path.suffix in (".py", ".sh"):
            text = path.read_text()
            about = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text.partition("\nset ")[0]
            for line in LINE.findall(about):
                yield from ((f"{path.parent.name}/{path.name}", command, True) for command in _lines(line))


def words_of(command: str) -> list[str]:
    """The words of a command: no settings in front, and what is ours by one name."""
    words = shlex.split(command)
    while "=" in words[0] and words[0] != "export":
        del words[0]
    if words[0] == "torchrun":
        program = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
        words = ["python", *words[program:]]
    words[0] = words[0].removeprefix(".venv/bin/")
    return ["dualkv", *words[3:]] if words[:3] == ["python", "-m", "dualkv"] else words


class _Taken(BaseException):
    """The command line was understood; nothing has begun."""


def parse(words: list[str]) -> None:
    """Runs `dualkv ...`, `python -m MODULE ...` or `python FILE ...` up to where its own code would begin.

    Fails the test for an option, a value or a subcommand that the program does not take.
    """

    def take(*_: object, **__: object) -> None:
        raise _Taken

    def parse_and_take(self: argparse.ArgumentParser, *args: object, **named: object) -> None:
        own(self, *args, **named)
        raise _Taken

    own = argparse.ArgumentParser.parse_args
    program = words[:1] if words[0] == "dualkv" else words[1 : 2 + (words[1] == "-m")]
    module, given = program[-1], words[words.index(program[-1]) + 1 :]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'.*' found in sys.modules")  # the module is run once more, as a program
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_take)
        patch.setattr(typer.core.TyperCommand, "invoke", take, raising=False)
        patch.setattr(sys, "argv", [module, *given])
        try:
            if module.endswith(".py"):
                runpy.run_path(str(ROOT / module), run_name="__main__")
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        except _Taken:
            return
        except SystemExit as end:
            if end.code in (0, None) and "--help" in given:
                return
            pytest.fail(f"`{shlex.join(words)}` is not taken: exit code {end.code}")
    pytest.fail(f"`{shlex.join(words)}` ran, though it was only to be parsed")

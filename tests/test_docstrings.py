"""Every docstring begins with its subject or its verb: "Turn ascending rows into ranges", not "Of ascending rows"."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("cute_kernels", "codegen", "dualkv", "tools", "tests", "examples", "deploy")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# A sentence may put such a word in front of its subject. In a docstring it seldom does: mostly the subject is missing,
# or stands in another file. So none may be the first word.
QUESTIONS = "how what whatever when whenever where wherever which whichever who whoever whom whose why"
PREPOSITIONS = (
    "about above across after against along among around as at before behind below beneath beside besides between"
    " beyond by despite during except for from in inside into like near of off on onto out outside over past per since"
    " through to toward towards under unlike until unto up upon via while with within without"
)
CONJUNCTIONS = "also although and because but either else even if meanwhile nor not only or so than then though unless"
PRONOUNS = "he her him his it its ours she such that their theirs them they those"
ADVERBS = "here mostly never now often seldom sometimes together twice"
# Capital, as `out` and `into` are names of tensors too.
FORBIDDEN = frozenset(f"{QUESTIONS} {PREPOSITIONS} {CONJUNCTIONS} {PRONOUNS} {ADVERBS} same".title().split())
SCOPES = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def fragment(docstring: str) -> str | None:
    """Return the first words of a docstring that does not begin with its subject or its verb."""
    words = docstring.split()[:4]
    first = words[0].strip("\"'(,.:;") if words else ""
    if first in FORBIDDEN or words[:2] == ["The", "same"]:
        return " ".join(words)
    return None


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Iterate over the docstrings of a module, its classes, its functions and their attributes."""
    for scope in ast.walk(tree):
        if isinstance(scope, SCOPES):
            for statement in scope.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_subject_or_a_verb(folder):
    found = []
    for path in (path for path in FILES if path.is_relative_to(ROOT / folder)):
        for docstring in docstrings(ast.parse(path.read_text())):
            if first := fragment(docstring.value):
                found.append(f"{path.relative_to(ROOT)}:{docstring.lineno}: {first} ...")
    assert found == []

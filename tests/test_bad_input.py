"""Bad input on the CPU: type and words of every refusal, before anything runs; and that no refusal goes untested."""

from __future__ import annotations

import ast
import re
import traceback
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bad_input import BAD, BAD_ON_CPU, base, nothing_runs

ROOT = Path(__file__).parent.parent
MODULES = ("attention", "compat", "grpo", "logprobs", "ops")  # whose refusals are all of tensors
LOOKS = {"aten.detach.default", "aten.alias.default", "dualkv.fwd.default", "dualkv.bwd.default"}  # compute nothing


class Computes(TorchDispatchMode):
    """Names of the operations that were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bad", BAD + BAD_ON_CPU, ids=str)
def test_one_sentence_before_anything_runs(bad, monkeypatch):
    call = bad.prepare("cpu")
    with nothing_runs(monkeypatch), Computes() as computes:
        bad.check(call, "cpu")
    assert bad.values or computes.names <= LOOKS


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.function in ("attention", "fwd", "bwd")], ids=str)
def test_refused_behind_a_good_call_too(bad):
    """Forms of tensors that a layout has seen are not checked again."""
    function, arguments = base(bad.function)
    function(**arguments)
    bad.check(bad.prepare("cpu"), "cpu")


# ---------------------------------------------------------------- none is missing
def refusals(path):
    """The raises of a module that say something."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node


def test_every_refusal_of_a_tensor_is_in_the_list(monkeypatch):
    found = set()
    for bad in BAD + BAD_ON_CPU:
        with nothing_runs(monkeypatch):
            error = bad.check(bad.prepare("cpu"), "cpu")
        last = traceback.extract_tb(error.__traceback__)[-1]
        found.add((Path(last.filename).stem, last.lineno))
    for module in MODULES:
        for node in refusals(ROOT / "dualkv" / f"{module}.py"):
            if ast.unparse(node.exc.func) in ("ValueError", "TypeError"):
                lines = range(node.lineno, node.end_lineno + 1)
                assert any((module, line) in found for line in lines), f"dualkv/{module}.py:{node.lineno} is not tested"


PLACEHOLDER = "\0"


def template(node):
    """The text of a message."""
    text = node.exc.args[0]
    if not isinstance(text, ast.JoinedStr):
        return str(text.value) if isinstance(text, ast.Constant) else PLACEHOLDER
    return "".join(str(x.value) if isinstance(x, ast.Constant) else PLACEHOLDER for x in text.values)


def runs(text):
    """Two and three words in a row, none of them with a part that is put in."""
    words = [word.strip(",.:;()[]") for word in text.split()]
    several = (words[i : i + n] for n in (2, 3) for i in range(len(words) - n + 1))
    return {" ".join(some) for some in several if not any(PLACEHOLDER in word for word in some)}


def test_every_message_is_asked_for_by_a_test():
    """Words in a row that no other message of its module has, in a string of a test."""
    strings = [
        re.sub(r"\\(.)", r"\1", node.value)  # of patterns
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    asked = set().union(*map(runs, strings))
    untested, told = [], 0
    for path in sorted((ROOT / "dualkv").rglob("*.py")):
        messages = {template(node): node.lineno for node in refusals(path)}
        for text, line in messages.items():
            own = runs(text).difference(*(runs(other) for other in messages if other != text))
            told += bool(own)
            if own and not own & asked and path.stem not in MODULES:
                untested.append(f"{path.relative_to(ROOT)}:{line}: {text!r}")
    assert untested == []
    assert told > 0.9 * sum(len(list(refusals(path))) for path in (ROOT / "dualkv").rglob("*.py"))

"""Bad input on the CPU: type and words of every refusal, before anything runs; and that no refusal goes untested."""

from __future__ import annotations

import ast
import re
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dualkv import Layout, pack, pack_sequences, plan_micro_batches, plan_sequences
from dualkv.grpo import group_advantages, token_weights
from tests.bad_input import BAD, BAD_ON_CPU, base, nothing_runs

ROOT = Path(__file__).parent.parent
NAMES = ("grpo", "logprobs", "ops/attention", "ops/compat", "ops/dispatch")
MODULES = [ROOT / "dualkv" / f"{name}.py" for name in NAMES]  # whose refusals are all of tensors
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


# ---------------------------------------------------------------- text for tokens, one list too few
LISTS = r"expected a list of response lengths for each prompt, such as \[\[3, 2\]\] for one prompt and two responses"
TEXT = "expected token ids: tokenize texts first"
advantages, weights = partial(group_advantages, torch.ones(3)), partial(token_weights, mean="token")


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        *(
            (function, arguments, f"^response_lens{words}, {LISTS}$")
            for function in (Layout.from_lengths, partial(plan_micro_batches, budget=9))
            for arguments, words in [
                (([5], [3, 2]), r"\[0\] is 3"),
                (([5, 5], [[3, 2], 2]), r"\[1\] is 2"),
                (([5], ["32"]), r"\[0\] is '32'"),
                (([5], torch.tensor([3, 2])), r"\[0\] is tensor\(3\)"),
                (([5], [None]), r"\[0\] is None"),
                (([5], 3), " is 3"),
                (([5], "32"), " is '32'"),
                (([5], torch.tensor(3)), r" is tensor\(3\)"),
            ]
        ),
        (Layout.from_lengths, (5, [[3]]), "^prompt_lens is 5, expected a list of integers"),
        (Layout.from_lengths, (["5"], [["3"]]), "^prompt_lens must hold integers, got str values such as '5'$"),
        (Layout.from_segments, (5, -1), "^offsets is 5, expected a list of integers$"),
        (Layout.from_segments, ("05", [-1]), "^offsets is '05', expected a list of integers$"),
        (Layout.from_cu_seqlens, ([0, 2], 4), "^cu_seqlens_responses is 4, expected a list of integers$"),
        (pack, (["a"], [["b"]]), rf"^prompts\[0\] is the text 'a', {TEXT}$"),
        (pack, (["a"], ["b"]), rf"^prompts\[0\] is the text 'a', {TEXT}$"),
        (pack, ([[1]], ["b"]), rf"^responses\[0\] is the text 'b', {TEXT}$"),
        (pack, ([[1]], [[[2], "b"]]), rf"^responses\[0\]\[1\] is the text 'b', {TEXT}$"),
        (pack, ([[1]], [["b"]]), r"^responses\[0\] must hold integers, got str values such as 'b'$"),
        (pack, (["long " * 99], [[1]]), rf"^prompts\[0\] is the text 'long [^,]{{,30}}', {TEXT}$"),
        (pack, ([1, 2], [3, 4]), r"^prompts\[0\] is 1, expected a list of integers$"),
        (pack, ([[1, 2]], [None]), r"^responses\[0\] is None, expected a list of integers$"),
        (pack_sequences, (["ab"],), rf"^sequences\[0\] is the text 'ab', {TEXT}$"),
        (pack_sequences, ([1, 2],), r"^sequences\[0\] is 1, expected a list of integers$"),
        (pack_sequences, ([[1, 2]], [1]), r"^loss_masks\[0\] is 1, expected a list of zeros and ones, one a token$"),
        (pack_sequences, ([[1, 2]], [["0", "1"]]), r"^loss_masks\[0\] is \['0', '1'\], expected a list of zeros"),
        (pack_sequences, ([[1, 2]], 1), "^loss_masks is a int, expected a list of masks$"),
        (plan_sequences, ([[1, 2]], "5"), "^budget is '5', expected an integer$"),
        (Layout.from_token_sequences, (["ab"],), rf"^sequences\[0\] is the text 'ab', {TEXT}$"),
        (Layout.from_token_sequences, ([[1]], "2"), "^min_shared is '2', expected an integer$"),
        (advantages, (3,), "^group_sizes is 3, expected a list of integers$"),
        (advantages, ([3.0],), "^group_sizes must hold integers, got float64 values such as 3.0$"),
        (weights, ("3",), "^response_lens is '3', expected a list of integers$"),
    ],
)
def test_text_and_one_list_too_few(function, arguments, words):
    with pytest.raises(TypeError, match=words):
        function(*arguments)


def test_group_ids_that_are_no_list():
    with pytest.raises(ValueError, match=r"^group_ids has no entries for 2 rollouts, expected one a rollout$"):
        pack([[1], [1]], [[2], [3]], group_ids=5)


def test_lists_of_lengths_in_any_container():
    expected = Layout.from_lengths([5, 4], [[3, 2], []])
    for lists in (((3, 2), ()), ([3, 2], range(0)), (np.array([3, 2]), torch.tensor([]).long()), iter([[3, 2], []])):
        layout = Layout.from_lengths([5, 4], lists)
        assert layout.offsets.tolist() == expected.offsets.tolist()
        assert layout.parent.tolist() == expected.parent.tolist()


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
        found.add((Path(last.filename).resolve(), last.lineno))
    for module in MODULES:
        for node in refusals(module):
            if ast.unparse(node.exc.func) in ("ValueError", "TypeError"):
                lines = range(node.lineno, node.end_lineno + 1)
                assert any((module, line) in found for line in lines), f"{module}:{node.lineno} is not tested"


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
    untested, told, messages_in_all = [], 0, 0
    for path in sorted((ROOT / "dualkv").rglob("*.py")):
        messages = {template(node): node.lineno for node in refusals(path)}
        messages_in_all += len(messages)
        for text, line in messages.items():
            own = runs(text).difference(*(runs(other) for other in messages if other != text))
            told += bool(own)
            if own and not own & asked and path not in MODULES:
                untested.append(f"{path.relative_to(ROOT)}:{line}: {text!r}")
    assert untested == []
    assert told > 0.9 * messages_in_all

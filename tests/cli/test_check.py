"""`dualkv doctor --check`: that it sees what is wrong, and which calls it makes."""

from __future__ import annotations

import itertools
import sys
import types
from dataclasses import replace

import torch

from dualkv import Layout
from dualkv.cli import check
from dualkv.ops import backends, composition


def test_the_check_finds_what_is_wrong(monkeypatch):
    """The check runs on the CPU, with backends that compute the reference, another scale, or nothing; cuDNN's is not
    imported."""
    imported = "cudnn" in sys.modules
    reference = backends.BACKENDS["reference"]

    def with_scale(factor):
        def forward(softmax_scale, **call):
            return reference.module.forward(softmax_scale=softmax_scale * factor, **call)

        return replace(reference, module=types.SimpleNamespace(forward=forward, backward=reference.module.backward))

    def with_gradients(change):
        def backward(**call):
            found = list(reference.module.backward(**call))
            change(found)
            return tuple(found)

        return replace(reference, module=types.SimpleNamespace(forward=reference.module.forward, backward=backward))

    def not_finite(which):
        return with_gradients(lambda found: found[which].view(-1)[-1:].fill_(float("nan")))

    def without_dlse():
        def backward(dlse, **call):
            return reference.module.backward(dlse=None, **call)

        return replace(reference, module=types.SimpleNamespace(forward=reference.module.forward, backward=backward))

    count, every = itertools.count(1), {"sinks": True, "lse": True, "deterministic": True}
    case = check.Case("a case", Layout.from_lengths([20], [[5, 6]]), (4, 2, 16, 24), every, torch.bfloat16)
    broken = types.SimpleNamespace(forward=lambda **call: 1 / 0, backward=None)
    named = {"right": with_scale(1), "wrong": with_scale(2), "broken": replace(reference, module=broken),
             "refusing": replace(reference, refuses=lambda *given: "this test"),
             "without dlse": without_dlse(),
             "refusing dlse": replace(reference, refuses=lambda q, v, dlse: "dlse" if dlse is not None else None),
             **{f"NaN in d{name}": not_finite(which) for which, name in enumerate(("q", "k", "v", "sinks"))},
             "others every time": with_gradients(lambda found: found[0].mul_(1 + next(count) / 256))}  # fmt: skip
    for name, backend in named.items():
        monkeypatch.setitem(backends.BACKENDS, name, backend)
    lines = {line.backend: line for line in check.run(torch.device("cpu"), list(named), iter([case]))}
    not_wrong = {"right", "refusing", "refusing dlse"}
    assert {name for name, line in lines.items() if not line.wrong} == not_wrong
    assert lines["others every time"].says.startswith("WRONG: gradients differ from call to call")
    assert all(lines[f"NaN in d{name}"].worst == float("inf") for name in ("q", "k", "v", "sinks"))
    assert lines["right"].worst < check.BOUNDS[torch.bfloat16] < min(lines[x].worst for x in ("wrong", "without dlse"))
    assert "division by zero" in lines["broken"].says
    assert lines["refusing"].says == "refused: does not serve this test"
    assert lines["refusing dlse"].says == "refused: does not serve dlse"
    # Half precision has a bound of its own, and a loss by out alone asks for no gradient of lse.
    half = case._replace(dtype=torch.float16, features={})
    asked = ["right", "without dlse", "refusing dlse"]
    lines = list(check.run(torch.device("cpu"), asked, iter([half])))
    assert not any(line.wrong for line in lines)
    assert max(line.worst for line in lines) < check.BOUNDS[torch.float16] / 2
    monkeypatch.setitem(backends.BACKENDS, "off", with_gradients(lambda found: found[1].mul_(1.01)))
    lines = list(check.run(torch.device("cpu"), ["off"], iter([half, half._replace(dtype=torch.bfloat16)])))
    assert [line.wrong for line in lines] == [True, False]
    assert composition.unsupported(torch.empty(0)) == "torch.float32 inputs"
    assert ("cudnn" in sys.modules) == imported


def test_the_check_has_every_kind_of_call():
    """The cases include each kind of call that some backend computes in a way of its own."""
    made = list(check.cases())
    assert len({case.name for case in made}) == len(made) <= 13
    features = {name for case in made for name in case.features}
    assert features == {"window", "chunk", "sinks", "lse", "softcap", "deterministic"}
    assert {case.dtype for case in made} == {torch.bfloat16, torch.float16} == set(check.BOUNDS)
    assert {1, 2, 8} <= {case.layout.num_groups for case in made}
    pairs = {case.heads[2:] for case in made}
    assert (192, 128) in pairs
    assert any(case.heads == (16, 4, 192, 128) and {"window", "sinks"} <= {*case.features} for case in made)
    assert any(d != of_v and max(d, of_v) <= 128 for d, of_v in pairs)
    assert any(case.layout.depth > 2 and "chunk" in case.features for case in made)

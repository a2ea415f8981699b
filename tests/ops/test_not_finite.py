"""NaN and infinity in one response on the CPU; tests/gpu/test_not_finite.py asks the same of the kernels."""

from __future__ import annotations

import pytest
import torch

from dualkv import Layout
from dualkv.ops import reference
from tests.not_finite import (
    BROKEN,
    INF,
    LENGTHS,
    NAN,
    SEGMENTS,
    WHERE,
    broken,
    check,
    inputs,
    limits,
    mathematics,
    step,
)

NAMES = "out", "dq", "dk", "dv"


VALUES = NAN, INF, -INF


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("names", BROKEN, ids=str)
def test_a_broken_response_leaves_others_their_results(names, value):
    layout = Layout.from_lengths(*LENGTHS)
    tensors = inputs(layout, 8, 2, 1, torch.float64)
    clean = step(tensors, layout, False)
    for case, where in enumerate(WHERE, BROKEN.index(names) + VALUES.index(value)):
        segment = SEGMENTS[case % len(SEGMENTS)]  # every way to break meets every segment in one of the tests
        rows = slice(*layout.offsets[segment : segment + 2].tolist())
        changed = broken(tensors, names, rows, where, value)
        want = mathematics(*changed, layout.visible_end)
        check(NAMES, step(changed, layout, False), want, clean, rows, limits(names, value))


def test_results_that_are_finite_are_made_once(monkeypatch):
    real = reference.chunks
    monkeypatch.setattr(reference, "chunks", lambda *a: pytest.fail("again") if a[2] else real(*a))
    layout = Layout.from_lengths(*LENGTHS)
    step(inputs(layout, 8, 2, 1, torch.float32), layout, False)


def test_a_check_that_fails():
    layout = Layout.from_lengths(*LENGTHS)
    tensors = inputs(layout, 8, 2, 1, torch.float64)
    clean, rows = step(tensors, layout, False), slice(*layout.offsets[2:4].tolist())
    changed = broken(tensors, ("v",), rows, "rows", NAN)
    want, got = mathematics(*changed, layout.visible_end), step(changed, layout, False)
    check(NAMES, got, want, clean, rows)
    got[0][0] = NAN
    with pytest.raises(AssertionError, match="out outside the broken response is off by nan"):
        check(NAMES, got, want, clean, rows)
    got[0][0] = clean[0][0]
    got[1][rows] = 0.0
    with pytest.raises(AssertionError, match="dq has lost a value that is not finite"):
        check(NAMES, got, want, clean, rows)

"""Ranks start again where gloo did not connect them, and nowhere else."""

from __future__ import annotations

import pytest

from tests import ranks


@pytest.mark.parametrize(
    ("runs", "passes"),
    [
        ([(True, "fine")], True),
        ([(False, f"{ranks.UNCONNECTED} with closed"), (True, "fine")], True),
        ([(False, f"{ranks.UNCONNECTED} with closed"), (False, f"{ranks.UNCONNECTED} again")], False),
        ([(False, "another error")], False),
    ],
)
def test_only_what_gloo_did_not_connect_starts_again(monkeypatch, runs, passes):
    left = list(runs)
    monkeypatch.setattr(ranks, "_started", lambda *given: left.pop(0))
    if passes:
        assert ranks.on_ranks(2, "module:function") == runs[-1][1]
    else:
        with pytest.raises(AssertionError, match=runs[-1][1]):
            ranks.on_ranks(2, "module:function")
    assert not left

"""The exit code of `tools.bench.invariance`: not the number of rows, of which a process reports the last eight bits."""

from __future__ import annotations

import pytest

from tools.bench import invariance


@pytest.mark.parametrize("rows", [0, 1, 256])
def test_rows_that_differ_fail_the_command(monkeypatch, rows):
    found = {"differ": {"batch_invariant": {"hidden_states": 0, "logp": rows}}}
    monkeypatch.setattr(invariance, "updated", lambda *_: found)
    with pytest.raises(SystemExit) as caught:
        invariance.update(device="cpu")
    assert caught.value.code == bool(rows)
    assert isinstance(caught.value.code, bool)

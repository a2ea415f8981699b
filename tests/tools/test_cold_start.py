"""The cold start benchmark without a GPU: what it files, when, and its table. Its processes are stand-ins."""

from __future__ import annotations

import pytest
import torch

from dualkv.cli import precompile
from tools import filed
from tools.bench import cold_start, record


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Ways in the order in which their processes ran; each takes 0.5 s a step, the compiling one ten times that."""
    ran = []

    def once(way, kernels, cache):
        if ran[-1:] == ["compiling"]:
            raise RuntimeError(f"{way}: killed")
        ran.append(way)
        step = 5.0 if way == "compiling" else 0.5
        names = ("python", "torch", "dualkv", "tensors", "forward", "backward")
        return {name: step * i for i, name in enumerate(names, start=1)}

    monkeypatch.setattr(cold_start, "once", once)
    monkeypatch.setattr(precompile, "precompile", lambda specs, folder, jobs: folder.mkdir())
    monkeypatch.setattr(record, "environment", lambda meter: {"commit": "c" * 40})
    monkeypatch.setattr(record, "Meter", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return ran


def test_what_is_done_is_filed_though_the_rest_fails(processes, tmp_path):
    path = tmp_path / "cold.json"
    with pytest.raises(RuntimeError, match="killed"):
        cold_start.main(path, repeat=3, compiling=1)
    assert processes == list(cold_start.WAYS)
    recorded = filed.read(path)
    assert recorded["commit"] == "c" * 40
    assert {way: len(runs) for way, runs in recorded["runs"].items()} == dict.fromkeys(cold_start.WAYS, 1)
    text = cold_start.markdown(recorded)
    assert "| artefacts | 2.5 | 0.50 | 0.50 | 0.50 |" in text
    assert "| compiling | 25.0 | 5.00 | 5.00 | 5.00 |" in text
    assert "| pytorch | 2.5 |  | 0.50 | 0.50 |" in text

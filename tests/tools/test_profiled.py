"""Profiles of benchmarks as text (tools/bench/profiled)."""

from __future__ import annotations

import torch

from tools.bench import profiled


def test_pauses_are_between_kernels_of_all_streams():
    kernels = [(0.0, 5.0, "a"), (4.0, 30.0, "b"), (6.0, 8.0, "c"), (40.0, 41.0, "d"), (100.0, 101.0, "e")]
    assert profiled.pauses(kernels) == [(41.0, 100.0, "d", "e")]


def test_a_profile_names_operations(tmp_path):
    x = torch.ones(9, 9)
    profiled.write_profile(lambda: x @ x, tmp_path / "0.txt")
    assert "aten::mm" in (tmp_path / "0.txt").read_text()

"""The benchmark of a hybrid (tools/bench/hybrid), in small, on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from dualkv.integrations.recurrent import rules
from tools.bench import hybrid
from tools.bench.hybrid import Groups
from tools.bench.step import Sizes

SIZES = Sizes("tiny-hybrid", layers=4, responses=3, prompt_len=8, response_len=5, micro_batch=2, repeats=1,
              chunk_size=10, dtype="float32")  # fmt: skip
GROUPS = Groups(groups=1, responses=2, prompt_len=8, response_len=4)


def test_parts():
    """The test takes 10 s: the functions of PyTorch loop over the rows of a chunk."""
    parts = ["mixer", "shares", "step", "distance"]
    before = rules.convolve, rules.scan
    *_, figures = hybrid.measure(SIZES, GROUPS, GROUPS, parts, torch.device("cpu"))
    assert not [part for part in parts if "error" in figures[part]]
    assert figures["mixer"]["rows"] == 8 + 3 * 5
    assert len(figures["mixer"]["packed"]) == len(figures["mixer"]["one_call"]) == 5
    for ranks in hybrid.DEGREES:
        share = figures["shares"][f"of {ranks}"]
        assert len(share["seconds"]) == len(figures["shares"]["whole"]) == 5
        assert share["share_over_whole_by_ranks"] > 0
    assert [figures["step"][way]["rows"] for way in ("packed", "replicated")] == [23, 39]
    assert figures["step"]["times_as_fast"] > 0
    for distances in (figures["distance"][way] for way in ("packed", "replicated")):
        assert max(distances.values()) < 1e-5
    assert (rules.convolve, rules.scan) == before

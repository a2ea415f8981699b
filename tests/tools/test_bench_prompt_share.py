"""The benchmark over the prompt's share (tools/bench/prompt_share), in small, on the CPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from tools.bench import harness, prompt_share
from tools.bench.step import Sizes

SIZES = Sizes("tiny", layers=1, responses=4, prompt_len=48, response_len=16, micro_batch=2, repeats=1, chunk_size=10,
              dtype="float32")  # fmt: skip


def test_both_ways_compute_the_same_group_in_turns():
    written = list(prompt_share.measure(SIZES, [0.25, 0.7], 2, 0.0, "math", torch.device("cpu")))
    assert [len(figures["points"]) for figures in written] == [1, 2, 2, 2]
    few, many = written[-1]["points"]
    assert [(p["prompt_len"], p["response_len"]) for p in (few, many)] == [(16, 48), (48, 16)]
    assert few["rows"] == {"replicated": 4 * 64, "packed": 16 + 4 * 48}
    assert many["rows"] == {"replicated": 4 * 64, "packed": 48 + 4 * 16}
    assert 1 < few["flop_ratio"] < many["flop_ratio"]
    for figures in (few, many):
        assert figures["logp_rms"] < 1e-5
        assert [len(times) for times in figures["seconds"].values()] == [2, 2]
        assert figures["speed_up"] > 0


def test_a_turn_lasts_as_long_as_it_is_told(monkeypatch):
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    assert harness.turn(lambda: None, 2.5) == [1, 1, 1]
    assert harness.turn(lambda: None, 0.0) == [1]


def test_a_share_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match=r"got a share of 0\.01 of 64 tokens"):
        prompt_share.point(SIZES, 0.01)

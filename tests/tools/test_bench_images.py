"""The benchmark of images (tools/bench/images), in small, on the CPU: both ways compute the same."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tools.bench.images import Sizes, measure


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("turns", [0, 2])
def test_both_ways_compute_the_same(turns: int) -> None:
    sizes = Sizes(layers=1, responses=3, response_len=5, images=2, side=2, text=7, micro_batch=2, repeats=1, tiny=True,
                  turns=turns, walk=6 * turns)  # fmt: skip
    figures = measure(sizes, torch.device("cpu"))
    assert figures["logp_rms_apart"] < 1e-5
    assert 1 < figures["flop_ratio"] < 3
    walked = {f"{part}, walked" for part in ("visual", "language_model", "lm_head") if turns}
    assert figures["gradients_apart"].keys() == {"visual", "language_model", "lm_head"} | walked
    assert max(figures["gradients_apart"].values()) < 1e-5

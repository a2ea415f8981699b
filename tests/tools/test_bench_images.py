"""The benchmark of images (tools/bench/images), in small, on the CPU: both ways compute the same."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tools.bench.images import Sizes, measure


@pytest.mark.usefixtures("one_thread")
def test_both_ways_compute_the_same() -> None:
    sizes = Sizes(layers=1, responses=3, response_len=5, images=2, side=2, text=7, micro_batch=2, repeats=1, tiny=True)
    figures = measure(sizes, torch.device("cpu"))
    assert figures["logp_rms_apart"] < 1e-5
    assert figures["gradients_apart"].keys() == {"visual", "language_model", "lm_head"}
    assert max(figures["gradients_apart"].values()) < 1e-5

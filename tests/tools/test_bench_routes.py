"""Routes that an engine records for rollouts of one prompt agree as far as rounding lets them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tools.bench import routes


def test_parts_that_agree() -> None:
    found = routes.measure(routes.Sizes(layers=2, hidden=64, experts=8, chosen=2, prompt=80, rollouts=2), torch.float32)
    assert found["choices"] >= found["rows"] >= found["prefix"] > 0.9

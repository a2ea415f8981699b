"""Multi-token prediction on packed rows: wrong where the next row is taken for the next token, right with copies."""

from __future__ import annotations

import pytest

layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(layers, "MtpLayer"):
    pytest.skip("an earlier transformers", allow_module_level=True)

from tools.bench import prediction  # noqa: E402


def test_gradients_by_way() -> None:
    found = prediction.measure(prediction.Sizes(prompt=9, responses=(4, 1, 6)))
    assert all(distance > 0.05 for distance in found["next_row"].values())
    assert all(distance < 1e-5 for distance in found["copied"].values())

"""The benchmark of a layer with an indexer, small and on the CPU."""

from __future__ import annotations

import pytest
import torch

tf = pytest.importorskip("transformers")

from tests.integrations.tiny import SIZES  # noqa: E402
from tests.integrations.transformers.test_indexers import INDEXER  # noqa: E402
from tests.integrations.transformers.test_latent import EXPERTS, LATENT  # noqa: E402
from tools.bench.indexers import make_layer, measure, published  # noqa: E402


def test_both_ways_compute_the_same_with_fewer_rows() -> None:
    config = tf.DeepseekV32Config(**SIZES | LATENT | EXPERTS | INDEXER | {"num_hidden_layers": 1})
    assert published(4, 2048).index_head_dim == 128
    model = make_layer(config, torch.device("cpu"), torch.float32)
    found = measure(model, prompt_len=20, response_len=5, responses=4, together=3, repeats=1)
    assert found["rows"] == {"packed": 40, "apart": 100}
    assert found["distance"]["largest"] < 1e-5
    assert found["flex"] == "torch.float32 inputs"
    assert {found[name].keys() >= {"packed", "apart"} for name in ("step", "forward", "selection")} == {True}

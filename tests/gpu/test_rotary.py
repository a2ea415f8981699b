"""Rotary embeddings that depend on the length of the sequence, on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from dualkv.integrations.transformers import enable
from tests.integrations import scaled
from tools import zoo

pytestmark = pytest.mark.any_gpu


@pytest.mark.parametrize(("kind", "rope"), [*scaled.pairs(("phi3", "llama")), ("gemma3_text", "dynamic")])
def test_sequences_alone(kind: str, rope: str) -> None:
    """Packed sequences equal separate ones in fp32, in one row and walked."""
    model = scaled.make(kind, rope)
    ids = scaled.token_ids(model).cuda()
    model = model.cuda()
    expected = scaled.alone(model, ids)
    enable(model)
    layout = scaled.LAYOUT.to("cuda")
    with torch.no_grad():
        logits = model(input_ids=ids, dualkv=layout).logits[0]
    assert scaled.error([logits[path] for path in scaled.PATHS], expected) < zoo.BOUND
    assert scaled.error(scaled.walked(model, ids, 5), expected) < zoo.BOUND

"""Tests that what `enable` does to a model and to transformers' files is undone to the last attribute."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch

tf = pytest.importorskip("transformers")

from dualkv.integrations import patching  # noqa: E402
from dualkv.integrations.transformers import disable, enable  # noqa: E402
from tests.integrations import states  # noqa: E402
from tests.integrations.tiny import LAYOUT, make_featured, make_model, token_ids  # noqa: E402
from tests.integrations.transformers import test_recurrent  # noqa: E402

FILES = r"transformers\.(models\..+\.modeling_\w+|modeling_\w+|masking_utils|integrations\..+)"
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}  # fmt: skip

MODELS: dict[str, Any] = {
    "plain": make_model,
    "experts": partial(make_model, "qwen3_moe"),
    "factors by length": partial(make_featured, "phi3", 64, rope_parameters=LONGROPE),
    "layers that drop arguments": partial(make_featured, "phimoe", 64),
} | {family: partial(test_recurrent.make, family) for family in test_recurrent.FAMILIES}


@pytest.fixture(autouse=True)
def as_imported() -> None:
    patching.undo_process()


def step(model: Any, **inputs: Any) -> None:
    model(input_ids=token_ids(LAYOUT), use_cache=False, **inputs).logits.sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_disable_leaves_nothing(name: str) -> None:
    model = MODELS[name]()
    step(model)
    before, files = states.of_model(model), states.of_files(FILES)
    enable(model, check=False)
    step(model, dualkv=LAYOUT)
    assert len(states.differences(before, states.of_model(model))) > 1
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (model, *copies):
        disable(other)
    assert states.differences(before, states.of_model(model)) == []
    assert bool(states.differences(files, states.of_files(FILES))) == (name in test_recurrent.FAMILIES)
    patching.undo_process()
    assert states.differences(files, states.of_files(FILES)) == []
    for other in copies:  # whose attributes are copies too
        assert states.of_model(other).keys() == before.keys()
        assert not any(patching.is_marked(type(m).forward) for m in other.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())
        step(other)


def test_fast_is_undone_but_for_gradient_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = make_model().train()
    before, files = states.of_model(model), states.of_files(FILES)
    enable(model, check=False, fast=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # a trainer's, which layers are to keep attention in
    trainers = states.of_model(model)
    step(model, dualkv=LAYOUT)
    assert any("checkpointing_func" in name for name in states.differences(trainers, states.of_model(model)))
    disable(model)
    left = states.differences(before, states.of_model(model))
    of_transformers = re.compile(r".*(checkpointing|require_grads|embed_tokens\._forward_hooks|keeps_products).*")
    assert [name for name in left if not of_transformers.fullmatch(name)] == []
    of_layers = [name for name in left if name.endswith("checkpointing_func")]
    assert not set(of_layers) & set(states.differences(trainers, states.of_model(model)))
    patching.undo_process()
    assert states.differences(files, states.of_files(FILES)) == []


@pytest.mark.parametrize("family", test_recurrent.there("qwen3_5_text", "minimax"))
def test_a_model_is_prepared_again_behind_an_undone_process(family: str) -> None:
    model = enable(test_recurrent.make(family), check=False)
    expected = model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits
    patching.undo_process()
    assert torch.equal(model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits, expected)

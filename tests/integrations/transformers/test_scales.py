"""Layers of FP8 in an enabled model are said once. Classes of the names of torchao's and Transformer Engine's stand in
for theirs; `tests/tools/test_bench.py` runs torchao's."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from torch import nn

from dualkv.integrations.transformers import enable, scales
from tests.integrations.tiny import LAYOUT, make_model, token_ids


@pytest.fixture(autouse=True)
def unsaid() -> None:
    scales._warn.cache_clear()


def put(model: Any, name: str, package: str, granularity: str | None = None) -> None:
    """Put layers of that class in the place of the down projections of a model."""
    cls = type(name, (nn.Linear,), {"__module__": package})
    for layer in model.model.layers:
        old = layer.mlp.down_proj
        new = cls(old.in_features, old.out_features, bias=False)
        new.weight = old.weight
        if granularity is not None:
            cast = SimpleNamespace(scaling_granularity=SimpleNamespace(name=granularity))
            new.config = SimpleNamespace(cast_config_input=cast)
        layer.mlp.down_proj = new


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (("Float8Linear", "torchao.float8.float8_linear", "AXISWISE"), scales.OF_ROWS),
        (("Float8Linear", "torchao.float8.float8_linear", "TENSORWISE"), scales.OF_CALLS),
        (("LayerNormMLP", "transformer_engine.pytorch.module.layernorm_mlp", None), scales.OF_CALLS),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_layers_of_8_bits_are_said_once(layer: tuple[str, str, str | None], said: str, later: bool) -> None:
    """Accelerate converts a model when its trainer prepares it, after `enable`."""
    model = make_model()
    if later:
        enable(model)
    put(model, *layer)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if not later:
            enable(model)
        for _ in range(2):
            model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
    (text,) = [str(w.message) for w in found if str(w.message).startswith("dualkv")]
    assert f"Qwen3Model has 2 layers of the class {layer[0]}. In FP8 {said}" in text


def test_other_layers_are_not() -> None:
    model = make_model()
    put(model, "Linear4bit", "bitsandbytes.nn.modules")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = enable(model)
        model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)

"""Models whose code stands between a call and its attention: what they drop, number or keep by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

tf = pytest.importorskip("transformers")

from dualkv.integrations.transformers import (  # noqa: E402
    disable,
    enable,
    layers,
    recompute_layers,
)
from tests.integrations.tiny import (  # noqa: E402
    LAYOUT,
    SIZES,
    TREE,
    hooks,
    token_ids,
)
from tools import zoo  # noqa: E402

TINY = {name: value for name, value in SIZES.items() if name != "head_dim"}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def made(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return getattr(tf, family)(getattr(tf, f"{family.split('For')[0]}Config")(**settings))


def compare(model: Any, compiled: bool = False) -> None:
    for layout in (LAYOUT, TREE):
        expected = zoo.replicated(model, layout)
        enable(model)
        call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        logits, found = zoo.packed(call, layout)
        got = logits, {name.removeprefix("_orig_mod."): gradient for name, gradient in found.items()}
        assert zoo.difference(got, expected) < 1e-4


@pytest.mark.parametrize("family", ["StableLmForCausalLM", "NemotronForCausalLM"])
def test_layers_that_hand_no_keyword_arguments_on(family: str) -> None:
    model = made(family, **TINY)
    assert layers.drops_arguments(type(model.model.layers[0]))
    assert not layers.drops_arguments(tf.models.llama.modeling_llama.LlamaDecoderLayer)
    compare(model)
    with pytest.raises(ValueError, match="is set to gradient checkpointing and does not hand keyword arguments on"):
        recompute_layers(model.train())(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
    model.eval()
    if family.startswith("Nemotron"):
        compare(model, compiled=True)
    assert all(part.dualkv_layout is None for part in layers.attention_modules(model))
    ids = token_ids(LAYOUT)
    with_hooks = model(input_ids=ids).logits
    assert hooks(disable(model)) == 0
    assert torch.equal(model(input_ids=ids).logits, with_hooks)


@pytest.mark.parametrize(
    "family", ["FuyuForCausalLM", "Idefics2ForConditionalGeneration", "MllamaForConditionalGeneration"]
)
def test_models_around_a_decoder(family: str) -> None:
    """Fuyu's numbers rows, Idefics 2's makes a cache, Mllama's decoder has layers that text skips."""
    text: dict[str, Any] = {"text_config": TINY, "image_token_id": 94, "vision_config": VISION}
    if family.startswith("Fuyu"):
        text = {**TINY, "image_token_id": 94, "image_size": 8, "patch_size": 4, "text_config": None}
    if family.startswith("Idefics2"):
        text["text_config"] = {"model_type": "mistral", **TINY}
        text["perceiver_config"] = {
            "hidden_size": 48,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 1,
            "resampler_depth": 1,
            "resampler_n_latents": 2,
        }
    if family.startswith("Mllama"):
        text["text_config"] = {**TINY, "cross_attention_layers": [1]}
        text["vision_config"] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28,
                                 "num_global_layers": 1, "attention_heads": 2, "intermediate_layers_indices": [0],
                                 "vision_output_dim": 32, "patch_size": 14}  # fmt: skip
    compare(made(family, **text))


def test_states_of_images_are_refused_beside_a_layout() -> None:
    config = tf.models.mllama.configuration_mllama.MllamaTextConfig(**TINY, cross_attention_layers=[1])
    model = enable(tf.MllamaForCausalLM(config))
    with pytest.raises(ValueError, match="cross_attention_states"):
        model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT, cross_attention_states=torch.zeros(1, 4, 48))

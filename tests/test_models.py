"""Named configurations: the models that they are named for."""

from __future__ import annotations

import pytest
import torch

from dualkv.models import CONFIGS, load_model

# Billions of parameters, as their authors give them.
BILLIONS = {
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-30b-a3b": 30.532,
    "qwen2.5-7b": 7.616,
    "llama-3-8b": 8.030,
    "mistral-7b": 7.248,
    "gpt-oss-20b": 20.915,
    "gemma-3-12b": 11.766,  # without the vision tower and its projection
    "olmo-3-7b": 7.298,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_number_of_parameters(name):
    tf = pytest.importorskip("transformers")
    settings = dict(CONFIGS[name])
    config = tf.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], abs=5e-4)


def test_shape_of_qwen35_is_the_default_of_its_class():
    tf = pytest.importorskip("transformers")
    settings = {name: value for name, value in CONFIGS["qwen3.5-9b"].items() if name != "rope_parameters"}
    default = tf.AutoConfig.for_model(settings["model_type"])
    others = {"max_position_embeddings", "full_attention_interval"}
    assert {name: getattr(default, name) for name in {*settings} - others} == {
        name: value for name, value in settings.items() if name not in others
    }
    assert [i for i, kind in enumerate(default.layer_types) if kind == "full_attention"] == list(range(3, 32, 4))


def test_all_are_checked():
    assert {*BILLIONS, "tiny", "tiny-hybrid", "qwen3.5-9b"} == {*CONFIGS}


def test_a_seed_leaves_the_generators_of_gpus(monkeypatch):
    """`torch.manual_seed` seeds them all, and ranks would draw alike afterwards."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    first, second = (load_model("tiny", torch.float32, torch.device("cpu"), seed=3) for _ in range(2))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert torch.equal(torch.get_rng_state(), before)
    assert seeded == []

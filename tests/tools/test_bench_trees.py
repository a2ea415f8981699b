"""The benchmark of updates on traces (tools/bench/trees), in small, on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from dualkv.bench import trees
from dualkv.models import CONFIGS
from tests.integrations.tiny import SIZES
from tools.bench import trees as bench
from tools.bench.step import Sizes, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
NAME = "trace-tau2-1-n3-t3-x0.01"


@pytest.fixture
def sizes(monkeypatch):
    monkeypatch.setitem(CONFIGS, "smallest", SIZES | {"model_type": "qwen3", "num_hidden_layers": 1})
    return Sizes("smallest", 1, 0, 0, 0, 0, repeats=1, chunk_size=10, dtype="float32", optimizer=True)


def test_ways_compute_the_same(sizes):
    *_, figures = bench.measure(sizes, [NAME], ["replicated", "nothing", *bench.WAYS[1:]], 100, 1e9, CPU)
    made = figures["traces"][NAME]
    assert "'nothing'" in made["ways"].pop("nothing")["error"]
    for way in bench.WAYS:
        assert made["ways"][way]["logp_rms_from_first_way"] < 1e-5
    rows = {way: made["ways"][way]["rows"] for way in bench.WAYS}
    assert rows["replicated"] == made["tokens"]
    assert made["packed_tokens"] == rows["walked"] < rows["packed"] == rows["gathered"] < made["tokens"]
    assert made["ways"]["replicated"]["done_flops"] == pytest.approx(made["flops"][0])
    assert made["ways"]["packed"]["done_flops"] >= made["flops"][1]
    assert made["ways"]["packed"]["micro_batches"] > 1, "cut, which repeats tokens"
    assert made["of_flop_ratio"] == pytest.approx(made["speed_up"] / made["flop_ratio"])
    assert f"share {made['share_ratio']:.2f}" in bench.line(NAME, made)


def test_flops_are_those_of_the_weights(sizes):
    model = make_model(sizes, CPU)
    layers = sum(w.numel() for w in model.model.layers.parameters() if w.dim() > 1)
    head = model.lm_head.weight.numel()
    assert trees.flops("smallest", 7, 0, 3) == 6 * (layers * 7 + head * 3)
    config = model.config
    assert trees.flops("smallest", 0, 5, 0) == 12 * 5 * config.num_attention_heads * config.head_dim


def test_distance(sizes):
    found = bench.distance(sizes, NAME, list(bench.WAYS), 200, CPU)
    assert all(0 <= x < 1e-5 for x in found.values())
    assert found["packed"] > 0


def test_gradients_of_ways_add_up_alike(sizes):
    """By weights that differ in every token: a token in the wrong place shows."""
    trace = bench.traces.parse(NAME)
    rollouts = trace.token_sequences(SIZES["vocab_size"]), trace.loss_masks()
    weights = torch.randn(sum(int(m.sum()) for m in rollouts[1]), generator=torch.Generator().manual_seed(3))
    found = []
    for way in bench.WAYS:
        model = make_model(sizes, CPU)
        bench.prepared(model, way)
        bench.passes(way, model, bench.batches(way, *rollouts, 150, CPU), weights, False, 16, 150)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-4 * float(found[0].abs().max()))

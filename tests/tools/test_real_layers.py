"""Attention of real layers against float64: every way computes the same, and a model's features are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface

from dualkv.bench.workloads import Workload
from tests.bench.test_sides import fake_peers  # noqa: F401
from tools.bench import real_layers
from tools.bench.real_layers import NAMES, WAYS, capture, judge, markdown, packed

pytestmark = pytest.mark.usefixtures("one_thread")
GROUP = Workload("real", (30,), ((7, 5, 9),), heads=4, kv_heads=2, head_dim=16)


def drawn(scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(51, heads, 16, generator=generator) for heads in (4, 2, 2))
    return [q * scale, k, v]


def test_every_way_computes_the_same(fake_peers, monkeypatch):  # noqa: F811
    by_sdpa = real_layers.by_sdpa

    def both(rows, workload, scale, dout):
        wide = [x.double() for x in rows], workload, scale, dout.double()
        for one, other in zip(real_layers.by_fa4(*wide), by_sdpa(*wide), strict=True):
            assert float((one.float() - other).norm() / other.norm()) < 1e-3
        return by_sdpa(rows, workload, scale, dout)

    monkeypatch.setattr(real_layers, "by_sdpa", both)
    layers = [judge(drawn(scale), GROUP, 0.3) for scale in (1.0, 400.0)]
    for layer in layers:
        assert layer["error"].keys() == {"groups", "tree", "sdpa"} <= WAYS.keys()
        assert all(0 < layer["error"][way]["out"] < 1e-4 for way in layer["error"])
    assert all(0 < layers[0]["error"][way][name] < 1e-5 for way in WAYS if way != "fa4" for name in NAMES)
    assert [layer["recomputed"]["groups"]["rows"] > 0 for layer in layers] == [False, True]
    table = markdown({"dtypes": {"fp32": layers, "again": layers}})
    assert [line.split(" | ")[0][2:] for line in table.splitlines()[2:5]] == [
        WAYS[way] for way in ("groups", "tree", "sdpa")
    ]


def test_only_full_attention_is_captured():
    """A model whose layer 3 has a window, as transformers hands it to an attention function."""

    def of_model(**features):
        def forward(input_ids, use_cache):
            call = AttentionInterface()["captured"]
            q, k, v = (torch.randn(1, heads, input_ids.shape[1], 8) for heads in (4, 2, 2))
            module = SimpleNamespace(layer_idx=3, is_causal=True, num_key_value_groups=2, training=False)
            call(module, q, k, v, None, scaling=0.25, **features)

        return SimpleNamespace(base_model=forward, set_attn_implementation=lambda name: None)

    sequences = [torch.arange(6), torch.arange(7)]
    ((first, second),), scales = capture(of_model(sliding_window=None), sequences)
    assert scales == [0.25]
    assert [len(x) for x in (*first, *second)] == [6] * 3 + [7] * 3
    assert packed([first[0], second[0]], 4).shape == (4 + 2 + 3, 4, 8)
    with pytest.raises(ValueError, match="layer 3 has sliding_window"):
        capture(of_model(sliding_window=4), sequences)

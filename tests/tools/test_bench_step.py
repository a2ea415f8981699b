"""The benchmark of a step (tools/bench/step) and the attention it measures against, in small, on the CPU."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from dualkv.bench import trees
from dualkv.models import CONFIGS
from tests.integrations.tiny import make_model
from tools.bench import harness, stock_attention
from tools.bench import step as bench_step
from tools.bench.step import Update

SIZES = Update("tiny", layers=1, responses=4, prompt_len=24, response_len=6, micro_batch=2, repeats=2, chunk_size=10,
              dtype="float32")  # fmt: skip


def test_ways_compute_the_same():
    ways = ["packed", "no such way", "replicated"]
    *_, figures = bench_step.measure(SIZES, ways, torch.device("cpu"))
    rows = figures["rows"]
    assert list(rows) == ways
    assert "no such way" in rows.pop("no such way")["error"]
    for row in rows.values():
        assert row["logp_rms_from_first_row"] < 1e-5
        assert row["tflops_done"] <= row["tflops_nominal"]
    assert [rows[name]["micro_batches"] for name in ("packed", "replicated")] == [1, 2]
    assert [len(rows[name]["seconds"]) for name in ("packed", "replicated")] == [2, 1]
    assert rows["replicated"]["tflops_done"] == rows["replicated"]["tflops_nominal"]


OSS = {"model_type": "gpt_oss", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2,
       "initializer_range": 0.2, "num_hidden_layers": 2,
       "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip


def test_windows_sinks_experts_and_an_optimizer(monkeypatch):
    """Both ways compute the same, with windows, sinks and experts; the optimizer's step leaves the weights."""
    monkeypatch.setitem(CONFIGS, "tiny-oss", OSS)
    sizes = replace(SIZES, model="tiny-oss", layers=2, optimizer=True)
    assert bench_step.kinds_of(harness.make_config(sizes.model, sizes.layers)) == [(5, True), (None, True)]
    *_, figures = bench_step.measure(sizes, ["packed", "replicated"], torch.device("cpu"))
    assert figures["rows"]["replicated"]["logp_rms_from_first_row"] < 1e-5
    assert bench_step.make_config(sizes)._experts_implementation == "grouped_mm"
    pairs = 24 * 24 / 2 + 4 * (6 * 24 + 6 * 6 / 2) + 12.5 + 19 * 5 + 4 * 6 * 5
    counted = trees.flops("tiny-oss", 24 + 4 * 6, 0, 4 * 6) + 12 * pairs * 4 * 16
    assert bench_step.flops(sizes, packed=True) == pytest.approx(counted, rel=1e-3)


def test_flops_are_those_of_the_rows():
    model = bench_step.make_model(SIZES, torch.device("cpu"))
    layer = sum(w.numel() for w in model.model.layers.parameters() if w.dim() > 1)
    heads = 4 * 64
    pairs = 24 * 24 / 2 + 4 * (6 * 24 + 6 * 6 / 2)
    packed = 6 * (layer * (24 + 4 * 6) + 320 * 256 * 4 * 6) + 12 * pairs * heads
    assert bench_step.flops(SIZES, packed=True) == pytest.approx(packed)
    assert bench_step.flops(SIZES, packed=False) > 2 * packed


def test_stock_attention_of_sequences_end_to_end():
    """Three sequences, in one row and as a batch, agree with the model's own attention of each alone."""
    model, ids = make_model("qwen3"), torch.randint(3, 96, (3, 8), generator=torch.Generator().manual_seed(0))
    alone = torch.cat([model(one[None]).logits for one in ids])
    model.config._attn_implementation = {"": stock_attention.register("math", 8)}
    positions = torch.arange(8).repeat(3)[None]
    end_to_end = model(ids.view(1, -1), position_ids=positions).logits.view(3, 8, -1)
    for found in (model(ids).logits, end_to_end):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="got 6 rows, expected a multiple of the sequences' 8 tokens"):
        model(ids[:, :6])


@pytest.mark.parametrize(("window", "with_sinks"), [(3, True), (None, True), (4, False)])
def test_stock_attention_with_windows_and_sinks(monkeypatch, window, with_sinks):
    """FlexAttention, uncompiled, and what FlashAttention-4 is asked for, against scores written out."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 16, generator=draw) for heads in (4, 2, 2))
    rule = stock_attention.Rule(0.3, window, torch.randn(4, generator=draw) if with_sinks else None)
    expected = stock_attention.CALLS["math"](q, k, v, rule)
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    torch.testing.assert_close(stock_attention.CALLS["flex"](q, k, v, rule), expected, rtol=1e-5, atol=1e-5)

    def flash_attn_func(*qkv, softmax_scale, causal, window_size, learnable_sink):
        assert causal
        left, right = window_size
        assert right is None
        same = stock_attention.Rule(softmax_scale, None if left is None else left + 1, learnable_sink)
        return stock_attention.CALLS["math"](*qkv, same), None

    interface = types.ModuleType("flash_attn.cute.interface")
    interface.flash_attn_func = flash_attn_func
    for name, module in (("flash_attn", types.ModuleType("flash_attn")), ("flash_attn.cute", types.ModuleType("c"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    assert torch.equal(stock_attention.CALLS["fa4"](q, k, v, rule), expected)
    with pytest.raises(ValueError, match="no windows and no sinks"):
        stock_attention.CALLS["fa2"](q, k, v, rule)


def test_the_fastest_of_those_that_run(monkeypatch):
    def seconds(name, *shape):
        if name == "fa4":
            raise ModuleNotFoundError("No module named 'flash_attn'")
        return {"cudnn": 2.0, "flex": 1.0}[name]

    monkeypatch.setattr(stock_attention, "seconds", seconds)
    found, tried = stock_attention.fastest(1, 8, 4, 2, 16, names=["fa4", "cudnn", "flex"])
    assert (found, tried["cudnn"]) == ("flex", 2.0)
    assert "flash_attn" in tried["fa4"]
    with pytest.raises(RuntimeError, match="no attention of replicated sequences runs here"):
        stock_attention.fastest(1, 8, 4, 2, 16, names=["fa4"])

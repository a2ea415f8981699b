"""The measurement of TRL's ways of one micro-batch, in small on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # read when its prefix tree is imported
from dualkv import RowCosts
from dualkv.integrations.trl.common import Walks
from tools import filed
from tools.bench import trl as bench_trl
from tools.bench import trl_async

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def segments(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, **__: Any) -> torch.Tensor:
    """Stand in for FlashAttention, whose causal mask ends at the last key: one segment after another."""
    out = []
    for i in range(len(cu_q) - 1):
        # [H, n, D] of a segment's queries, [Hk, m, D] of the keys of its path
        own = q[cu_q[i] : cu_q[i + 1]].transpose(0, 1)
        keys, values = (x[cu_k[i] : cu_k[i + 1]].transpose(0, 1) for x in (k, v))
        n, m = own.shape[1], keys.shape[1]
        mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        given = {"attn_mask": mask, "scale": softmax_scale, "enable_gqa": True}
        out.append(torch.nn.functional.scaled_dot_product_attention(own, keys, values, **given).transpose(0, 1))
    return torch.cat(out)


def test_three_ways_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_trl.FlashAttention4, "flash_attn_varlen_func", staticmethod(segments))
    bench_trl.main(
        tmp_path / "trl.json",
        model="tiny",
        groups=2,
        responses=3,
        prompt_len=24,
        response_len=8,
        dtype="float32",
        steps=1,
    )
    recorded = filed.read(tmp_path / "trl.json")
    ways = recorded["ways"]
    assert list(ways) == ["padded", "tree", "packed"]
    lens = [len(r) for r in bench_trl.make_rollouts(bench_trl.Settings(**recorded["settings"])).responses]
    assert ways["padded"]["rows"] == 6 * (24 + 8)
    assert ways["packed"]["rows"] == ways["tree"]["rows"] == 2 * 23 + sum(lens) + 6
    for figures in ways.values():
        assert figures["loss"] == pytest.approx(ways["padded"]["loss"], rel=1e-5, abs=1e-6)
        assert figures["gradient_norm"] == pytest.approx(ways["padded"]["gradient_norm"], rel=1e-4)
        assert figures["mean_log_prob_difference_to_first"] < 1e-5
        assert figures["seconds"]["median"] > 0
    assert ways["padded"]["gradient_norm"] > 1e-3


def test_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of several turns: tool outputs do not count, and more than prompts is shared."""
    monkeypatch.setattr(bench_trl.FlashAttention4, "flash_attn_varlen_func", staticmethod(segments))
    names = ["trace-search-0-n6-x0.02", "trace-tau2-1-n2-t3-x0.02"]
    path = tmp_path / "trl.json"
    bench_trl.main(path, model="tiny", layers=1, trace=names, dtype="float32", steps=1, distance=names[:1])
    found = filed.read(path)["traces"]
    assert list(found) == names
    for made in found.values():
        ways = made["ways"]
        assert list(ways) == ["padded", "tree", "packed"]
        for figures in ways.values():
            assert figures["loss"] == pytest.approx(ways["padded"]["loss"], rel=1e-5, abs=1e-6)
            assert figures["mean_log_prob_difference_to_first"] < 1e-5
    search, tau2 = (found[name]["ways"] for name in names)
    assert search["padded"]["gradients_from_fp32"] < 1e-6
    assert 0 < search["packed"]["gradients_from_fp32"] < 1e-4
    assert "gradients_from_fp32" not in tau2["packed"]
    assert search["packed"]["rows"] < search["padded"]["rows"]
    assert search["packed"]["rows"] == search["tree"]["rows"]
    # Of this small trace some parts are too short to be shared.
    assert tau2["tree"]["rows"] <= tau2["packed"]["rows"] < 1.1 * tau2["tree"]["rows"] < 0.3 * tau2["padded"]["rows"]
    with pytest.raises(typer.BadParameter, match="nothing"):
        bench_trl.main(path, model="tiny", trace=["nothing"])


def test_gradients_in_fp32_are_those_of_the_same_weights(tmp_path: Path) -> None:
    path, name = tmp_path / "trl.json", "trace-search-0-n3-x0.02"
    bench_trl.main(path, model="tiny", layers=1, ways=["padded", "packed"], distance=[name], steps=1)
    ways = filed.read(path)["traces"][name]["ways"]
    assert all(1e-4 < made["gradients_from_fp32"] < 0.05 for made in ways.values()), ways


def test_a_way_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured."""
    monkeypatch.setattr(bench_trl, "of_tree", lambda *_: 1 / 0)
    path = tmp_path / "trl.json"
    bench_trl.main(path, model="tiny", layers=1, trace=["trace-search-0-n3-x0.02"], dtype="float32", steps=1)
    ways = filed.read(path)["traces"]["trace-search-0-n3-x0.02"]["ways"]
    assert ways["tree"] == {"error": "ZeroDivisionError: division by zero"}
    assert {"padded", "packed"} == {way for way, made in ways.items() if "seconds" in made}


def test_asynchronous_trainers_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both trainers, and the stock model on every path alone, make the same of a trace."""
    monkeypatch.setattr(bench_trl.FlashAttention4, "flash_attn_varlen_func", staticmethod(segments))
    monkeypatch.setattr(trl_async.theirs, "get_peak_flops_per_device", lambda *_: None)
    name, path = "trace-tau2-1-n2-t3-x0.02", tmp_path / "async.json"
    given = {"model": "tiny", "layers": 1, "dtype": "float32", "autocast": False, "turns": 1, "seconds": 0.0}
    trl_async.main(path, trace=[name], distance=[name], **given)
    found = filed.read(path)
    timed, apart = found["traces"][name], found["distance"][name]
    assert found["refused"] == {}
    assert all(timed[way]["median"] > 0 for way in ("trl", "dualkv"))
    for figures in (timed["dualkv"], apart["trl"], apart["dualkv"]):
        assert 0 < figures["gradients_apart"] < 1e-5
        assert figures["log_probs_apart"]["max"] < 1e-5


def test_ways_of_a_group_larger_than_a_micro_batch_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = RowCosts(kept=0.1, path=0, graph=1, recomputed=1)
    monkeypatch.setattr(Walks, "_costs", lambda *_: costs)
    made = bench_trl.of_trainer

    def of_trainer(*args: Any) -> bench_trl.Step:
        few = [30.0] if len(args) == 6 else []  # bytes, in place of what resident memory says of so small a model
        return made(*args[:5], *few)

    monkeypatch.setattr(bench_trl, "of_trainer", of_trainer)
    shape = {"responses": 4, "prompt_len": 24, "response_len": 8, "shortest": 8, "micro_batch": 2, "steps": 1}
    ways = ["padded", "split", "walked:1.3"]
    bench_trl.main(tmp_path / "trl.json", model="tiny", dtype="float32", ways=ways, **shape)
    found = filed.read(tmp_path / "trl.json")["ways"]
    assert [found[way]["rows"] for way in ways] == [4 * 32, 2 * (23 + 2 * 9), 23 + 4 * 9]
    for figures in found.values():
        assert figures["gradient_norm"] == pytest.approx(found["padded"]["gradient_norm"], rel=1e-4)
        assert figures["mean_log_prob_difference_to_first"] < 1e-5

"""The measurement of TRL's ways of one micro-batch, in small on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # read when its prefix tree is imported
from tests.integrations.trl.test_async_grpo import varlen
from tools import filed
from tools.bench import trl as bench_trl
from tools.bench import trl_async

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def test_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of several turns: tool outputs do not count, and more than prompts is shared."""
    monkeypatch.setattr(bench_trl.FlashAttention4, "flash_attn_varlen_func", staticmethod(varlen))
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


def test_asynchronous_trainers_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both trainers, and the stock model on every path alone, make the same of a trace."""
    monkeypatch.setattr(bench_trl.FlashAttention4, "flash_attn_varlen_func", staticmethod(varlen))
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

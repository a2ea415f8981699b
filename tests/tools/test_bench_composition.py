"""The composition beside an earlier one: sides that compute the same, and the table of their times."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from dualkv.bench import run, sides
from dualkv.bench.workloads import DIRECTIONS, parse
from dualkv.ops import backends
from tests.bench.fake import Fp32Inputs
from tools.bench import composition

EARLIER = """
from __future__ import annotations

from dataclasses import dataclass

from dualkv.ops.reference import backward as _backward, forward

@dataclass
class Part:
    rows: int

def parts(segments):
    return segments.cached(("composition", "cpu", None), lambda: "earlier")

def backward(*call):
    *others, deterministic = call
    assert deterministic is False
    assert parts(call[6]) == "earlier"
    return _backward(*others)
"""


@pytest.fixture
def earlier(tmp_path):
    path = tmp_path / "composition.py"
    path.write_text(EARLIER)
    return composition.load(path)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_earlier_composition_is_compared_with_todays(monkeypatch, earlier, direction):
    monkeypatch.setitem(backends.BACKENDS, "flash", backends.BACKENDS["reference"])
    made = Fp32Inputs(parse("30:5,9;11:4").with_shape(heads=4, kv_heads=2, head_dim=16))
    with torch.no_grad():
        now = sides.SIDES[composition.NOW](made, direction)
        now.call()
        made.layout._segments.cached(("composition", "cpu", None), lambda: "today's")
        side = composition.before(earlier, made, direction)
        assert run.run_checked(side, now.results()) < 1e-6
        assert list(now.parts) == (["merge"] if direction == "fwd" else [])
        for part in now.parts.values():
            part()


def test_an_earlier_composition_has_no_features(earlier):
    workload = replace(parse("30:5,9").with_shape(heads=4, kv_heads=2, head_dim=16), window=4)
    with pytest.raises(ValueError, match="full attention"):
        composition.before(earlier, Fp32Inputs(workload), "fwd")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.py"):
        composition.load(tmp_path / "missing.py")


def test_an_ampere_card_is_stood_in_for(monkeypatch):
    import torch._inductor.config as config
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic as Heuristic

    monkeypatch.setattr(config, "force_disable_caches", False)
    monkeypatch.setenv("DISABLE_MMA_V3", "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for name in ("get_flex_attn_fwd_configs", "get_flex_attn_bwd_configs"):
        monkeypatch.setattr(Heuristic, name, getattr(Heuristic, name))
    tiles, hopper = Heuristic(), Heuristic().get_flex_attn_bwd_configs(128, torch.bfloat16)
    composition.as_ampere()
    assert (os.environ["DISABLE_MMA_V3"], config.force_disable_caches) == ("1", True)
    assert tiles.get_flex_attn_bwd_configs(128, torch.bfloat16) != hopper
    assert tiles.get_flex_attn_fwd_configs(64, torch.bfloat16) == [tiles.a100_default_flex_config[torch.bfloat16, 64]]
    assert torch.cuda.get_device_capability() == (9, 0)


def test_times_over_the_compositions():
    def result(direction, **ms):
        of = {name: {"sustained_ms": value} for name, value in ms.items()}
        return {"workload": {"name": "w"}, "direction": direction, "sides": of}

    whole = result("fwd", **{composition.FLEX: 24.0})
    now = {"sustained_ms": 20.0, "cold_ms": 18.0, "parts": {"merge": {"cold_ms": 0.45, "in_total": True}}}
    whole["sides"] |= {composition.NOW: now, composition.REPLICATED: {"error": "too large"}}
    failed = result("bwd", **{composition.FLEX: 30.0})
    failed["sides"][composition.NOW] = {"error": "it failed"}
    rows = composition.table([whole, failed]).splitlines()[2:]
    assert rows[0] == "| w, fwd | 20.00 | 2.5% |  | 24.00: 1.20 |"
    assert rows[1] == "| w, bwd | it failed |  |  |  |"

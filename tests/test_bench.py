"""The benchmark without a GPU: work counted against brute force, peers that compute the same, figures and JSON."""

from __future__ import annotations

import io
import json
import re
import statistics
import subprocess
import sys
import types

import pytest
import torch
import torch.utils.flop_counter  # before aten ops are replaced below: it looks them up
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import dualkv
from tools import bench, peers
from tools.workloads import NAMED, Workload, parse

LENS = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=4)


# ---------------------------------------------------------------- workloads
@settings(deadline=None)
@given(LENS)
def test_flops_against_brute_force(groups):
    workload = Workload("x", tuple(p for p, _ in groups), tuple(tuple(r) for _, r in groups), 6, 2, 40)
    pairs, row = 0, 0
    for prompt, responses in groups:
        prompt_rows = range(row, row + prompt)
        row += prompt
        pairs += sum(1 for q in prompt_rows for k in prompt_rows if k <= q)
        for length in responses:
            own = range(row, row + length)
            row += length
            pairs += sum(1 for q in own for k in (*prompt_rows, *own) if k <= q)
    assert workload.visible_pairs() == pairs
    assert workload.forward_flops() == pairs * 6 * 40 * 4


def test_the_main_workload_has_the_known_work():
    assert NAMED["n32-p8192-r2048"].forward_flops() == pytest.approx(10.45e12, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "prompts", "responses"),
    [
        ("8192:32x2048", (8192,), ((2048,) * 32,)),
        ("700:130,911;40:", (700, 40), ((130, 911), ())),
        (" 5 : 2 x 3 , 4", (5,), ((3, 3, 4),)),
        ("0:7", (0,), ((7,),)),
    ],
)
def test_workloads_by_lengths(text, prompts, responses):
    workload = parse(text)
    assert (workload.prompt_lens, workload.response_lens) == (prompts, responses)


@pytest.mark.parametrize("text", ["n32", "5", "a:1", "5:1,,2", "5:x3", "5:2x", ";", "5:-1", "5:1.5"])
def test_bad_workloads(text):
    with pytest.raises(ValueError, match=re.escape(f"workload {text!r} is neither a name such as")):
        parse(text)


def test_bad_shapes():
    with pytest.raises(ValueError, match="no tokens"):
        parse("0:")
    for change in ({"heads": 9}, {"head_dim": 84}, {"dtype": "fp32"}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} is"):
            NAMED["n32-p8192-r2048"].with_shape(**change)
    assert NAMED["n32-p8192-r2048"].with_shape(heads=64, dtype=None).name == "n32-p8192-r2048 heads=64"


# ---------------------------------------------------------------- peers
def _dense(q, k, v, scale, causal):
    """Attention of one sequence, the last query on the last key if causal; out [n, H, D], lse [H, n]."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    if causal:
        n, m = q.shape[0], k.shape[0]
        hidden = torch.arange(m) > torch.arange(n)[:, None] + m - n
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(q.dtype), scores.logsumexp(-1)


def _varlen(q, k, v, cu_q, cu_k, scale, causal):
    spans = [zip(c[:-1].tolist(), c[1:].tolist(), strict=True) for c in (cu_q, cu_k)]
    parts = [_dense(q[a:b], k[c:d], v[c:d], scale, causal) for (a, b), (c, d) in zip(*spans, strict=True)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


@pytest.fixture
def fake_peers(monkeypatch):
    """FlashAttention-4 and PyTorch's FlashAttention as plain PyTorch; nothing is compiled."""

    def fa4(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse):
        assert return_lse
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        return (*_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal), None, None, None)

    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = fa4
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)

    def aten(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
        return _varlen(q, k, v, cu_q, cu_k, scale, causal)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten)
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(peers.hopper, "unsupported", lambda q, segments: None)


PEER_WORKLOADS = ["40:7,1,33", "30:5,0,9;0:11,4;21:;1:6", "16:", "0:12"]


@pytest.mark.parametrize("name", peers.SIDES)
@pytest.mark.parametrize("text", PEER_WORKLOADS)
def test_every_side_computes_the_same(fake_peers, text, name):
    workload = parse(text).with_shape(heads=4, kv_heads=2, head_dim=16)
    inputs = peers.Inputs(workload, "cpu")
    inputs.q, inputs.k, inputs.v = (x.float() for x in (inputs.q, inputs.k, inputs.v))
    expected = dualkv.attention(inputs.q, inputs.k, inputs.v, inputs.layout)
    side = peers.SIDES[name](inputs)
    assert peers.run_checked(side, expected) < 1e-5
    for part in side.parts.values():
        part()
    assert set(side.extra) <= {*side.parts, "merge"}


def test_unwritten_output_is_an_error():
    side = peers.Side(lambda: None, lambda: torch.tensor([1.0, float("nan")]))
    with pytest.raises(RuntimeError, match="not written"):
        peers.run_checked(side, None)


# ---------------------------------------------------------------- figures
class Event:
    """A call of `ms` milliseconds on a GPU that is not there."""

    ms = 2.0

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return self.ms


@pytest.fixture
def no_gpu(monkeypatch):
    def timed(call):
        call()
        return Event(), Event()

    monkeypatch.setattr(bench, "_timed", timed)
    monkeypatch.setattr(bench, "PAUSE", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    class CpuInputs(peers.Inputs):
        def __init__(self, workload):
            super().__init__(workload, "cpu")

    monkeypatch.setattr(peers, "Inputs", CpuInputs)


def constant(value, parts=()):
    def make(inputs):
        out = torch.full_like(inputs.q, value)
        return peers.Side(lambda: None, lambda: out, {p: lambda: None for p in parts}, extra=("merge",))

    return make


def broken(inputs):
    raise NotImplementedError("head_dim 16 is not supported")


class FakeMeter(bench.Meter):
    def __init__(self):
        self.absent, self.total = None, 0.0

    def joules(self):
        self.total += 5.0
        return self.total

    def state(self):
        return {"sm_clock_mhz": 1500, "power_w": 690.0, "temperature_c": 60}

    def driver(self):
        return "580.1"


def run(monkeypatch, sides, limit=None, meter=None):
    monkeypatch.setattr(peers, "SIDES", sides)
    workload = parse("20:5,9").with_shape(heads=2, kv_heads=1, head_dim=16)
    said = []
    result = bench.bench(workload, list(sides), 0.01, 3, bench.Clock(limit), meter or FakeMeter(), said.append)
    assert len(said) == len(sides) * 5
    return workload, result


def test_figures_of_sides_in_turns(no_gpu, monkeypatch):
    sides = {"dualkv": constant(1.0), "fa4-3-calls": constant(1.25, ["own", "merge"]), "flex": broken}
    workload, result = run(monkeypatch, sides)
    mine, theirs, failed = result["sides"].values()
    flops = workload.forward_flops()
    assert mine["sustained_ms"] == theirs["sustained_ms"] == mine["cold_ms"] == 2.0
    assert mine["sustained_tflops"] == pytest.approx(flops / 2e-3 / 1e12)
    assert [len(side["rounds"]) for side in (mine, theirs)] == [3, 3]
    assert mine["joules"] == pytest.approx(5.0 / statistics.median(r["calls"] for r in mine["rounds"]))
    assert mine["sm_clock_mhz"] == 1500
    assert mine["speed_against_reference"] == 1.0
    assert theirs["max_difference"] == 0.25
    assert theirs["parts"] == {"own": {"cold_ms": 2.0, "in_total": True}, "merge": {"cold_ms": 2.0, "in_total": False}}
    assert failed == {"error": "NotImplementedError: head_dim 16 is not supported"}


def test_sustained_is_the_median_of_rounds(monkeypatch):
    rounds = [{"ms": ms, "calls": 9, "joules": j} for ms, j in ((3.0, 1.0), (1.0, 7.0), (2.0, 4.0))]
    figures = bench.summary(4.0, 33.0, rounds, 8_000_000_000)
    assert figures["sustained_ms"] == 2.0
    assert figures["sustained_tflops"] == pytest.approx(4.0)
    assert figures["cold_tflops"] == pytest.approx(2.0)
    assert figures["joules"] == 4.0
    assert figures["host_us"] == 33.0


def test_the_time_limit_is_reported_not_silent(no_gpu, monkeypatch):
    _, result = run(monkeypatch, {"dualkv": constant(1.0), "flex": constant(1.0)}, limit=-1.0)
    assert all("time limit" in side["error"] for side in result["sides"].values())


def test_without_nvml_the_figures_go_without_energy(no_gpu, monkeypatch):
    meter = bench.Meter()  # this machine has no GPU, or the test's fake sides use none
    meter.absent = "NVMLError: no driver"
    _, result = run(monkeypatch, {"dualkv": constant(1.0)}, meter=meter)
    assert "joules" not in result["sides"]["dualkv"]
    assert result["sides"]["dualkv"]["sustained_ms"] == 2.0


def test_table_shows_every_side(no_gpu, monkeypatch):
    _, result = run(monkeypatch, {"dualkv": constant(1.0, ["own", "merge"]), "flex": broken})
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(bench.table(result))
    text = console.export_text()
    assert "own 2.000, + merge 2.000" in text
    assert "head_dim 16 is not supported" in text


def test_environment_names_what_was_used():
    found = bench.environment(None)
    assert set(found) == {"date", "commit", "changed_files", "gpu", "python", "cuda", "versions"}
    assert torch.__version__.startswith(found["versions"]["torch"])  # which may lack the build, as +cu130
    assert set(found["versions"]) == set(peers.PACKAGES)


# ---------------------------------------------------------------- command line
def command(*arguments):
    app = typer.Typer()
    app.command()(bench.main)
    return CliRunner().invoke(app, arguments)


def test_command_line_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "n28-p4096-r2048" in command("--list").output
    assert command("--list", "-w", "5:2x3", "--head-dim", "80").exit_code == 0
    for arguments, says in (
        (["-w", "nothing"], "neither a name"),
        (["--head-dim", "84"], "head_dim is 84"),
        (["-s", "cudnn"], "none of dualkv, fa4-3-calls"),
    ):
        done = command(*arguments)
        assert done.exit_code == 2
        assert says in " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())
    done = command()
    assert done.exit_code == 1
    assert "this machine has none" in " ".join(done.output.split())


def test_json_report(no_gpu, monkeypatch, tmp_path):
    properties = types.SimpleNamespace(name="H200", multi_processor_count=132, total_memory=2**37)
    for name, value in (
        ("is_available", lambda: True),
        ("current_device", lambda: 0),
        ("get_device_properties", lambda device: properties),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(bench, "Meter", FakeMeter)
    monkeypatch.setattr(peers, "SIDES", {"dualkv": constant(1.0), "flex": broken})
    path = tmp_path / "new" / "forward.json"
    done = command(
        "-w", "20:5", "-w", "9:", "--head-dim", "16", "--seconds", "0.1", "--rounds", "1", "--json", str(path)
    )
    assert done.exit_code == 0, done.output
    assert "not (all) measured: flex" in done.output
    report = json.loads(path.read_text())
    assert report["schema"] == bench.SCHEMA
    assert set(report) == {*bench.environment(None), "schema", "settings", "results"}
    assert report["gpu"] == {
        "name": "H200", "multiprocessors": 132, "memory_gib": 128.0, "driver": "580.1", "nvml": "present",
    }  # fmt: skip
    assert report["settings"] == {"seconds": 0.1, "rounds": 1, "time_limit": None, "sides": ["dualkv", "flex"]}
    assert [result["workload"]["name"] for result in report["results"]] == ["20:5 head_dim=16", "9: head_dim=16"]
    for result in report["results"]:
        assert set(result) == {"workload", "reference", "sides"}
        assert set(result["workload"]) == {
            "name", "prompt_lens", "response_lens", "heads", "kv_heads", "head_dim", "dtype",
            "tokens", "dedup_ratio", "forward_flops",
        }  # fmt: skip
        assert set(result["sides"]["dualkv"]) == {
            "compared_with", "parts", "cold_ms", "cold_tflops", "host_us", "rounds", "sustained_ms",
            "sustained_tflops", "joules", "sm_clock_mhz", "power_w", "temperature_c",
        }  # fmt: skip
        assert set(result["sides"]["flex"]) == {"error"}


def test_module_runs():
    done = subprocess.run([sys.executable, "-m", "tools.bench", "--help"], capture_output=True, text=True, check=True)
    assert "--time-limit" in done.stdout

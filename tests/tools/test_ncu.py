"""tools.ncu without a GPU: profiles recorded on an H200 and cut short, and an ncu that only plays back."""

from __future__ import annotations

import json
import re
import stat
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from codegen.tiles import BACKWARD_TILES, FEW_KEYS_FORWARD_TILES, FEW_KEYS_TILES, FORWARD_TILES
from dualkv.bench.workloads import parse
from dualkv.ops import hopper
from tools import filed
from tools.ncu import collect, metrics
from tools.ncu.__main__ import app
from tools.ncu.job import Job

ROOT = Path(__file__).parents[2]
FORWARD = ROOT / "tests" / "files" / "ncu"


def cli(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def figures(kernel: metrics.Kernel) -> dict[str, float | None]:
    return {figure.name: figure.of(kernel) for figure in metrics.FIGURES}


# ---------------------------------------------------------------- reading
def test_the_forward_of_an_h200():
    profile = metrics.read(FORWARD)
    (kernel,) = profile.kernels
    shown = figures(kernel)
    assert kernel.operation == "fwd"
    # The recorded cells, by hand: ns, 32-byte sectors, bytes.
    raw = dict(metrics.read_csv((FORWARD / "metrics.csv").read_text())[0][1])
    assert shown["duration, ms"] == raw["gpu__time_duration.sum"] / 1e6
    assert shown["L2 reads, GB"] == raw["lts__t_sectors_srcunit_tex_op_read.sum"] * 32 / 1e9
    assert shown["DRAM reads, GB"] == raw["dram__bytes_read.sum"] / 1e9
    flops = profile.job.workload.flops("fwd")
    assert shown["TFLOP/s, useful work"] == pytest.approx(flops / raw["gpu__time_duration.sum"] / 1e3)
    assert 500 < shown["TFLOP/s, useful work"] < 989
    assert 1 <= shown["executed / useful FLOP"] < 1.2
    assert shown["local memory requests"] == 0


def test_predictions_hold_on_the_h200():
    """The model's bytes between L2 and SMs are those that were counted, and the tensor cores' peak fits ncu's share."""
    (kernel,) = metrics.read(FORWARD).kernels
    shown = figures(kernel)
    assert shown["L2 reads, GB"] == pytest.approx(shown["L2 reads predicted, GB"], rel=0.1)
    busy = kernel.ops / kernel.seconds / kernel.peaks["tensor"]
    assert 100 * busy == pytest.approx(shown["tensor pipe busy, %"], rel=0.02)
    stalls = kernel.stalls()
    assert stalls == sorted(stalls, key=lambda item: -item[1])
    assert 0.5 < sum(share for _, share in stalls) < 1


# ---------------------------------------------------------------- the model
def test_report_as_json(tmp_path):
    json_to = tmp_path / "figures.json"
    done = cli("report", FORWARD, "--json", json_to)
    assert done.exit_code == 0, done.output
    figures = filed.read(json_to)
    assert figures["gpu"]["name"] == "NVIDIA H200"
    (profile,) = figures["profiles"]
    (kernel,) = profile["kernels"]
    assert kernel["operation"] == "fwd"
    table = [line for line in done.output.splitlines() if line.startswith("|")]
    assert re.match(r"\| duration, ms \| \d+\.\d{3} \|", table[2])


# ---------------------------------------------------------------- running ncu
PLAYBACK = """#!{python}
import pathlib, sys
data, log = pathlib.Path({data!r}), pathlib.Path({log!r})
with log.open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if "--version" in sys.argv:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)")
elif "raw" in sys.argv:
    print((data / "metrics.csv").read_text())
else:
    pathlib.Path(sys.argv[sys.argv.index("--export") + 1]).write_text("a report")
"""


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Pretend that a Hopper GPU is here, and that kernels are compiled."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(hopper, "device_unsupported", lambda device: None)
    monkeypatch.setattr(collect.store, "entry", lambda spec: tmp_path)
    monkeypatch.setattr(collect, "Meter", lambda: None)
    about = json.loads((FORWARD / "about.json").read_text())
    (tmp_path / "kernel.cubin").touch()
    described = types.SimpleNamespace(function=about["symbols"]["fwd"])
    monkeypatch.setattr(collect.cubin, "resources", lambda code: described)
    monkeypatch.setattr(collect, "environment", lambda meter: {"gpu": about["gpu"], "commit": "abc"})


def install(monkeypatch, folder: Path, script: str) -> None:
    path = folder / "bin" / "ncu"
    path.parent.mkdir()
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(path.parent))


def test_run_leaves_a_profile(monkeypatch, tmp_path, gpu):
    log = tmp_path / "log"
    install(monkeypatch, tmp_path, PLAYBACK.format(python=sys.executable, data=str(FORWARD), log=str(log)))
    done = cli("run", tmp_path / "out", "-w", "8192:32x512")
    assert done.exit_code == 0, done.output
    assert "TFLOP/s, useful work" in done.output
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"about.json", "report.ncu-rep", "metrics.csv"}
    profile = metrics.read(tmp_path / "out")
    assert (profile.about["ncu"], profile.about["commit"]) == ("2025.3.1.0 (build 1)", "abc")
    ran = log.read_text().splitlines()[0]
    assert "--clock-control none" in ran, "the card's clocks are left alone"
    assert "--profile-from-start off" in ran
    assert "tools.ncu.target" in ran


def test_a_job_profiles_the_kernels_that_its_layout_takes(monkeypatch):
    short, long = (Job(parse(name), "bwd") for name in ("g128-n8-short", "n32-p8192-r2048"))
    assert short.specs()["bwd"].tile == FEW_KEYS_TILES[128] != BACKWARD_TILES[128]
    assert long.specs()["bwd"].tile == BACKWARD_TILES[128]
    of_forwards = [Job(job.workload, "fwd") for job in (short, long)]
    found = [job.specs()["fwd"].tile for job in of_forwards]
    assert found == [FEW_KEYS_FORWARD_TILES[128], FORWARD_TILES[128]]
    with pytest.raises(ValueError, match="the forward of 5 query heads a KV head is two launches here"):
        Job(parse("n24-p3000-r1500-gqa5"), "fwd").specs()
    for table in (BACKWARD_TILES, FEW_KEYS_TILES, FORWARD_TILES, FEW_KEYS_FORWARD_TILES):
        for head_dim, tile in table.copy().items():
            monkeypatch.setitem(table, head_dim, tile)  # put back afterwards
    tuned = Job(short.workload, "bwd", tile={"tile_m": 64})
    tuned.use_tile()
    assert tuned.specs()["bwd"].tile == replace(long.specs()["bwd"].tile, tile_m=64) == BACKWARD_TILES[128]
    tuned = Job(short.workload, "fwd", tile={"tile_n": 48})
    tuned.use_tile()
    assert tuned.specs()["fwd"].tile == replace(of_forwards[1].specs()["fwd"].tile, tile_n=48) == FORWARD_TILES[128]

"""Figures of sides in turns on a GPU that is not there, and what `dualkv bench` makes of them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types

import pytest
import torch

from dualkv.bench import inputs, run, sides, timing
from dualkv.bench.workloads import DIRECTIONS, NAMED, parse
from tests.bench.fake import ROLLOUTS, Fp32Inputs


class Event:
    """A call of `ms` milliseconds on a GPU that is not there."""

    ms, polls = 2.0, 7

    def synchronize(self):
        pass

    def query(self):
        """Report False for some polls, then True."""
        self.polls -= 1
        return self.polls < 0

    def elapsed_time(self, end):
        return self.ms


@pytest.fixture
def no_gpu(monkeypatch):
    def timed(call):
        call()
        return Event(), Event()

    monkeypatch.setattr(timing, "timed", timed)
    monkeypatch.setattr(timing, "PAUSE", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(inputs, "Inputs", Fp32Inputs)


def constant(value, parts=()):
    def make(inputs, direction):
        out = torch.full_like(inputs.q, value)
        return inputs_side(out, parts)

    def inputs_side(out, parts):
        return inputs.Side(lambda: None, lambda: (out,), {p: lambda: None for p in parts}, extra=("merge",))

    return make


def parses_arguments(inputs, direction):
    """Parse the program's arguments, as the DSL of FlashAttention-4 does when it compiles."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-diagnostic", choices=["all", "fail"])
    parser.parse_known_args()
    return constant(1.0)(inputs, direction)


def broken(inputs, direction):
    raise NotImplementedError("head_dim 16 is not\n supported")


def missing(inputs, direction):
    raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")


class FakeMeter(timing.Meter):
    def __init__(self):
        self.taken = 0

    def sample(self):
        """690 W by a counter that moves at every third sample, 0.1 s apart."""
        self.taken += 1
        at = self.taken / 30
        return [timing.Sample(at, 69.0 * (self.taken // 3), 1500, 60)]

    def limits(self):
        return {"driver": "580.1", "nvml": "present", "max_sm_clock_mhz": 1980, "power_limit_w": 700.0}


def measured(monkeypatch, makers, limit=None, meter=None, direction="fwd"):
    monkeypatch.setattr(sides, "SIDES", makers)
    workload = parse("20:5,9").with_shape(heads=2, kv_heads=1, head_dim=16)
    done = []

    def track(items, what, total):
        items = list(items)
        assert len(items) == total
        for item in items:
            yield item
            done.append(item)

    clock, meter = timing.Clock(limit), meter or FakeMeter()
    result = run.bench(workload, direction, list(makers), 0.01, 3, clock, meter, track)
    assert len(done) == len(makers) * 4
    return workload, result


def test_sides_do_not_see_the_options_of_the_program(no_gpu, monkeypatch):
    given = ["dualkv", "bench", "-d", "bwd"]
    monkeypatch.setattr(sys, "argv", given)
    _, result = measured(monkeypatch, {"dualkv": constant(1.0), "fa4-3-calls": parses_arguments})
    assert not any("error" in figures for figures in result["sides"].values())
    assert sys.argv is given


def test_figures_of_sides_in_turns(no_gpu, monkeypatch):
    makers = {"dualkv": constant(1.0), "fa4-3-calls": constant(1.01, ["own", "merge"]), "flex": broken}
    for direction in DIRECTIONS:
        workload, result = measured(monkeypatch, makers, direction=direction)
        mine, theirs, failed = result["sides"].values()
        flops = workload.flops(direction)
        assert (result["direction"], result["flops"]) == (direction, flops)
        assert mine["sustained_ms"] == theirs["sustained_ms"] == mine["cold_ms"] == 2.0
        assert mine["sustained_tflops"] == pytest.approx(flops / 2e-3 / 1e12)
        assert [len(side["rounds"]) for side in (mine, theirs)] == [3, 3]
        assert all(r["calls"] >= timing.MIN_CALLS for r in mine["rounds"])
        assert mine["power_w"] == pytest.approx(690.0)
        assert 0 < mine["joules"] < 690.0
        assert mine["sm_clock_mhz"] == 1500
        assert mine["speed_against_reference"] == 1.0
        assert theirs["difference"] == pytest.approx(0.01)
        assert theirs["parts"] == {
            "own": {"cold_ms": 2.0, "in_total": True}, "merge": {"cold_ms": 2.0, "in_total": False},
        }  # fmt: skip
        assert failed == {"error": "NotImplementedError: head_dim 16 is not supported"}


def test_the_first_turn_follows_one_of_the_last_side(no_gpu, monkeypatch):
    """The figures of no side come after a pause, when the card takes more power for a while."""
    calls, turns = [], []

    def maker(inputs, direction):
        side = constant(1.0)(inputs, direction)
        calls.append(side.call)
        return side

    def sustained(call, *rest):
        turns.append(calls.index(call))
        return {"ms": float(len(turns)), "calls": 1}

    monkeypatch.setattr(run, "sustained", sustained)
    _, result = measured(monkeypatch, {"dualkv": maker, "flex": maker})
    assert turns == [1, 0, 1, 0, 1, 0, 1]
    rounds = {name: [turn["ms"] for turn in side["rounds"]] for name, side in result["sides"].items()}
    assert rounds == {"dualkv": [2.0, 4.0, 6.0], "flex": [3.0, 5.0, 7.0]}


def test_a_side_that_computes_something_else_is_not_timed(no_gpu, monkeypatch):
    _, result = measured(monkeypatch, {"dualkv": constant(1.0), "flex": constant(1.25)})
    assert "sustained_ms" not in result["sides"]["flex"]
    assert "computes something else" in result["sides"]["flex"]["error"]


def test_energy_is_counted_between_movements_of_its_counter():
    """A counter that moves every 0.1 s, read every 0.01 s in a turn of 0.35 s: 4 movements, or 3 by a bad start."""
    for start in (0.0, 0.03, 0.08):
        times = [start + 0.01 * i for i in range(36)]
        samples = [timing.Sample(t, 1000.0 + 70.0 * int(t * 10 + 1e-9), 1600 + i % 3, 55) for i, t in enumerate(times)]
        figures = timing.energy(samples, 0.007)
        assert figures["power_w"] == pytest.approx(700.0)
        assert figures["joules"] == pytest.approx(4.9)
        assert figures["sm_clock_mhz"] == 1601
    assert set(timing.energy(samples[:9], 0.007)) == {"sm_clock_mhz", "temperature_c"}, "one movement tells nothing"
    assert timing.energy([], 0.007) == {}


def test_what_the_time_limit_leaves_out_is_said(fake_gpu, dualkv_bench, monkeypatch, tmp_path):
    monkeypatch.setattr(timing.Clock, "up", property(lambda self: self.limit is not None))
    monkeypatch.setattr(timing.Clock, "check", lambda self: None)
    words = ["-w", "20:5", "-w", "9:", "-d", "fwd,bwd", "-s", "dualkv", "--seconds", 0.1, "--rounds", 1]
    code, _, err = dualkv_bench(*words, "--time-limit", 7, "--json", tmp_path / "b.json")
    assert code == 0
    assert "the time limit of 7 s left out 3 of 4 results" in err
    report = json.loads((tmp_path / "b.json").read_text())
    assert (report["asked"], len(report["results"])) == (4, 1), "one is always begun"


def test_environment_names_what_was_used(tmp_path, monkeypatch):
    found = run.environment(None)
    assert set(found) == {
        "date", "commit", "changed_files", "gpu", "python", "cuda", "versions",
    }  # fmt: skip
    assert torch.__version__.startswith(found["versions"]["torch"])  # which may lack the build, as +cu130
    assert set(found["versions"]) == set(run.PACKAGES)
    monkeypatch.setattr(run, "STAMP", tmp_path / ".stamp.json")  # this checkout may have one
    monkeypatch.setattr(run, "_git", lambda *arguments: {"rev-parse": "a" * 40, "status": "M x"}.get(arguments[0], ""))
    found = run.environment(None)
    assert (found["commit"], found["changed_files"]) == ("a" * 40, ["M x"])
    # Installed inside a checkout of something else, which does not track this code.
    monkeypatch.setattr(run, "_git", lambda *arguments: None if arguments[0] == "ls-files" else "b" * 40)
    found = run.environment(None)
    assert (found["commit"], found["changed_files"]) == ("unknown", None)
    monkeypatch.undo()
    monkeypatch.setattr(run, "ROOT", tmp_path)  # no checkout at all
    monkeypatch.setattr(run, "STAMP", tmp_path / ".stamp.json")
    found = run.environment(None)
    assert (found["commit"], found["changed_files"]) == ("unknown", None)


# ---------------------------------------------------------------- command line
@pytest.fixture
def dualkv_bench(run):
    """Runs `dualkv bench ...` in this process: exit code, standard output, standard error."""
    return lambda *words: run("bench", *map(str, words))


def test_command_line_without_a_gpu(dualkv_bench, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, _ = dualkv_bench("--list")
    assert code == 0
    assert all(name in out for name in NAMED)
    assert "5:2x3" in dualkv_bench("--list", "-w", "5:2x3")[1]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(json.dumps(group) for group in ROLLOUTS))
    assert "rollouts.jsonl (bytes) 2/2" in dualkv_bench("--list", "--rollouts", path, "--budget", 13)[1]
    for words, says in (
        (["-w", "nothing"], "workload 'nothing' is neither a name"),
        (["--head-dim", "84"], "head_dim is 84, expected"),
        (["-s", "cudnn"], "--side is 'cudnn', expected one of dualkv,"),
        (["-d", "fwd,back"], "--direction is 'fwd,back', expected some of fwd,bwd,both"),
        (["--budget", "3"], "go with --rollouts FILE, which is missing"),
        (["--rollouts", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        ([], "measures on a CUDA GPU and PyTorch sees none here"),
    ):
        code, out, err = dualkv_bench(*words)
        assert (code, out) == (1, "")
        assert err.startswith("dualkv: ")
        assert says in err
        assert err.count("\n") == 1


@pytest.fixture
def fake_gpu(no_gpu, monkeypatch):
    properties = types.SimpleNamespace(name="H200", multi_processor_count=132, total_memory=2**37)
    for name, value in (
        ("is_available", lambda: True),
        ("current_device", lambda: 0),
        ("get_device_properties", lambda device: properties),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(run, "Meter", FakeMeter)
    makers = {"dualkv": constant(1.0, ["own", "merge"]), "dualkv-deterministic": constant(1.0), "flex": broken}
    for name, value in (*makers.items(), ("fa4-3-calls", missing)):
        monkeypatch.setitem(sides.SIDES, name, value)


def test_a_run(fake_gpu, dualkv_bench, tmp_path):
    names = ["dualkv", "dualkv-deterministic", "flex", "fa4-3-calls"]
    code, out, err = dualkv_bench(
        "-w", "20:5", "-w", "9:", "--heads", 2, "--kv-heads", 1, "--head-dim", 16, "--seconds", 0.1, "--rounds", 1,
        *(word for name in names for word in ("-s", name)),
        "--json", tmp_path / "b.json",
    )  # fmt: skip
    assert code == 0, err
    assert "flex was not measured 4 times: NotImplementedError: head_dim 16 is not supported" in err
    assert "fa4-3-calls was not measured 4 times: not installed: pip install --pre flash-attn-4" in err
    assert "own 2.000, + merge 2.000" in out
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["schema"] == run.SCHEMA
    assert set(report) == {*run.environment(None), "schema", "settings", "asked", "results"}
    assert report["asked"] == 4
    assert report["gpu"] == {
        "name": "H200", "multiprocessors": 132, "memory_gib": 128.0, "driver": "580.1", "nvml": "present",
        "max_sm_clock_mhz": 1980, "power_limit_w": 700.0,
    }  # fmt: skip
    assert report["settings"] == {"seconds": 0.1, "rounds": 1, "time_limit": None, "sides": names}
    shape = "heads=2 kv_heads=1 head_dim=16"
    assert [(r["workload"]["name"], r["direction"]) for r in report["results"]] == [
        (f"20:5 {shape}", "fwd"), (f"20:5 {shape}", "bwd"), (f"9: {shape}", "fwd"), (f"9: {shape}", "bwd"),
    ]  # fmt: skip
    for result in report["results"]:
        assert set(result) == {"flops", "workload", "direction", "reference", "sides", "took_s"}
        assert set(result["workload"]) == {
            "name", "prompt_lens", "response_lens", "heads", "kv_heads", "head_dim", "dtype", "parent", "tokens",
            "dedup_ratio",
        }  # fmt: skip
        assert set(result["sides"]["dualkv"]) == {
            "compared_with", "parts", "cold_ms", "cold_tflops", "rounds", "sustained_ms",
            "sustained_tflops", "joules", "sm_clock_mhz", "power_w", "temperature_c",
        }  # fmt: skip
        assert set(result["sides"]["flex"]) == {"error"}
        assert ("dualkv-deterministic" in result["sides"]) == (result["direction"] == "bwd")
    assert f"9: {shape}, backward: H=2 Hk=1 D=16 bf16, 9 tokens" in out


def test_changed_files_are_said_as_git_says_them(monkeypatch, tmp_path):
    """The first line too, which begins with a blank where nothing is staged."""

    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    for folder in ("codegen", "dualkv"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("")
    git("add", ".")
    git("commit", "-q", "-m", "m")
    for folder in ("codegen", "dualkv"):
        (tmp_path / folder / "a.py").write_text("changed")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    said = run._git("status", "--porcelain")
    assert said.splitlines() == [" M codegen/a.py", " M dualkv/a.py"]

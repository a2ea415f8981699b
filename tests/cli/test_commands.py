"""The command line: what it prints, where, and that every failure is one sentence and a non-zero exit."""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import dualkv.demo.run
from dualkv.cli import commands, doctor, output
from dualkv.demo.settings import ON_CUDA, DemoSettings

SMALL = ["demo", "--prompt-len", "40", "--response-len", "8", "--responses", "2", "--steps", "1", "--device", "cpu"]
Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("one_thread", "smaller_tiny")


def test_demo_prints_the_comparison(run: Run, tmp_path: Path) -> None:
    code, out, err = run(*SMALL, "--json", str(tmp_path / "demo.json"))
    assert code == 0, err
    for text in (
        "1 x GRPO update of tiny",
        "tokens computed",
        "forward",
        "backward",
        "total time",
        "log-probs, absolute",
        "gradients, relative",
        "EXACT TO ROUNDING: largest difference",
    ):
        assert text in out
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["settings"]["prompt_len"] == 40
    assert found["unit"] == "bytes"
    assert "bytes are counted" not in out, "no text was given"


def test_tables_are_wide_where_no_terminal_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output.console_of(None).width == output.WIDE
    assert output.wide_enough(Console(force_terminal=True, width=77)).width == 77
    monkeypatch.setenv("COLUMNS", "90")
    assert output.console_of(None).width == 90


def test_json_has_standard_output_to_itself(run: Run) -> None:
    code, out, err = run(*SMALL, "--json", "-", "--dtype", "bfloat16")
    assert code == 0
    data = json.loads(out)
    assert data["exact"] is True
    assert set(data["to_truth"]) == {"replicated", "packed"}
    assert "distance from float32" in err


def test_two_ways_that_differ_exit_non_zero(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in ("float32", "float64"):  # which decides where float32 rounds
        monkeypatch.setitem(dualkv.demo.run.TOLERANCE, dtype, 0.0)
    code, out, _ = run(*SMALL)
    assert code == 1
    assert "DIFFERENT: largest difference" in out


def test_rollouts_from_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"prompt": "What is a tuple?", "responses": ["A list.", "Fixed."], "rewards": [0, 1]}\n')
    code, out, err = run("demo", "--rollouts", str(path), "--device", "cpu")
    assert code == 0, err
    assert "3 x GRPO update" in out
    assert "text without --tokenizer: bytes are counted, not tokens" in out


def bad_file(folder: Path, text: str) -> str:
    (folder / "bad.jsonl").write_text(text)
    return str(folder / "bad.jsonl")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["demo", "--steps", "0"], "Invalid value for '--steps'"),
        (["demo", "--dtype", "int8"], "dtype is 'int8', expected one of float64, "),
        (["demo", "--steps", "many"], "--steps"),
        (["demo", "--colour", "red"], "--colour"),
        (["demon"], "demon"),
        (["demo", "--model", "gpt-9"], "model 'gpt-9' is neither a local folder nor a GGUF file nor one of tiny"),
        (["demo", "--rollouts", "/absent/r.jsonl"], "/absent/r.jsonl: No such file or directory"),
        (["demo", "--tokenizer", "/absent/t"], "tokenizer '/absent/t' is no local file or folder"),
        (["bench", "--json", "/absent/p.json"], "there is no folder /absent to write it to"),
        (["demo", "--json", "/absent/p.json"], "there is no folder /absent to write it to"),
        (["doctor", "--json", "/absent/p.json"], "there is no folder /absent to write it to"),
        (["doctor", "--check", "--model", "qwen3-8b"], "--check is of this machine and --model of a model"),
        (["doctor", "--import", "json"], "--import registers a type for --model"),
        (["precompile", "--models", "qwen3-8b", "--features", "window", "--out", "o"], "'window' without --head-dims"),
        (["precompile", "--head-dims", "64", "--out", "o"], "--head-dims is '64' without --gqa"),
        (["precompile", "--gqa", "4", "--out", "o"], "--gqa is '4' without --head-dims"),
        (["trees", "--tokenizer", "/absent/t"], "--tokenizer and --min-shared go with --from FILE, which is missing"),
        (["trees", "--min-shared", "64"], "--tokenizer and --min-shared go with --from FILE, which is missing"),
        (["trees", "--sources", "--json", "s.json"], "--sources prints the numbers of all traces, expected nothing"),
        (["demo", "--rollouts", "r.jsonl", "--turns", "3"], "--turns is 3 beside --rollouts"),
        (["demo", "--rollouts", "r.jsonl", "--prompt-len", "8"], "--prompt-len is 8 beside --rollouts"),
        (["precompile", "--head-dims", "64", "--gqa", "4", "--tp", "2", "--out", "o"], "'2' without --models"),
        (["demo", "--budget", "50", "--prompt-len", "50", "--response-len", "9"], "budget is 50 tokens, the longest"),
        (["demo", "--prompt-len", "99999999"], "prompt_len is 99999999, expected 1 to "),
        (["demo", "--device", "cuda:99"], "device is 'cuda:99'"),
        (["demo", "--rollouts", '{"prompt": "a", "responses": ["b"]}'], "bad.jsonl:1: 'rewards' is missing"),
        (["demo", "--rollouts", '{"prompt": "a", "responses": ["b"], "rewards": [NaN]}'], "bad.jsonl:1: rewards[0]"),
        (["demo", "--rollouts", '{"prompt": "a", "responses": [""], "rewards": [1]}'], "no response tokens"),
    ],
)
def test_failures_are_one_sentence(run: Run, tmp_path: Path, words: list[str], says: str) -> None:
    words = [bad_file(tmp_path, word) if word.startswith("{") else word for word in words]
    code, out, err = run(*words)
    assert code != 0
    assert out == ""
    assert err.startswith("dualkv: ")
    assert says in err
    assert err.count("\n") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            ModuleNotFoundError("No module named 'transformers'", name="transformers"),
            "pip install 'dualkv[transformers]'",
        ),
        (ModuleNotFoundError("No module named 'spam.ham'", name="spam.ham"), "spam is missing: pip install spam"),
        (torch.OutOfMemoryError("CUDA out of\nmemory"), "with a lower --budget or --gradient-checkpointing"),
        (RuntimeError("something\nelse"), "RuntimeError: something else (run again with --debug"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_failures_inside(run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, says: str) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(dualkv.demo.run, "run_demo", fails)
    code, out, err = run(*SMALL)
    assert out == ""
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert err.startswith("dualkv: ")
    assert says in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dualkv", "demo", "--dtype", "int8", "--debug"])
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        commands.main()


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"dualkv {dualkv.__version__}\n", "")


def test_doctor(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    assert out.startswith(f"dualkv {dualkv.__version__}, Python ")
    assert version("torch") in out
    assert "the chunked reference" in out
    code, out, _ = run("doctor", "--json", "-")
    found = json.loads(out)
    assert found["healthy"] is True
    assert {p["name"] for p in found["packages"]} >= {"torch", "transformers", "nvidia-cutlass-dsl"}
    assert len(found["runs"]) == 1 + torch.cuda.device_count()


@pytest.mark.parametrize(
    ("cuda", "gpus", "says"),
    [
        (None, [], "no NVIDIA GPU with a working driver"),
        (None, ["NVIDIA H200"], "is built without CUDA: pip install --force-reinstall torch"),
        ("13.0", ["NVIDIA H200"], "update the driver to one for CUDA 13.0"),
    ],
)
def test_doctor_on_machines_without_a_usable_gpu(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, gpus: list[str], says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert says in doctor._advice("580.1" if gpus else None, gpus)[0]


def test_doctor_reads_the_drivers_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '580.65, NVIDIA H200, 9.0, 143771 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor._driver() == ("580.65", ["NVIDIA H200, compute capability 9.0, 143771 MiB"])
    tool.write_text("#!/bin/sh\necho 'no devices were found'; exit 6\n")
    assert doctor._driver() == (None, [])


def test_defaults_of_the_demo_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DemoSettings.given() == DemoSettings()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert DemoSettings.given(device="cpu", seed=3) == DemoSettings(device="cpu", seed=3)
    there = DemoSettings.given(steps=None, groups=5, prompt_len=100)
    assert there == DemoSettings(**ON_CUDA | {"groups": 5, "prompt_len": 100})
    assert (there.dtype, there.steps) == ("bfloat16", 1)

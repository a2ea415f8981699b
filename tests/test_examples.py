"""The examples run as they stand, in small on the CPU. (Those of veRL: tests/integrations/verl/test_examples.py.)"""

from __future__ import annotations

import json
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch

from tests import small_example
from tests.ranks import on_ranks
from tools.bench import real_model as records

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
COMPARED = re.compile(r"update \d: loss (\S+), gradient norm (\S+), (\S+) tokens")
LINE = re.compile(r"update \d: loss (\S+), gradient norm (\S+), (\S+) tokens packed on (\d) ranks, (\S+) replicated")


@pytest.fixture
def example(monkeypatch, capsys):
    """Runs an example in this process: what it printed."""

    def call(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *options])
        threads, state = torch.get_num_threads(), torch.get_rng_state()
        torch.set_num_threads(1)
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(state)
        return capsys.readouterr().out

    return call


def test_one_gpu_learns(example):
    printed = example("one_gpu.py", "--tiny", "--steps", "5", "--response-len", "12", "--lr", "0.003")
    rewards = [float(reward) for reward in re.findall(r"step \d: reward (\S+),", printed)]
    assert len(rewards) == 5
    assert rewards[-1] > rewards[0] + 0.05
    packed, replicated = (
        int(n.replace(",", "")) for n in re.search(r"(\S+) tokens packed, (\S+) repl", printed).groups()
    )
    assert packed < replicated / 3


def test_long_context(example):
    printed = example("long_context.py", "--tiny")
    steps = re.findall(r"loss (\S+), gradient norm (\S+),", printed)
    assert len(steps) == 2
    assert steps[0] == steps[1]  # nothing was updated
    assert float(steps[0][1]) > 0
    assert "576 tokens packed, 2,112 replicated" in printed


def assert_same_updates(packed, replicated):
    """Check that an example printed equal losses and gradients, of fewer tokens."""
    packed, replicated = COMPARED.findall(packed), COMPARED.findall(replicated)
    assert len(packed) == len(replicated) > 1
    for (loss, norm, tokens), (expected, expected_norm, all_tokens) in zip(packed, replicated, strict=True):
        assert float(loss) == pytest.approx(float(expected), abs=1e-5)
        assert float(norm) == pytest.approx(float(expected_norm), rel=1e-4)
        assert int(tokens.replace(",", "")) < int(all_tokens.replace(",", "")) / 1.5
    assert len({loss for loss, _, _ in packed}) > 1  # something was updated


@pytest.mark.parametrize("options", [[], ["--prompts", "--budget", "150"], ["--teacher", "tiny"]], ids=str)
def test_fine_tuning_and_distillation(example, options):
    options = ["--tiny", "--updates", "2", "--lr", "0.05", *options]
    assert_same_updates(example("answers.py", *options), example("answers.py", *options, "--replicated"))


def test_plain_modules(example):
    assert_same_updates(example("plain_modules.py"), example("plain_modules.py", "--replicated"))


def test_an_actor_that_takes_padded_batches(example, monkeypatch):
    """Two ranks with packed rows agree with one that runs all rollouts padded."""
    options = ["--tiny", "--updates", "2", "--lr", "0.001"]
    two = on_two_ranks("padded_actor.py", *options)
    as_one_rank(monkeypatch)
    assert_same_updates(two, example("padded_actor.py", *options, "--padded", "--micro-batch", "16"))


def on_two_ranks(name, *options):
    printed = on_ranks(2, "tests.ranks:script", str(EXAMPLES / name), *options)
    assert "Warning" not in printed, printed
    return printed


def as_one_rank(monkeypatch):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)


def test_ranks_together_compute_what_one_computes(example, monkeypatch):
    options = ["--tiny", "--updates", "2", "--budget", "600"]
    printed = on_two_ranks("four_gpus.py", *options)
    as_one_rank(monkeypatch)
    two, one = LINE.findall(printed), LINE.findall(example("four_gpus.py", *options))
    assert len(two) == 2
    for (loss, norm, packed, ranks, replicated), (loss_of_one, norm_of_one, packed_of_one, _, same) in zip(
        two, one, strict=True
    ):
        assert ranks == "2"
        assert float(loss) == pytest.approx(float(loss_of_one), abs=2e-5)
        assert float(norm) == pytest.approx(float(norm_of_one), rel=1e-4)
        assert packed == packed_of_one
        assert replicated == same
    assert float(two[1][0]) < -0.01


@pytest.fixture
def real_model(monkeypatch):
    """The example on real weights, as a module, with a small model, bytes for tokens and a task of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield small_example.load("real_model", monkeypatch)
    torch.set_num_threads(threads)


def test_real_model_samples_from_the_whole_sequence(real_model):
    """The levels of keys and values, and greedy responses, against forwards of the whole sequence."""
    model = real_model.load_model("tiny", torch.float32, torch.device("cpu"), 0)
    draw = torch.Generator().manual_seed(0)
    prefix, *questions = (torch.randint(256, (n,), generator=draw).tolist() for n in (30, 5, 9, 7))
    sampler = real_model.Sampler(model, prefix, 3, 2, 9, 6, greedy=1)
    with torch.no_grad():
        sampler.read_prefix()
    uniform = torch.rand(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for g, group in enumerate(sampler(questions, 4)):
        for i, response in enumerate(group):
            ids = torch.tensor([prefix + questions[g] + response])
            with torch.no_grad():
                logits = model(ids).logits[0, -len(response) - 1 : -1].double()
            cumulative = logits.softmax(-1).cumsum(-1)
            numbers = uniform[2 * g + i, : len(response), None] * cumulative[:, -1:]
            sampled = torch.searchsorted(cumulative, numbers, right=True)[:, 0]
            assert response == (logits.argmax(-1) if i == 0 else sampled).tolist()


@pytest.mark.parametrize("more", [[], ["--lora", "4"]], ids=str)
def test_real_model_learns_the_same_both_ways_and_resumes(real_model, monkeypatch, tmp_path, more):
    common = ["--prefix", "60", "--groups", "2", "--responses", "4", "--response-len", "6", "--held-out", "4", "--lr"]
    common += ["1e-3", "--eval-groups", "2", "--save-every", "1", "--dtype", "float32", "--device", "cpu", *more]
    logs = {}
    for way, updates in (("packed", "1"), ("packed", "2"), ("replicated", "2")):  # the second goes on from the first
        folder = tmp_path / way
        monkeypatch.setattr(sys, "argv", ["", "--out", str(folder), "--way", way, "--updates", updates, *common])
        real_model.main()
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        logs[way] = {line["update"]: line for line in lines if "reward" in line}
    packed, replicated = logs["packed"], logs["replicated"]
    assert packed.keys() == replicated.keys() == {1, 2}
    assert packed[1]["crc"] == replicated[1]["crc"]
    for update, line in packed.items():
        for name in ("reward", "kl", "entropy", "loss", "grad_norm"):
            assert line[name] == pytest.approx(replicated[update][name], rel=1e-3, abs=1e-5), name
        assert line["rows"] < replicated[update]["rows"] / 1.5
    assert packed[2]["kl"] > 0
    made = records.record([tmp_path / "replicated", tmp_path / "packed"], [], None, None)
    assert made["runs_of"]["packed"]["alike"][0] == 1
    assert made["commit"] == json.loads((tmp_path / "packed" / "log.jsonl").read_text().splitlines()[0])["commit"]
    assert "| packed" in records.markdown(made, made)

"""The examples run as they stand, in small on the CPU. (Those of veRL: tests/integrations/verl/test_examples.py.)"""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
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


def test_ranks_together_compute_what_one_computes(example, monkeypatch):
    options = ["--tiny", "--updates", "2", "--budget", "600"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command += [str(EXAMPLES / "four_gpus.py"), *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr, done.stderr
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    two, one = LINE.findall(done.stdout), LINE.findall(example("four_gpus.py", *options))
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

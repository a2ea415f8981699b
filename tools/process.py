"""Programs of others that tools start, and the GPU that they need."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dualkv.ops import hopper

ROOT = Path(__file__).parents[1]


class ToolError(RuntimeError):
    """An error that says in one sentence why a tool did not run."""


def find_program(name: str, *elsewhere: str, install: str) -> str:
    """Find the path of a program of CUDA, on PATH or by patterns of other places, the newest first.

    Raises:
        ToolError: it is not installed, or the kernels do not run here.
    """
    found = shutil.which(name) or next((p for pattern in elsewhere for p in sorted(glob.glob(pattern))[::-1]), None)
    if found is None:
        raise ToolError(f"{name} is not on PATH: install {install}")
    if not torch.cuda.is_available():
        raise ToolError(f"{name} needs an NVIDIA GPU and PyTorch sees none here")
    why_not = hopper.device_unsupported(torch.device("cuda", torch.cuda.current_device()))
    if why_not:
        raise ToolError(f"the kernels run on compute capability 9.0 (H100, H200), not on {why_not}")
    return found


def run_limited(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command in the project's folder; returns its exit code and what it printed on both streams.

    After `seconds` it is stopped, with what it started and what holds its output, and the exit code is None.
    """
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, stopped = process.communicate(timeout=seconds)[0], False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, stopped = process.communicate()[0], True
    return None if stopped else process.returncode, output.decode(errors="replace")

"""Runs a job under ncu and leaves a profile's folder."""

from __future__ import annotations

import glob
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from codegen import cubin, store
from dualkv.bench.run import environment
from dualkv.bench.timing import Meter
from dualkv.ops import hopper
from tools.ncu.job import Job
from tools.process import run_limited

ELSEWHERE = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
NO_RIGHT = "ERR_NVGPUCTRPERM"
SECONDS = 600  # for one profile: some 40 passes of every kernel


class ProfileError(RuntimeError):
    """An error that says in one sentence why there is no profile."""


def find_ncu() -> str:
    """Path of ncu.

    Raises:
        ProfileError: it is not installed.
    """
    found = [shutil.which("ncu"), *(path for pattern in ELSEWHERE for path in sorted(glob.glob(pattern))[::-1])]
    for path in found:
        if path:
            return path
    raise ProfileError(
        "ncu is not on PATH: install Nsight Compute (package nsight-compute of the CUDA repositories, or part of the "
        "CUDA toolkit); report reads a profile without it"
    )


def check_gpu() -> None:
    """
    Raises:
        ProfileError: the kernels do not run here.
    """
    if not torch.cuda.is_available():
        raise ProfileError("profiling needs an NVIDIA GPU and PyTorch sees none here")
    why_not = hopper.device_unsupported(torch.device("cuda", torch.cuda.current_device()))
    if why_not:
        raise ProfileError(f"the kernels run on compute capability 9.0 (H100, H200), not on {why_not}")


def why_failed(output: str) -> str:
    """One sentence of what ncu printed."""
    if NO_RIGHT in output:
        return (
            "this user may not read the GPU's counters: run as root (in a container, with --cap-add=SYS_ADMIN), or "
            "have the administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
            "(https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
        )
    errors = re.findall(r"==ERROR== (.*)", output)
    said = errors or [line for line in output.splitlines() if line.strip() and not line.startswith("==PROF==")][-3:]
    return "ncu failed: " + (" ".join(" ".join(said).split())[-500:] or "it printed nothing")


def collect(job: Job, folder: Path) -> dict[str, Any]:
    """Profile `job` into `folder`; returns about.json.

    Raises:
        ProfileError: no ncu, no GPU, no right to read counters, a run that failed.
        KernelError: a kernel cannot be compiled.
    """
    ncu = find_ncu()
    check_gpu()
    job.use_tile()
    entries = {name: store.entry(spec) for name, spec in job.specs().items()}
    folder.mkdir(parents=True, exist_ok=True)
    request, report = folder / "job.json", folder / "report.ncu-rep"
    request.write_text(json.dumps(job.to_dict()))
    # The card's clocks stay as they are: kernels are profiled at the clock that they run at.
    options = ["--set", "full", "--profile-from-start", "off", "--clock-control", "none", "--force-overwrite"]
    target = [sys.executable, "-m", "tools.ncu.target", str(request.absolute())]
    _run([ncu, *options, "--export", str(report.absolute()), *target])
    request.unlink()
    show = [ncu, "--import", str(report.absolute()), "--csv", "--print-units", "base", "--page"]
    (folder / "metrics.csv").write_text(_run([*show, "raw"]))
    symbols = {name: cubin.resources((at / "kernel.cubin").read_bytes()).function for name, at in entries.items()}
    about = {**job.to_dict(), "specs": {n: s.to_dict() for n, s in job.specs().items()}, "symbols": symbols}
    about |= environment(Meter()) | {"ncu": _run([ncu, "--version"]).split("Version")[-1].strip()}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def _run(command: list[str]) -> str:
    """Run a command and return its output.

    Raises:
        ProfileError: it fails, or takes longer than SECONDS.
    """
    code, output = run_limited(command, SECONDS)
    if code is None:
        raise ProfileError(f"{Path(command[0]).name} did not end within {SECONDS} s: give a smaller workload")
    if code or "==ERROR==" in output:
        raise ProfileError(why_failed(output))
    return output

"""Run a job under ncu and leave a profile's folder."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from codegen import cubin, store
from dualkv.bench.run import environment
from dualkv.bench.timing import Meter
from tools.ncu.job import Job
from tools.process import ToolError, find_program, run_limited

ELSEWHERE = "/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu"
INSTALL = (
    "Nsight Compute (package nsight-compute of the CUDA repositories, or part of the CUDA toolkit); report reads a "
    "profile without it"
)
NO_RIGHT = "ERR_NVGPUCTRPERM"
SECONDS = 600  # for one profile: some 40 passes of every kernel


def why_failed(output: str) -> str:
    """Say in one sentence what ncu printed."""
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
        ToolError: no ncu, no GPU, no right to read counters, a run that failed.
        KernelError: a kernel cannot be compiled.
    """
    ncu = find_program("ncu", *ELSEWHERE, install=INSTALL)
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
        ToolError: it fails, or takes longer than SECONDS.
    """
    code, output = run_limited(command, SECONDS)
    if code is None:
        raise ToolError(f"{Path(command[0]).name} did not end within {SECONDS} s: give a smaller workload")
    if code or "==ERROR==" in output:
        raise ToolError(why_failed(output))
    return output

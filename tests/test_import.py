"""`import dualkv` is light: no compiler, no triton, no transformers, and little time on top of torch's own."""

from __future__ import annotations

import statistics
import subprocess
import sys

PROGRAM = """
import sys, time
import torch
had = set(sys.modules)
start = time.perf_counter()
import dualkv
seconds = time.perf_counter() - start
print(seconds, *sorted({m.split(".")[0] for m in set(sys.modules) - had}))
"""

USES = """
import dualkv
dualkv.grpo.ALGORITHMS
print(dualkv.integrations.transformers.enable.__name__)
"""


def test_submodules_come_when_they_are_used():
    run = subprocess.run([sys.executable, "-c", USES], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["enable"]


def test_import_is_light():
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    loaded = set(runs[0][1:])
    assert "dualkv" in loaded
    assert not loaded & {"cutlass", "triton", "transformers", "rich", "typer", "matplotlib", "cuda", "tvm_ffi"}
    assert statistics.median(float(run[0]) for run in runs) < 0.3

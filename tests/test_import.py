"""`import dualkv` is light: no compiler, no triton, no transformers, and little time on top of torch's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

PROGRAM = """
import sys, time
start = time.process_time()
import torch
had = set(sys.modules)
between = time.process_time()
import dualkv
part = (time.process_time() - between) / (between - start)
print(part, *sorted({m.split(".")[0] for m in set(sys.modules) - had}))
"""


def test_import_is_light():
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    loaded = set(runs[0][1:])
    assert "dualkv" in loaded
    assert not loaded & {"cutlass", "triton", "transformers", "rich", "typer", "matplotlib", "cuda", "tvm_ffi"}
    assert min(float(run[0]) for run in runs) < 0.3, "of the time that torch takes"


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch brings GNU OpenMP on Linux alone")
@pytest.mark.parametrize(
    ("words", "given", "spins"),
    [
        (["-m", "dualkv", "--version"], {}, "0"),
        (["SCRIPT", "--version"], {}, "0"),
        (["-m", "dualkv", "--version"], {"OMP_WAIT_POLICY": "active"}, "30000000000"),
        (["-c", "import dualkv"], {}, "300000"),
    ],
)
def test_waiting_threads_sleep_in_the_command_line_alone(tmp_path, words, given, spins):
    """The spin count is the one that OpenMP itself prints when torch loads it."""
    script = tmp_path / "dualkv"  # as pip writes it
    script.write_text("import sys\nfrom dualkv.__main__ import main\nsys.exit(main())\n")
    command = [sys.executable, *(str(script) if word == "SCRIPT" else word for word in words)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | given
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)[1] == spins

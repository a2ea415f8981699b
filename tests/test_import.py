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


def test_the_command_line_refuses_a_bad_file_before_torch_is_imported(tmp_path):
    """Each command that reads rollouts does, from a file and from standard input."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is imported')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    (tmp_path / "bad.jsonl").write_text(
        '{"prompt": "a", "responses": ["b"], "rewards": [1]}\n\n {"prompt": "a",, "b": 1}\n'
    )
    for command, name in (("trees --from", "-"), ("bench --rollouts", "bad.jsonl"), ("demo --rollouts", "bad.jsonl")):
        done = subprocess.run(
            [sys.executable, "-m", "dualkv", *command.split(), name], cwd=tmp_path, env=environment, text=True,
            input=(tmp_path / "bad.jsonl").read_text(), capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.startswith(f"dualkv: {name}:3: not valid JSON ("), done.stderr
        assert done.stderr.endswith("at column 17)\n")


def test_every_public_name_is_found_where_nothing_is_imported_yet():
    import dualkv

    for name in dualkv.__all__:
        assert dualkv.__getattr__(name) is getattr(dualkv, name)


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch brings GNU OpenMP on Linux alone")
@pytest.mark.parametrize(
    ("words", "given", "spins"),
    [
        (["-m", "dualkv", "trees", "--sources"], {}, "0"),
        (["SCRIPT", "trees", "--sources"], {"OMP_WAIT_POLICY": "active"}, "30000000000"),
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

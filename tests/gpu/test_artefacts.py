"""Kernels compiled ahead, on a Hopper GPU: the driver agrees with their manifest, and they run without the compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from codegen import KernelError, cubin, precompiled, store
from codegen.tiles import FEW_KEYS_FORWARD_TILES, HEAD_DIMS
from dualkv.cli.precompile import requested

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(compile_all, tmp_path_factory):
    """Every head dim's kernels, deterministic ones too, as `dualkv precompile` would leave them."""
    into = tmp_path_factory.mktemp("artefacts")
    specs = requested(head_dims=HEAD_DIMS, gqa=[7], deterministic=True)
    compile_all(specs)
    for spec in specs:
        entry = store.entry(spec)
        shutil.copytree(entry, into / entry.name)
    assert len(precompiled.write_manifest(into, "9.9.9")["kernels"]) == len(specs)
    return into


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_driver_agrees_with_the_manifest(folder):
    """Registers, stack, threads and occupancy of every kernel, read back from the loaded cubin."""
    if why_not := cubin.unreadable():
        pytest.skip(why_not)
    found = precompiled.check(folder)
    assert found.problems == []
    assert found.read_back == found.kernels == len(list(folder.glob("dualkv_*"))) >= 30


def test_the_driver_answers_for_the_shared_memory_that_is_asked(folder):
    """Occupancy follows the shared memory that is asked of the loaded cubin, and more than an SM has is refused."""
    if why_not := cubin.unreadable():
        pytest.skip(why_not)
    manifest = json.loads((folder / "manifest.json").read_text())["kernels"]
    kernel = max(manifest.items(), key=lambda item: item[1]["ctas_per_sm"])[0]
    code = (folder / kernel / "kernel.cubin").read_bytes()
    said = manifest[kernel]
    right = cubin.on_device(code, said["threads"], said["shared_memory"])
    assert right == {name: said[name] for name in right}
    assert cubin.on_device(code, said["threads"], 100 * 1024)["ctas_per_sm"] == 2
    with pytest.raises(KernelError, match="cuFuncSetAttribute failed with CUDA_ERROR_INVALID_VALUE"):
        cubin.on_device(code, said["threads"], 300 * 1024)


WITHOUT_COMPILER = """
import importlib.util, runpy, sys

class NoCompiler:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cutlass":
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, NoCompiler())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "cutlass" else find(name, *rest)
runpy.run_path("deploy/verify.py", run_name="__main__")
"""


def test_forward_and_backward_run_without_the_compiler(folder, tmp_path):
    """deploy/verify.py compares every head dim's kernels with the reference, and forwards of short segments."""
    said = run(WITHOUT_COMPILER, DUALKV_KERNEL_DIR=str(folder), DUALKV_JIT="0", DUALKV_CACHE_DIR=str(tmp_path / "none"))
    assert said.count("forward and backward, largest relative difference") == len(HEAD_DIMS) + sum(
        isinstance(head_dims, int) for head_dims in FEW_KEYS_FORWARD_TILES
    )
    assert not (tmp_path / "none").exists()


FORK = """
import os
import dualkv, torch
child = os.fork()  # before a kernel is loaded, with which tvm-ffi has PyTorch look for GPUs: no CUDA in children then
layout = dualkv.Layout.from_lengths([100], [[20, 30]], device="cuda")
torch.manual_seed(0)
q = torch.randn(layout.num_tokens, 7, 128, device="cuda", dtype=torch.bfloat16)
k, v = torch.randn(2, layout.num_tokens, 1, 128, device="cuda", dtype=torch.bfloat16)
print(float(dualkv.attention(q, k, v, layout).float().abs().sum()), flush=True)
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(0)
"""


def test_a_process_that_forks_after_the_import_runs_kernels_on_both_sides(folder):
    parent, child = run(FORK, DUALKV_KERNEL_DIR=str(folder), DUALKV_JIT="0").split()
    assert parent == child


TWO = """
import sys
import dualkv, torch
from codegen import store
layout = dualkv.Layout.from_lengths([100], [[20, 30]], device="cuda")
torch.manual_seed(0)
q, k, v = torch.randn(3, layout.num_tokens, 2, 128, device="cuda", dtype=torch.bfloat16)
print(float(dualkv.attention(q, k, v, layout).float().abs().sum()), store.counts["compiled"])
"""


def test_processes_of_two_gpus_share_a_cache(tmp_path):
    """One compile, the same kernel, the same result; two devices of one process are in test_dispatch.py."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = os.environ | {"DUALKV_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("DUALKV_KERNEL_DIR", None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO],
            cwd=ROOT, env=environment | {"CUDA_VISIBLE_DEVICES": str(gpu)}, stdout=subprocess.PIPE, text=True,
        )
        for gpu in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert said[0][0] == said[1][0]
    assert sorted(compiled for _, compiled in said) == ["0", "1"]

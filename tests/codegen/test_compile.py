"""One real compile, without a GPU: what comes out, what the caller's process keeps, and loading it without the DSL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import compile, store, toolchain
from codegen.spec import forward_spec

SPEC = forward_spec("bf16", 64, 1)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with the entry of SPEC, compiled where the DSL's own settings say something else."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_DSL_ARCH", "sm_80")
        patch.setenv("CUTE_DSL_COMPILER_OPT", "iket")
        before = dict(os.environ)
        modules = set(sys.modules)
        ((_, entry),) = store.fill([SPEC], folder)
        assert dict(os.environ) == before
        assert not [m for m in set(sys.modules) - modules if m.split(".")[0] == "cutlass"]
    return entry


def test_entry_holds_hopper_code_and_its_symbol(compiled):
    cubin = (compiled / "kernel.cubin").read_bytes()
    assert cubin.startswith(b"\x7fELF")
    assert b"-arch sm_90a" in cubin
    assert f"__tvm_ffi_{SPEC.symbol}".encode() in (compiled / "kernel.so").read_bytes()


LOADER = """
import sys
import torch  # first: builds of it with CUDA look for triton themselves

class NoDSL:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "cuda", "triton"):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, NoDSL())
before = set(sys.modules)
from codegen import store
from codegen.spec import forward_spec
kernel = store.load(forward_spec("bf16", 64, 1))
assert store.counts == {"kernel_dir": 1}, store.counts
assert not [m for m in set(sys.modules) - before if m.split(".")[0] in ("cutlass", "cuda")]
x = torch.zeros(5, 2, 64, dtype=torch.bfloat16)
work, schedule, rows = (torch.zeros(shape, dtype=torch.int32) for shape in ((1, 8), (2, 2), (5,)))
try:
    kernel(x, x, x, x, torch.zeros(2, 5), work, schedule, rows, 0.1, 132)
except ValueError as e:
    print(e)
try:
    kernel(x)
except TypeError as e:
    print(e)
"""


def test_a_stored_kernel_loads_and_checks_its_arguments_without_the_dsl(compiled):
    environment = os.environ | {"DUALKV_KERNEL_DIR": str(compiled.parent), "DUALKV_JIT": "0"}
    done = subprocess.run([sys.executable, "-c", LOADER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    on_the_cpu, too_few = done.stdout.splitlines()
    assert "expected device_type=cuda" in on_the_cpu
    assert "Expects 10 parameters" in too_few


def test_no_linker_and_no_compiler_are_said(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        RuntimeError, match=r"no linker is on PATH \(gcc, cc or clang\): install one, or set DUALKV_KERN"
    ):
        compile.compile_kernel(SPEC, tmp_path)
    monkeypatch.setattr(toolchain, "can_compile", lambda: False)
    with pytest.raises(RuntimeError, match="only the runtime of the CuTe DSL: pip install"):
        compile.compile_kernel(SPEC, tmp_path)


def test_a_failing_worker_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "cute_kernels"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise SyntaxError('half an edit')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(RuntimeError, match=r"compiling fwd bf16 head_dim=64 .* failed: (?s:.*)half an edit"):
        compile.compile_kernel(SPEC, tmp_path)


def test_ptxas_report_survives_line_wraps():
    text = """ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are
        serialized due to insufficient register resources for the function 'kernel'
        ptxas         .     344 bytes stack frame, 696 bytes
        spill stores, 952 bytes spill loads
        ptxas info    : Used 168
        registers, used 16 barriers"""
    assert compile.ptxas_report(text) == {
        "registers": 168,
        "stack": 344,
        "spill_stores": 696,
        "spill_loads": 952,
        "wgmma_warnings": ["C7512"],
    }
    with pytest.raises(RuntimeError, match="ptxas reported on 0 kernels, expected 1"):
        compile.ptxas_report("")


def test_flavours_follow_the_driver(monkeypatch, tmp_path):
    for major in (12, 13):
        library = tmp_path / f"cu{major}" / "lib" / "libcute_dsl_runtime.so"
        library.parent.mkdir(parents=True)
        library.touch()
    monkeypatch.setattr(toolchain, "dsl_folder", lambda: tmp_path)
    flavour = toolchain.flavour.__wrapped__
    for driver, expected in ((None, "cu13"), (12, "cu12"), (13, "cu13"), (14, "cu13")):
        monkeypatch.setattr(toolchain, "driver_cuda", lambda driver=driver: driver)
        assert flavour() == expected
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: 11)
    with pytest.raises(RuntimeError, match=r"fits the driver \(CUDA 11\): installed cu12, cu13"):
        flavour()


def test_runtime_library_is_the_one_the_dsl_links_to():
    program = "from cutlass.cute.runtime import find_runtime_libraries as f; print(f(enable_tvm_ffi=False)[0])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == toolchain.runtime_library()


SIZES = """
from codegen.spec import table
from codegen.compile import _kernel
for spec in table():
    if spec.operation == "bwd":
        kernel, tile = _kernel(spec), spec.tile
        assert kernel.slab_floats() == tile.slab_floats(spec.head_dim), spec
        print(spec)
    if spec.operation in ("bwd", "bwd_preprocess"):  # of as many rows as a layout may have
        stats = _kernel(spec).fake_arguments()[4 if spec.operation == "bwd" else 3]
        assert [x.width for x in stats.shape] == [32, 64], spec
"""


def test_workspaces_are_as_large_as_the_backward_kernels_take_them():
    done = subprocess.run([sys.executable, "-c", SIZES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5 * 2 * 5  # with dQ each in two orders of its sums

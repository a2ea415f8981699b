"""One real compile, of a small kernel without a GPU: what comes out, and what the caller's process keeps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from codegen import KernelError, compile, manifest, precompiled, store, toolchain
from codegen.spec import backward_specs
from codegen.tiles import FEW_KEYS_TILES, HEAD_DIM_PAIRS

SPEC = backward_specs("bf16", 64).postprocess


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


def test_it_is_as_recorded(compiled):
    """The settings of the DSL that stood around the compile changed nothing."""
    record = manifest.read(Path(__file__).with_name("manifest.json"))
    ((_, now),) = manifest.describe([SPEC], compiled.parent, 1)
    assert manifest.differences(record["kernels"][str(SPEC)], now) == []


REMEDIES = ("the wheel dualkv-kernels", "`pip install 'dualkv[compile]'`", "`dualkv toolchain install`")


def test_no_c_compiler_and_no_dsl_are_said(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        RuntimeError, match=r"no C compiler is on PATH \(gcc, cc or clang\), .*: install one, or set DUALK"
    ):
        compile.compile_kernel(SPEC, tmp_path)
    monkeypatch.setattr(toolchain, "_environment", lambda: "nvidia-cutlass-dsl is not installed")
    monkeypatch.setenv("DUALKV_CACHE_DIR", str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        compile.compile_kernel(SPEC, tmp_path)
    for words in ("(nvidia-cutlass-dsl is not installed; there is no private toolchain)", *REMEDIES):
        assert words in str(caught.value)


def test_a_failing_worker_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "cute_kernels"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise SyntaxError('half an edit')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(
        RuntimeError, match=r"compiling bwd_postprocess bf16 head_dim=64 .* failed: (?s:.*)half an edit"
    ):
        compile.compile_kernel(SPEC, tmp_path)


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        # Shared memory that `smem_bytes` leaves out shows here: a launch of such a kernel would fail on the GPU.
        ({"shared_memory": 2**18}, rf"{2**18} bytes of shared memory fits no multiprocessor"),
        ({"cutlass": "/elsewhere/cutlass/x.py"}, r"the process took cutlass from /elsewhere/.*, expected nvidia-cutla"),
    ],
    ids=["shared memory", "another DSL"],
)
def test_what_the_worker_reports_is_checked(compiled, monkeypatch, tmp_path, lies, says):
    record, code = precompiled.record_of(compiled), (compiled / "kernel.cubin").read_bytes()
    said = f"Used {record['registers']} registers, {record['stack']} bytes stack frame,"
    said += " 0 bytes spill stores, 0 bytes spill loads"

    def worker(*args, cwd, **rest):
        (cwd / "kernel.cubin").write_bytes(code)
        report = {"cutlass": str(toolchain.found().dsl / "cutlass" / "x.py"), "ptxas": "", "shared_memory": 0}
        (cwd / "worker.json").write_text(json.dumps(report | lies))
        return subprocess.CompletedProcess(args, 0, said, "")

    monkeypatch.setattr(compile.subprocess, "run", worker)
    with pytest.raises(KernelError, match=says):
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


def _dsl(root: Path, majors=(12, 13), **versions: str) -> Path:
    """A folder that looks like an installed DSL."""
    versions = {"nvidia_cutlass_dsl": "4.8.1", "apache_tvm_ffi": "0.1.15", **versions}
    for name, version in versions.items():
        (root / f"{name}-{version}.dist-info").mkdir(parents=True)
        (root / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    libs = root / "nvidia_cutlass_dsl" / "dsl_packages" / "cutlass" / "_mlir" / "_mlir_libs"
    libs.mkdir(parents=True)
    for major in majors:
        (root / "nvidia_cutlass_dsl" / f"cu{major}" / "lib").mkdir(parents=True)
        (libs / f"_cutlass_ir.cu{major}{EXTENSION_SUFFIXES[0]}").touch()
    return root


def _examined(root: Path):
    return toolchain._examined.__wrapped__(root, root / "nvidia_cutlass_dsl")


def test_flavours_follow_the_driver(monkeypatch, tmp_path):
    root = _dsl(tmp_path)
    for driver, expected in ((None, "cu13"), (12, "cu12"), (13, "cu13"), (14, "cu13")):
        monkeypatch.setattr(toolchain, "driver_cuda", lambda driver=driver: driver)
        assert _examined(root).flavour == expected
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: 11)
    assert re.search(r"and the driver \(CUDA 11\), it has cu12, cu13: install", _examined(root))


def test_which_dsl_compiles(tmp_path):
    """A DSL that vLLM pins does not compile, nor one for another Python, nor with a tvm-ffi that is too old."""
    found = _examined(_dsl(tmp_path / "right"))
    assert found.version("nvidia-cutlass-dsl") == "4.8.1"
    assert found.path == [
        str(tmp_path / "right" / "nvidia_cutlass_dsl" / "dsl_packages"), str(tmp_path / "right")
    ]  # fmt: skip
    assert _examined(_dsl(tmp_path / "a", nvidia_cutlass_dsl="4.5.2")).endswith(
        "nvidia-cutlass-dsl 4.5.2, expected 4.8"
    )
    assert "apache-tvm-ffi 0.1.9, to compile" in _examined(_dsl(tmp_path / "b", apache_tvm_ffi="0.1.9"))
    assert "it has none" in _examined(_dsl(tmp_path / "c", majors=()))
    other = _dsl(tmp_path / "d")
    for path in other.rglob("_cutlass_ir.*"):
        path.rename(path.with_name(path.name.replace(EXTENSION_SUFFIXES[0], ".cpython-39-x86_64-linux-gnu.so")))
    assert "it has none" in _examined(other)


SIZES = """
from codegen.spec import table
from codegen.compile import _kernel
for spec in table():
    if spec.operation == "bwd":
        kernel, tile = _kernel(spec), spec.tile
        assert kernel.partial_floats() == tile.partial_floats(*spec.head_dims), spec
        print(spec)
    if spec.operation in ("bwd", "bwd_preprocess"):  # of as many rows as a layout may have
        stats = _kernel(spec).fake_arguments()[4 if spec.operation == "bwd" else 3]
        assert [x.width for x in stats.shape] == [32, 64], spec
"""


def test_workspaces_are_as_large_as_the_backward_kernels_take_them():
    done = subprocess.run([sys.executable, "-c", SIZES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = len(HEAD_DIM_PAIRS) + len(FEW_KEYS_TILES)
    assert len(done.stdout.splitlines()) == kinds * 2 * 5  # with dQ each in two orders of its sums

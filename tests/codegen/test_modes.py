"""The package loads what it writes under any umask, and nobody else can write to it.

Each case is a process of its own, so that the umask does not leak. A stand-in for the compiler copies a real kernel,
and one for pip the files of the private toolchain.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.spec import backward_specs
from tests.codegen import stand_in
from tests.codegen.real import copied

ROOT = Path(__file__).parents[2]
SPEC = backward_specs("bf16", 64).postprocess
UMASKS = (0o000, 0o077)  # 022 is the one of all other tests
PROGRAM = """
import json, os, sys
from importlib.metadata import version
from pathlib import Path
from codegen import compile, precompiled, store, toolchain
from codegen.spec import backward_specs
from dualkv.cli import precompile

work, spec, there = Path.cwd(), backward_specs("bf16", 64).postprocess, Path(sys.argv[1])
def copied(spec, folder):
    for kind in ("so", "cubin", "ptx"):
        with open(folder / f"kernel.{kind}", "wb", opener=lambda *how: os.open(*how, mode=0o777)) as file:  # as ld does
            file.write((there / f"kernel.{kind}").read_bytes())
    return json.loads((there / "kernel.json").read_text())
compile.compile_kernel = copied
precompile.precompile([spec], work / "for" / "image", 1, code=["ptx"], wheel=work / "of" / "wheels")
checked = precompile.check(work / "for" / "image", [spec])
assert (checked.kernels, checked.problems) == (1, []), checked
os.environ["DUALKV_KERNEL_DIR"] = str(work / "for" / "image")
store.load(spec)
assert store.counts["kernel_dir"] == 1, store.counts

del os.environ["DUALKV_KERNEL_DIR"]
store._loaded.clear()
store.load(spec)
assert store.where(spec) == "memory" and store.counts["compiled"] == 2, store.counts
store._loaded.clear()
store.load(spec)
assert store.counts["cache"] == 1, store.counts

toolchain._environment = lambda: "nvidia-cutlass-dsl 4.5.2, expected 4.8"
toolchain.PRIVATE, toolchain.PRIVATE_FFI = version("nvidia-cutlass-dsl"), version("apache-tvm-ffi")
toolchain._installer = lambda: [sys.executable, str(work / "pip.py"), "install"]
assert toolchain.install() == toolchain.found()
"""


@pytest.mark.parametrize("umask", UMASKS, ids=lambda umask: f"{umask:03o}")
def test_what_is_written_is_loaded_whatever_the_umask(tmp_path, umask):
    work = tmp_path / "work"
    work.mkdir()
    (work / "pip.py").write_text(stand_in.PIP)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("DUALKV_")}
    ours |= {"DUALKV_CACHE_DIR": str(work / "home" / "cache" / "dualkv"), "PYTHONPATH": str(ROOT), "PIP_COPIES": "1"}
    command = [sys.executable, "-c", PROGRAM, str(copied(SPEC, tmp_path))]
    done = subprocess.run(command, cwd=work, env=ours, umask=umask, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {path: path.lstat().st_mode & 0o777 for path in work.rglob("*") if not path.is_symlink()}
    del found[work / "pip.py"]
    assert len(found) > 100
    others = {path: f"{mode:o}" for path, mode in found.items() if mode & 0o022}
    assert not others
    shared = {path: mode for path, mode in found.items() if path.relative_to(work).parts[0] in ("for", "of")}
    unlocked = {path: mode for path, mode in shared.items() if not path.name.endswith(".lock")}
    # Kernels for an image are made by one user and loaded by others.
    assert {f"{mode:o}" for path, mode in unlocked.items() if path.is_dir()} == {"755"}
    assert {f"{mode:o}" for path, mode in unlocked.items() if path.is_file()} == {"644"}
    names = [path.name for path in unlocked]
    for expected in ("kernel.so", "kernel.json", "manifest.json", "code"):
        assert expected in names
    assert {path.suffix for path in unlocked} >= {".whl", ".ptx"}
    assert found[work / "home" / "cache"] == found[work / "home" / "cache" / "dualkv"] == 0o700

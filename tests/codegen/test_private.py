"""The private toolchain: installed by a stand-in for pip that takes this environment's files; compiles are real."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from codegen import KernelError, store, toolchain
from codegen.spec import backward_specs
from tests.codegen import stand_in
from tests.codegen.real import copied

DSL, FFI = version("nvidia-cutlass-dsl"), version("apache-tvm-ffi")
SPEC = backward_specs("bf16", 64).postprocess


@pytest.fixture
def private(monkeypatch, tmp_path):
    """An environment whose DSL is vLLM's, and the stand-in; what it was asked for."""
    monkeypatch.setattr(toolchain, "_environment", lambda: "nvidia-cutlass-dsl 4.5.2, expected 4.8")
    monkeypatch.setattr(toolchain, "PRIVATE", DSL)
    monkeypatch.setattr(toolchain, "PRIVATE_FFI", FFI)
    monkeypatch.setenv("DUALKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DUALKV_KERNEL_DIR", raising=False)
    monkeypatch.setenv("PIPS", str(tmp_path / "pips"))
    (tmp_path / "pip.py").write_text(stand_in.PIP)
    monkeypatch.setattr(toolchain, "_installer", lambda: [sys.executable, str(tmp_path / "pip.py"), "install"])
    return lambda: (tmp_path / "pips").read_text().splitlines() if (tmp_path / "pips").exists() else []


def test_its_versions_are_the_pinned_ones():
    """The pins are those of the compiler whose kernels the manifest records."""
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert f"nvidia-cutlass-dsl=={toolchain.PRIVATE}" in pins
    assert f"apache-tvm-ffi=={toolchain.PRIVATE_FFI}" in pins


def test_its_kernels_are_those_of_the_environments_compiler(private, monkeypatch, tmp_path):
    """The kernels are equal byte for byte, and so are their records; the worker took cutlass and tvm-ffi from the
    private folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "_environment", lambda: toolchain._examined(None, _dsl_here()))
        own = copied(SPEC, tmp_path / "own")
        described = toolchain.compiler()
    made = toolchain.install()
    assert toolchain.found() == made
    assert str(made) == f"nvidia-cutlass-dsl {described['nvidia-cutlass-dsl']} in the private toolchain {made.root}"
    assert made.root == tmp_path / "cache" / f"toolchain-{DSL}-cp{sys.version_info[0]}{sys.version_info[1]}"
    theirs = store.add(SPEC, tmp_path / "theirs")
    for name in ("kernel.cubin", "kernel.ptx", "kernel.json", "kernel.so"):
        assert (own / name).read_bytes() == (theirs / name).read_bytes(), name
    assert json.loads((theirs / "kernel.json").read_text())["compiler"] == described == made.compiler


def _dsl_here() -> Path:
    return Path(next(iter(importlib.util.find_spec("nvidia_cutlass_dsl").submodule_search_locations)))


def test_it_is_installed_once_whoever_asks(private):
    before = toolchain.lacking()
    assert "there is no private toolchain" in before
    made = []
    threads = [threading.Thread(target=lambda: made.append(toolchain.install())) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(made) == 4
    assert len(set(made)) == 1
    (asked,) = private()
    names = ["nvidia-cutlass-dsl", *(f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu13"))]
    assert set(asked.split()) > {f"apache-tvm-ffi=={FFI}", *(f"{name}=={DSL}" for name in names)}
    assert "--no-deps" in asked
    assert toolchain.lacking() is None
    assert made[0].root.parent.stat().st_mode & 0o777 == 0o700


def test_a_driver_of_cuda_12_gets_its_flavour(private, monkeypatch):
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: 12)
    assert f"nvidia-cutlass-dsl-libs-cu12=={DSL}" in toolchain.requirements()
    assert toolchain.install().flavour == "cu12"


def test_a_failed_download_is_one_sentence_and_leaves_nothing(private, monkeypatch, tmp_path, capfd):
    """The installer's reports are shown."""
    monkeypatch.setenv("PIP_FAILS", "1")
    with pytest.raises(
        KernelError, match=r"the private toolchain cannot be installed, .* failed: .*ERROR: No matching"
    ):
        toolchain.install()
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []
    monkeypatch.delenv("PIP_FAILS")
    assert toolchain.install() == toolchain.found()
    assert capfd.readouterr().err.count("Downloading") == 2


def test_what_does_not_serve_is_replaced(private, monkeypatch, tmp_path):
    """A private toolchain is replaced if it does not serve, such as that of a machine with an older driver on a shared
    home."""
    root = toolchain.private_folder()
    (root / "nvidia_cutlass_dsl").mkdir(parents=True)
    root.parent.chmod(0o700)
    toolchain._examined.cache_clear()
    assert f"the private toolchain {root} has nvidia-cutlass-dsl absent, expected 4.8" in toolchain.lacking()
    assert toolchain.install().root == root
    assert toolchain.lacking() is None


def test_one_that_others_can_write_to_is_replaced(private):
    """A private toolchain that others can write to is replaced: an older version installed it so under umask 002."""
    root = toolchain.install().root
    root.chmod(0o775)
    assert f"the private toolchain {root} can be written by others (mode 775)" in toolchain.lacking()
    assert toolchain.install() == toolchain.found()
    assert not root.stat().st_mode & 0o022
    assert len(private()) == 2


def test_a_cache_that_others_write_to_is_no_place_for_it(private, tmp_path):
    toolchain.install()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(KernelError, match="can be written by others"):
        toolchain.found()


def test_the_command(private, run, tmp_path):
    code, out, err = run("toolchain", "install")
    assert (code, err) == (0, "Downloading\n")  # what the installer says
    assert f"nvidia-cutlass-dsl=={DSL}" in out
    assert f"in the private toolchain {toolchain.private_folder()} compiles kernels from now on" in out
    code, out, _ = run("toolchain", "install")
    assert code == 0
    assert out.startswith("nothing to install: nvidia-cutlass-dsl ")
    assert len(private()) == 1


def test_uv_installs_where_there_is_no_pip(monkeypatch):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/bin/{name}")
    assert toolchain._installer()[:3] == ["/bin/uv", "pip", "install"]
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(KernelError, match="neither pip nor uv is here"):
        toolchain._installer()


def test_it_is_never_installed_unasked(private, tmp_path):
    with pytest.raises(KernelError, match="`dualkv toolchain install`"):
        store.entry(SPEC)
    assert private() == []
    assert not (tmp_path / "cache").exists()

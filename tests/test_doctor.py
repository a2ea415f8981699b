"""What `dualkv doctor` says of kernels: which are ready, where they are looked for, and what becomes of the others."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from codegen import KernelError, store, toolchain
from codegen.spec import backward_specs, forward_spec
from dualkv import cli, doctor
from tests.codegen import stand_in


def test_kernels_that_are_ready(compiles, monkeypatch, tmp_path):
    assert doctor._kernels()[0] == []
    for _ in store.fill([forward_spec("bf16", 128, 4), *backward_specs("bf16", 128).present], store.cache_dir()):
        pass
    store.cache_dir().chmod(0o700)
    there = tmp_path / "there"
    for _ in store.fill([forward_spec("bf16", 128, 8), forward_spec("fp16", 64, 1)], there):
        pass
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(there))
    ready, lookup, wrong = doctor._kernels()
    assert ready == [
        doctor.Ready("bf16", 128, [4, 8], True, False),
        doctor.Ready("fp16", 64, [1], False, False),
    ]
    assert f"looked for in DUALKV_KERNEL_DIR={there} and then the cache {store.cache_dir()}" in lookup
    assert "compiled at their first use" in lookup
    assert wrong == []
    monkeypatch.setenv("DUALKV_JIT", "0")
    assert "refused, because DUALKV_JIT=0" in doctor._kernels()[1]


def test_kernels_of_another_version_are_said(compiles, monkeypatch, tmp_path):
    for _, entry in store.fill([forward_spec("bf16", 128, 4)], tmp_path / "k"):
        stand_in.changed(entry / "kernel.json", sources="others")
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(tmp_path / "k"))
    ready, _, wrong = doctor._kernels()
    assert ready == []
    assert wrong == [
        f"1 of the kernels in {tmp_path / 'k'} are not used here ({entry.name} was made from other kernel sources): "
        "run dualkv precompile again, with this version"
    ]


def test_what_keeps_kernels_from_being_found_or_compiled(compiles, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor._kernels()[2] == ["kernels cannot be compiled: no linker is on PATH (gcc, cc or clang): install one"]
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(tmp_path / "absent"))
    assert "expected an existing folder" in doctor._kernels()[2][0]


def test_what_it_tells_to_install_is_what_the_package_asks_for():
    """With what each extra is for: one of those it brings is among the optional packages."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert list(doctor.NEEDED) == project["dependencies"]
    told = {
        extra: name
        for name, _, how in doctor.OPTIONAL
        for extra in project["optional-dependencies"]
        if f"[{extra}]" in how
    }
    assert set(told) == set(project["optional-dependencies"]) - {"dev"}
    for extra, name in told.items():
        assert any(requirement.startswith(name) for requirement in project["optional-dependencies"][extra])


def test_an_environment_that_only_loads_kernels_is_healthy(monkeypatch):
    right = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in doctor.COMPILING else right(name))
    assert not doctor.examine().healthy
    monkeypatch.setattr(toolchain, "can_compile", lambda: False)
    found = doctor.examine()
    assert found.healthy
    assert any("only the runtime of the CuTe DSL" in sentence for sentence in found.advice)

    def absent():
        raise KernelError("nvidia-cutlass-dsl is not installed")

    monkeypatch.setattr(toolchain, "dsl_folder", absent)
    toolchain.flavour.cache_clear()
    try:
        assert not doctor.examine().healthy
    finally:
        toolchain.flavour.cache_clear()


def test_the_command_prints_them(compiles, monkeypatch, capsys):
    for _ in store.fill([forward_spec("bf16", 96, 7)], store.cache_dir()):
        pass
    store.cache_dir().chmod(0o700)
    monkeypatch.setattr(sys, "argv", ["dualkv", "doctor"])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    out = capsys.readouterr().out
    assert "bf16, head dim 96" in out
    assert f"the cache {store.cache_dir()}" in out

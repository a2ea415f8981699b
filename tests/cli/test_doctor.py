"""Tests of `dualkv doctor` on kernels: which are ready, where they are looked for, and what becomes of the others."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from codegen import packages, store, toolchain
from codegen.spec import backward_specs, forward_spec
from dualkv.cli import commands, doctor
from dualkv.integrations import flash_linear_attention as fla
from tests.codegen import stand_in

FORWARDS = [forward_spec("bf16", 128, 4, few_keys=few_keys) for few_keys in (False, True)]


def test_kernels_that_are_ready(compiles, monkeypatch, tmp_path):
    assert doctor._kernels()[0] == []
    many, few = (backward_specs("bf16", 128, few_keys=few_keys).present for few_keys in (False, True))
    for specs, ratios, whole in ((FORWARDS[:1], [], False), (many, [], False), (few, [], True), (FORWARDS, [4], True)):
        for _ in store.fill(specs, store.cache_dir()):
            pass
        store.cache_dir().chmod(0o700)
        some = [doctor.Ready("bf16", 128, 128, ratios, whole, False)] if ratios or whole else []
        assert doctor._kernels()[0] == some
    there = tmp_path / "there"
    others = [forward_spec("bf16", 128, 8, few_keys=few_keys) for few_keys in (False, True)]
    for _ in store.fill([*others, forward_spec("fp16", 64, 1)], there):
        pass
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(there))
    ready, lookup, wrong = doctor._kernels()
    assert ready == [
        doctor.Ready("bf16", 128, 128, [4, 8], True, False),
        doctor.Ready("fp16", 64, 64, [1], False, False),
    ]
    assert (
        f"looked for in DUALKV_KERNEL_DIR={there} (3 kernels), then the cache {store.cache_dir()} (8 kernels)" in lookup
    )
    assert re.search(r"compiled at their first use by nvidia-cutlass-dsl 4.8.\d of this environment", lookup)
    assert wrong == []
    monkeypatch.setenv("DUALKV_JIT", "0")
    assert "refused: DUALKV_JIT=0" in doctor._kernels()[1]
    monkeypatch.setenv("DUALKV_JIT", "no")
    assert any("DUALKV_JIT is 'no', expected 0 (never compile) or 1" in said for said in doctor._kernels()[2])
    assert doctor._compiler() is None


def test_kernels_of_another_version_are_said(compiles, monkeypatch, tmp_path):
    for _, entry in store.fill([forward_spec("bf16", 128, 4)], tmp_path / "k"):
        stand_in.changed(entry / "kernel.json", sources="others")
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(tmp_path / "k"))
    ready, _, wrong = doctor._kernels()
    assert ready == []
    assert len(wrong) == 1
    for part in (str(tmp_path / "k"), entry.name, "make the kernels again"):
        assert part in wrong[0]


def test_what_keeps_kernels_from_being_found_or_compiled(compiles, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (wrong,) = doctor._kernels()[2]
    assert "no C compiler is on PATH" in wrong
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(tmp_path / "absent"))
    assert "expected an existing folder" in doctor._kernels()[2][0]


def test_the_extra_hybrid_asks_for_a_triton_without_the_fault():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    hybrid = project["optional-dependencies"]["hybrid"]
    assert any(requirement.startswith(f"triton>={fla.TRITON};") for requirement in hybrid)


def test_what_is_lacking_is_said(monkeypatch):
    """The advice says of every package which versions serve, what was found and how to install it."""
    right = packages.found
    for name, package in packages.PACKAGES.items():
        for version in (None, "0.0.7")[: 1 + (package.lowest is not None)]:
            monkeypatch.setattr(packages, "found", lambda n, at=(name, version): at[1] if n == at[0] else right(n))
            (found,) = [one for one in doctor._packages() if one.name == name]
            assert (found.version, found.versions, found.usable) == (version, package.versions, False)
            assert found.needed == package.needed
            here = "not installed" if version is None else f"found {version}"
            says = f"{package.wanted} ({here}: {package.install})"
            if not package.needed and version is None:
                says = f"for {package.purpose}: {package.install}"
            assert sum(says in sentence for sentence in doctor._advice(None, [])) == 1


@pytest.mark.parametrize(
    ("name", "version"),
    [("trl", "1.15.0"), ("transformers", "4.57.3"), ("torch", "2.10.1"), ("apache-tvm-ffi", "0.2.0")],
)
def test_the_command_says_what_is_too_old(name, version, monkeypatch, capsys):
    package, right = packages.PACKAGES[name], packages.found
    monkeypatch.setattr(packages, "found", lambda other: version if other == name else right(other))
    monkeypatch.setattr(sys, "argv", ["dualkv", "doctor"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        commands.main()
    assert bool(caught.value.code) == package.needed
    out = capsys.readouterr().out
    assert re.search(rf"{name} .* {version}, expected {package.versions}", out)
    assert f"{package.wanted} (found {version}: {package.install})" in out


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({}, None),
        ({"flash-linear-attention": "0.7.0", "triton": "3.7.1"}, None),
        ({"flash-linear-attention": "0.6.1", "triton": "3.6.0"}, "no backward on Hopper with Triton 3.6.0: install"),
        ({"flash-linear-attention": "0.5.2", "triton": "3.6.0"}, "0.6 or newer (found 0.5.2: pip install 'dualkv[hyb"),
    ],
)
def test_flash_linear_attention_and_its_refusal(versions, says, monkeypatch):
    """The advice has what `enable` would refuse."""
    monkeypatch.setattr(packages, "found", versions.get)
    monkeypatch.setattr(fla, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    fla.lacking.cache_clear()
    try:
        advice = doctor._advice("580", ["H100"])
    finally:
        fla.lacking.cache_clear()
    found = [sentence for sentence in advice if "flash-linear-attention" in sentence]
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_what_serves_is_said(compiles, monkeypatch, tmp_path):
    """The wheel, the cache, this environment's compiler, the private one, nothing: and nothing is enough for no GPU."""
    hopper = doctor.Runs("cuda:0, bf16 or fp16", doctor.KERNEL, "a Hopper GPU")
    monkeypatch.setattr(doctor, "_runs", lambda: [hopper])
    found = doctor.examine()
    assert re.fullmatch(r"nvidia-cutlass-dsl 4.8.\d of this environment", found.compiler)
    assert found.healthy
    monkeypatch.setattr(toolchain, "_environment", lambda: "nvidia-cutlass-dsl is not installed")
    found = doctor.examine()
    assert (found.compiler, found.healthy) == (None, False)
    assert found.advice[0].startswith("there are no kernels: nothing here compiles kernels (nvidia-cutlass-dsl is not")
    monkeypatch.setattr(doctor, "_runs", list)
    assert doctor.examine().healthy

    monkeypatch.setattr(doctor, "_runs", lambda: [hopper])
    package = tmp_path / "site" / "dualkv_kernels"
    private = toolchain.Toolchain(tmp_path / "toolchain", tmp_path / "toolchain" / "nvidia_cutlass_dsl", "cu13")
    monkeypatch.setattr(toolchain, "_private", lambda: private)
    found = doctor.examine()
    assert found.compiler == f"nvidia-cutlass-dsl absent in the private toolchain {tmp_path / 'toolchain'}"
    entry, _ = (store.add(spec, package) for spec in FORWARDS)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(toolchain, "_private", lambda: "there is no private toolchain")
    found = doctor.examine()
    assert "looked for in the wheel dualkv-kernels absent (2 kernels), then the cache" in found.lookup
    assert "others are refused: nothing here compiles kernels" in found.lookup
    assert found.kernels == [doctor.Ready("bf16", 128, 128, [4], False, False)]
    assert found.healthy
    stand_in.changed(entry / "kernel.json", sources="others")
    assert any("make the wheel dualkv-kernels again" in sentence for sentence in doctor.examine().advice)


def test_the_command_prints_them(compiles, monkeypatch, capsys):
    for _ in store.fill([forward_spec("bf16", 96, 7, few_keys=x) for x in (False, True)], store.cache_dir()):
        pass
    store.cache_dir().chmod(0o700)
    monkeypatch.setattr(sys, "argv", ["dualkv", "doctor"])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as caught:
        commands.main()
    assert not caught.value.code
    out = capsys.readouterr().out
    assert "bf16, head dim 96" in out
    assert f"the cache {store.cache_dir()}" in out


def test_a_backend_that_serves_nothing_is_unhealthy(monkeypatch):
    monkeypatch.setenv("DUALKV_BACKEND", "fa2")
    found = doctor.examine()
    assert not found.healthy
    assert "DUALKV_BACKEND chooses what computes attention: unset it for the default" in found.advice
    monkeypatch.setenv("DUALKV_BACKEND", "reference")
    assert any(runs.what != doctor.NOTHING for runs in doctor.examine().runs)

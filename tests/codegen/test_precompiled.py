"""A folder of kernels and its manifest.json: what it says, and every way in which it may lie."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import KernelError, cubin, precompiled, store, toolchain
from codegen.select import Shape, select, words
from codegen.spec import GRADIENTS, KernelSpec, backward_specs, forward_spec, table
from codegen.tiles import HEAD_DIM_PAIRS
from tests.codegen import stand_in
from tests.codegen.real import copied

VERSION = "9.9.9"
SPECS = [backward_specs("bf16", 64).preprocess, backward_specs("bf16", 64).postprocess]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with two real kernels, small ones."""
    folder = tmp_path_factory.mktemp("made")
    for spec in SPECS:
        copied(spec, folder)
    precompiled.write_manifest(folder, VERSION)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy, to be damaged."""
    return shutil.copytree(made, tmp_path / "kernels")


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_the_manifest_says_what_is_there(made):
    said = manifest(made)
    assert (said["schema"], said["arch"]) == (2, "sm_90a")
    assert said["versions"]["dualkv"] == VERSION
    assert {"flavour", "machine", "nvidia-cutlass-dsl", "compiler-sha256"} < set(said["versions"])
    assert len(said["kernels"]) == 2
    for name, kernel in said["kernels"].items():
        spec = KernelSpec.from_json(json.dumps(kernel["spec"]))
        assert spec in SPECS
        assert kernel["symbol"] == spec.symbol
        record = json.loads((made / name / "kernel.json").read_text())
        assert {field: record[field] for field in precompiled.FIELDS} == kernel
        assert kernel["registers"] > 0
        assert kernel["spill_stores"] == kernel["spill_loads"] == 0
        assert kernel["ctas_per_sm"] >= 1


def test_a_good_folder(made):
    found = precompiled.check(made, SPECS)
    assert found.problems == []
    assert found.kernels == 2
    if found.not_read_back is None:
        assert found.read_back == 2


def _lie(**fields):
    """The manifest says something else of the first kernel."""

    def tell(folder, name):
        said = manifest(folder)
        said["kernels"][name] |= fields
        (folder / "manifest.json").write_text(json.dumps(said))

    return tell


def _both_lie(**fields):
    """Make the cubin and its record lie."""

    def tell(folder, name):
        _lie(**fields)(folder, name)
        stand_in.changed(folder / name / "kernel.json", **fields)

    return tell


def _listed_only(folder, name):
    shutil.rmtree(folder / name)


def _swapped(folder, name):
    """The two kernels' folders, exchanged."""
    (other,) = set(manifest(folder)["kernels"]) - {name}
    (folder / name).rename(folder / "x")
    (folder / other).rename(folder / name)
    (folder / "x").rename(folder / other)


def _other_cubin(folder, name):
    """A cubin that is not in kernel.so, with its own hash in record and manifest."""
    (other,) = set(manifest(folder)["kernels"]) - {name}
    shutil.copyfile(folder / other / "kernel.cubin", folder / name / "kernel.cubin")
    _both_lie(cubin_sha256=manifest(folder)["kernels"][other]["cubin_sha256"])(folder, name)


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (_lie(registers=1), "differs: manifest.json says registers=1, its record"),
        (_lie(symbol="other"), "differs: manifest.json says symbol='other'"),
        (_lie(spec={}), "differs: manifest.json says spec={}"),
        (_lie(cubin_sha256="0"), "differs: manifest.json says cubin_sha256='0'"),
        (_lie(spill_stores=8), "differs: manifest.json says spill_stores=8, its record 0"),
        (_both_lie(registers=1), "differs: manifest.json says registers=1, its code"),
        (_both_lie(threads=64), "differs: manifest.json says threads=64, its code"),
        (_both_lie(stack=16), "differs: manifest.json says stack=16, its code 0"),
        (_both_lie(ctas_per_sm=31), "differs: manifest.json says ctas_per_sm=31, its code"),
        (_both_lie(shared_memory="much"), "is not described as kernels are (TypeError"),
        (_both_lie(so_sha256="0"), "is corrupt (kernel.so does not have the recorded hash)"),
        (_both_lie(cubin_sha256="0"), "has a kernel.cubin without the recorded hash"),
        (_other_cubin, "has a kernel.cubin that is not the code in kernel.so"),
        (_listed_only, "is in manifest.json and not in the folder"),
        (_swapped, "differs: manifest.json says spec="),
        (lambda folder, name: stand_in.flipped(folder / name / "kernel.so", 9), "is corrupt (kernel.so"),
        (lambda folder, name: stand_in.flipped(folder / name / "kernel.cubin", 9), "kernel.cubin"),
        (lambda folder, name: (folder / name / "kernel.cubin").unlink(), "has no readable kernel.cubin"),
        (lambda folder, name: (folder / name / "kernel.json").write_text("{}"), "has no readable record"),
        (lambda folder, name: (folder / "manifest.json").write_text("{}"), "cannot be read (KeyError"),
        (lambda folder, name: (folder / "manifest.json").unlink(), "cannot be read (FileNotFoundError"),
        (lambda folder, name: stand_in.changed(folder / "manifest.json", schema=3), "has schema 3, expected 2"),
        (lambda folder, name: stand_in.changed(folder / "manifest.json", kernels={name: 5}), "is not described"),
    ],
)
def test_a_manifest_that_lies(folder, lie, says):
    name = min(manifest(folder)["kernels"])
    lie(folder, name)
    found = precompiled.check(folder, SPECS)
    assert any(says in problem for problem in found.problems), found.problems


def test_the_gpu_has_the_last_word(made, monkeypatch):
    """The check also compares what the driver says of a loaded cubin (here a stand-in for it)."""
    said = max(manifest(made)["kernels"].items())[1]
    monkeypatch.setattr(cubin, "unreadable", lambda: None)

    def on_device(code, threads, shared_memory, **lies):
        own = cubin.resources(code)
        ctas = cubin.ctas_per_sm(own.registers, threads, shared_memory)
        facts = {"registers": own.registers, "stack": own.stack, "ctas_per_sm": ctas}
        return facts | {"static_shared_memory": own.static_shared_memory} | lies

    monkeypatch.setattr(cubin, "on_device", on_device)
    found = precompiled.check(made, SPECS)
    assert (found.problems, found.read_back, found.not_read_back) == ([], 2, None)
    for name in ("registers", "stack", "static_shared_memory", "ctas_per_sm"):
        monkeypatch.setattr(cubin, "on_device", lambda *given, name=name: on_device(*given, **{name: 99}))
        problems = precompiled.check(made).problems
        assert any(f"says {name}={said[name]}, the GPU 99" in problem for problem in problems)

    def refuses(*given):
        raise KernelError("cuModuleLoadData failed with CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(cubin, "on_device", refuses)
    assert any(
        "is not accepted by the GPU: cuModuleLoadData" in problem for problem in precompiled.check(made).problems
    )


def test_kernels_load_by_their_own_records_whatever_the_manifest_says(folder, monkeypatch):
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(folder))
    monkeypatch.setenv("DUALKV_CACHE_DIR", str(folder / "none"))
    monkeypatch.setenv("DUALKV_JIT", "0")
    (folder / "manifest.json").write_text("lies")
    assert {store.where(spec) for spec in SPECS} == {"kernel_dir"}
    (folder / "manifest.json").write_text(json.dumps({"schema": 2, "kernels": {"dualkv_fwd": {}}}))
    with pytest.raises(KernelError, match="DUALKV_JIT=0 forbids"):
        store.load(forward_spec("bf16", 64, 1))


def test_the_manifest_leaves_out_what_cannot_be_used_here(folder):
    name = min(manifest(folder)["kernels"])
    stand_in.changed(folder / name / "kernel.json", sources="those of another version")
    (folder / "notes").mkdir()
    (folder / "README").write_text("not a kernel")
    assert set(precompiled.write_manifest(folder, VERSION)["kernels"]) == {max(manifest(folder)["kernels"])}


def test_the_manifest_says_which_compiler_made_a_kernel(folder):
    """A compiler of another Python makes kernels that are used here too."""
    name = min(manifest(folder)["kernels"])
    compiler = json.loads((folder / name / "kernel.json").read_text())["compiler"] | {"compiler-sha256": "another"}
    stand_in.changed(folder / name / "kernel.json", compiler=compiler)
    kernels = precompiled.write_manifest(folder, VERSION)["kernels"]
    assert len(kernels) == 2
    assert kernels[name]["compiler"] == compiler
    assert precompiled.check(folder, SPECS).problems == []


# ---------------------------------------------------------------- the wheel
def entries(folder):
    return sorted(folder.glob("dualkv_*"))


def test_the_wheel_is_installed_by_pip_and_found_by_the_store(made, tmp_path, monkeypatch):
    wheel = precompiled.write_wheel(entries(made), tmp_path / "dist", VERSION)
    again = precompiled.write_wheel(reversed(entries(made)), tmp_path / "again", VERSION)
    assert wheel.read_bytes() == again.read_bytes()
    (minor,) = re.fullmatch(
        rf"dualkv_kernels-{re.escape(VERSION)}-py3-none-manylinux_2_(\d+)_{platform.machine()}\.whl", wheel.name
    ).groups()
    assert 17 <= int(minor) <= int(platform.libc_ver()[1].split(".")[1])
    site = tmp_path / "site"
    words = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)  # pip compares RECORD's hashes
    metadata = importlib.metadata.Distribution.at(next(site.glob("*.dist-info")))
    assert (metadata.name, metadata.version, metadata.requires) == ("dualkv-kernels", VERSION, [f"dualkv=={VERSION}"])
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("DUALKV_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.delenv("DUALKV_KERNEL_DIR", raising=False)
    monkeypatch.setattr(toolchain, "_environment", lambda: "nvidia-cutlass-dsl is not installed")
    monkeypatch.setattr(store, "_loaded", {})
    store.counts.clear()
    assert all(callable(kernel) for kernel in store.load_all(SPECS))
    assert store.counts == {"wheel": 2}
    assert sorted(p.name for p in store.entry(SPECS[0]).iterdir()) == ["kernel.json", "kernel.so"]


def test_a_wheel_that_is_too_large_or_cannot_be_written_is_refused(made, tmp_path, monkeypatch):
    with pytest.raises(KernelError, match=r"/proc/dist/.* cannot be written"):
        precompiled.write_wheel(entries(made), Path("/proc/dist"), VERSION)
    monkeypatch.setattr(precompiled, "MOST_BYTES", 4000)
    with pytest.raises(KernelError, match=r"\.whl would have \d+ bytes, expected at most 4000"):
        precompiled.write_wheel(entries(made), tmp_path / "dist", VERSION)
    assert list((tmp_path / "dist").iterdir()) == []


# ---------------------------------------------------------------- which kernels


def test_the_words_of_every_kernel_select_it():
    every = [Shape(d, h, (), of_v) for d, of_v in HEAD_DIM_PAIRS for h in range(1, 17)]
    specs = select(every, ["bf16", "fp16"], gradients=GRADIENTS, deterministic=True, trees=True)
    assert set(table()) <= set(specs)
    for spec in specs:
        assert words(spec), spec


def test_fill_stops_at_a_failure_and_begins_no_more(monkeypatch, compiles, tmp_path):
    begun = []

    def fails(spec, folder):
        begun.append(spec)
        raise KernelError("compiling failed: no")

    monkeypatch.setattr(store.compile, "compile_kernel", fails)
    specs = [forward_spec("bf16", 128, h) for h in range(1, 17)]
    with pytest.raises(KernelError, match="compiling failed: no"):
        list(store.fill(specs, tmp_path / "f", 1))
    assert len(begun) == 1

"""The store: what is a hit, what is a miss, who may be trusted. The compile is a stand-in."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from codegen import KernelError, compile, store, toolchain
from codegen.select import words
from codegen.spec import TILES, backward_specs, forward_spec
from tests.codegen import stand_in

SPEC = forward_spec("bf16", 128, 4)


def test_second_time_is_a_hit(compiles):
    assert store.where(SPEC) is None
    path = store.entry(SPEC)
    assert store.entry(SPEC) == path
    assert compiles() == [SPEC]
    assert store.where(SPEC) == "cache"
    assert sorted(p.name for p in path.iterdir()) == ["kernel.cubin", "kernel.json", "kernel.ptx", "kernel.so"]
    record = json.loads((path / "kernel.json").read_text())
    assert record["spec"] == SPEC.to_dict()
    assert record["registers"] == 168
    assert store.cache_dir().stat().st_mode & 0o777 == 0o700


def test_key_covers_spec_compiler_and_sources(compiles, monkeypatch):
    keys = {store.key(SPEC)}
    assert store.key(dataclasses.replace(SPEC)) in keys
    keys.add(store.key(dataclasses.replace(SPEC, dtype="fp16")))
    keys.add(store.key(dataclasses.replace(SPEC, tile=dataclasses.replace(SPEC.tile, tile_n=112))))
    compiler = dict(toolchain.compiler())
    for name in compiler:
        monkeypatch.setattr(toolchain, "compiler", lambda name=name: compiler | {name: "other"})
        keys.add(store.key(SPEC))
    monkeypatch.setattr(toolchain, "compiler", lambda: compiler)
    monkeypatch.setattr(toolchain, "source_digest", lambda operation: "edited")
    keys.add(store.key(SPEC))
    assert len(keys) == 4 + len(compiler)
    assert {"machine", "flavour", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs", "compiler-sha256"} == set(compiler)


def test_source_digest_covers_what_a_kernel_imports(tmp_path, monkeypatch):
    package = tmp_path / "cute_kernels"
    package.mkdir()
    sources = {
        "__init__": "",
        "fwd": "import math\nfrom cute_kernels import items\nfrom cute_kernels.mask import mask\n",
        "items": "ROW = 0\n",
        "mask": "import cute_kernels.deep\nmask = 1\n",
        "deep": "",
        "bwd": "from cute_kernels import fwd\n",
    }
    for name, text in sources.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cute_kernels", raising=False)
    seen = {toolchain.read_source_digest("fwd")}
    for name, text in sources.items():
        (package / f"{name}.py").write_text(f'"""Prose."""\n\n# prose\n{text}\n')
        assert toolchain.read_source_digest("fwd") in seen, name
        (package / f"{name}.py").write_text(f"{text}edited = 1\n")
        now = toolchain.read_source_digest("fwd")
        assert (now in seen) == (name == "bwd"), name
        seen.add(now)
    assert toolchain.read_source_digest("bwd") not in seen


def without_prose(source):
    """The syntax tree of a file, `pass` for each docstring."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def test_of_sources_the_code_counts_and_nothing_else():
    paths = {path for operation in TILES for path in toolchain.sources(operation).values() if path.suffix == ".py"}
    for path in paths:
        source = path.read_text()
        assert without_prose(source) == ast.dump(ast.parse(toolchain.code(source, "pass"))), path
    digests = {operation: toolchain.read_source_digest(operation) for operation in TILES}
    assert digests.pop("fwd") == digests.pop("fwd_paths"), "both kernels of head dim 512 are in one file"
    assert len(set(digests.values())) == len(digests), "each operation's own"
    assert toolchain.code('x = "#"  # prose\n\ny = """a\n# b"""\n') == 'x = "#"\ny = """a\n# b"""'


def _truncate(path):
    (path / "kernel.so").write_bytes((path / "kernel.so").read_bytes()[:-1])


def _flip(path):
    stand_in.flipped(path / "kernel.so", 3)


def _record(**changes):
    return lambda path: stand_in.changed(path / "kernel.json", **changes)


def _compiler(**changes):
    return _record(compiler=dict(toolchain.compiler()) | changes)


def _other_kernel(path):
    """Put another kernel's code under this one's record, hash and all."""
    code = stand_in.code_of(forward_spec("fp16", 128, 4))
    (path / "kernel.so").write_bytes(code)
    stand_in.changed(path / "kernel.json", so_sha256=hashlib.sha256(code).hexdigest())


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip,
        lambda path: (path / "kernel.so").unlink(),
        lambda path: (path / "kernel.json").unlink(),
        lambda path: (path / "kernel.json").write_text('{"schema"'),
        lambda path: (path / "kernel.json").write_text("[]"),
        _record(schema=store.SCHEMA + 1),
        _record(spec=forward_spec("fp16", 128, 4).to_dict()),
        _record(spec=SPEC.to_dict() | {"arch": "sm_100a"}),
        _record(sources="other"),
        _record(compiler={"flavour": "cu99"}),
        _compiler(**{"nvidia-cutlass-dsl": "4.9.0"}),
        _compiler(**{"compiler-sha256": "another ptxas"}),
        _compiler(flavour="cu12"),
        _compiler(machine="aarch64"),
        _other_kernel,
    ],
)
def test_damaged_and_foreign_entries_are_misses_that_heal(compiles, damage):
    path = store.entry(SPEC)
    damage(path)
    assert store.where(SPEC) is None
    assert store.entry(SPEC) == path
    assert len(compiles()) == 2
    assert store.where(SPEC) == "cache"
    assert not [p for p in store.cache_dir().iterdir() if p.name.startswith(".") and p.is_dir()]


def test_a_failed_compile_leaves_no_entry(compiles, monkeypatch):
    def fails(spec, folder):
        (folder / "kernel.so").write_bytes(b"half")
        raise RuntimeError("compiling failed: out of registers")

    with monkeypatch.context() as patch:
        patch.setattr(compile, "compile_kernel", fails)
        with pytest.raises(RuntimeError, match="out of registers"):
            store.entry(SPEC)
    assert [p.name for p in store.cache_dir().iterdir() if p.is_dir()] == []
    store.entry(SPEC)
    assert compiles() == [SPEC]


def test_sources_edited_under_a_running_process_are_not_stored(compiles, monkeypatch):
    monkeypatch.setattr(toolchain, "read_source_digest", lambda operation: "edited since")
    with pytest.raises(RuntimeError, match="the kernel sources changed under this process"):
        store.entry(SPEC)
    assert store.where(SPEC) is None


def test_many_askers_one_compile(compiles):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(store.entry(SPEC))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 8
    assert compiles() == [SPEC]


def test_several_kernels_are_compiled_side_by_side(compiles, monkeypatch):
    monkeypatch.setenv("STAND_IN_SECONDS", "3")
    monkeypatch.setattr(store, "_loaded", {})
    monkeypatch.setattr(store, "open_entry", lambda path, spec: spec.symbol)
    store.entry(SPEC)
    store.counts.clear()
    specs = [SPEC, *backward_specs("bf16", 128).present, SPEC]
    begin = time.monotonic()
    assert store.load_all(specs) == [spec.symbol for spec in specs]
    assert time.monotonic() - begin < 10, "four in turn take twelve seconds"
    assert store.counts == {"cache": 1, "compiled": 4}
    assert len(compiles()) == 5
    assert store.load_all(specs) == [spec.symbol for spec in specs]
    assert len(compiles()) == 5


def _no_compiler(monkeypatch):
    monkeypatch.setattr(toolchain, "_environment", lambda: "nvidia-cutlass-dsl 4.5.2, expected 4.8")


def test_kernel_dir_is_found_first_and_never_touched(compiles, monkeypatch, tmp_path):
    there = tmp_path / "made elsewhere"
    made = dict(store.fill([SPEC], there))[SPEC]
    before = {p: p.stat().st_mtime_ns for p in there.rglob("*")}
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(there))
    monkeypatch.setenv("DUALKV_JIT", "0")
    _no_compiler(monkeypatch)  # and no cache
    assert store.where(SPEC) == "kernel_dir"
    assert store.entry(SPEC) == made
    assert {p: p.stat().st_mtime_ns for p in there.rglob("*")} == before
    assert not store.cache_dir().exists()


def test_without_a_compiler_what_was_compiled_is_used_and_the_rest_is_one_sentence(compiles, monkeypatch):
    path = store.entry(SPEC)
    _no_compiler(monkeypatch)
    assert store.where(SPEC) == "cache"
    assert store.entry(SPEC) == path
    with pytest.raises(KernelError) as caught:
        store.load(forward_spec("fp16", 128, 4))
    said = str(caught.value)
    assert said.startswith(f"kernel {forward_spec('fp16', 128, 4)} is not compiled (looked in the cache {path.parent}")
    assert (
        "nothing here compiles kernels (nvidia-cutlass-dsl 4.5.2, expected 4.8; there is no private toolchain): "
        in said
    )
    for remedy in ("the wheel dualkv-kernels", "pip install 'dualkv[compile]'", "dualkv toolchain install"):
        assert remedy in said
    assert len(compiles()) == 1


def test_kernels_of_a_wheel_come_before_the_cache(compiles, monkeypatch, tmp_path):
    store.entry(SPEC)
    package = tmp_path / "site" / "dualkv_kernels"
    path = dict(store.fill([SPEC], package))[SPEC]
    (package / "__init__.py").touch()
    for folder in (package, path, path / "kernel.so"):
        folder.chmod(0o775)  # as pip leaves it under umask 002: as trusted as other installed packages
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert store.where(SPEC) == "wheel"
    _no_compiler(monkeypatch)
    store.counts.clear()
    assert store.entry(SPEC) == path
    assert store.counts == {"wheel": 1}
    monkeypatch.setattr("tvm_ffi.load_module", lambda file: {SPEC.symbol: file})
    assert store.open_entry(path, SPEC) == str(path / "kernel.so")
    stand_in.changed(path / "kernel.json", sources="other")
    assert store.where(SPEC) == "cache"
    with pytest.raises(KernelError, match=r"looked in the wheel dualkv-kernels \(no entry of it\) and the cache"):
        store.entry(forward_spec("fp16", 128, 4))


def test_another_interface_of_tvm_ffi_is_refused(compiles, monkeypatch):
    path = store.entry(SPEC)
    for version in ("0.2.0", "0.1.8"):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        store._check_ffi.cache_clear()
        says = rf"apache-tvm-ffi 0\.1\.9 or newer, below 0\.2 \(found {version}: pip install 'apache-tvm-ffi>="
        with pytest.raises(KernelError, match=says):
            store.open_entry(path, SPEC)
    store._check_ffi.cache_clear()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_flip, "is corrupt"),
        (_other_kernel, f"is corrupt (kernel.so does not export {SPEC.symbol})"),
        (_record(sources="other"), "was made from other kernel sources"),
        (_compiler(flavour="cu99"), "was made for cu99, the driver here runs CUDA 13"),
        (_compiler(machine="aarch64"), "was made for machine aarch64, here is "),
    ],
)
def test_without_jit_the_missing_kernel_is_named_with_reasons(compiles, monkeypatch, tmp_path, damage, says):
    damage(dict(store.fill([SPEC], tmp_path / "there"))[SPEC])
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: 13)
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(tmp_path / "there"))
    monkeypatch.setenv("DUALKV_JIT", "0")
    with pytest.raises(KernelError, match="DUALKV_JIT=0 forbids") as caught:
        store.load(SPEC)
    assert f"kernel {SPEC} is not compiled" in str(caught.value)
    assert says in str(caught.value)
    assert "--head-dims 128 --gqa 4 --dtypes bf16 --directions forward` makes it" in str(caught.value)
    assert len(compiles()) == 1


def test_without_jit_the_command_is_that_of_the_kernel(compiles, monkeypatch):
    monkeypatch.setenv("DUALKV_JIT", "0")
    for spec in backward_specs("fp16", 96, deterministic=True, gradients="qk").present:
        with pytest.raises(KernelError, match=f"`dualkv precompile --out DIR {' '.join(words(spec))}` makes it"):
            store.load(spec)
    own = dataclasses.replace(SPEC, tile=dataclasses.replace(SPEC.tile, tile_n=112))
    with pytest.raises(KernelError, match="no command makes it"):
        store.load(own)


def test_settings_that_make_no_sense(compiles, monkeypatch, tmp_path):
    monkeypatch.setenv("DUALKV_JIT", "no")
    with pytest.raises(RuntimeError, match=r"DUALKV_JIT is 'no', expected 0 \(never compile\) or 1"):
        store.entry(SPEC)
    monkeypatch.delenv("DUALKV_JIT")
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(tmp_path / "absent"))
    with pytest.raises(RuntimeError, match="expected an existing folder"):
        store.entry(SPEC)


def test_cache_of_another_user_or_open_to_others_is_refused(compiles, monkeypatch):
    store.entry(SPEC)
    store.cache_dir().chmod(0o770)
    with pytest.raises(RuntimeError, match="can be written by others"):
        store.load(SPEC)
    store.cache_dir().chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(RuntimeError, match="this process runs as 12345"):
        store.load(SPEC)


def test_kernel_dir_of_a_stranger_or_open_to_others_is_refused(compiles, monkeypatch, tmp_path):
    store.entry(SPEC)
    folder = tmp_path / "image"
    shutil.copytree(store.cache_dir(), folder)
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(folder))
    folder.chmod(0o777)
    with pytest.raises(KernelError, match=r"DUALKV_KERNEL_DIR .* can be written by others \(mode 777\)"):
        store.entry(SPEC)
    folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # an image's folder is root's, and runs as anybody
    owned_by = folder.stat().st_uid
    if owned_by == 0:
        assert store.entry(SPEC).parent == folder
    monkeypatch.setattr(Path, "stat", lambda path, **k: os.stat_result((0o40755, 0, 0, 1, 777, 0, 0, 0, 0, 0)))
    with pytest.raises(KernelError, match=r"DUALKV_KERNEL_DIR .* belongs to uid 777, this process runs as 12345"):
        store.entry(SPEC)


@pytest.mark.parametrize("part", ["", "kernel.so"])
def test_an_entry_open_to_others_is_refused_wherever_it_lies(compiles, monkeypatch, part):
    """The cache replaces an entry that an older version left open under umask 002; an entry of another folder is not
    loaded."""
    path = store.entry(SPEC) / part
    path.chmod(0o775)
    with pytest.raises(KernelError, match=r"the compiled kernel .* can be written by others \(mode 775\)"):
        store.open_entry(store.cache_dir() / store._name(SPEC), SPEC)
    monkeypatch.setenv("DUALKV_KERNEL_DIR", str(store.cache_dir()))
    monkeypatch.setenv("DUALKV_JIT", "0")
    with pytest.raises(KernelError, match=rf"can be written by others \(mode 775\).*chmod go-w {path}"):
        store.load(SPEC)
    monkeypatch.delenv("DUALKV_KERNEL_DIR")
    monkeypatch.delenv("DUALKV_JIT")
    assert store.entry(SPEC) / part == path
    assert not path.stat().st_mode & 0o022
    assert len(compiles()) == 2


def test_a_folder_that_others_can_write_to_is_not_filled(compiles, tmp_path):
    """No process could load from it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o775)
    with pytest.raises(KernelError, match=rf"the folder of kernels {tmp_path}/out can be written by others \(mode 775"):
        store.add(SPEC, tmp_path / "out")
    assert compiles() == []

"""Compiled kernels, found or made: memory, `DUALKV_KERNEL_DIR`, the user's cache, then a compile.

An entry is a folder `<symbol>-<key>` with `kernel.so`, `kernel.cubin` and the record `kernel.json`. It appears whole by
one rename, and counts only if its record fits what is asked for and `kernel.so` has the recorded hash; anything else is
a miss.

Environment:
    DUALKV_KERNEL_DIR: folder of entries made elsewhere, only ever read.
    DUALKV_CACHE_DIR: folder of entries made here (default `$XDG_CACHE_HOME/dualkv`, `~/.cache/dualkv`), mode 0700.
    DUALKV_JIT: 0 never compiles.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from codegen import compile, toolchain
from codegen.spec import KernelSpec, canonical_json

_log = logging.getLogger("dualkv.codegen")
SCHEMA = 1
Kernel = Callable[..., Any]

counts: Counter[str] = Counter()
"""How often kernels came from `kernel_dir`, `cache` or `compiled` in this process (memory is not counted)."""

_loaded: dict[KernelSpec, Kernel] = {}
_lock = threading.RLock()


def load(spec: KernelSpec) -> Kernel:
    """The kernel of `spec`, ready to be called; compiled first if it is nowhere to be found (seconds).

    Raises:
        RuntimeError: it must be compiled and cannot or may not be; a cache folder that is not safe to load code from.
    """
    kernel = _loaded.get(spec)
    if kernel is None:
        with _lock:
            kernel = _loaded.get(spec)
            if kernel is None:
                kernel = _loaded[spec] = _open(entry(spec) / "kernel.so", spec.symbol)
    return kernel


def entry(spec: KernelSpec) -> Path:
    """The entry of `spec` on disk, found or compiled."""
    found, where, why_not = _find(spec)
    if found is None:
        if not _may_compile():
            raise RuntimeError(
                f"kernel {spec} is not compiled and DUALKV_JIT=0 forbids compiling it here; looked in "
                f"{' and '.join(why_not)}. Unset DUALKV_JIT, or point DUALKV_KERNEL_DIR at a folder that holds it "
                "(any DUALKV_CACHE_DIR that was filled by a run with this version)"
            )
        folder = cache_dir()
        with _writing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
        return add(spec, folder)
    counts[where] += 1
    return found


def where(spec: KernelSpec) -> str | None:
    """`memory`, `kernel_dir` or `cache`: where `load` would find `spec` without compiling, None if nowhere."""
    return "memory" if spec in _loaded else _find(spec)[1] or None


def fill(specs: list[KernelSpec], folder: Path, jobs: int = 1) -> Iterator[tuple[KernelSpec, Path]]:
    """Compile what `folder` lacks of `specs`, `jobs` at a time; yields each spec and its entry, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(specs, pool.map(lambda spec: add(spec, folder), specs), strict=True)


# ---------------------------------------------------------------- look up
def key(spec: KernelSpec) -> str:
    """sha256 over everything that shapes the compiled kernel."""
    content = {
        "spec": spec.to_dict(),
        "compiler": dict(toolchain.compiler()),
        "sources": toolchain.source_digest(spec.operation),
    }
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def _name(spec: KernelSpec) -> str:
    return f"{spec.symbol}-{key(spec)[:16]}"


def _find(spec: KernelSpec) -> tuple[Path | None, str, list[str]]:
    """(entry, "kernel_dir" or "cache", []) or (None, "", what was looked at and why it does not do)."""
    why_not = []
    kernel_dir = os.environ.get("DUALKV_KERNEL_DIR")
    if kernel_dir:
        if not Path(kernel_dir).is_dir():
            raise RuntimeError(f"DUALKV_KERNEL_DIR is {kernel_dir!r}, expected an existing folder of compiled kernels")
        reasons = []
        for path in sorted(Path(kernel_dir).glob(f"{spec.symbol}-*")):
            reason = _mismatch(path, spec, same_compiler=False)
            if reason is None:
                return path, "kernel_dir", []
            reasons.append(f"{path.name} {reason}")
        why_not.append(f"DUALKV_KERNEL_DIR={kernel_dir} ({'; '.join(reasons) or 'no entry of it'})")
    path = cache_dir() / _name(spec)
    if path.is_dir():
        _check_private(cache_dir())
        reason = _mismatch(path, spec, same_compiler=True)
        if reason is None:
            return path, "cache", []
        why_not.append(f"the cache ({path} {reason})")
    else:
        why_not.append(f"the cache {cache_dir()} (no entry {path.name})")
    return None, "", why_not


def _mismatch(path: Path, spec: KernelSpec, same_compiler: bool) -> str | None:
    """Why the entry at `path` must not be loaded for `spec` here, or None."""
    try:
        record = json.loads((path / "kernel.json").read_text())
        so_hash = hashlib.sha256((path / "kernel.so").read_bytes()).hexdigest()
        compiler = dict(record["compiler"])
        if record["schema"] != SCHEMA:
            return f"has schema {record['schema']}, expected {SCHEMA}"
        if record["spec"] != spec.to_dict():
            return "is of another specification"
        if record["sources"] != toolchain.source_digest(spec.operation):
            return "was made from other kernel sources"
        if record["so_sha256"] != so_hash:
            return "is corrupt (kernel.so does not have the recorded hash)"
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"is corrupt ({type(e).__name__}: {e})"
    if same_compiler:
        return None if compiler == dict(toolchain.compiler()) else "was made by another compiler"
    # Made elsewhere: what loads it here must fit, what compiled it there may be absent here.
    if compiler.get("flavour") != toolchain.flavour():
        return f"was made for the {compiler.get('flavour')} runtime, here is {toolchain.flavour()}"
    ours, theirs = toolchain.version("apache-tvm-ffi"), str(compiler.get("apache-tvm-ffi"))
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        return f"was made for apache-tvm-ffi {theirs}, here is {ours}"
    return None


# ---------------------------------------------------------------- make
def add(spec: KernelSpec, folder: Path) -> Path:
    """The entry of `spec` in `folder`, compiled if there is none. One process compiles, others wait for it.

    Raises:
        RuntimeError: the compile failed, or the folder cannot be written.
    """
    path = folder / _name(spec)
    with _writing(folder), _locked(folder / f".{path.name}.lock"):
        if _mismatch(path, spec, same_compiler=True) is None:
            counts["cache"] += 1
            return path
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=folder))
        try:
            _make(spec, made)
            if path.exists():  # corrupt: a process that has it open keeps its files
                path.rename(made / "replaced")
            made.rename(path)
            shutil.rmtree(path / "replaced", ignore_errors=True)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return path


def _make(spec: KernelSpec, folder: Path) -> None:
    _log.info("compiling %s into %s, once", spec, folder.parent)
    record = {
        "schema": SCHEMA,
        "spec": spec.to_dict(),
        "symbol": spec.symbol,
        "compiler": dict(toolchain.compiler()),
        "sources": toolchain.source_digest(spec.operation),
        **compile.compile_kernel(spec, folder),
    }
    if toolchain.read_source_digest(spec.operation) != record["sources"]:
        raise RuntimeError(f"the kernel sources changed under this process while it compiled {spec}: start it again")
    for name in ("so", "cubin"):
        record[f"{name}_sha256"] = hashlib.sha256((folder / f"kernel.{name}").read_bytes()).hexdigest()
    (folder / "kernel.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    counts["compiled"] += 1


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise RuntimeError(
            f"the kernel cache {folder} cannot be written ({e.strerror or e}); set DUALKV_CACHE_DIR to one of yours"
        ) from e


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- settings and load
def cache_dir() -> Path:
    given = os.environ.get("DUALKV_CACHE_DIR")
    if given:
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "dualkv"


def _may_compile() -> bool:
    value = os.environ.get("DUALKV_JIT", "1")
    if value not in ("", "0", "1"):
        raise RuntimeError(f"DUALKV_JIT is {value!r}, expected 0 (never compile) or 1")
    return value != "0"


def _check_private(folder: Path) -> None:
    """Code is loaded from `folder`: it must belong to this user, and nobody else may write to it."""
    info = folder.stat()
    if info.st_uid != os.geteuid():
        raise RuntimeError(
            f"the kernel cache {folder} belongs to uid {info.st_uid}, this process runs as {os.geteuid()}: code is not "
            "loaded from another user's folder; set DUALKV_CACHE_DIR to a folder of yours"
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"the kernel cache {folder} can be written by others (mode {stat.S_IMODE(info.st_mode):o}): code is not "
            f"loaded from there; chmod 700 {folder} or set DUALKV_CACHE_DIR"
        )


@cache
def _runtime() -> ctypes.CDLL:
    """The DSL's runtime library, in the process before any kernel that links to it."""
    return ctypes.CDLL(str(toolchain.runtime_library()), mode=ctypes.RTLD_GLOBAL)


def _open(path: Path, symbol: str) -> Kernel:
    import tvm_ffi

    _runtime()
    kernel: Kernel = tvm_ffi.load_module(str(path))[symbol]
    return kernel

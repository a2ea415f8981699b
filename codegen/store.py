"""Find compiled kernels in memory, `DUALKV_KERNEL_DIR`, the wheel dualkv-kernels and the cache, or compile them.

An entry is a folder `<symbol>-<key>` with `kernel.so`, `kernel.cubin`, `kernel.ptx` and the record `kernel.json`. It
appears by one rename. It counts only if nobody but its owner can write to it, its record fits the specification and
`kernel.so` has the recorded hash and exports the symbol. Everything else is a miss.

Environment:
    DUALKV_KERNEL_DIR: folder of entries made elsewhere, never written.
    DUALKV_CACHE_DIR: folder of entries made here (default `$XDG_CACHE_HOME/dualkv`, `~/.cache/dualkv`), mode 0700.
    DUALKV_JIT: 0 never compiles.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import json
import logging
import os
import platform
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from codegen import KernelError, compile, folders, packages, select, toolchain
from codegen.folders import cache_dir, locked
from codegen.spec import KernelSpec, canonical_json

_log = logging.getLogger("dualkv.codegen")
SCHEMA = 2
Kernel = Callable[..., Any]

counts: Counter[str] = Counter()
"""The number of kernels that came from `kernel_dir`, `wheel`, `cache` or `compiled` in this process (memory is not
counted)."""

_loaded: dict[KernelSpec, Kernel] = {}
_lock = threading.RLock()


def load(spec: KernelSpec) -> Kernel:
    """The kernel of `spec`, ready to call. A kernel that is not found is compiled first, which takes seconds.

    Raises:
        KernelError: the kernel is not found, and cannot or may not be compiled; or the cache folder is not safe to load
            code from.
    """
    kernel = _loaded.get(spec)
    if kernel is None:
        with _lock:
            kernel = _loaded.get(spec)
            if kernel is None:
                kernel = _loaded[spec] = open_entry(entry(spec), spec)
    return kernel


def load_all(specs: Iterable[KernelSpec]) -> list[Kernel]:
    """Run `load` for several specifications: missing kernels are compiled in parallel."""
    specs = list(specs)
    with _lock:
        missing = [spec for spec in dict.fromkeys(specs) if spec not in _loaded]
        with ThreadPoolExecutor(max(1, len(missing))) as pool:
            for spec, path in zip(missing, pool.map(entry, missing), strict=True):
                _loaded[spec] = open_entry(path, spec)
        return [_loaded[spec] for spec in specs]


def entry(spec: KernelSpec) -> Path:
    """The entry of `spec` on disk, found or compiled."""
    found, where, why_not = _find(spec)
    if found is not None:
        counts[where] += 1
        return found
    looked = f"kernel {spec} is not compiled (looked in {' and '.join(why_not)})"
    if not may_compile():
        words = select.words(spec)
        make = f"`dualkv precompile --out DIR {' '.join(words)}` makes it" if words else "no command makes it"
        raise KernelError(
            f"{looked} and DUALKV_JIT=0 forbids compiling it here. {make}; set DUALKV_KERNEL_DIR=DIR then, or unset "
            "DUALKV_JIT"
        )
    if lacking := compile.cannot_compile():
        raise KernelError(f"{looked} and {lacking}")
    try:
        return _add(spec, folders.make_cache_dir())
    except OSError as e:
        cannot = f"the kernel cache {cache_dir()} cannot be written ({e.strerror or e})"
    try:
        path = _add(spec, _temporary_folder(os.getpid()))
    except OSError as e:
        raise KernelError(
            f"{cannot}, nor can {tempfile.gettempdir()} ({e.strerror or e}): set DUALKV_CACHE_DIR to a folder that can"
        ) from e
    _warn(f"{cannot}: kernels are compiled for this process alone; set DUALKV_CACHE_DIR to keep them")
    return path


@cache
def _warn(text: str) -> None:
    """Log a warning once a process."""
    _log.warning(text)


def where(spec: KernelSpec) -> str | None:
    """`memory`, `kernel_dir`, `wheel` or `cache`: where `load` would find `spec` without compiling, None if nowhere."""
    return "memory" if spec in _loaded else _find(spec)[1] or None


def has(spec: KernelSpec, folder: Path) -> bool:
    """Whether `add` would find the entry of `spec` in `folder`."""
    return mismatch(folder / _name(spec), spec, same_compiler=True) is None


def fill(specs: list[KernelSpec], folder: Path, jobs: int = 1) -> Iterator[tuple[KernelSpec, Path]]:
    """Compile what `folder` lacks of `specs`, `jobs` at a time; yields each spec and its entry, in order.

    Raises:
        KernelError: a compile failed, or the folder cannot be written. Compiles under way finish, and no more start.
    """
    pool, failed = ThreadPoolExecutor(jobs), threading.Event()

    def make(spec: KernelSpec) -> Path:
        if failed.is_set():  # a thread may come to the next one before the others are cancelled
            raise KernelError(f"{spec} was not compiled: one before it failed")
        try:
            return add(spec, folder)
        except BaseException:
            failed.set()
            raise

    try:
        futures = [pool.submit(make, spec) for spec in specs]
        for spec, future in zip(specs, futures, strict=True):
            yield spec, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------- look up
def key(spec: KernelSpec) -> str:
    """sha256 over everything that shapes the compiled kernel."""
    content = {
        "spec": spec.to_dict(),
        "compiler": toolchain.compiler(),
        "sources": toolchain.source_digest(spec.operation),
    }
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def _name(spec: KernelSpec) -> str:
    return f"{spec.symbol}-{key(spec)[:16]}"


def find_in(folder: Path, spec: KernelSpec) -> tuple[Path | None, list[str]]:
    """The entry of `spec` in a folder that any machine may have made, and why entries before it cannot be used."""
    reasons: list[str] = []
    for path in sorted(folder.glob(f"{spec.symbol}-*")):
        reason = mismatch(path, spec, same_compiler=False)
        if reason is None:
            return path, reasons
        reasons.append(f"{path.name} {reason}")
    return None, reasons


def _find(spec: KernelSpec) -> tuple[Path | None, str, list[str]]:
    """(entry, "kernel_dir", "wheel" or "cache", []) or (None, "", each place with the reason why it has no entry)."""
    why_not = []
    kernel_dir = folders.of_environment("DUALKV_KERNEL_DIR")
    if kernel_dir:
        if not kernel_dir.is_dir():
            raise KernelError(f"DUALKV_KERNEL_DIR is '{kernel_dir}', expected an existing folder of compiled kernels")
        folders.check_private(kernel_dir, "DUALKV_KERNEL_DIR", (os.geteuid(), 0))
        found, reasons = find_in(kernel_dir, spec)
        if found is not None:
            return found, "kernel_dir", []
        why_not.append(f"DUALKV_KERNEL_DIR={kernel_dir} ({'; '.join(reasons) or 'no entry of it'})")
    if wheel := wheel_dir():
        found, reasons = find_in(wheel, spec)
        if found is not None:
            return found, "wheel", []
        why_not.append(f"the wheel dualkv-kernels ({'; '.join(reasons) or 'no entry of it'})")
    cache = cache_dir()
    if cache.is_dir():
        folders.check_private(cache)
    if toolchain.found() is None:  # then the cache is read as a folder from another machine is
        found, reasons = find_in(cache, spec)
        if found is not None:
            return found, "cache", []
        why_not.append(f"the cache {cache} ({'; '.join(reasons) or 'no entry of it'})")
    elif (path := cache / _name(spec)).is_dir():
        reason = mismatch(path, spec, same_compiler=True)
        if reason is None:
            return path, "cache", []
        why_not.append(f"the cache ({path} {reason})")
    else:
        why_not.append(f"the cache {cache} (no entry {path.name})")
    return None, "", why_not


def wheel_dir() -> Path | None:
    """Folder of the entries in the wheel dualkv-kernels; None if the wheel is not installed."""
    found = importlib.util.find_spec("dualkv_kernels")  # codegen.precompiled packs it
    return Path(found.origin).parent if found and found.origin else None


def mismatch(path: Path, spec: KernelSpec, same_compiler: bool) -> str | None:
    """Say why the entry at `path` must not be loaded for `spec` here; None if it may.

    Args:
        same_compiler: whether this machine's compiler must have made the entry, as it makes the entries of the cache.
            Other entries must fit the machine and its driver; their compiler may be absent here.
    """
    try:
        if path.parent != wheel_dir():  # as safe as all installed packages
            for place in (path, path / "kernel.so"):
                if said := folders.open_to_others(place):
                    return said
        record = json.loads((path / "kernel.json").read_text())
        code = (path / "kernel.so").read_bytes()
        compiler = dict(record["compiler"])
        if record["schema"] != SCHEMA:
            return f"has schema {record['schema']}, expected {SCHEMA}"
        if record["spec"] != spec.to_dict():
            return "is of another specification"
        if record["sources"] != toolchain.source_digest(spec.operation):
            return "was made from other kernel sources"
        if record["so_sha256"] != hashlib.sha256(code).hexdigest():
            return "is corrupt (kernel.so does not have the recorded hash)"
        if f"__tvm_ffi_{spec.symbol}\0".encode() not in code:
            return f"is corrupt (kernel.so does not export {spec.symbol})"
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"is corrupt ({type(e).__name__}: {e})"
    if same_compiler:
        return None if compiler == toolchain.compiler() else "was made by another compiler"
    if compiler.get("machine") != platform.machine():
        return f"was made for machine {compiler.get('machine')}, here is {platform.machine()}"
    cuda, driver = compiler.get("flavour"), toolchain.driver_cuda()
    if driver is not None and cuda not in [f"cu{major}" for major in range(12, driver + 1)]:
        return f"was made for {cuda}, the driver here runs CUDA {driver}"
    return None


# ---------------------------------------------------------------- make
def add(spec: KernelSpec, folder: Path) -> Path:
    """The entry of `spec` in `folder`, compiled if there is none. One process compiles, the others wait for it.

    Raises:
        KernelError: the compile failed, or the folder cannot be written, or others can write to it.
    """
    try:
        folders.make_folder(folder, folders.SHARED)
        if said := folders.open_to_others(folder):  # whoever owns it: a container may fill its host's folder
            raise KernelError(f"the folder of kernels {folder} {said}")
        return _add(spec, folder)
    except OSError as e:
        raise KernelError(f"kernels cannot be written to {folder} ({e.strerror or e})") from e


def _add(spec: KernelSpec, folder: Path) -> Path:
    """Run `add`, but raise OSError if the folder cannot be written."""
    path = folder / _name(spec)
    with locked(folder / f".{path.name}.lock"):
        if has(spec, folder):
            counts["cache"] += 1
            return path
        for left in folder.glob(f".{path.name}.*"):  # left by a killed process: this process holds the lock
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
        made, replaced = (folder / f".{path.name}.{what}{secrets.token_hex(4)}" for what in ("new", "old"))
        try:
            folders.make_folder(made, folders.SHARED)
            _make(spec, made)
            for file in made.iterdir():
                folders.set_mode(file, folders.FILE)
            if path.exists():  # cannot be used; a process that has it open keeps its files
                path.rename(replaced)
            made.rename(path)
        finally:
            for left in (made, replaced):
                shutil.rmtree(left, ignore_errors=True)
    return path


def _make(spec: KernelSpec, folder: Path) -> None:
    _log.info("compiling %s into %s, once", spec, folder.parent)
    record = {
        "schema": SCHEMA,
        "spec": spec.to_dict(),
        "symbol": spec.symbol,
        "compiler": toolchain.compiler(),
        "sources": toolchain.source_digest(spec.operation),
        **compile.compile_kernel(spec, folder),
    }
    if toolchain.read_source_digest(spec.operation) != record["sources"]:
        raise KernelError(f"the kernel sources changed under this process while it compiled {spec}: start it again")
    for name in ("so", "cubin"):
        record[f"{name}_sha256"] = hashlib.sha256((folder / f"kernel.{name}").read_bytes()).hexdigest()
    (folder / "kernel.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    counts["compiled"] += 1


def _in_forked_child() -> None:
    """Replace the lock, which a thread of the parent may hold that does not exist in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_in_forked_child)


# ---------------------------------------------------------------- settings and load
@cache
def _temporary_folder(process: int) -> Path:
    """A folder of one process, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="dualkv-"))

    def remove() -> None:
        if os.getpid() == process:  # a forked child leaves its parent's folder alone
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def may_compile() -> bool:
    """Whether DUALKV_JIT lets kernels be compiled that are not found.

    Raises:
        KernelError: another value than 0 and 1.
    """
    value = os.environ.get("DUALKV_JIT", "1")
    if value not in ("", "0", "1"):
        raise KernelError(f"DUALKV_JIT is {value!r}, expected 0 (never compile) or 1")
    return value != "0"


@cache
def _check_ffi() -> None:
    """Raise KernelError unless tvm-ffi has the interface that kernels are linked to."""
    if said := packages.lacking("apache-tvm-ffi"):
        raise KernelError(f"kernels need {said}")


def open_entry(path: Path, spec: KernelSpec, symbol: str | None = None) -> Kernel:
    """Load the kernel of an entry for which :func:`mismatch` returns None.

    symbol: the exported function, where another version of this package made the entry and called it otherwise.

    Raises:
        KernelError: tvm-ffi or the entry cannot be loaded, or others can write to the entry.
    """
    if path.parent != wheel_dir():  # as safe as all installed packages
        for place in (path, path / "kernel.so"):  # the folder around them is checked already
            folders.check_private(place, "the compiled kernel", (os.geteuid(), 0))
    _check_ffi()
    try:
        import tvm_ffi

        kernel: Kernel = tvm_ffi.load_module(str(path / "kernel.so"))[symbol or spec.symbol]
    except (ImportError, OSError, RuntimeError, AttributeError) as e:
        raise KernelError(f"kernel {spec} in {path} cannot be loaded ({type(e).__name__}: {e})") from e
    return kernel

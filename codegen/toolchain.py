"""What makes and loads kernels on this machine: compiler flavour, versions, runtime library, kernel sources.

Everything here is found on disk. Neither cutlass nor torch is imported: a machine that only loads kernels may lack the
first, and this package does without the second.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
from functools import cache
from pathlib import Path

from codegen import KernelError

_COMPILER = re.compile(r"_cutlass_ir\.cu(\d+)\..*\.so")
# Not by `ast`: where two threads parse at once, as those that load kernels do, CPython 3.11 and 3.12 may raise
# SystemError.
_IMPORT = re.compile(
    r"^\s*(?:from (cute_kernels[\w.]*) import (\([^)]*\)|.*)|import (cute_kernels\.[\w.]+))", re.MULTILINE
)
_NAME = re.compile(r"(?<! as )\b\w+")


@cache
def dsl_folder() -> Path:
    """The installed `nvidia_cutlass_dsl` folder.

    Raises:
        KernelError: it is not installed.
    """
    found = importlib.util.find_spec("nvidia_cutlass_dsl")
    if found is None or not found.submodule_search_locations:
        raise KernelError(
            "nvidia-cutlass-dsl is not installed: pip install 'nvidia-cutlass-dsl[cu13]>=4.8,<4.9', "
            "or, only to run kernels compiled elsewhere, its runtime library (see docs/deployment.md)"
        )
    return Path(next(iter(found.submodule_search_locations)))


@cache
def driver_cuda() -> int | None:
    """Major CUDA version of the NVIDIA driver, None without one."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


@cache
def flavour() -> str:
    """`cu13` or `cu12`: the newest installed CuTe DSL that the driver can run, as the DSL itself picks it.

    Each flavour carries a ptxas of its own, so the same source compiles to different code.

    Raises:
        KernelError: none is installed, or none that the driver can run.
    """
    root = dsl_folder()
    majors = {int(p.parent.parent.name[2:]) for p in root.glob("cu*/lib/libcute_dsl_runtime.so")}
    driver = driver_cuda()
    usable = [m for m in majors if driver is None or m <= driver]
    if not usable:
        have = ", ".join(f"cu{m}" for m in sorted(majors)) or "none"
        raise KernelError(
            f"no CuTe DSL runtime in {root} fits the driver (CUDA {driver or 'absent'}): installed {have}; "
            f"install nvidia-cutlass-dsl[cu{driver or 13}] or a newer driver"
        )
    return f"cu{max(usable)}"


def runtime_library() -> Path:
    """`libcute_dsl_runtime.so` of the flavour in use; compiled kernels need it in the process."""
    return dsl_folder() / flavour() / "lib" / "libcute_dsl_runtime.so"


def can_compile() -> bool:
    """Whether the DSL's compiler is installed, not only the runtime of compiled kernels."""
    libs = dsl_folder() / "dsl_packages" / "cutlass" / "_mlir" / "_mlir_libs"
    return libs.is_dir() and any(
        m and f"cu{m[1]}" == flavour() for m in (_COMPILER.fullmatch(p.name) for p in libs.iterdir())
    )


def version(package: str) -> str:
    """Version of an installed package, `absent` without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


@cache
def compiler() -> tuple[tuple[str, str], ...]:
    """(name, version) of everything outside this project that shapes a compiled kernel.

    ptxas is built into the library of the DSL's compiler, whose hash therefore stands for it; a compiled kernel's
    record names the version that ptxas itself reports.
    """
    return (
        ("machine", platform.machine()),
        ("flavour", flavour()),
        ("nvidia-cutlass-dsl", version("nvidia-cutlass-dsl")),
        ("nvidia-cutlass-dsl-libs", version(f"nvidia-cutlass-dsl-libs-{flavour()}")),
        ("compiler-sha256", _compiler_hash()),
        ("apache-tvm-ffi", version("apache-tvm-ffi")),
    )


def _compiler_hash() -> str:
    """Of the library with the compiler and ptxas, as its package recorded it: reading 190 MB would take long."""
    try:
        files = importlib.metadata.files(f"nvidia-cutlass-dsl-libs-{flavour()}") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    return next((f.hash.value for f in files if f.hash and _COMPILER.fullmatch(f.name)), "absent")


@cache
def source_digest(operation: str) -> str:
    """:func:`read_source_digest` when this process first asked."""
    return read_source_digest(operation)


def read_source_digest(operation: str) -> str:
    """sha256 over the sources that an operation's kernel is made from, each with its name and length."""
    digest = hashlib.sha256()
    for name, path in sorted(sources(operation).items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def sources(operation: str) -> dict[str, Path]:
    """`cute_kernels/<operation>.py`, what it imports of its package, and what chooses its arguments and compiles it.

    With `cute_kernels/abi.py`, which every kernel imports, they are all that a kernel's code and the sizes of its
    host's buffers depend on, but for what the specification says.
    """
    found = importlib.util.find_spec("cute_kernels")
    if found is None or not found.submodule_search_locations:
        raise KernelError("the package cute_kernels, which dualkv is installed with, is missing")
    root = Path(next(iter(found.submodule_search_locations)))
    sources = {f"codegen.{name}": Path(__file__).with_name(f"{name}.py") for name in ("compile", "spec")}
    wanted = ["cute_kernels", f"cute_kernels.{operation}"]
    while wanted:
        name = wanted.pop()
        path = root.joinpath(*name.split(".")[1:]).with_suffix(".py") if "." in name else root / "__init__.py"
        if name in sources or not path.is_file():  # a name inside a module rather than a module
            continue
        sources[name] = path
        for module, names, plain in _IMPORT.findall(path.read_text(encoding="utf-8")):
            wanted += [plain] if plain else [module, *(f"{module}.{name}" for name in _NAME.findall(names))]
    return sources

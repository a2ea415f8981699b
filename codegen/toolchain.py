"""Find the compiler of kernels on this machine: the CuTe DSL, its versions, and the kernels' sources.

All of it is found on disk. Neither cutlass nor torch is imported: a machine that only loads kernels may lack cutlass,
and this package does not need torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from codegen import KernelError, folders, packages

_COMPILER = re.compile(rf"_cutlass_ir\.cu(\d+){re.escape(EXTENSION_SUFFIXES[0])}")  # for this Python
# Not by `ast`: CPython 3.11 and 3.12 may raise SystemError if two threads parse at once, as threads that load kernels
# do.
_IMPORT = re.compile(
    r"^\s*(?:from (cute_kernels[\w.]*) import (\([^)]*\)|.*)|import (cute_kernels\.[\w.]+))", re.MULTILINE
)
_NAME = re.compile(r"(?<! as )\b\w+")
_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*"|' + r"'''(?:[^\\]|\\.)*?'''|'(?:[^'\\\n]|\\.)*'|#[^\n]*", re.DOTALL
)


DSL = "4.8"  # the nvidia-cutlass-dsl that kernels are written for: 4.7 and older do not compile them
FFI = (0, 1, 10)  # the oldest apache-tvm-ffi that this DSL compiles with; kernels load with 0.1.9 too
PRIVATE, PRIVATE_FFI = "4.8.1", "0.1.15.post2"  # versions of the private toolchain
REMEDIES = (
    "install the wheel dualkv-kernels, or the compiler by `pip install 'dualkv[compile]'`, or, beside packages that "
    "pin another version of it, by `dualkv toolchain install`"
)


@dataclass(frozen=True)
class Toolchain:
    """A CuTe DSL that compiles kernels here.

    Attributes:
        root: the private toolchain's folder, None for the packages of this environment.
        dsl: its `nvidia_cutlass_dsl` folder.
        flavour: `cu13` or `cu12`, the newest that the driver can run, as the DSL itself picks it. Each carries a ptxas
            of its own, so the same source compiles to different code.
    """

    root: Path | None
    dsl: Path
    flavour: str

    def __str__(self) -> str:
        where = "of this environment" if self.root is None else f"in the private toolchain {self.root}"
        return f"nvidia-cutlass-dsl {self.version('nvidia-cutlass-dsl')} {where}"

    @property
    def path(self) -> list[str]:
        """Folders that come first on the PYTHONPATH of a process that compiles."""
        return [] if self.root is None else [str(self.dsl / "dsl_packages"), str(self.root)]

    def version(self, package: str) -> str:
        """Version of one of its packages; `absent` if it is not installed."""
        return _version(package, self.root)

    @cached_property
    def compiler(self) -> dict[str, str]:
        """Version of everything outside this project that shapes a compiled kernel.

        ptxas is built into the library of the DSL's compiler, so that library's hash stands for it. A compiled kernel's
        record has the version that ptxas reports. apache-tvm-ffi is left out: it generates no code.
        """
        libs = f"nvidia-cutlass-dsl-libs-{self.flavour}"
        files = next((d.files or [] for d in _distributions(libs, self.root)), [])
        # As its package recorded it: reading 190 MB would take long.
        hashes = (f.hash.value for f in files if f.hash and _COMPILER.fullmatch(f.name))
        return {
            "machine": platform.machine(),
            "flavour": self.flavour,
            "nvidia-cutlass-dsl": self.version("nvidia-cutlass-dsl"),
            "nvidia-cutlass-dsl-libs": self.version(libs),
            "compiler-sha256": next(hashes, "absent"),
        }


def found() -> Toolchain | None:
    """Find the compiler of kernels here: this environment's DSL, else the private toolchain, else None."""
    return next((t for t in (_environment(), _private()) if isinstance(t, Toolchain)), None)


def lacking() -> str | None:
    """Say in one sentence why nothing compiles kernels here and what to do; None if something does."""
    if found() is not None:
        return None
    return f"nothing here compiles kernels ({_environment()}; {_private()}): {REMEDIES}"


def compiler() -> dict[str, str]:
    """:attr:`Toolchain.compiler` of the toolchain found.

    Raises:
        KernelError: there is none.
    """
    toolchain = found()
    if toolchain is None:
        raise KernelError(str(lacking()))
    return toolchain.compiler


@cache
def _environment() -> Toolchain | str:
    """This environment's toolchain, or why there is none."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is None or not spec.submodule_search_locations:
        return "nvidia-cutlass-dsl is not installed"
    return _examined(None, Path(next(iter(spec.submodule_search_locations))))


def private_folder() -> Path:
    """Folder of the private toolchain. It may not exist."""
    return folders.cache_dir() / f"toolchain-{PRIVATE}-cp{sys.version_info[0]}{sys.version_info[1]}"


def _private() -> Toolchain | str:
    """The private toolchain, or why there is none."""
    root = private_folder()
    if not root.is_dir():
        return "there is no private toolchain"
    folders.check_private(root.parent)
    if said := folders.open_to_others(root):
        return f"the private toolchain {root} {said}"
    return _examined(root, root / "nvidia_cutlass_dsl")


@cache
def _examined(root: Path | None, dsl: Path) -> Toolchain | str:
    """The DSL in a folder, or why it cannot compile kernels."""
    version, ffi = _version("nvidia-cutlass-dsl", root), _version("apache-tvm-ffi", root)
    where = "" if root is None else f"the private toolchain {root} has "
    if not version.startswith(f"{DSL}."):
        return f"{where}nvidia-cutlass-dsl {version}, expected {DSL}"
    if packages.release(ffi) < FFI:
        return f"{where}apache-tvm-ffi {ffi}, to compile with the DSL takes {'.'.join(map(str, FFI))}"
    libs = dsl / "dsl_packages" / "cutlass" / "_mlir" / "_mlir_libs"
    names = (_COMPILER.fullmatch(p.name) for p in libs.glob("_cutlass_ir.*"))
    majors = sorted({int(m[1]) for m in names if m and (dsl / f"cu{m[1]}" / "lib").is_dir()})
    driver = driver_cuda()
    usable = [m for m in majors if driver is None or m <= driver]
    if not usable:
        have = ", ".join(f"cu{m}" for m in majors) or "none"
        return (
            f"no compiler in {dsl} is for this Python and the driver (CUDA {driver or 'absent'}), it has {have}: "
            f"install nvidia-cutlass-dsl[cu{driver or 13}] or a newer driver"
        )
    return Toolchain(root, dsl, f"cu{max(usable)}")


# ---------------------------------------------------------------- the private toolchain
def install() -> Toolchain:
    """The toolchain that compiles kernels here. If there is none, pip or uv installs the private toolchain.

    Raises:
        KernelError: the private toolchain cannot be downloaded or written, or does not work here.
    """
    if (serving := found()) is not None:
        return serving
    root = private_folder()
    try:
        cache = folders.make_cache_dir()
        with folders.locked(cache / f".{root.name}.lock"):
            _examined.cache_clear()  # another process may have installed it meanwhile
            if isinstance(there := _private(), Toolchain):
                return there
            for left in cache.glob(f".{root.name}.new*"):  # left by a killed process: this process holds the lock
                shutil.rmtree(left, ignore_errors=True)
            made = cache / f".{root.name}.new{secrets.token_hex(4)}"
            try:
                _download(made)
                folders.close_to_others(made)
                _examined.cache_clear()
                if isinstance(why_not := _examined(made, made / "nvidia_cutlass_dsl"), str):
                    raise KernelError(f"the private toolchain does not serve here: {why_not}")
                shutil.rmtree(root, ignore_errors=True)
                made.rename(root)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    except OSError as e:
        raise KernelError(f"the private toolchain {root} cannot be written ({e.strerror or e})") from e
    there = _private()
    assert isinstance(there, Toolchain)
    return there


def requirements() -> list[str]:
    """Exact packages of the private toolchain. Others, such as cuda-bindings, come from the environment."""
    libs = ("base", "core", "cu12" if driver_cuda() == 12 else "cu13")
    names = ["nvidia-cutlass-dsl", *(f"nvidia-cutlass-dsl-libs-{lib}" for lib in libs)]
    return [*(f"{name}=={PRIVATE}" for name in names), f"apache-tvm-ffi=={PRIVATE_FFI}"]


def _download(folder: Path) -> None:
    words = [*_installer(), "--target", str(folder), "--no-deps", "--only-binary", ":all:", *requirements()]
    lines = []
    # What pip and uv report of their downloads is shown as it comes, on standard error.
    with subprocess.Popen(
        words, env=os.environ | {"PIP_USER": "0"}, stdout=2, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            lines.append(line)
    if process.returncode:
        said = " ".join("".join(lines).split())[-1000:]
        raise KernelError(f"the private toolchain cannot be installed, `{' '.join(words)}` failed: {said}")


def _installer() -> list[str]:
    """pip of this environment, or uv if uv made the environment."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise KernelError("neither pip nor uv is here to install the private toolchain with: install one")


# ---------------------------------------------------------------- versions and sources
@cache
def driver_cuda() -> int | None:
    """Major CUDA version of the NVIDIA driver; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def version(package: str) -> str:
    """Version of an installed package; `absent` if it is not installed."""
    return _version(package, None)


def _version(package: str, root: Path | None) -> str:
    return next((d.version for d in _distributions(package, root)), "absent")


def _distributions(name: str, root: Path | None) -> Iterable[importlib.metadata.Distribution]:
    """Distributions of a package in a folder, or in this environment."""
    return importlib.metadata.Distribution.discover(name=name, path=sys.path if root is None else [str(root)])


# Modules of cute_kernels beside an operation's own, with its kernel of some head dims.
ANOTHER_KERNEL = {"fwd": ("fwd_split",), "fwd_paths": ("fwd_split",)}


@cache
def source_digest(operation: str) -> str:
    """:func:`read_source_digest` when this process first asked."""
    return read_source_digest(operation)


def read_source_digest(operation: str) -> str:
    """sha256 of the code that an operation's kernel is compiled from. Comments and docstrings do not count."""
    digest = hashlib.sha256()
    for name, path in sorted(sources(operation).items()):
        content = path.read_text(encoding="utf-8")
        content = code(content) if path.suffix == ".py" else content
        digest.update(f"{name} {len(content)}\n{content}".encode())
    return digest.hexdigest()


def code(source: str, docstring: str = "") -> str:
    """A Python file's text without comments, blank lines and docstrings.

    Args:
        docstring: a statement that takes the place of each docstring.
    """
    kept, end = [], 0
    for found in _STRING_OR_COMMENT.finditer(source):
        kept.append(source[end : found.start()])
        end = found.end()
        if found[0].startswith("#"):
            continue
        before = next((text.rstrip()[-1] for text in reversed(kept) if text.strip()), ":")  # a file may begin with one
        begins_line = not source[source.rfind("\n", 0, found.start()) + 1 : found.start()].strip()
        kept.append(docstring if before == ":" and begins_line and found[0].startswith('"""') else found[0])
    lines = "".join([*kept, source[end:]]).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


def sources(operation: str) -> dict[str, Path]:
    """An operation's sources by module: its kernel, what the kernel imports, and what chooses, compiles and links it.

    The kernel is in `cute_kernels/<operation>.py` or in :data:`ANOTHER_KERNEL`, and every kernel imports
    `cute_kernels/abi.py`. Besides the specification, a kernel's code and the sizes of its host buffers depend on
    nothing else.
    """
    found = importlib.util.find_spec("cute_kernels")
    if found is None or not found.submodule_search_locations:
        raise KernelError("the package cute_kernels, which dualkv is installed with, is missing")
    root = Path(next(iter(found.submodule_search_locations)))
    names = {"codegen.compile": "compile.py", "codegen.spec": "spec.py", "codegen.runtime": "runtime.c"}
    sources = {name: Path(__file__).with_name(file) for name, file in names.items()}
    wanted = ["cute_kernels", *(f"cute_kernels.{name}" for name in (operation, *ANOTHER_KERNEL.get(operation, ())))]
    while wanted:
        name = wanted.pop()
        path = root.joinpath(*name.split(".")[1:]).with_suffix(".py") if "." in name else root / "__init__.py"
        if name in sources or not path.is_file():  # a name inside a module rather than a module
            continue
        sources[name] = path
        for module, names, plain in _IMPORT.findall(path.read_text(encoding="utf-8")):
            wanted += [plain] if plain else [module, *(f"{module}.{name}" for name in _NAME.findall(names))]
    return sources

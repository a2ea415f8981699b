"""Packages of other projects: the lowest version that this project works with, what it is for, and how to install it.

Every check of an installed package is one of this module: :func:`require` where a package is imported, :func:`lacking`
where another way is taken without it, and `dualkv doctor`, which lists them all. A version is refused below the lowest
one that was tried. A newer one is refused only for a fault that is known, or where what is borrowed of it has changed
(:mod:`codegen.surface`). Nothing is imported to find out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "of unknown version"  # importable and without metadata, such as a clone of Megatron-LM on PYTHONPATH


@dataclass(frozen=True)
class Package:
    """A package of another project.

    Attributes:
        name: on PyPI.
        module: that it is imported by.
        lowest: version; None where any version serves.
        purpose: noun phrase.
        install: command.
        needed: whether this project cannot do without.
        below: first version with a known fault, else None.
        tried: newest version that the tests ran with, of packages whose surface is probed (:mod:`codegen.surface`).
    """

    name: str
    module: str
    lowest: str | None
    purpose: str
    install: str
    needed: bool = False
    below: str | None = None
    tried: str | None = None

    @property
    def versions(self) -> str:
        """Versions that serve, in words; empty if all do."""
        lowest = f"{self.lowest} or newer" if self.lowest else ""
        return lowest + (f", below {self.below}" if self.below else "")

    @property
    def wanted(self) -> str:
        """Name and versions, in words."""
        return f"{self.name} {self.versions}".rstrip()


def _needed(requirement: str, module: str, purpose: str, below: str | None = None) -> Package:
    name, lowest = re.split(r"[<>=,]+", requirement)[:2]
    return Package(name, module, lowest, purpose, f"pip install '{requirement}'", True, below)


_ALL = (
    # As this project's metadata asks for them.
    _needed("torch>=2.11", "torch", "everything"),
    _needed("numpy>=2.0", "numpy", "everything"),
    # Kernels are linked to the interface of 0.1.
    _needed("apache-tvm-ffi>=0.1.9,<0.2", "tvm_ffi", "loading and calling kernels", below="0.2"),
    _needed("cuda-bindings>=13.0,<14", "cuda.bindings", "compiling kernels, reading them back from a GPU"),
    _needed("typer>=0.20", "typer", "the command line"),
    _needed("rich>=14", "rich", "the command line"),
    # Of another series the compiled code was never recorded: `codegen.toolchain` asks for this one.
    Package("nvidia-cutlass-dsl", "nvidia_cutlass_dsl", "4.8", "compiling kernels", "pip install 'dualkv[compile]'"),
    # The lowest that veRL takes. The trainers of TRL pass their tests with 5.10.4 too.
    Package(
        "transformers", "transformers", "5.5.3", "language models, `dualkv demo`",
        "pip install 'dualkv[transformers]'", tried="5.24.0",
    ),
    Package("peft", "peft", "0.18", "adapters in models", "pip install 'peft>=0.18'"),
    Package(
        "flash-linear-attention", "fla", "0.6", "recurrent layers on a GPU",
        "pip install 'dualkv[hybrid]'", tried="0.6.0",
    ),
    Package("trl", "trl", "1.16", "the TRL trainer", "pip install 'dualkv[trl]'", tried="1.16.0"),
    Package("ms-swift", "swift", "4.6", "the ms-swift trainer", "pip install 'dualkv[swift]'", tried="4.6.0"),
    Package("verl", "verl", "0.9.1", "the veRL plugin", "pip install 'dualkv[verl]'"),
    Package("openrlhf", "openrlhf", "0.11.2", "the OpenRLHF adapter", "pip install 'dualkv[openrlhf]'", tried="0.11.2"),
    Package("skyrl", "skyrl", "0.4", "the SkyRL adapter", "pip install 'dualkv[skyrl]'", tried="0.4.0"),
    Package(
        "megatron-core", "megatron.core", "0.16.1", "models of megatron-core",
        "pip install 'dualkv[megatron]'", tried="0.19.2",
    ),
    Package("nvidia-ml-py", "pynvml", "13", "energy in benchmarks", "pip install 'dualkv[bench]'"),
    Package("triton", "triton", None, "torch.compile and recurrent layers on a GPU", "pip install triton"),
    Package(
        "nvidia-cudnn-frontend", "cudnn", "1.29", "attention on Blackwell GPUs by cuDNN",
        "pip install 'dualkv[cudnn]'", tried="1.32.0",
    ),
    Package("liger-kernel", "liger_kernel", "0.8.5", "norms and MLPs of `fast=True`", "pip install liger-kernel"),
    Package("flash-attn-4", "flash_attn.cute", None, "a peer in benchmarks", "pip install --pre flash-attn-4"),
    Package(
        "magi_attention", "magi_attention", None, "a peer in benchmarks",
        "build https://github.com/SandAI-org/MagiAttention from its sources",
    ),
)  # fmt: skip
PACKAGES = {package.name: package for package in _ALL}


def found(name: str) -> str | None:
    """Return the version of an installed package of PACKAGES: UNKNOWN if it has no metadata, None if it is absent."""
    is_module = _is_module(PACKAGES[name].module)
    if is_module is None:
        return None
    try:
        return importlib.metadata.version(name) or UNKNOWN
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN if is_module else None


def lacking(name: str) -> str | None:
    """Say what is lacking of a package of PACKAGES: the versions that serve, what was found, how to install them.

    Returns:
        A noun phrase, such as "trl 1.16 or newer (found 1.15.0: pip install 'dualkv[trl]')", or None.
    """
    package, version = PACKAGES[name], found(name)
    if version is not None and _serves(package, version):
        return None
    here = "not installed" if version is None else f"found {version}"
    return f"{package.wanted} ({here}: {package.install})"


def require(name: str, by: str) -> None:
    """Check a package of PACKAGES; called before the package is imported.

    Args:
        by: what needs it, the subject of the sentence.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ImportError: its version does not serve.
    """
    if (said := lacking(name)) is not None:
        error = ModuleNotFoundError if found(name) is None else ImportError
        raise error(f"{by} needs {said}", name=PACKAGES[name].module)


def of_module(module: str) -> Package | None:
    """Return the package of PACKAGES that a module belongs to, by the first part of its name; None if there is none."""
    first = module.partition(".")[0]
    return next((package for package in PACKAGES.values() if package.module.partition(".")[0] == first), None)


def release(version: str) -> tuple[int, ...]:
    """Return a version's numbers, to compare: (2, 11) of "2.11.0a0+nv26.2".

    A pre-release counts as its release: NVIDIA's containers have pre-releases of PyTorch.
    """
    numbers = re.match(r"\s*v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    parts = [int(n) for n in numbers[1].split(".")] if numbers else []
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def _serves(package: Package, version: str) -> bool:
    if version == UNKNOWN:
        return True
    old = package.lowest is not None and release(version) < release(package.lowest)
    return not old and (package.below is None or release(version) < release(package.below))


def _is_module(module: str) -> bool | None:
    """Return whether a module is there; None if not even a folder of its name is. No part of it is imported."""
    first, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # imported, and without a specification
        return True
    if spec is None or sys.modules.get(module, spec) is None:
        return None
    if not rest:
        return spec.origin is not None
    places = [Path(place, *rest) for place in spec.submodule_search_locations or []]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places) or None

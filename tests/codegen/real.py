"""Small kernels that are really compiled, once for all tests: they lie in build/kernels, as those of test_manifest."""

from __future__ import annotations

import shutil
from pathlib import Path

from codegen import store
from codegen.spec import KernelSpec

FOLDER = Path(__file__).parents[2] / "build" / "kernels"


def copied(spec: KernelSpec, folder: Path) -> Path:
    """Copy a kernel's entry into a folder, and compile the kernel if no test has yet. Returns the copy."""
    entry = store.add(spec, FOLDER)
    return Path(shutil.copytree(entry, folder / entry.name))

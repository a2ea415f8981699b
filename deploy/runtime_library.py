"""`python deploy/runtime_library.py DIR`, with the CuTe DSL installed: copies the one library of it that compiled
kernels link to, and NVIDIA's licence, into DIR, the library as it lies in site-packages.

See docs/deployment.md for what that licence allows.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

from codegen import toolchain


def copy(to: Path) -> list[Path]:
    """The files written."""
    library, folder = toolchain.runtime_library(), toolchain.dsl_folder()
    package = f"nvidia-cutlass-dsl-libs-{toolchain.flavour()}"
    files = importlib.metadata.files(package) or []
    licences = [Path(str(f.locate())) for f in files if f.name == "LICENSE"]
    if not licences:
        raise SystemExit(f"{package} has no LICENSE among its files: nothing is copied without it")
    beside = to / folder.name
    target = beside / library.relative_to(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy2(library, target)), Path(shutil.copy2(licences[0], beside / "LICENSE"))]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected one argument, the folder to copy into")
    for path in copy(Path(sys.argv[1])):
        print(path)

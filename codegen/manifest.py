"""What the compiled kernels look like, recorded: `python -m codegen.manifest tests/codegen/manifest.json` rewrites it.

A change of registers, spills, shared memory, or of how many wgmma and TMA instructions a kernel holds shows here, on a
machine without a GPU, before anybody measures it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codegen import store, toolchain
from codegen.spec import KernelSpec, table

WATCHED = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "STL", "LDL")
RESOURCES = ("registers", "stack", "spill_stores", "spill_loads", "shared_memory", "wgmma_warnings")


def describe(specs: list[KernelSpec], folder: Path, jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compile `specs` into `folder`; yields each one's text and what the compiler made of it, in order."""
    for spec, entry in store.fill(specs, folder, jobs):
        record = json.loads((entry / "kernel.json").read_text())
        code = {"instructions": instructions(entry / "kernel.cubin")}
        yield str(spec), {name: record[name] for name in RESOURCES} | code


def instructions(cubin: Path) -> dict[str, int]:
    """How often each watched instruction occurs; wgmma by shape and types, register budgets by value."""
    sass = subprocess.run([_nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    found: Counter[str] = Counter()
    for name, operands in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", sass):
        kind = name.split(".")[0]
        if kind in WATCHED:
            found[f"{name} {operands.strip()}" if kind == "USETMAXREG" else name] += 1
    return dict(sorted(found.items()))


def _nvdisasm() -> str:
    """nvdisasm on PATH, or the one of PyPI's nvidia-cuda-nvdisasm."""
    candidates = [shutil.which("nvdisasm"), *(f"{p}/nvidia/{toolchain.flavour()}/bin/nvdisasm" for p in sys.path if p)]
    for path in candidates:
        if path and os.access(path, os.X_OK):
            return path
    raise RuntimeError("nvdisasm is neither on PATH nor installed: pip install nvidia-cuda-nvdisasm")


def versions(folder: Path) -> dict[str, str]:
    """The compiler that made the entries of `folder`."""
    records = [json.loads(path.read_text()) for path in folder.glob("*/kernel.json")]
    return {**records[0]["compiler"], "ptxas": records[0]["ptxas"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every specialization and record registers, memory and code.")
    parser.add_argument("path", type=Path, help="the manifest to write")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="compiles at a time")
    arguments = parser.parse_args()
    specs, kernels = table(), {}
    with tempfile.TemporaryDirectory() as folder:
        for text, described in describe(specs, Path(folder), arguments.jobs):
            kernels[text] = described
            print(f"{len(kernels)}/{len(specs)} {text}", flush=True)
        manifest = {"versions": versions(Path(folder)), "kernels": kernels}
    arguments.path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

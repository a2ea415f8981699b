"""A compile that takes no compiler: it writes the files that a kernel's compile writes, and notes that it did."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from codegen import compile
from codegen.spec import KernelSpec

SECONDS = 0.05


def code_of(spec: KernelSpec) -> bytes:
    return f"code of\0__tvm_ffi_{spec.symbol}\0 and more".encode()


def compile_kernel(spec: KernelSpec, folder: Path) -> dict[str, Any]:
    """Notes every call as a line of $COMPILES."""
    time.sleep(float(os.environ.get("STAND_IN_SECONDS", SECONDS)))
    with open(os.environ["COMPILES"], "a") as file:
        file.write(spec.to_json() + "\n")
    (folder / "kernel.so").write_bytes(code_of(spec))
    for name in ("cubin", "ptx"):
        (folder / f"kernel.{name}").write_bytes(name.encode())
    return {"registers": 168}


def compiles() -> list[KernelSpec]:
    """List the kernels that every process with this $COMPILES compiled."""
    path = Path(os.environ["COMPILES"])
    return [KernelSpec.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def install() -> None:
    """Compile so from now on, in this process."""
    compile.compile_kernel = compile_kernel


def flipped(path: Path, at: int) -> None:
    """Turn one bit of a file, in a new file of its name: a process that loaded the old one still maps it."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.unlink()
    path.write_bytes(content)


def changed(path: Path, **fields: Any) -> None:
    """A JSON file's fields, replaced."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

"""A compile that takes no compiler: it writes the files that a kernel's compile writes, and notes that it did. And a
pip that takes no index: it links the files of this environment's packages."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from codegen import compile
from codegen.spec import KernelSpec

SECONDS = 0.05
# $PIPS: a file that gets the arguments of each call. $PIP_FAILS: the call fails. $PIP_COPIES: small files are copied.
PIP = """
import importlib.metadata, os, shutil, sys
from pathlib import Path
words = sys.argv[1:]
target = Path(words[words.index("--target") + 1])
with open(os.environ.get("PIPS", os.devnull), "a") as file:
    file.write(" ".join(words) + "\\n")
sys.stderr.write("Downloading\\n")
if os.environ.get("PIP_FAILS"):
    target.mkdir()
    (target / "half").touch()
    sys.exit("ERROR: No matching distribution found")
for requirement in words[words.index(":all:") + 1 :]:
    for file in importlib.metadata.files(requirement.partition("==")[0]):
        here, there = Path(file.locate()), target / file
        if here.exists() and not there.exists() and there.resolve().is_relative_to(target.resolve()):
            there.parent.mkdir(parents=True, exist_ok=True)
            if os.environ.get("PIP_COPIES") and here.stat().st_size <= 2**16:
                shutil.copyfile(here, there)
            else:
                there.symlink_to(here.resolve())
"""


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

"""Folders of kernels for machines without a compiler: manifest.json, checks, the wheel, and code for reading.

`manifest.json` says what is in a folder, for people and for :func:`check`. Loading does not read it, because every
kernel has a record of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen import KernelError, cubin, folders, store, toolchain
from codegen.spec import ARCHS, KernelSpec

SCHEMA = 2
MANIFEST = "manifest.json"
PACKAGE = "dualkv_kernels"  # codegen.store looks for kernels in it
MOST_BYTES = 100_000_000  # of a wheel: PyPI's limit for a file
CODE = ("cubin", "ptx", "sass")
CODE_FOLDER = "code"
NO_RECORD = "has no readable record of this version (kernel.json)"
# The fields of an entry's record that manifest.json repeats.
FIELDS = (
    "spec", "symbol", "registers", "stack", "spill_stores", "spill_loads", "threads", "shared_memory",
    "static_shared_memory", "ctas_per_sm", "sources", "compiler", "ptxas", "cubin_sha256", "so_sha256",
)  # fmt: skip


@dataclass
class Checked:
    """The result of :func:`check`.

    Attributes:
        kernels: number of kernels in the manifest.
        problems: one sentence each.
        read_back: number of kernels whose registers, stack, threads and occupancy the driver confirms.
        not_read_back: why no kernel is read back, on a machine that cannot do so.
    """

    kernels: int = 0
    problems: list[str] = field(default_factory=list)
    read_back: int = 0
    not_read_back: str | None = None


# ---------------------------------------------------------------- write
def record_of(entry: Path) -> dict[str, Any]:
    """`kernel.json` of an entry."""
    record: dict[str, Any] = json.loads((entry / "kernel.json").read_text())
    return record


def write_manifest(folder: Path, version: str) -> dict[str, Any]:
    """Write `manifest.json`: every kernel in the folder that can be used here, each with the compiler that made it.

    Args:
        folder: of compiled kernels.
        version: of dualkv.

    Raises:
        KernelError: the folder cannot be written.
    """
    try:
        with folders.locked(folder / ".manifest.lock"):
            kernels = {}
            for path in sorted(folder.iterdir()):
                spec = _spec_of(path)
                if spec is not None and store.mismatch(path, spec, same_compiler=False) is None:
                    record = record_of(path)
                    kernels[path.name] = {name: record[name] for name in FIELDS}
            manifest = {
                "schema": SCHEMA,
                "arch": ARCHS[0],
                "versions": {"dualkv": version, **toolchain.compiler()},
                "kernels": kernels,
            }
            new = folder / f".{MANIFEST}.new"
            new.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
            folders.set_mode(new, folders.FILE)
            new.replace(folder / MANIFEST)
    except OSError as e:
        raise KernelError(f"{folder / MANIFEST} cannot be written ({e.strerror or e})") from e
    return manifest


def _spec_of(path: Path) -> KernelSpec | None:
    """The specification in an entry's record; None if `path` is no entry, or one of another version."""
    try:
        return KernelSpec.from_json(json.dumps(record_of(path)["spec"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def emit(entry: Path, spec: KernelSpec, kinds: Iterable[str], into: Path) -> Iterator[Path]:
    """Write an entry's code as `<symbol>.<kind>`, for kinds of CODE.

    Raises:
        KernelError: `kinds` has sass, and there is no nvdisasm.
    """
    for kind in kinds:
        folders.make_folder(into, folders.SHARED)
        path = into / f"{spec.symbol}.{kind}"
        if kind == "sass":
            path.write_text(cubin.sass(entry / "kernel.cubin"))
        else:
            shutil.copyfile(entry / f"kernel.{kind}", path)
        folders.set_mode(path, folders.FILE)
        yield path


# ---------------------------------------------------------------- the wheel dualkv-kernels
def write_wheel(entries: Iterable[Path], folder: Path, version: str) -> Path:
    """Write `dualkv_kernels-<version>-py3-none-manylinux_2_<glibc>_<machine>.whl` with the files that loading needs.

    The same entries make the same file. The wheel fits any Python and requires this version of dualkv, because the
    records name its sources.

    Raises:
        KernelError: the folder cannot be written, or the wheel would be larger than MOST_BYTES.
    """
    files: dict[str, bytes] = {
        f"{PACKAGE}/__init__.py": b'"""Compiled kernels of dualkv: codegen.store finds them."""\n'
    }
    glibc = [17]  # of manylinux2014, the oldest that PyTorch is built for
    for entry in sorted(entries):
        for name in ("kernel.so", "kernel.json"):
            files[f"{PACKAGE}/{entry.name}/{name}"] = content = (entry / name).read_bytes()
            glibc += [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", content)]
    tag = f"py3-none-manylinux_2_{max(glibc)}_{platform.machine()}"
    about = f"{PACKAGE}-{version}.dist-info"
    files[f"{about}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: {PACKAGE.replace('_', '-')}\nVersion: {version}\n"
        "Summary: Compiled kernels of dualkv for Hopper GPUs\nLicense-Expression: Apache-2.0\n"
        f"Requires-Dist: dualkv=={version}\n"
    ).encode()
    files[f"{about}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: dualkv {version}\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    )
    rows = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}\n")
    files[f"{about}/RECORD"] = "".join([*rows, f"{about}/RECORD,,\n"]).encode()
    path = folder / f"{PACKAGE}-{version}-{tag}.whl"
    new = folder / f".{path.name}.new"
    try:
        folders.make_folder(folder, folders.SHARED)
        try:
            with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
                for name, content in files.items():
                    info = zipfile.ZipInfo(name)  # dated 1980: the file does not depend on the time
                    info.external_attr = 0o644 << 16
                    wheel.writestr(info, content, zipfile.ZIP_DEFLATED)
            if new.stat().st_size > MOST_BYTES:
                raise KernelError(f"{path} would have {new.stat().st_size} bytes, expected at most {MOST_BYTES}")
            folders.set_mode(new, folders.FILE)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as e:
        raise KernelError(f"{path} cannot be written ({e.strerror or e})") from e
    return path


# ---------------------------------------------------------------- check
def check(folder: Path, specs: Iterable[KernelSpec] = ()) -> Checked:
    """Check that `manifest.json` is true, that all its kernels load here, and that `specs` are among them.

    Nothing in the folder is written. On a machine with a Hopper GPU and cuda-bindings the driver loads the kernels too,
    and its numbers are compared.
    """
    found = Checked(not_read_back=cubin.unreadable())
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        kernels = dict(manifest["kernels"])
        if manifest["schema"] != SCHEMA:
            found.problems.append(f"{MANIFEST} has schema {manifest['schema']}, expected {SCHEMA}")
            return found
    except (OSError, ValueError, KeyError, TypeError) as e:
        found.problems.append(f"{folder / MANIFEST} cannot be read ({type(e).__name__}: {e})")
        return found
    usable = set()
    for name, said in kernels.items():
        found.kernels += 1
        try:
            problems = list(_problems(folder / name, said))
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            problems = [f"is not described as kernels are ({type(e).__name__}: {e})"]
        spec = _spec_of(folder / name)
        if spec is not None and not problems:
            usable.add(spec)
            if found.not_read_back is None:
                problems += _differences_on_device(folder / name, said)
                found.read_back += not problems
        found.problems += [f"{name} {problem}" for problem in problems]
    found.problems += [f"no usable kernel {spec}" for spec in specs if spec not in usable]
    return found


def unusable(folder: Path) -> dict[str, str]:
    """The entries of a folder that cannot be loaded here, and why."""
    found = {}
    for path in sorted(folder.glob("dualkv_*-*")):
        spec = _spec_of(path)
        reason = NO_RECORD if spec is None else store.mismatch(path, spec, same_compiler=False)
        if reason is not None:
            found[path.name] = reason
    return found


def _problems(path: Path, said: dict[str, Any]) -> Iterator[str]:
    """Find what is wrong with an entry, or with the manifest's description of it."""
    if not path.is_dir():
        yield f"is in {MANIFEST} and not in the folder"
        return
    spec = _spec_of(path)
    if spec is None:
        yield NO_RECORD
        return
    if reason := store.mismatch(path, spec, same_compiler=False):
        yield reason
        return
    record = record_of(path)
    lies = [
        f"{name}={said.get(name)!r}, its record {record.get(name)!r}"
        for name in FIELDS
        if not _same(name, said, record)
    ]
    yield from (f"differs: {MANIFEST} says {lie}" for lie in lies)
    if lies:
        return
    try:
        code = (path / "kernel.cubin").read_bytes()
        own = cubin.resources(code)
    except (OSError, ValueError) as e:
        yield f"has no readable kernel.cubin ({e})"
        return
    if hashlib.sha256(code).hexdigest() != said["cubin_sha256"]:
        yield "has a kernel.cubin without the recorded hash"
    elif code not in (path / "kernel.so").read_bytes():
        yield "has a kernel.cubin that is not the code in kernel.so"
    facts = {
        "registers": own.registers,
        "stack": own.stack,
        "threads": own.threads,
        "static_shared_memory": own.static_shared_memory,
        "ctas_per_sm": cubin.ctas_per_sm(own.registers, own.threads, own.static_shared_memory + said["shared_memory"]),
    }
    yield from _differences(said, facts, "its code")
    try:
        store.open_entry(path, spec)
    except KernelError as e:
        yield str(e)


def _same(name: str, said: dict[str, Any], record: dict[str, Any]) -> bool:
    return name in said and name in record and bool(said[name] == record[name])


def _differences_on_device(path: Path, said: dict[str, Any]) -> list[str]:
    try:
        facts = cubin.on_device((path / "kernel.cubin").read_bytes(), said["threads"], said["shared_memory"])
    except KernelError as e:
        return [f"is not accepted by the GPU: {e}"]
    return list(_differences(said, facts, "the GPU"))


def _differences(said: dict[str, Any], facts: dict[str, int], whose: str) -> Iterator[str]:
    for name, value in facts.items():
        if said[name] != value:
            yield f"differs: {MANIFEST} says {name}={said[name]}, {whose} {value}"

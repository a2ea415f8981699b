"""Registers, stack, shared memory and threads of a cubin, from its ELF file and, with a GPU, from the driver; its
machine code as text.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen import KernelError, packages, toolchain

# Resources of an SM of compute capability 9.0 (CUDA Programming Guide, "Compute Capabilities"), and the units in which
# they are allocated: registers by the warp, shared memory by the CTA. The system takes 1 KiB of each CTA's.
SM_REGISTERS, WARP_REGISTERS_UNIT = 65536, 256
SM_WARPS, SM_CTAS, WARP = 64, 32, 32
SM_SHARED_MEMORY, SHARED_MEMORY_UNIT, SYSTEM_SHARED_MEMORY = 228 * 1024, 128, 1024

# Attributes of `.nv.info` sections, and how their values are stored.
_REGISTERS, _FRAME_SIZE, _REQUIRED_THREADS = 0x2F, 0x11, 0x10
_SIZED = 4
_NO_CONTENT = 8  # type of an ELF section that takes space in memory and none in the file


@dataclass(frozen=True)
class Resources:
    """Resources of the one kernel in a cubin: registers and bytes of stack a thread, threads and bytes of static shared
    memory a CTA, and the kernel's symbol."""

    registers: int
    stack: int
    threads: int
    static_shared_memory: int
    function: str


def resources(cubin: bytes) -> Resources:
    """Resources of the kernel in `cubin`, read from the ELF file as the driver reads it.

    Raises:
        ValueError: `cubin` is not a cubin, or does not have exactly one kernel.
    """
    try:
        sections = _sections(cubin)
        functions = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
        if len(functions) != 1:
            raise ValueError(f"the cubin has {len(functions)} kernels, expected 1")
        found = _attributes(sections[".nv.info"]) | _attributes(sections[f".nv.info.{functions[0]}"])
        shared = sections.get(f".nv.shared.{functions[0]}", b"")  # with what the system takes
        x, y, z = struct.unpack_from("<3I", found[_REQUIRED_THREADS])
        return Resources(
            registers=struct.unpack_from("<2I", found[_REGISTERS])[1],
            stack=struct.unpack_from("<2I", found[_FRAME_SIZE])[1],
            threads=x * y * z,
            static_shared_memory=max(0, len(shared) - SYSTEM_SHARED_MEMORY),
            function=functions[0],
        )
    except (struct.error, KeyError, IndexError, UnicodeDecodeError) as e:
        raise ValueError(f"the cubin cannot be read ({type(e).__name__}: {e})") from e


def _sections(elf: bytes) -> dict[str, bytes]:
    """Name and content of an ELF64 file's sections; zeros where a section has a size and no content."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("the cubin is no ELF file")
    (at,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, at + i * size) for i in range(count)]
    strings = headers[names][4]

    def name(header: tuple[int, ...]) -> str:
        begin = strings + header[0]
        return elf[begin : elf.index(b"\0", begin)].decode()

    def content(header: tuple[int, ...]) -> bytes:
        at, size = header[4:6]
        return bytes(size) if header[1] == _NO_CONTENT else elf[at : at + size]

    return {name(header): content(header) for header in headers}


def _attributes(section: bytes) -> dict[int, bytes]:
    """Values of an `.nv.info` section that come with a size, by attribute."""
    found, at = {}, 0
    while at + 4 <= len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == _SIZED:
            found[attribute] = section[at : at + size]
            at += size
    return found


def ctas_per_sm(registers: int, threads: int, shared_memory: int) -> int:
    """CTAs that an SM of compute capability 9.0 holds at once.

    Args:
        registers: registers a thread.
        threads: threads a CTA.
        shared_memory: dynamic shared memory a CTA, bytes.
    """
    warps = -(-threads // WARP)
    registers_a_warp = -(-registers * WARP // WARP_REGISTERS_UNIT) * WARP_REGISTERS_UNIT
    shared = -(-(shared_memory + SYSTEM_SHARED_MEMORY) // SHARED_MEMORY_UNIT) * SHARED_MEMORY_UNIT
    # An SM has four partitions, each with a quarter of its registers and of its warps.
    warps_by_registers = SM_REGISTERS // 4 // registers_a_warp * 4
    return min(SM_CTAS, SM_WARPS // warps, warps_by_registers // warps, SM_SHARED_MEMORY // shared)


def unreadable() -> str | None:
    """Say why :func:`on_device` cannot read kernels back here; None if it can."""
    try:
        _call("cuInit", 0)
        if not _call("cuDeviceGetCount"):
            return "there is no GPU"
        attribute = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_"
        major, minor = (_call("cuDeviceGetAttribute", f"{attribute}{part}", 0) for part in ("MAJOR", "MINOR"))
    except KernelError as e:
        return str(e)
    return None if (major, minor) == (9, 0) else f"GPU 0 has compute capability {major}.{minor}, expected 9.0"


def on_device(cubin: bytes, threads: int, shared_memory: int) -> dict[str, int]:
    """Ask the driver about the cubin, loaded on GPU 0, for CTAs of `threads` threads and so many dynamic bytes.

    Returns:
        registers, stack (bytes of local memory a thread), static_shared_memory and ctas_per_sm.

    Raises:
        KernelError: there are no cuda-bindings or no GPU, or the driver does not load the cubin.
    """
    _call("cuInit", 0)
    gpu = _call("cuDeviceGet", 0)
    _call("cuCtxPushCurrent", _call("cuDevicePrimaryCtxRetain", gpu))
    try:
        module = _call("cuModuleLoadData", cubin)
        try:
            function = _call("cuModuleGetFunction", module, resources(cubin).function.encode())
            attribute = "CU_FUNC_ATTRIBUTE_"
            _call("cuFuncSetAttribute", function, f"{attribute}MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_memory)
            registers, stack, static = (
                _call("cuFuncGetAttribute", f"{attribute}{name}", function)
                for name in ("NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES")
            )
            ctas = _call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, shared_memory)
            return {"registers": registers, "stack": stack, "static_shared_memory": static, "ctas_per_sm": ctas}
        finally:
            _call("cuModuleUnload", module)
    finally:
        _call("cuCtxPopCurrent")
        _call("cuDevicePrimaryCtxRelease", gpu)


def _call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver API and return its result. Attributes are given by name."""
    if toolchain.driver_cuda() is None:
        raise KernelError("there is no NVIDIA driver")
    if said := packages.lacking("cuda-bindings"):
        raise KernelError(f"kernels are read back with {said}")
    from cuda.bindings import driver

    enums = {"CU_FUNC_": driver.CUfunction_attribute, "CU_DEVIC": driver.CUdevice_attribute}
    values = [getattr(enums[a[:8]], a) if isinstance(a, str) else a for a in arguments]
    error, *results = getattr(driver, name)(*values)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"{name} failed with {driver.CUresult(error).name}")
    return results[0] if results else None


def sass(cubin: Path) -> str:
    """Machine code as text."""
    return subprocess.run([_nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


def _nvdisasm() -> str:
    """nvdisasm on PATH, or the one of PyPI's nvidia-cuda-nvdisasm."""
    packaged = (f"{p}/nvidia/{flavour}/bin/nvdisasm" for flavour in ("cu13", "cu12") for p in sys.path if p)
    candidates = [shutil.which("nvdisasm"), *packaged]
    for path in candidates:
        if path and os.access(path, os.X_OK):
            return path
    raise KernelError("nvdisasm is neither on PATH nor installed: pip install nvidia-cuda-nvdisasm")

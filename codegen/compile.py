"""Compile a :class:`KernelSpec` into a shared object with its machine code, on any machine: no GPU is needed.

The compile runs in its own process (`python -m codegen.compile` in the folder, the spec on stdin): the DSL reads its
target from the environment when it is imported, and nothing that it does reaches the caller's process.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from codegen import KernelError, cubin, toolchain
from codegen.spec import FORWARDS, PARTIAL, KernelSpec

C_COMPILERS = ("gcc", "cc", "clang")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def cannot_compile() -> str | None:
    """Say what this machine lacks to compile kernels and how to get it; None if it can compile."""
    if said := toolchain.lacking():
        return said
    if not any(map(shutil.which, C_COMPILERS)):
        return "no C compiler is on PATH (gcc, cc or clang), by which kernels are linked: install one"
    return None


def compile_kernel(spec: KernelSpec, folder: Path) -> dict[str, Any]:
    """Write `kernel.so`, `kernel.cubin` and `kernel.ptx` of `spec` into `folder`, which exists.

    Returns:
        The compiler's report: ptxas version, registers a thread, stack and spilled bytes, threads, dynamic and static
        shared memory of a CTA (bytes), CTAs that an SM holds, and the codes of ptxas warnings about wgmma (C7512 and
        the like: ptxas serializes products).

    Raises:
        KernelError: there is no CuTe DSL or C compiler, or the compile failed. The message says which and why.
        OSError: the folder cannot be written, or has no space left.
    """
    if lacking := cannot_compile():
        raise KernelError(
            f"kernel {spec} must be compiled and {lacking}, or set DUALKV_KERNEL_DIR to a folder that holds it"
        )
    chosen = toolchain.found()
    assert chosen is not None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    environment |= {
        "CUTE_DSL_ARCH": spec.arch,
        "CUTE_DSL_COMPILER_OPT": "remarks{ptx}",
        "CUTE_DSL_KEEP_PTX": "1",
        "LC_ALL": "C",
        "PYTHONPATH": os.pathsep.join([*chosen.path, *(os.path.abspath(p) for p in sys.path if p)]),
    }
    worker = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", "codegen.compile"],
        cwd=folder, env=environment, input=spec.to_json(), capture_output=True, text=True,
    )  # fmt: skip
    said = (worker.stdout + worker.stderr).strip()
    if worker.returncode:
        for code in NO_SPACE:
            if os.strerror(code) in said:
                raise OSError(code, os.strerror(code), str(folder))
        raise KernelError(f"compiling {spec} failed: {said[-2000:]}")
    report = folder / "worker.json"
    found: dict[str, Any] = json.loads(report.read_text()) | ptxas_report(said)
    report.unlink()
    used = Path(found.pop("cutlass"))
    if chosen.dsl.resolve() not in used.parent.resolve().parents:
        raise KernelError(f"compiling {spec} failed: the process took cutlass from {used}, expected {chosen}")
    own = cubin.resources((folder / "kernel.cubin").read_bytes())
    if (own.registers, own.stack) != (found["registers"], found["stack"]):
        raise KernelError(f"compiling {spec} failed: ptxas reported {found}, its cubin says {own}")
    shared_memory = own.static_shared_memory + found["shared_memory"]
    ctas = cubin.ctas_per_sm(own.registers, own.threads, shared_memory)
    if ctas == 0:
        raise KernelError(
            f"compiling {spec} failed: a CTA of {own.threads} threads with {own.registers} registers each and"
            f" {shared_memory} bytes of shared memory fits no multiprocessor"
        )
    return found | {"threads": own.threads, "static_shared_memory": own.static_shared_memory, "ctas_per_sm": ctas}


def ptxas_report(text: str) -> dict[str, Any]:
    """Registers, stack, spills and wgmma warnings from the output of ptxas, which the DSL may wrap at any space."""
    text = " ".join(text.split())
    registers = re.findall(r"Used (\d+) registers", text)
    bytes_ = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if len(registers) != 1 or len(bytes_) != 1:
        raise KernelError(f"ptxas reported on {len(registers)} kernels, expected 1: {text[-2000:]}")
    stack, stores, loads = map(int, bytes_[0])
    return {
        "registers": int(registers[0]),
        "stack": stack,
        "spill_stores": stores,
        "spill_loads": loads,
        "wgmma_warnings": sorted(set(re.findall(r"\bC75\d\d\b", text))),
    }


# ---------------------------------------------------------------- in the worker
def _kernel(spec: KernelSpec) -> Any:
    """The kernel object of a specification, which the DSL compiles."""
    import cutlass

    module = importlib.import_module(f"cute_kernels.{spec.operation}")
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[spec.dtype]
    tile = spec.to_dict()["tile"]
    more: dict[str, Any] = {"features": spec.features} if spec.features else {}
    if spec.head_dim_v is not None:
        more["head_dim_v"] = spec.head_dim_v
    if spec.operation in FORWARDS:
        kernel = {"fwd": "ForwardKernel", "fwd_paths": "PathForwardKernel"}[spec.operation]
        if spec.head_dim > 256:
            module, kernel = importlib.import_module("cute_kernels.fwd_split"), f"Split{kernel}"
        return getattr(module, kernel)(dtype, spec.head_dim, spec.packed_heads, **tile, **more)
    make = {
        "bwd_preprocess": "BackwardPreprocess",
        "bwd": "backward_kernel",
        "bwd_sum": "PartialSum",
        "bwd_postprocess": "BackwardPostprocess",
    }[spec.operation]
    partial = {"gradients": spec.gradients} if spec.operation in PARTIAL else {}
    return getattr(module, make)(dtype, spec.head_dim, **partial, **tile, **more)


def _shared_memory(ir: str) -> int:
    """Dynamic shared memory of the one launch, from the host code (LLVM dialect): field 2 of cudaLaunchConfig_t."""
    config = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    stores = re.findall(
        rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, {config}\s+"
        r"llvm\.store (%\w+), \1 : i64",
        ir,
    )
    if len(stores) != 1:
        raise RuntimeError(f"found {len(stores)} kernel launches in the compiled host code, expected 1")
    before = ir[: ir.index(f"llvm.store {stores[0][1]}, {stores[0][0]} : i64")]
    return int(re.findall(rf"{stores[0][1]} = llvm\.mlir\.constant\((\d+) : i64\)", before)[-1])


def _worker() -> None:
    """Compile the spec on stdin into the current folder."""
    spec = KernelSpec.from_json(sys.stdin.read())
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm-ffi would import torch: a second, not needed
    import cutlass
    import cutlass.cute as cute
    import tvm_ffi
    from cutlass.base_dsl.version_info import CUDA_VERSION

    flavour = toolchain.compiler()["flavour"]
    if f"cu{CUDA_VERSION.major}" != flavour:
        raise RuntimeError(f"the CuTe DSL chose its cu{CUDA_VERSION.major} compiler, expected {flavour}")
    kernel = _kernel(spec)
    options = f"--enable-tvm-ffi --gpu-arch {spec.arch} --keep-cubin --dump-dir ."
    compiled = cute.compile(kernel, *kernel.fake_arguments(), options=options)
    for dumped in Path().iterdir():
        dumped.unlink()
    code = compiled.artifacts.CUBIN
    Path("kernel.cubin").write_bytes(code)
    Path("kernel.ptx").write_text(compiled.artifacts.PTX)
    compiled.export_to_c("kernel.o", function_name=spec.symbol, export_only_tvm_ffi_symbols=True)
    # kernel.so needs libc and tvm-ffi's library, by soname. `defs` fails if host code calls any other library.
    runtime, ffi = Path(__file__).with_name("runtime.c"), tvm_ffi.libinfo.find_libtvm_ffi()
    cc = str(next(filter(None, map(shutil.which, C_COMPILERS))))
    flags = ["-O2", "-fPIC", "-shared", "-s", "-Wl,-z,defs"]
    subprocess.run([cc, *flags, "-o", "kernel.so", "kernel.o", str(runtime), str(ffi)], check=True)
    Path("kernel.o").unlink()
    ptxas = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", code)
    report = {
        "cutlass": cutlass.__file__,
        "ptxas": ptxas[1].decode() if ptxas else "unknown",
        "shared_memory": _shared_memory(str(compiled.ir_module)),
    }
    Path("worker.json").write_text(json.dumps(report))


if __name__ == "__main__":
    _worker()

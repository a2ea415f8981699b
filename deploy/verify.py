"""Holds a runtime environment to its promise: no compiler, every kernel that it was given loads, and runs on a GPU.

DUALKV_JIT=0 python deploy/verify.py: kernels of the wheel dualkv-kernels or, where it is set, of DUALKV_KERNEL_DIR.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch

import dualkv
from codegen import folders, precompiled, store
from codegen.spec import KernelSpec, backward_specs, forward_spec
from dualkv.ops import hopper

DTYPES = {name: dtype for dtype, name in hopper.DTYPES.items()}
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3}  # of the largest value: half-precision inputs and outputs


def specs_in(folder: Path) -> list[KernelSpec]:
    """Read the specifications from the records of a folder."""
    records = [precompiled.record_of(path) for path in sorted(folder.glob("dualkv_*-*"))]
    return [KernelSpec.from_json(json.dumps(record["spec"])) for record in records]


def backward_of(spec: KernelSpec) -> list[KernelSpec]:
    """The backward's kernels of a forward's calls."""
    more = {"features": spec.features, "head_dim_v": spec.head_dim_v, "few_keys": of_few_keys(spec)}
    return backward_specs(spec.dtype, spec.head_dim, **more).present


def of_few_keys(forward: KernelSpec) -> bool:
    """Whether a forward is that of many short segments."""
    given = forward.dtype, forward.head_dim, forward.packed_heads
    return forward != forward_spec(*given, features=forward.features, head_dim_v=forward.head_dim_v)


def run(forward: KernelSpec, backward: bool, on: str = "cuda") -> float:
    """One call of the kernel, with its features, against the reference on the CPU in fp32: largest difference, relative
    to largest values. With a kernel of short segments this small layout is taken for a large one."""
    layout = dualkv.Layout.from_lengths([200, 3], [[70, 1, 129], [40]])
    generator = torch.Generator().manual_seed(0)
    heads, rows = forward.packed_heads, layout.num_tokens
    shapes = [(rows, 2 * heads, forward.head_dim)] + [(rows, 2, head_dim) for head_dim in forward.head_dims]
    half = [torch.randn(s, generator=generator).to(DTYPES[forward.dtype]) for s in shapes]
    sinks = torch.randn(2 * heads, generator=generator) if "sinks" in forward.features else None
    softcap = 20.0 if "softcap" in forward.features else None
    results = []
    for device, dtype in ((on, DTYPES[forward.dtype]), ("cpu", torch.float32)):
        q, k, v = (x.to(device, dtype, copy=True).requires_grad_(backward) for x in half)
        of_heads = None if sinks is None else sinks.to(device)
        least = 0 if of_few_keys(forward) else 2**62
        with patch.multiple(hopper, FEW_KEYS_ROWS=least, FEW_KEYS_COST=0, FEW_KEYS_WALK=0, PARTS_COST=0):
            out = dualkv.attention(q, k, v, layout.to(device), sinks=of_heads, softcap=softcap)
            if backward:
                out.float().square().sum().backward()
        results.append([out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)])
    return max(
        float((ours.cpu().float() - truth).abs().max() / truth.abs().max())
        for ours, truth in zip(*results, strict=True)
    )


def main() -> None:
    given = folders.of_environment("DUALKV_KERNEL_DIR")
    source, folder = ("kernel_dir", given) if given else ("wheel", store.wheel_dir())
    if folder is None or os.environ.get("DUALKV_JIT") != "0":
        sys.exit("expected the wheel dualkv-kernels or DUALKV_KERNEL_DIR, and DUALKV_JIT to be 0")
    if importlib.util.find_spec("cutlass") is not None:
        sys.exit("cutlass can be imported here: this environment has the compiler that it is to do without")
    specs = specs_in(folder)
    for spec in specs:
        store.load(spec)
    if not specs or store.counts != {source: len(specs)}:
        sys.exit(f"kernels came from {dict(store.counts)}, expected {len(specs)}, more than none, from {source}")
    if "cute_dsl" in Path("/proc/self/maps").read_text():
        sys.exit("a library of the CuTe DSL is in this process: kernels are to do without")
    print(f"{len(specs)} kernels load without a compiler, from {folder}")
    why_not = hopper.device_unsupported(torch.device("cuda", 0)) if torch.cuda.is_available() else "no GPU"
    if why_not:
        print(f"not run: {why_not}")
        return
    for spec in specs:
        if spec.operation == "fwd":
            backward = set(backward_of(spec)) <= set(specs)
            difference = run(spec, backward)
            print(f"{spec}: forward{' and backward' if backward else ''}, largest relative difference {difference:.1e}")
            if not difference < TOLERANCE[spec.dtype]:
                sys.exit("too large")


if __name__ == "__main__":
    main()

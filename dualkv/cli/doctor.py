"""Examine this machine for dualkv: GPUs, driver, packages, kernels, what runs where and why, and what is missing."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from codegen import KernelError, compile, folders, packages, precompiled, store, toolchain
from codegen.spec import DTYPES, backward_specs, forward_spec
from codegen.tiles import HEAD_DIM_PAIRS, MAX_PACKED_HEADS, head_parts
from dualkv import __version__
from dualkv.cli.precompile import usable_cpus
from dualkv.integrations import flash_linear_attention
from dualkv.ops import backends


@dataclass(frozen=True)
class Package:
    """A package and what it is for.

    Attributes:
        version: None if it is missing.
        versions: those that serve, in words; empty if all do.
        usable: whether it is there, in a version that serves.
        needed: whether dualkv cannot do without.
    """

    name: str
    version: str | None
    versions: str
    usable: bool
    needed: bool
    purpose: str
    install: str


@dataclass(frozen=True)
class Runs:
    """The backend that computes attention for tensors on `where`, and why."""

    where: str
    what: str
    why: str


@dataclass(frozen=True)
class Ready:
    """Kernels of a dtype and a native pair of head dims that are compiled: the forward's by GQA ratio, and whole
    backwards, of layouts with short segments and of others."""

    dtype: str
    head_dim: int
    head_dim_v: int
    forward: list[int]
    backward: bool
    deterministic: bool


@dataclass(frozen=True)
class Diagnosis:
    """All findings; `advice` holds one sentence for each thing to do, most important first.

    `kernels` are those that are ready, `lookup` says where kernels are looked for, `compiler` what compiles others here
    (None: nothing).
    """

    dualkv: str
    python: str
    system: str
    cpus: int
    driver: str | None
    gpus: list[str]
    packages: list[Package]
    runs: list[Runs]
    kernels: list[Ready]
    lookup: str
    compiler: str | None
    advice: list[str]

    @property
    def healthy(self) -> bool:
        """Whether everything that dualkv needs is there: packages, for a Hopper GPU kernels or their compiler, and a
        DUALKV_BACKEND that serves something, if it is set."""
        served = self.kernels or self.compiler or not any(runs.what == KERNEL for runs in self.runs)
        computed = not self.runs or any(runs.what != NOTHING for runs in self.runs)
        return bool(served) and computed and all(package.usable for package in self.packages if package.needed)

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dictionary for JSON."""
        return asdict(self) | {"healthy": self.healthy}


KERNEL, NOTHING = backends.BACKENDS["hopper"].what, "nothing"


def examine() -> Diagnosis:
    """Looks at this machine; imports nothing beyond PyTorch, and waits at most seconds for the driver's tool."""
    driver, gpus = _driver()
    kernels, lookup, unready = _kernels()
    return Diagnosis(
        dualkv=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        cpus=usable_cpus(),
        driver=driver,
        gpus=gpus,
        packages=_packages(),
        runs=_runs(),
        kernels=kernels,
        lookup=lookup,
        compiler=_compiler(),
        advice=unready + _advice(driver, gpus),
    )


def _packages() -> list[Package]:
    return [
        Package(
            p.name, packages.found(p.name), p.versions, packages.lacking(p.name) is None, p.needed, p.purpose, p.install
        )
        for p in packages.PACKAGES.values()
    ]


def _compiler() -> str | None:
    """The compiler that compiles kernels at their first use; None if nothing does."""
    try:
        may = store.may_compile() and compile.cannot_compile() is None
    except KernelError:  # said beside the kernels
        may = False
    return str(toolchain.found()) if may else None


def _kernels() -> tuple[list[Ready], str, list[str]]:
    """Kernels that are ready; where they are looked for, and what happens to others; what is wrong with that."""
    try:
        folder = folders.of_environment("DUALKV_KERNEL_DIR")
        cannot = compile.cannot_compile() if store.may_compile() else "DUALKV_JIT=0"
        places = [
            *([f"DUALKV_KERNEL_DIR={folder} ({_counted(folder)})"] if folder else []),
            *([f"the wheel dualkv-kernels {toolchain.version('dualkv-kernels')} ({_counted(wheel)})"]
              if (wheel := store.wheel_dir()) else []),
            f"the cache {store.cache_dir()} ({_counted(store.cache_dir())})",
        ]  # fmt: skip
        lookup = f"kernels are looked for in {', then '.join(places)}; others are "
        lookup += f"refused: {cannot}" if cannot else f"compiled at their first use by {toolchain.found()}"
        found = [_ready(dtype, *pair) for dtype in DTYPES for pair in HEAD_DIM_PAIRS]
    except KernelError as e:
        return [], str(e), [str(e)]
    ready = [one for one in found if one.forward or one.backward]
    unready = [f"there are no kernels: {cannot}"] if cannot and not ready else []
    for what, made in (("kernels", folder), ("wheel dualkv-kernels", store.wheel_dir())):
        if made and (unusable := precompiled.unusable(Path(made))):
            name, why = min(unusable.items())
            unready.append(
                f"{len(unusable)} of the kernels in {made} are not used here ({name} {why}): make the {what} again, "
                "with this version"
            )
    return ready, lookup, unready


def _counted(folder: Path) -> str:
    entries = len(list(folder.glob("dualkv_*-*")))
    return f"{entries} kernel{'' if entries == 1 else 's'}"


def _ready(dtype: str, head_dim: int, head_dim_v: int) -> Ready:
    def serves(ratio: int) -> bool:
        return all(
            store.where(forward_spec(dtype, head_dim, len(heads), head_dim_v=head_dim_v, few_keys=few_keys))
            for heads in (range(ratio), *head_parts(ratio))
            for few_keys in (False, True)
        )

    def whole(deterministic: bool) -> bool:
        kinds = [
            backward_specs(dtype, head_dim, deterministic, head_dim_v=head_dim_v, few_keys=x) for x in (False, True)
        ]
        return all(store.where(spec) for specs in kinds for spec in specs.present)

    ratios = [ratio for ratio in range(1, MAX_PACKED_HEADS + 1) if serves(ratio)]
    return Ready(dtype, head_dim, head_dim_v, ratios, whole(False), whole(True))


def _driver() -> tuple[str | None, list[str]]:
    """Version of the NVIDIA driver, and its GPUs as text, with or without a PyTorch that sees them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, []
    query = "driver_version,name,compute_cap,memory.total"
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None, []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 4] if done.returncode == 0 else []
    if not rows:
        return None, []
    return rows[0][0], [f"{name}, compute capability {cc}, {memory}" for _, name, cc, memory in rows]


def _runs() -> list[Runs]:
    """Find the backend that serves each device, by the same checks as the ops."""
    runs = [_served("CPU", torch.device("cpu"), torch.float32)]
    for i in range(torch.cuda.device_count()):
        device = torch.device("cuda", i)
        runs.append(_served(f"{device}, bf16 or fp16", device, torch.bfloat16))
        runs.append(_served(f"{device}, fp32 or fp64", device, torch.float32))
    return runs


def _served(where: str, device: torch.device, dtype: torch.dtype) -> Runs:
    """Find the backend for a plain call with tensors of `dtype` on `device`, and why: DUALKV_BACKEND, or what the
    backends before it refuse."""
    q = torch.empty(0, 1, 128, dtype=dtype, device=device)
    name, refused = backends.first(q, q)
    asked = backends.of_variable()
    if asked is not None:
        if asked not in backends.BACKENDS:
            why = f"{backends.VARIABLE} is {asked!r}, expected one of {', '.join(backends.BACKENDS)}"
            return Runs(where, NOTHING, why)
        reason = backends.BACKENDS[asked].unsupported(q, q)
        if reason:
            return Runs(where, NOTHING, f"{backends.VARIABLE} is {asked!r}, which does not serve {reason}")
        return Runs(where, backends.BACKENDS[asked].what, f"{backends.VARIABLE} is {asked!r}")
    if device.type == "cpu":
        why = "no kernels are made for CPUs; exact, for tests and small models"
    elif dtype == torch.float32:
        why = "kernels take bf16 and fp16; slow"
    elif not refused:
        why = f"{torch.cuda.get_device_name(device)} is a Hopper GPU"
    else:
        why = "; ".join(f"{other} does not serve {reason}" for other, reason in refused.items())
    return Runs(where, backends.BACKENDS[name].what, why)


def _advice(driver: str | None, gpus: list[str]) -> list[str]:
    lacking = {package: said for package in packages.PACKAGES.values() if (said := packages.lacking(package.name))}
    advice = [f"dualkv needs {said} for {package.purpose}" for package, said in lacking.items() if package.needed]
    optional = {package: said for package, said in lacking.items() if not package.needed}
    absent = [package for package in optional if packages.found(package.name) is None]
    advice += [f"for {package.purpose}: {said}" for package, said in optional.items() if package not in absent]
    if backends.of_variable() is not None:
        advice.append(f"{backends.VARIABLE} chooses what computes attention: unset it for the default")
    if not torch.cuda.is_available():
        if not gpus:
            advice.append("no NVIDIA GPU with a working driver: everything runs on the CPU, for tests and small models")
        elif torch.version.cuda is None:
            advice.append(
                f"there is a GPU and this PyTorch ({torch.__version__}) is built without CUDA: "
                "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
            )
        else:
            advice.append(
                f"there is a GPU (driver {driver}) that PyTorch {torch.__version__} cannot use: "
                f"update the driver to one for CUDA {torch.version.cuda}, and check CUDA_VISIBLE_DEVICES"
            )
    if (sentence := flash_linear_attention.refusal()) is not None:
        advice.append(sentence)
    advice += dict.fromkeys(f"for {package.purpose}: {package.install}" for package in absent)
    return advice

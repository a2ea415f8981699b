"""Read the figures of each kernel from a profile's folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.spec import KernelSpec
from tools.ncu.job import Job
from tools.ncu.model import Need, need

SECTOR = 32  # bytes
DENSE_FLOPS = (
    4096  # bf16 and fp16 products, a cycle and SM of compute capability 9.0 (ncu's own peak counts sparse ones)
)
_DURATION = "gpu__time_duration.sum"
_CLOCK = "sm__cycles_elapsed.avg.per_second"
_TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
_OPS = "sm__ops_path_tensor_src_{}.sum"
_OPS_BF16, _OPS_FP16 = _OPS.format("bf16_dst_fp32"), _OPS.format("fp16")
_SHARED = "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed"
_WAVES = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
_L2 = "lts__t_sectors_srcunit_tex_op_{}.sum"
_L2_READ, _L2_ADD = (_L2.format(op) for op in ("read", "red"))
_L2_SECTORS, _L2_HIT = "lts__t_sectors_srcunit_tex.sum", "lts__t_sector_hit_rate.pct"
_L2_PEAK, _L2_CLOCK = "derived__lts__lts2xbar_bytes.sum.peak_sustained", "lts__cycles_elapsed.avg.per_second"
_SM_READ = "l1tex__m_xbar2l1tex_read_bytes.sum"
_DRAM_READ, _DRAM_WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
_DRAM_PEAK, _DRAM_CLOCK = "dram__bytes.sum.peak_sustained", "dram__cycles_elapsed.avg.per_second"
_LOCAL = tuple(f"l1tex__t_requests_pipe_lsu_mem_local_op_{op}.sum" for op in ("ld", "st"))
_SM_COUNT = "launch__sm_count"
_STALLS = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (  # what a warp waits for, by ncu's name
    "barrier",
    "long_scoreboard",
    "short_scoreboard",
    "wait",
    "gmma",
    "mio_throttle",
    "lg_throttle",
    "math_pipe_throttle",
    "dispatch_stall",
    "not_selected",
    "membar",
    "no_instruction",
    "branch_resolving",
    "drain",
    "imc_miss",
    "sleeping",
    "tex_throttle",
    "misc",
)


class ReadError(ValueError):
    """A folder that is no profile, in one sentence."""


@dataclass(frozen=True)
class Kernel:
    """One profiled launch: its operation (None for a kernel that is not this project's), metrics, and what it needs."""

    operation: str | None
    symbol: str
    metrics: Mapping[str, float]
    need: Need

    @property
    def name(self) -> str:
        return self.operation or self.symbol[:40]

    def get(self, name: str) -> float | None:
        return self.metrics.get(name)

    def sum(self, *names: str) -> float | None:
        """The sum of some metrics; None unless all are there."""
        values = [self.metrics.get(name) for name in names]
        return None if None in values else sum(values)  # type: ignore[arg-type]

    @property
    def seconds(self) -> float:
        return self.metrics[_DURATION] / 1e9

    @property
    def ops(self) -> float | None:
        """Operations that the tensor cores executed, masked ones too."""
        return self.sum(_OPS_BF16, _OPS_FP16)

    @property
    def l2_bytes(self) -> float | None:
        """The bytes between L2 and the SMs; a line that multicast brings to two SMs counts once."""
        return _times(self.get(_L2_SECTORS), SECTOR)

    @property
    def dram_bytes(self) -> float | None:
        return self.sum(_DRAM_READ, _DRAM_WRITE)

    @property
    def peaks(self) -> dict[str, float | None]:
        """FLOP/s of the tensor cores, bytes/s from L2 towards the SMs and of DRAM, at the clocks of this run."""
        return {
            "tensor": _times(_times(self.get(_SM_COUNT), DENSE_FLOPS), self.get(_CLOCK)),
            "l2": _times(self.get(_L2_PEAK), self.get(_L2_CLOCK)),
            "dram": _times(self.get(_DRAM_PEAK), self.get(_DRAM_CLOCK)),
        }

    def stalls(self) -> list[tuple[str, float]]:
        """(reason, share of a resident warp's time), longest first; an issued instruction takes the rest."""
        given = {name: self.get(_STALLS.format(name)) for name in STALLS}
        known = {name: value for name, value in given.items() if value is not None}
        total = sum(known.values()) + 1  # issuing one instruction
        return sorted(((name, value / total) for name, value in known.items()), key=lambda item: -item[1])


def _times(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


@dataclass(frozen=True)
class Figure:
    """One line of a report: how it is called and shown, and what it is of a kernel (None: not known or no such)."""

    name: str
    form: str
    of: Callable[[Kernel], float | None]


def _metric(name: str) -> Callable[[Kernel], float | None]:
    return lambda kernel: kernel.get(name)


FIGURES = (
    Figure("duration, ms", ".3f", lambda k: k.seconds * 1e3),
    Figure("SM clock, GHz", ".2f", lambda k: _times(k.get(_CLOCK), 1e-9)),
    Figure("TFLOP/s, useful work", ".0f", lambda k: k.need.flops / k.seconds / 1e12 if k.need.flops else None),
    Figure("executed / useful FLOP", ".3f", lambda k: _over(k.ops, k.need.flops)),
    Figure("tensor pipe busy, %", ".1f", _metric(_TENSOR)),
    Figure("shared memory pipe busy, %", ".1f", _metric(_SHARED)),
    Figure("bank conflicts a wavefront", ".4f", lambda k: _over(k.get(_CONFLICTS), k.get(_WAVES))),
    Figure("L2 hit rate, %", ".1f", _metric(_L2_HIT)),
    Figure("L2 reads, GB", ".3f", lambda k: _times(k.get(_L2_READ), SECTOR / 1e9)),
    Figure("L2 reads predicted, GB", ".3f", lambda k: _times(k.need.l2_read_bytes, 1e-9)),
    Figure("arriving at SMs (multicast twice), GB", ".3f", lambda k: _times(k.get(_SM_READ), 1e-9)),
    Figure("L2 additions, GB", ".3f", lambda k: _times(k.get(_L2_ADD), SECTOR / 1e9)),
    Figure("L2 additions predicted, GB", ".3f", lambda k: _times(k.need.l2_add_bytes, 1e-9)),
    Figure("DRAM, TB/s", ".2f", lambda k: _times(_over(k.dram_bytes, k.seconds), 1e-12)),
    Figure("DRAM reads, GB", ".3f", lambda k: _times(k.get(_DRAM_READ), 1e-9)),
    Figure("DRAM writes, GB", ".3f", lambda k: _times(k.get(_DRAM_WRITE), 1e-9)),
    Figure("DRAM with each tensor once, GB", ".3f", lambda k: _times(k.need.dram_bytes, 1e-9)),
    Figure("local memory requests", ".0f", lambda k: k.sum(*_LOCAL)),
)  # fmt: skip


# ---------------------------------------------------------------- a folder
@dataclass(frozen=True)
class Profile:
    """The profile that `run` left in a folder."""

    name: str
    about: dict[str, Any]
    job: Job
    kernels: list[Kernel]

    @property
    def environment(self) -> dict[str, Any]:
        """Machine, versions, commit and date."""
        return {
            name: value for name, value in self.about.items() if name not in {*self.job.to_dict(), "specs", "symbols"}
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of the roofline, for a JSON file."""
        kernels = [
            {
                "operation": kernel.operation,
                "seconds": kernel.seconds,
                "sm_clock_hz": kernel.get(_CLOCK),
                "peaks": kernel.peaks,
                "flops": kernel.need.flops,
                "l2_bytes": kernel.l2_bytes,
                "dram_bytes": kernel.dram_bytes,
            }
            for kernel in self.kernels
            if kernel.need.flops
        ]
        about = {name: self.about.get(name) for name in ("direction", "date", "commit")}
        return {**about, "workload": self.job.workload.name, "kernels": kernels}


def read(folder: Path) -> Profile:
    """
    Raises:
        ReadError: a folder that `run` did not leave, or left incomplete.
    """
    about, metrics = (_text(folder, name) for name in ("about.json", "metrics.csv"))
    try:
        given = json.loads(about)
        job = Job.from_dict(given)
        specs = {name: KernelSpec.from_json(json.dumps(spec)) for name, spec in given["specs"].items()}
        operations = {symbol: name for name, symbol in given["symbols"].items()}
        kernels = []
        for symbol, values in read_csv(metrics):
            operation = operations.get(symbol)
            needed = need(job, specs[operation]) if operation else Need()
            kernels.append(Kernel(operation, symbol, values, needed))
    except (KeyError, TypeError, ValueError) as e:
        raise ReadError(f"{folder} holds no profile that this version reads ({type(e).__name__}: {e})") from e
    return Profile(folder.name, given, job, kernels)


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text()
    except OSError as e:
        raise ReadError(
            f"{folder} is no profile: {name} cannot be read ({e.strerror}); `python -m tools.ncu run` makes one"
        ) from None


def read_csv(text: str) -> list[tuple[str, dict[str, float]]]:
    """(kernel, its metrics in base units) of each launch, of ncu's raw page as CSV.

    Raises:
        ReadError: text that is not such a page, or holds no kernel.
    """
    rows = list(csv.reader(text.splitlines()))
    begin = next((i for i, row in enumerate(rows) if row[:1] == ["ID"] and "Kernel Name" in row), None)
    if begin is None or len(rows) < begin + 3:
        raise ReadError("the report holds no kernels: nothing ran between the profiler's marks, or ncu printed no CSV")
    head = rows[begin]
    kernels = []
    for row in rows[begin + 2 :]:  # a row of units is between
        if len(row) < len(head):
            continue
        cells = dict(zip(head, row, strict=False))
        kernels.append(
            (cells["Kernel Name"], {name: v for name, text in cells.items() if (v := _number(text)) is not None})
        )
    return kernels


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None

"""Measure one side: cold and sustained time, and energy, clock and power through NVML."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from codegen.packages import require

COLD_CALLS, PART_CALLS, MIN_CALLS, PAUSE = 10, 5, 5, 0.2
FEW_CALLS, LONG_MS = 3, 300  # of single calls, where more would take longer than this together
BATCH_MS, POLL = 50, 0.002  # calls queued at a time; seconds between two samples of NVML


class TimeUp(Exception):
    """The time limit is reached."""


class Clock:
    """Raises TimeUp once `limit` seconds have passed since it was made."""

    def __init__(self, limit: float | None) -> None:
        self.begin, self.limit = time.monotonic(), limit

    @property
    def up(self) -> bool:
        return self.limit is not None and time.monotonic() - self.begin > self.limit

    def check(self) -> None:
        if self.up:
            raise TimeUp(f"not measured: the time limit of {self.limit:g} s was reached")


class Sample(NamedTuple):
    """The counters that NVML reports at one moment (`at`, seconds)."""

    at: float
    joules: float  # since the driver was loaded
    sm_clock_mhz: float
    temperature_c: float


class Meter:
    """Energy, clock and temperature of the current GPU through NVML. `absent` says why there is none."""

    def __init__(self) -> None:
        self.absent: str | None = None
        try:
            require("nvidia-ml-py", "energy")
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self.nvml, self.gpu = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.sample()
        except Exception as e:  # a missing package, driver or right: figures go without energy
            self.absent = f"{type(e).__name__}: {e}"

    def sample(self) -> list[Sample]:
        """Read NVML now; the list is empty where NVML is absent."""
        if self.absent:
            return []
        joules = self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu) / 1e3
        clock = self.nvml.nvmlDeviceGetClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM)
        temperature = self.nvml.nvmlDeviceGetTemperature(self.gpu, self.nvml.NVML_TEMPERATURE_GPU)
        return [Sample(time.monotonic(), joules, clock, temperature)]

    def limits(self) -> dict[str, Any]:
        """The driver's version, and the GPU's limits of clock and power."""
        if self.absent:
            return {"driver": "unknown", "nvml": self.absent}
        return {
            "driver": str(self.nvml.nvmlSystemGetDriverVersion()),
            "nvml": "present",
            "max_sm_clock_mhz": self.nvml.nvmlDeviceGetMaxClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM),
            "power_limit_w": self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.gpu) / 1e3,
        }


def timed(call: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events around one call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    return begin, end


def cold_ms(call: Callable[[], Any], calls: int = COLD_CALLS, pause: float = PAUSE) -> float:
    """Median of single calls (fewer where they are long), the GPU idle for `pause` seconds before the first."""
    torch.cuda.synchronize()
    time.sleep(pause)
    times: list[float] = []
    while len(times) < FEW_CALLS or (len(times) < calls and sum(times) < LONG_MS):
        begin, end = timed(call)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def sustained(call: Callable[[], Any], expected_ms: float, seconds: float, meter: Meter) -> dict[str, Any]:
    """Run calls back to back for `seconds`, at least MIN_CALLS; the next batch is queued before the last one is
    through.

    Returns:
        Median ms of the last three quarters, joules a call, watts, median clock, temperature at the end.
    """
    batch = max(1, min(50, round(BATCH_MS / expected_ms)))
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    samples: list[Sample] = []

    def wait(end: torch.cuda.Event) -> None:
        while not end.query():
            samples.extend(meter.sample())
            time.sleep(POLL)

    torch.cuda.synchronize()
    begin = time.monotonic()
    while time.monotonic() - begin < seconds or len(events) < MIN_CALLS:
        before = events[-1:]
        events += [timed(call) for _ in range(batch)]
        for _, end in before:
            wait(end)
    wait(events[-1][1])
    wall = time.monotonic() - begin
    late = [a.elapsed_time(b) for a, b in events[len(events) // 4 :]]
    return {"ms": statistics.median(late), "calls": len(events), **energy(samples, wall / len(events))}


def energy(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Compute the energy, power, clock and temperature from samples taken while calls of `seconds` ran back to back.
    Energy is left out where its counter hardly moved.

    The counter moves some ten times a second only. So power is what it gained between the first and the last time
    that it was seen to move, not between begin and end.
    """
    if not samples:
        return {}
    moved = [b for a, b in itertools.pairwise(samples) if b.joules != a.joules]
    state = {
        "sm_clock_mhz": statistics.median(s.sm_clock_mhz for s in samples),
        "temperature_c": samples[-1].temperature_c,
    }
    if len(moved) < 2:
        return state
    watts = (moved[-1].joules - moved[0].joules) / (moved[-1].at - moved[0].at)
    return {"joules": watts * seconds, "power_w": watts, **state}

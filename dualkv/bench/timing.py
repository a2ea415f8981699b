"""How one side is timed: cold, sustained, and what it holds of the host; energy, clock and power through NVML."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

COLD_CALLS, PART_CALLS, MIN_CALLS, HOST_CALLS, PAUSE = 10, 5, 5, 20, 0.2


class TimeUp(Exception):
    """The time limit is reached."""


class Clock:
    """Raises TimeUp once `limit` seconds have passed since it was made."""

    def __init__(self, limit: float | None) -> None:
        self.begin, self.limit = time.monotonic(), limit

    def check(self) -> None:
        if self.limit is not None and time.monotonic() - self.begin > self.limit:
            raise TimeUp(f"not measured: the time limit of {self.limit:g} s was reached")


class Meter:
    """Energy, clock and power of the current GPU through NVML. `absent` says why there is none."""

    def __init__(self) -> None:
        self.absent: str | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self.nvml, self.gpu = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.joules()
        except Exception as e:  # a missing package, driver or right: figures go without energy
            self.absent = f"{type(e).__name__}: {e}"

    def joules(self) -> float:
        return 0.0 if self.absent else self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu) / 1e3

    def state(self) -> dict[str, float]:
        if self.absent:
            return {}
        return {
            "sm_clock_mhz": self.nvml.nvmlDeviceGetClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM),
            "power_w": self.nvml.nvmlDeviceGetPowerUsage(self.gpu) / 1e3,
            "temperature_c": self.nvml.nvmlDeviceGetTemperature(self.gpu, self.nvml.NVML_TEMPERATURE_GPU),
        }

    def limits(self) -> dict[str, Any]:
        """Driver, and what holds the GPU back."""
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
    """Median of single calls, the GPU idle for `pause` seconds before the first."""
    torch.cuda.synchronize()
    time.sleep(pause)
    times = []
    for _ in range(calls):
        begin, end = timed(call)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def host_us(call: Callable[[], Any], expected_ms: float) -> float:
    """Median time that a call holds the host, microseconds, of calls one after another (fewer where they are long)."""
    times = []
    torch.cuda.synchronize()
    for _ in range(max(3, min(HOST_CALLS, round(200 / expected_ms)))):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def sustained(call: Callable[[], Any], expected_ms: float, seconds: float, meter: Meter) -> dict[str, Any]:
    """Back to back for `seconds` and MIN_CALLS calls at least.

    Returns:
        Median ms of the last three quarters, joules a call, clock and power at the end.
    """
    batch = max(1, min(50, round(100 / expected_ms)))
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    torch.cuda.synchronize()
    begin, joules = time.monotonic(), meter.joules()
    while time.monotonic() - begin < seconds or len(events) < MIN_CALLS:
        events += [timed(call) for _ in range(batch)]
        state = meter.state()
        events[-1][1].synchronize()
    joules = meter.joules() - joules
    late = [a.elapsed_time(b) for a, b in events[len(events) // 4 :]]
    energy = {} if meter.absent else {"joules": joules / len(events)}
    return {"ms": statistics.median(late), "calls": len(events), **energy, **state}

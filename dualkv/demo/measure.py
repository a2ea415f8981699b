"""Wall-clock time by phase and peak memory, on CPU and CUDA."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CLEAR_REFS, STATUS = "/proc/self/clear_refs", "/proc/self/status"


class Stopwatch:
    """Seconds spent in named phases; on CUDA each phase waits for the device at its start and end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] += time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class PeakMemory:
    """Most memory in use inside its `measured()` blocks, above what was in use when it was made.

    On CUDA it is what PyTorch's allocator handed out. On the CPU it is resident memory of this process as the Linux
    kernel tracks it (the high-water mark VmHWM, reset at the start), so it includes what operators use inside; memory
    freed earlier is given back to the system first. Elsewhere it is not measured.

    Attributes:
        bytes: the peak so far; None where it cannot be measured, and before the first block.
        method: how it is measured, in a few words.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None
        self.method = "allocated by PyTorch" if device.type == "cuda" else "resident memory of the process"
        gc.collect()  # what is garbage already would be missing from the difference once it is collected
        self._start = self._reset()
        if self._start is None:
            self.method = "not measured: needs CUDA, or Linux with a writable /proc/self/clear_refs"

    @contextmanager
    def measured(self) -> Iterator[None]:
        """A block whose peak counts."""
        self._reset()
        yield
        if self._start is not None:
            cuda = self._device.type == "cuda"
            peak = torch.cuda.max_memory_allocated(self._device) if cuda else _resident("VmHWM")
            self.bytes = max(self.bytes or 0, peak - self._start)

    def _reset(self) -> int | None:
        """Forget the peak so far; bytes in use now, None where they cannot be measured."""
        if self._device.type != "cuda":
            return _reset_resident_peak()
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)


def _reset_resident_peak() -> int | None:
    """Return free heap to the system, reset the high-water mark, and return the resident bytes now; None: cannot."""
    try:
        # glibc only; without it freed memory stays resident and the growth is understated.
        ctypes.CDLL(None).malloc_trim(0)
        with open(CLEAR_REFS, "w") as file:
            file.write("5")
        return _resident("VmRSS")
    except (OSError, AttributeError):
        return None


def _resident(field: str) -> int:
    with open(STATUS) as file:
        found = re.search(rf"^{field}:\s+(\d+) kB$", file.read(), re.MULTILINE)
    if found is None:
        raise OSError(f"{STATUS} has no {field}")
    return int(found[1]) * 1024

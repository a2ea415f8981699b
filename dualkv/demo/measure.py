"""Peak memory, on CPU and CUDA."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class PeakMemory:
    """Most memory in use inside its `measured()` blocks, above what was in use when it was made.

    On CUDA it is what PyTorch's allocator handed out. On the CPU it is resident memory of this process as the Linux
    kernel tracks it (the high-water mark VmHWM, reset at the start), so it includes what operators use inside; memory
    freed earlier is given back to the system first.

    Attributes:
        bytes: the peak so far; None before the first block, and where neither CUDA nor Linux measures it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None
        gc.collect()  # what is garbage already would be missing from the difference once it is collected
        self._start = self._reset()

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
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        try:
            # glibc only; without it freed memory stays resident and the growth is understated.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            return _resident("VmRSS")
        except (OSError, AttributeError):
            return None


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024

"""Time repeated runs of a whole step, for benchmarks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def repeated(
    run: Callable[[], Any], repeats: int, between: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], Any]:
    """Seconds of each run, their median, and on a GPU the peak of memory in them; what the last run returned.

    `between` follows each run and is not timed. What is compiled or tuned at a first call has to be there.
    """
    gc.collect()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, last = [], None
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        last = run()
        wait()
        seconds.append(time.perf_counter() - start)
        between()
    found: dict[str, Any] = {"seconds": seconds, "median": statistics.median(seconds)}
    return found | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if cuda else {}), last

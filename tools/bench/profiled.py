"""A short profile of a run on this machine, as text: which kernels take its time, and what the GPU waits for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROWS, WIDTH = 70, 110  # of each table, and of its names
PAUSE = 20.0  # us without a kernel that are counted as a pause


class Pause(NamedTuple):
    """Time without a kernel: us since the first event."""

    begin: float
    end: float
    before: str
    behind: str

    @property
    def length(self) -> float:
        return self.end - self.begin


def pauses(kernels: Sequence[tuple[float, float, str]]) -> list[Pause]:
    """Find the pauses between kernels of all streams, (begin, end, name) each."""
    found: list[Pause] = []
    last, name = float("-inf"), ""
    for begin, end, this in sorted(kernels):
        if name and begin - last >= PAUSE:
            found.append(Pause(last, begin, name, this))
        if end > last:
            last, name = end, this
    return found


def write_profile(run: Callable[[], Any], to: Path) -> None:
    """Run once in PyTorch's profiler, and write tables of kernels, of operations on the host, and of pauses."""
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        run()
    events = list(found.events() or ())
    averages = found.key_averages()
    said: list[str] = []
    if cuda:
        kernels = [
            (e.time_range.start, e.time_range.end, e.name)
            for e in events
            if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
        ]
        said.append(_of_pauses(kernels, events))
    for order in [*(["self_cuda_time_total"] if cuda else []), "self_cpu_time_total"]:
        said.append(averages.table(sort_by=order, row_limit=ROWS, max_name_column_width=WIDTH))
    to.write_text("\n\n".join(said) + "\n")


def _of_pauses(kernels: list[tuple[float, float, str]], events: Sequence[Any]) -> str:
    """Say how long kernels ran, and what the host did in the longest pauses."""
    if not kernels:
        return "no kernels ran"
    found = pauses(kernels)
    wall = max(end for _, end, _ in kernels) - min(begin for begin, _, _ in kernels)
    idle = sum(pause.length for pause in found)
    lines = [
        f"{wall / 1e3:.1f} ms from the first kernel to the end of the last, of which {idle / 1e3:.1f} ms in"
        f" {len(found)} pauses of {PAUSE:.0f} us or more without a kernel. The longest, and the host's operation then:"
    ]
    on_host = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if e.device_type == DeviceType.CPU)
    begins = [begin for begin, _, _ in on_host]
    for pause in sorted(found, key=lambda one: -one.length)[:ROWS]:
        middle = (pause.begin + pause.end) / 2
        running = [(end - begin, name) for begin, end, name in on_host[: bisect_right(begins, middle)] if end >= middle]
        host = ", in ".join(name[:50] for _, name in sorted(running)[:3]) or "Python"
        lines.append(f"{pause.length / 1e3:8.3f} ms  {host}; between {pause.before[:60]} and {pause.behind[:60]}")
    return "\n".join(lines)

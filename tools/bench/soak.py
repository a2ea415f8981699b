"""`python -m tools.bench.soak --json FILE`: a day of training steps in half an hour, with memory flat.

Every step has a layout of its own, made and dropped: packed groups or a call of the paper's function, in kernels of
several head dims, deterministic or not, forward and backward. Now and then a CUDA graph is captured, replayed and
dropped. A step that is always the same must give the same bits to the end. Memory on the device and on the host is
looked at between steps, after a garbage collection, when nothing of a step is left.

May run beside other work on the GPU; only this process's memory counts. Exit code 1 and the reasons if memory grew or a
result was wrong; the file is written in any case, and every time memory is looked at.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer

import dualkv
from dualkv import Layout
from dualkv.bench.timing import Meter
from tools.bench.record import OptionalJsonPath, Record

SHAPES = ((128, 8, 2), (64, 4, 4), (256, 4, 1))  # head dim, heads, KV heads
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
LONGEST = {"cuda": (3000, 500), "cpu": (60, 20)}  # prompt, response
REPLAYS = 50
GRAPH_EVERY, CHECK_EVERY = 200, 25  # steps
# What the end of a run may have more than its second quarter (the first one fills caches): MiB, objects.
MAY_GROW = {
    "allocated": 1.0, "reserved": 256.0, "device": 320.0, "resident": 48.0, "descriptors": 4, "threads": 2,
    "layouts": 32,
}  # fmt: skip
FILED = 4  # of so many samples one is filed
FEWEST = 4  # samples that can be judged
UNFINISHED = "ended before its time"  # what the file of a run says until it is through


class Wrong(RuntimeError):
    """A result that is not what it was, or not finite."""


# ---------------------------------------------------------------- steps
def _tensors(device: str, shape: tuple[int, int, int], rows: list[int], seed: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, the last of q's shape; rows of q, then of k and v."""
    head_dim, heads, kv_heads = shape
    generator = torch.Generator(device).manual_seed(seed)
    sizes = [(rows[0], heads), (rows[1], kv_heads), (rows[1], kv_heads), (rows[0], heads)]
    return [torch.randn(*n, head_dim, device=device, dtype=DTYPES[device], generator=generator) for n in sizes]


def _results(layout: Layout, tensors: list[torch.Tensor], deterministic: bool) -> list[torch.Tensor]:
    """out, dq, dk, dv"""
    q, k, v, dout = (x.detach().requires_grad_() for x in tensors)
    out = dualkv.attention(q, k, v, layout, deterministic=deterministic)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _groups(rng: random.Random, device: str) -> Layout:
    prompt, response = LONGEST[device]
    counts = [rng.randint(0, 8) for _ in range(rng.randint(1, 3))]
    return Layout.from_lengths(
        [rng.randint(0, prompt) for _ in counts], [[rng.randint(1, response) for _ in range(n)] for n in counts], device
    )


def _packed(rng: random.Random, device: str, shape: tuple[int, int, int], layout: Layout) -> list[torch.Tensor]:
    rows = layout.num_tokens
    return _results(layout, _tensors(device, shape, [rows, rows], rng.getrandbits(31)), rng.random() < 0.5)


def _papers(rng: random.Random, device: str, shape: tuple[int, int, int]) -> list[torch.Tensor]:
    """A call of the paper's function, with cumulative lengths of its own on the device."""
    context, own = LONGEST[device][0] // 2, [rng.randint(1, LONGEST[device][1]) for _ in range(4)]
    q_lens = own if rng.random() < 0.5 else [context + own[0], *own[1:]]
    q, k, v, dout = _tensors(device, shape, [sum(q_lens), context + sum(own)], rng.getrandbits(31))
    parts = q, k[:context], v[:context], k[context:], v[context:]
    q, kc, vc, kd, vd = leaves = [x.detach().requires_grad_() for x in parts]
    lens = [[0, *torch.tensor(x).cumsum(0).tolist()] for x in (q_lens, own)]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in lens)
    out = dualkv.flash_attn_dualkv_varlen_func(
        q, kc, vc, kd, vd, cu_q, cu_k, max(q_lens), context, max(own), causal=True
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _graph(rng: random.Random, device: str, shape: tuple[int, int, int], layout: Layout) -> None:
    """A graph of both directions, replayed with other inputs, against eager calls."""
    rows = layout.num_tokens
    tensors = _tensors(device, shape, [rows, rows], rng.getrandbits(31))
    _results(layout, tensors, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _results(layout, tensors, True)
    for x in tensors:
        x.normal_()
    want = _results(layout, tensors, True)
    for _ in range(REPLAYS):
        graph.replay()
    if not all(map(torch.equal, captured, want)):
        raise Wrong(f"a replayed graph differs from eager calls: {layout}")


def steps(seed: int, device: str) -> Iterator[str]:
    """Does a step at a time, without end, and says of which kind it was.

    Raises:
        Wrong: a result that is not finite or has changed.
    """
    rng, same = random.Random(seed), None
    shape = SHAPES[0]
    lengths = [LONGEST[device][0] // 3, 30], [[LONGEST[device][1] // 2, 20, 1, 13], [10, 7]]
    for step in itertools.count():
        if step % CHECK_EVERY == 0:
            layout = Layout.from_lengths(*lengths, device)
            fixed = _tensors(device, shape, [layout.num_tokens] * 2, 0)
            results = _results(layout, fixed, True)
            same = same or [x.cpu() for x in results]
            if not all(torch.equal(x.cpu(), y) for x, y in zip(results, same, strict=True)):
                raise Wrong(f"step {step}: the results of the same call have changed")
            yield "the same"
        elif step % GRAPH_EVERY == 1 and device == "cuda":
            _graph(rng, device, rng.choice(SHAPES), _groups(rng, device))
            yield "graph"
        elif step % 3 == 2:
            _finite(_papers(rng, device, rng.choice(SHAPES)), step)
            yield "paper's function"
        else:
            layout = _groups(rng, device)
            _finite(_packed(rng, device, rng.choice(SHAPES), layout), step)
            yield "groups"


def _finite(results: list[torch.Tensor], step: int) -> None:
    if not all(bool(x.isfinite().all()) for x in results):
        raise Wrong(f"step {step}: results that are not finite")


# ---------------------------------------------------------------- memory
def on_device(meter: Meter | None) -> dict[str, float]:
    """MiB that the driver counts for this process, kernels and graphs included; nothing where it does not tell."""
    if meter is None or meter.absent:
        return {}
    try:
        running = meter.nvml.nvmlDeviceGetComputeRunningProcesses(meter.gpu)
    except Exception:  # a driver or a container that does not tell
        return {}
    mine = [process.usedGpuMemory for process in running if process.pid == os.getpid()]
    return {"device": round(mine[0] / 2**20, 1)} if mine and mine[0] is not None else {}


def sample(device: str, seconds: float, steps: int, meter: Meter | None = None) -> dict[str, float]:
    """Measure what this process holds: MiB on the device (used and kept) and of the host; what else may leak,
    counted."""
    gc.collect()
    gpu = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if device == "cuda" else (0, 0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "seconds": round(seconds, 1),
        "steps": steps,
        "allocated": round(gpu[0] / 2**20, 3),
        "reserved": round(gpu[1] / 2**20, 1),
        "resident": round(resident / 2**20, 1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "layouts": dualkv.segments.living(),
        **on_device(meter),
    }


def grown(curve: list[dict[str, float]]) -> list[str]:
    """A sentence for each thing of which a run's last quarter has more than its second one may have: medians."""
    quarter = len(curve) // 4
    if quarter == 0:
        return [f"memory was looked at {len(curve)} times, too few to tell: expected at least {FEWEST}"]
    said = []
    for name, limit in MAY_GROW.items():
        if any(name not in s for s in curve):
            continue
        parts = curve[quarter : 2 * quarter], curve[-quarter:]
        before, after = (statistics.median(s[name] for s in part) for part in parts)
        if after - before > limit:
            said.append(f"{name} grew from {before:g} to {after:g}, by more than {limit:g}")
    return said


def run(seconds: float, seed: int, device: str, every: float, record: Any = lambda made: None) -> dict[str, Any]:
    """Steps for so long; `record` is given what there is each time memory has been looked at, every so many seconds.

    Returns:
        steps by kind, the curve of samples, and `problems`: a sentence for each thing that is wrong.
    """
    done: Counter[str] = Counter()
    made: dict[str, Any] = {"seconds": seconds, "seed": seed, "device": device, "curve": [], "problems": [UNFINISHED]}
    meter = Meter() if device == "cuda" else None
    begin = looked = time.monotonic()
    try:
        for kind in steps(seed, device):
            done[kind] += 1
            now = time.monotonic()
            last = now - begin >= seconds
            if now - looked >= every or last:
                looked = now
                made["steps"] = dict(sorted(done.items()))
                made["curve"].append(sample(device, now - begin, done.total(), meter))
                record(made)
            if last:
                break
        made["problems"] = grown(made["curve"])
    except Wrong as e:
        made["problems"] = [str(e)]
    record(made)
    return made


def main(
    seconds: Annotated[float, typer.Option(help="How long.")] = 1800.0,
    every: Annotated[float, typer.Option(help="Seconds from one look at memory to the next.")] = 15.0,
    seed: Annotated[int, typer.Option(help="Of the layouts and inputs.")] = 0,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it.")] = "cuda",
    json_to: OptionalJsonPath = None,
) -> None:
    file = Record(json_to, device == "cuda")

    def record(made: dict[str, Any]) -> None:
        # Of each minute or so one sample is filed, and the last; all of them are judged.
        curve = [*made["curve"][:-1:FILED], *made["curve"][-1:]]
        file.write({**made, "curve": curve}, curve[-1:])

    made = run(seconds, seed, device, every, record)
    for problem in made["problems"]:
        print(problem, file=sys.stderr)
    raise typer.Exit(1 if made["problems"] else 0)


if __name__ == "__main__":
    typer.run(main)

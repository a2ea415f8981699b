"""`python -m tools.bench.host_time --json FILE`: how long a call of the ops holds the host.

Calls one after another on batches so small that the GPU waits for the host, not the host for room in the GPU's queue.
What a call does on the host does not depend on how long its sequences are. Beside them stand PyTorch's own attention
and one allocation: on a host that other work loads, those are slow too. A core that it shares with others may run at
half its pace for seconds, so the rounds go on for a while.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import typer

import dualkv
from dualkv import Layout
from dualkv.bench.show import markdown_table
from tools.bench.record import JsonPath, Record

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAYOUTS = {"1 group of 4": ([100], [[30] * 4]), "64 groups of 32": ([4] * 64, [[1] * 32] * 64)}
CALLS = 100  # of one kind in a row; 100 backwards are 400 launches: the queue has room for a thousand
SECONDS = 20.0
NAMES = {
    "fwd": "`torch.ops.dualkv.fwd`",
    "attention": "`dualkv.attention`, no gradients",
    "attention_grad": "`dualkv.attention`, recorded by autograd",
    "bwd": "`torch.ops.dualkv.bwd`",
    "backward": "backward through autograd",
    "sdpa": "PyTorch's causal `scaled_dot_product_attention`",
    "empty": "`torch.empty` on the GPU",
}


def calls(layout: Layout) -> dict[str, Callable[[], Any]]:
    """Make the calls to time, one for each of NAMES, on random tensors of a layout."""
    q, k, v = (
        torch.randn(layout.num_tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    leaves = leaf_q, leaf_k, leaf_v = [x.clone().requires_grad_() for x in (q, k, v)]
    fixed = layout.offsets, layout.parent, HEAD_DIM**-0.5
    out, lse = torch.ops.dualkv.fwd(q, k, v, *fixed)
    dout, recorded = torch.randn_like(out), dualkv.attention(leaf_q, leaf_k, leaf_v, layout)
    one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "fwd": lambda: torch.ops.dualkv.fwd(q, k, v, *fixed),
        "attention": lambda: dualkv.attention(q, k, v, layout),
        "attention_grad": lambda: dualkv.attention(leaf_q, leaf_k, leaf_v, layout),
        "bwd": lambda: torch.ops.dualkv.bwd(dout, q, k, v, out, lse, *fixed),
        "backward": lambda: torch.autograd.grad(recorded, leaves, dout, retain_graph=True),
        "sdpa": lambda: sdpa(one_q, one_k, one_v, is_causal=True, enable_gqa=True),
        "empty": lambda: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    }


def microseconds(call: Callable[[], Any]) -> list[float]:
    """Time each of CALLS calls; the queue is empty before."""
    torch.cuda.synchronize()
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return times


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Time all calls in turns; by layout and call, the median, tenth and ninetieth percentile of all rounds."""
    timed = {name: calls(Layout.from_lengths(*lengths, device="cuda")) for name, lengths in LAYOUTS.items()}
    times: dict[str, dict[str, list[float]]] = {name: {what: [] for what in of} for name, of in timed.items()}
    for of in timed.values():
        for call in of.values():
            microseconds(call)  # warms up
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for name, of in timed.items():
            for what, call in of.items():
                times[name][what] += microseconds(call)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, of_layout in times.items():
        found[name] = {}
        for what, took in of_layout.items():
            tenths = statistics.quantiles(took, n=10)
            found[name][what] = {"median_us": statistics.median(took), "p10_us": tenths[0], "p90_us": tenths[-1]}
    return found


def markdown(recorded: dict[str, Any]) -> str:
    """Tabulate the medians, as docs/performance.md has them."""
    rows = [
        [said, *(f"{calls[name]['median_us']:.0f}" for calls in recorded["calls"].values())]
        for name, said in NAMES.items()
        if name != "empty"
    ]
    return markdown_table(["microseconds", *recorded["calls"]], rows)


def main(json_to: JsonPath) -> None:
    """Measure host times on this machine."""
    if not torch.cuda.is_available():
        sys.exit("host times are measured on a GPU, and PyTorch finds none here")
    record, load = Record(json_to), {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "calls": CALLS, "seconds": SECONDS}
    print(markdown(record.write({**load, "shape": shape, "calls": measure()})))


if __name__ == "__main__":
    typer.run(main)

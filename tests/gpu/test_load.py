"""Faults and load on a Hopper GPU: memory that runs out, streams, threads, processes, many replays, a long run."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

import dualkv
from codegen.spec import backward_specs, forward_spec
from codegen.tiles import HEAD_DIM_PAIRS
from dualkv import Layout
from tests.gpu import turns
from tools.bench import soak
from tools.process import ROOT

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
LAYOUT = ([700, 30], [[200, 300, 1, 77], [64, 500]])
PROCESSES = 8
REPLAYS = 10_000
SOAK_SECONDS = 10.0
TURNS_SECONDS = 15.0


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    for head_dim, heads, kv_heads in {(HEAD_DIM, HEADS, KV_HEADS), *soak.SHAPES}:
        backward = [spec for fixed in (False, True) for spec in backward_specs("bf16", head_dim, fixed).present]
        compile_all([forward_spec("bf16", head_dim, heads // kv_heads), *backward])
    ratio = turns.HEADS // turns.KV_HEADS
    for head_dim, of_v in HEAD_DIM_PAIRS:
        backward = backward_specs("bf16", head_dim, True, head_dim_v=of_v).present
        compile_all([forward_spec("bf16", head_dim, ratio, head_dim_v=of_v), *backward])


def inputs(layout, seed=0):
    """q, k, v, dout"""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(layout.num_tokens, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=generator) for s in shapes]


def step(q, k, v, dout, layout, deterministic=True):
    """[out, dq, dk, dv]"""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = dualkv.attention(*leaves, layout, deterministic=deterministic)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def same(got, want):
    return all(map(torch.equal, got, want))


# ---------------------------------------------------------------- memory that runs out
def test_out_of_memory_in_the_backward_leaves_the_process_usable():
    """Memory runs out at every allocation of the backward in turn."""
    layout = Layout.from_lengths([20000], [[5000] * 4])
    q, k, v, dout = inputs(layout)
    want = step(q, k, v, dout, layout)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    total, failed = torch.cuda.get_device_properties(0).total_memory, 0
    for room in range(0, 400, 20):  # MiB
        out = dualkv.attention(*leaves, layout, deterministic=True)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room * 2**20) / total)
        try:
            got = torch.autograd.grad(out, leaves, dout)
        except torch.OutOfMemoryError:
            failed += 1
        else:
            break
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.synchronize()
        assert same(step(q, k, v, dout, layout), want)
    assert failed >= 3, "the backward did not run out of memory at several places"
    assert same([out.detach(), *got], want)


# ---------------------------------------------------------------- streams, threads, processes
@pytest.mark.parametrize("deterministic", [True, False])
def test_two_streams_at_once(deterministic):
    layouts = [Layout.from_lengths(*LAYOUT), Layout.from_lengths([3000], [[400] * 9])]
    calls = [(*inputs(layout, seed), layout) for seed, layout in enumerate(layouts)]
    wants = [step(*call, deterministic) for call in calls]
    torch.cuda.synchronize()
    streams, gots = [torch.cuda.Stream() for _ in calls], [[], []]
    for _ in range(20):
        for call, stream, got in zip(calls, streams, gots, strict=True):
            with torch.cuda.stream(stream):
                got.append(step(*call, deterministic))
    torch.cuda.synchronize()
    for got, want in zip(gots, wants, strict=True):
        for out, dq, dk, dv in got:
            assert same((out, dk, dv), (want[0], want[2], want[3]))
            assert torch.equal(dq, want[1]) if deterministic else (dq - want[1]).abs().max() < 0.05


def test_the_cuda_runtime_that_pytorch_is_linked_to_is_found():
    """Kernels take their functions of CUDA so (codegen/runtime.c)."""
    library = ctypes.CDLL("libc10_cuda.so", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    version = ctypes.c_int()
    assert library.cudaRuntimeGetVersion(ctypes.byref(version)) == 0
    assert version.value // 1000 == int(torch.version.cuda.partition(".")[0])
    assert library.cudaLibraryLoadData, "since CUDA 12.8"


REUSED = """
import ctypes, os, torch, dualkv
from tests.gpu.test_load import LAYOUT, inputs, same, step

def create():
    handle = ctypes.c_void_p()
    assert int(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))) == 0
    return handle.value

layout, fresh = (dualkv.Layout.from_lengths(*LAYOUT) for _ in range(2))
given = inputs(layout, 0)
want = step(*given, fresh, True)
torch.cuda.synchronize()
first = handle = create()
for turn in range(20):
    stream = torch.cuda.ExternalStream(handle)
    with torch.cuda.stream(stream):
        got = step(*given, layout, True)
    stream.synchronize()
    assert same(got, want), turn
    assert int(torch.cuda.cudart().cudaStreamDestroy(handle)) == 0
    handle = create()
    if handle != first:  # then nothing may be freed that was used on the destroyed stream
        print("other", flush=True)
        os._exit(0)
with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
    got = step(*given, layout, True)
    del layout  # while the stream works
    for seed in range(1, 5):  # plans of others, into memory that is free
        other = dualkv.Layout.from_lengths(*LAYOUT)
        step(*inputs(other, seed), other, True)
torch.cuda.synchronize()
assert same(got, want)
print("reused", flush=True)
os._exit(0)
"""


def test_a_stream_with_the_handle_of_a_destroyed_one():
    done = subprocess.run([sys.executable, "-c", REUSED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    if done.stdout.split() != ["reused"]:
        pytest.skip("CUDA gave another handle to the new stream")


def test_two_threads_at_once():
    """Each with a stream and layouts of its own, made while the other runs."""
    lengths = [([100 * i + 7], [[50 * i, 33]]) for i in range(1, 9)]
    calls = [(*inputs(Layout.from_lengths(*n), i), Layout.from_lengths(*n)) for i, n in enumerate(lengths)]
    wants = [step(*call) for call in calls]
    torch.cuda.synchronize()
    wrong = []

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in [*range(number, 8, 2), *range(1 - number, 8, 2)] * 10:
                    fresh = Layout.from_lengths(*lengths[i])
                    if not same(step(*calls[i][:4], fresh), wants[i]):
                        wrong.append((number, i))
                torch.cuda.current_stream().synchronize()
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


PROCESS = """
import sys, torch
from tests.gpu.test_load import LAYOUT, Layout, inputs, same, step
layout = Layout.from_lengths(*LAYOUT)
call = (*inputs(layout), layout)
want = step(*call)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(200):
    assert same(step(*call), want)
print(" ".join(str(x.double().sum().item()) for x in want))
"""


def test_eight_processes_at_once():
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(PROCESSES)
    ]  # fmt: skip
    try:
        for process in processes:
            process.stdout.readline()  # all begin together; a failed one says so below
        results = [process.communicate("\n", timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    layout = Layout.from_lengths(*LAYOUT)
    want = " ".join(str(x.double().sum().item()) for x in step(*inputs(layout), layout))
    for process, (out, err) in zip(processes, results, strict=True):
        assert process.returncode == 0, err[-2000:]
        assert out.strip() == want


def test_results_while_the_gpu_switches_between_processes():
    """An interrupted kernel goes on: CTAs of a cluster do not wait for each other then as they do in a kernel alone."""
    called = ["/".join(map(str, dict.fromkeys(pair))) for pair in HEAD_DIM_PAIRS] + [turns.MERGE]
    words = [word for what in called for word in (what, turns.digest(turns.caller(what)()))]
    command = [sys.executable, "-m", "tests.gpu.turns", str(TURNS_SECONDS), *words]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    try:
        results = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, results, strict=True):
        assert process.returncode == 0, err[-2000:]
        found = json.loads(out)
        assert found["calls"] > 2 * len(called)
        assert not found["different"], found


# ---------------------------------------------------------------- many replays, a long run
def test_a_graph_replayed_ten_thousand_times():
    layout = Layout.from_lengths(*LAYOUT)
    q, k, v, dout = inputs(layout)
    step(q, k, v, dout, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(q, k, v, dout, layout)
    generator = torch.Generator("cuda").manual_seed(1)
    for replay in range(REPLAYS):
        if replay % 1000 == 0:
            for x in (q, k, v, dout):
                x.normal_(generator=generator)
            want = step(q, k, v, dout, layout)
            for x in got:
                x.fill_(float("nan"))
        graph.replay()
        if replay % 1000 in (0, 1, 500, 999):
            assert same(got, want)
    assert replay == REPLAYS - 1


def test_a_long_run_keeps_its_memory():
    """Ten seconds of what `python -m tools.bench.soak` does for half an hour."""
    assert soak.run(SOAK_SECONDS, 0, "cuda", every=SOAK_SECONDS / 16)["problems"] == []

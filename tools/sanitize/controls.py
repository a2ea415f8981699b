"""Small CUDA programs whose verdict is known, run beside the kernels: what a tool finds, misses and invents.

`planted` faults prove that a tool sees anything in this setting. `correct` ones use an instruction of the kernels the
way its documentation asks, so a report about them is the tool's error. (PTX ISA, "Asynchronous copy": a bulk copy's
writes are visible to threads that observed the completion of its mbarrier's phase.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_FAULTS = r"""
extern "C" __global__ void out_of_bounds(float* x, int n) {
    x[n + threadIdx.x] = 1.0f;
}
extern "C" __global__ void shared_race(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void uninitialized(float* x, const float* never_written) {
    x[threadIdx.x] = never_written[threadIdx.x] + 1.0f;
}
extern "C" __global__ void foreign_barrier(float* x) {
    if (threadIdx.x < 17) __syncwarp(0xffff);  // thread 16 is none of those that the mask names
    x[threadIdx.x] = 1.0f;
}
"""
_WAIT = r"""
__device__ unsigned at(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ void wait(const void* bar, unsigned phase) {
    asm volatile("{ .reg .pred p;\n again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra done;\n"
                 " bra again;\n done: }" :: "r"(at(bar)), "r"(phase) : "memory");
}
"""
# A ring of two stages filled by bulk copies: a producer warp, two consumer warps, full and empty mbarriers.
_RING = (
    _WAIT
    + r"""
__device__ void ring(const float* in, float* out, int blocks, bool await_full, bool together) {
    __shared__ alignas(128) float data[2][64];
    __shared__ alignas(8) unsigned long long full[2], empty[2];
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&full[i])));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" :: "r"(at(&empty[i])));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < blocks; ++i) {
            int stage = i & 1, phase = (i >> 1) & 1;
            wait(&empty[stage], phase ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" :: "r"(at(&full[stage])) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
                         :: "r"(at(data[stage])), "l"(in + 64 * i), "r"(at(&full[stage])) : "memory");
        }
    } else if (threadIdx.x >= 32) {
        float sum = 0;
        for (int i = 0; i < blocks; ++i) {
            int stage = i & 1, phase = (i >> 1) & 1;
            if (await_full) wait(&full[stage], phase);
            sum += *static_cast<volatile float*>(&data[stage][threadIdx.x - 32]);
            if (!await_full) wait(&full[stage], phase);  // too late, but stages stay in step
            if (together) __syncwarp();
            if (threadIdx.x % 32 == 0)
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(&empty[stage])) : "memory");
        }
        out[threadIdx.x - 32] = sum;
    }
    __syncthreads();
}
extern "C" __global__ void bulk_ring(const float* in, float* out, int n) { ring(in, out, n, true, true); }
extern "C" __global__ void bulk_ring_no_syncwarp(const float* in, float* out, int n) { ring(in, out, n, true, false); }
extern "C" __global__ void bulk_ring_no_wait(const float* in, float* out, int n) { ring(in, out, n, false, true); }
"""
)
# A warp hands what it computed to another one, block by block, by full and empty mbarriers: P of bwd_wide.
_EXCHANGE = (
    _WAIT
    + r"""
__device__ void arrive(const void* bar) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(bar)) : "memory");
}
extern "C" __global__ void exchange(const float* in, float* out, int blocks) {
    __shared__ float data[32];
    __shared__ alignas(8) unsigned long long full, empty;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&full)));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&empty)));
    }
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < blocks; ++i) {
        if (threadIdx.x < 32) {
            wait(&empty, (i & 1) ^ 1);
            data[threadIdx.x] = in[32 * i + threadIdx.x];
            arrive(&full);
        } else {
            wait(&full, i & 1);
            sum += data[threadIdx.x - 32];
            arrive(&empty);
        }
    }
    if (threadIdx.x >= 32) out[threadIdx.x - 32] = sum;
}
"""
)
# Two warps meet at one barrier, each at a place of its own in the program: warps with different parts of the forward.
_MEETING = r"""
extern "C" __global__ void meeting(const float* in, float* out) {
    __shared__ float data[64];
    if (threadIdx.x < 32) {
        data[threadIdx.x] = in[threadIdx.x];
        asm volatile("bar.sync 0;" ::: "memory");
        out[threadIdx.x] = data[63 - threadIdx.x];
    } else {
        data[threadIdx.x] = 2.0f * in[threadIdx.x];
        asm volatile("bar.sync 0;" ::: "memory");
        out[threadIdx.x] = 3.0f * data[63 - threadIdx.x];
    }
}
"""
# A lane of one warp counts, and a lane of another looks now and then how far it is: what paces bwd_narrow's clearing.
# Volatile accesses are relaxed ones to the memory model (PTX ISA, "ld.volatile"), so this is no race.
_POLLED = r"""
extern "C" __global__ void polled(int* out, int n) {
    __shared__ int at;
    unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(&at));
    if (threadIdx.x == 0) asm volatile("st.volatile.shared.s32 [%0], 0;" :: "r"(place));
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i <= n; ++i) {
            __nanosleep(2000);
            asm volatile("st.volatile.shared.s32 [%0], %1;" :: "r"(place), "r"(i));
        }
    } else if (threadIdx.x == 32) {
        int seen = 0;
        do {
            __nanosleep(1000);
            asm volatile("ld.volatile.shared.s32 %0, [%1];" : "=r"(seen) : "r"(place));
        } while (seen < n);
        out[0] = seen;
    }
}
"""
_STORE = r"""
extern "C" __global__ void bulk_store(float* out) {
    __shared__ alignas(128) float data[64];
    data[threadIdx.x] = threadIdx.x;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(data));
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" :: "l"(out), "r"(from) : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
extern "C" __global__ void read_back(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x]; }
"""


def _run(source: str, name: str, threads: int, *arguments: torch.Tensor | int) -> None:
    kernel = torch.cuda._compile_kernel(source, name)
    kernel(grid=(1, 1, 1), block=(threads, 1, 1), args=list(arguments))
    torch.cuda.synchronize()


def _ring(name: str) -> None:
    blocks = torch.randn(8, 64, device="cuda")
    out = torch.zeros(64, device="cuda")
    _run(_RING, name, 96, blocks, out, len(blocks))
    if name != "bulk_ring_no_wait":
        torch.testing.assert_close(out, blocks.sum(0))


def _exchange() -> None:
    blocks, out = torch.randn(8, 32, device="cuda"), torch.zeros(32, device="cuda")
    _run(_EXCHANGE, "exchange", 64, blocks, out, len(blocks))
    torch.testing.assert_close(out, blocks.sum(0))


def _meeting() -> None:
    values, out = torch.randn(64, device="cuda"), torch.zeros(64, device="cuda")
    _run(_MEETING, "meeting", 64, values, out)
    low, high = values.flip(0).chunk(2)
    torch.testing.assert_close(out, torch.cat([2 * low, 3 * high]))


def _polled() -> None:
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    _run(_POLLED, "polled", 64, out, 8)
    assert out.item() == 8


def _store() -> None:
    made, copy = torch.empty(64, device="cuda"), torch.zeros(64, device="cuda")
    _run(_STORE, "bulk_store", 64, made)
    _run(_STORE, "read_back", 64, made, copy)
    torch.testing.assert_close(copy.cpu(), torch.arange(64.0))


PLANTED: dict[str, tuple[str, Callable[[], None]]] = {  # by tool: the fault, and what runs it
    "memcheck": ("out_of_bounds", lambda: _run(_FAULTS, "out_of_bounds", 64, torch.zeros(64, device="cuda"), 64)),
    "racecheck": ("shared_race", lambda: _run(_FAULTS, "shared_race", 64, torch.zeros(64, device="cuda"))),
    "initcheck": (
        "uninitialized",
        lambda: _run(_FAULTS, "uninitialized", 64, torch.zeros(64, device="cuda"), torch.empty(64, device="cuda")),
    ),
    "synccheck": ("foreign_barrier", lambda: _run(_FAULTS, "foreign_barrier", 64, torch.zeros(64, device="cuda"))),
}
CORRECT: dict[str, Callable[[], None]] = {
    "bulk_ring": lambda: _ring("bulk_ring"),
    "bulk_ring_no_syncwarp": lambda: _ring("bulk_ring_no_syncwarp"),
    "bulk_store": _store,
    "exchange": _exchange,
    "meeting": _meeting,
    "polled": _polled,
}
RACY: dict[str, Callable[[], None]] = {"bulk_ring_no_wait": lambda: _ring("bulk_ring_no_wait")}

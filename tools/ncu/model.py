"""Compute the least work and traffic of a kernel, from the workload and its tile configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from codegen import tiles
from codegen.spec import FORWARDS, KernelSpec
from tools.ncu.job import Job

ELEMENT, FLOAT = 2, 4  # bytes of bf16 and fp16, of fp32


@dataclass(frozen=True)
class Need:
    """The least work and traffic of a kernel; None where the model does not say.

    Attributes:
        flops: on deduplicated work, each prompt once; 0 for kernels without products.
        dram_bytes: every tensor that the kernel reads or writes, once.
        l2_read_bytes: from L2 to the SMs. Forward: each row of K and V once for every tile of query rows that sees it.
            Backward: each row of Q and dO once for every cluster's keys that it sees.
        l2_add_bytes: of fp32 additions to dQ, once for every CTA's keys; for every cluster's at the head dims at which
            its CTAs sum up dQ together.
    """

    flops: int = 0
    dram_bytes: int | None = None
    l2_read_bytes: int | None = None
    l2_add_bytes: int | None = None


def need(job: Job, spec: KernelSpec) -> Need:
    """Compute what the kernel of `spec` needs in `job`."""
    w = job.workload
    layout, native = w.layout(), tiles.kernel_head_dim(w.head_dim)
    q = layout.num_tokens * w.heads * w.head_dim * ELEMENT  # also out, dout, dq
    kv = layout.num_tokens * w.kv_heads * w.head_dim * ELEMENT  # each of k, v, dk, dv
    row = layout.num_tokens * w.heads * FLOAT  # one number a row and head
    sums = layout.num_tokens * w.heads * native * FLOAT  # dQ in fp32
    pairs = w.visible_pairs() * w.heads
    both = 2 * w.head_dim * ELEMENT  # a row of K and V, or of Q and dO
    if spec.operation in FORWARDS:
        rows = spec.tile.tokens(spec.packed_heads) * spec.packed_heads
        return Need(w.flops("fwd"), 2 * q + 2 * kv + row, q + pairs * both // rows)
    if spec.operation == "bwd_preprocess":
        return Need(0, 2 * q + row + 2 * row + sums)
    if spec.operation == "bwd":
        tile = spec.tile
        summed = tile.tile_n * (tile.cluster if native > tiles.NARROW else 1)
        return Need(
            w.flops("bwd"),
            2 * q + 4 * kv + 2 * row + 2 * sums,
            2 * kv + pairs * (both + 2 * FLOAT) // (tile.tile_n * tile.cluster),
            pairs * native * FLOAT // summed,
        )
    if spec.operation == "bwd_postprocess":
        return Need(0, sums + q)
    return Need()

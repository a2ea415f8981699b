"""The merge of two results of attention over disjoint sets of keys, as one Triton kernel; imported where it runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32  # of one program


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out, part_out, lse, part_lse, rows, first, n, head_dim,
    out_row, out_head, part_row, part_head, lse_head, part_lse_head,
    INDEXED: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, inside = tl.arange(0, COLUMNS), i < n
    row = tl.load(rows + i, inside, 0) if INDEXED else (first + i).to(tl.int64)
    old = tl.load(lse + head * lse_head + row, inside, 0.0)
    new = tl.load(part_lse + head * part_lse_head + i, inside, 0.0)
    # log(exp(old) + exp(new)); two infinities of one sign are their own sum.
    most = tl.maximum(old, new, propagate_nan=tl.PropagateNan.ALL)
    apart = tl.where(old == new, 0.0, -tl.abs(old - new))
    whole = most + tl.log(1.0 + tl.exp(apart))
    kept = inside[:, None] & (column < head_dim)[None]
    to = out + row[:, None] * out_row + head * out_head + column[None]
    of_part = part_out + i.to(tl.int64)[:, None] * part_row + head * part_head + column[None]
    merged = tl.load(to, kept, 0.0).to(tl.float32) * tl.exp(old - whole)[:, None]
    merged += tl.load(of_part, kept, 0.0).to(tl.float32) * tl.exp(new - whole)[:, None]
    tl.debug_barrier()  # all warps of the program have loaded what is overwritten now
    tl.store(to, merged.to(out.dtype.element_ty), kept)
    tl.store(lse + head * lse_head + row, whole, inside)


def merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor, rows: torch.Tensor | slice
) -> None:
    """Merge partial results like :func:`dualkv.ops.composition.merge`, on the current stream and device."""
    n, heads, head_dim = part_out.shape
    if n == 0:
        return
    index, first = (rows, 0) if isinstance(rows, torch.Tensor) else (lse, rows.start)
    _merge[triton.cdiv(n, ROWS), heads](
        out, part_out, lse, part_lse, index, first, n, head_dim,
        *out.stride()[:2], *part_out.stride()[:2], lse.stride(0), part_lse.stride(0),
        INDEXED=index is rows, COLUMNS=triton.next_power_of_2(head_dim), ROWS=ROWS,
    )  # fmt: skip

"""`flash_attn_dualkv_varlen_func`: the call of the DualKV paper's kernels, served by this package's attention.

A causal call becomes one packed group, `[context | decoded 0 | decoded 1 | ...]`, in which every query has its row.
Rows without a query hold zeros and cost as much as others. Where queries of a sequence other than the first are
positions of the context, these positions need a row for each sequence: then every sequence gets its own copy of the
context's end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from dualkv.arrays import IntArray, Lengths, cumulative_array, outside_inference_mode, positions
from dualkv.layout import Layout
from dualkv.ops.attention import attention, casts, check_local
from dualkv.ops.dispatch import DTYPES, check_head_dim, check_scale
from dualkv.ops.tensors import tma_ready

Function = TypeVar("Function", bound=Callable[..., Any])

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LAYOUTS_KEPT = 16  # of the last calls with different lengths: so many micro-batches may alternate without new plans


def _eager(function: Function) -> Function:
    """Keep a function out of torch.compile's graphs, without changing its type."""
    return cast(Function, torch.compiler.disable(function))


@_eager
def flash_attn_dualkv_varlen_func(
    q: torch.Tensor,
    k_context: torch.Tensor,
    v_context: torch.Tensor,
    k_decoded: torch.Tensor,
    v_decoded: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k_decoded: torch.Tensor,
    max_seqlen_q: int,
    context_seqlen: int,
    max_seqlen_k_decoded: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Attention of N sequences that share one context of P tokens and continue it with R_i tokens of their own each.

    Sequence i's queries are the last `len_q[i]` of its P + R_i positions, 0 <= len_q[i] <= P + R_i. With `causal` a
    query sees its sequence up to its own position; without, it sees the whole context and all R_i tokens of its own
    sequence. The call is fastest where `len_q` is P + R_0 for the first sequence and R_i for the others: then no
    row is computed in vain.

    Both `cu_seqlens` are read on the host. For a tensor on a GPU that is a wait, once for each tensor as long as the
    tensor lives and PyTorch counts no write to it. So every layer of a model should pass the same tensors. Every call
    also compares them with what was read, on the GPU and without a wait. If they differ, the whole result is NaN.
    They differ after a write that PyTorch does not count: `.data.copy_`, some collectives, the replay of a CUDA graph.
    To pass new lengths, pass a new tensor (`cu_seqlens.clone()`), or write by `copy_` or an index outside of graphs.

    A CUDA graph can be captured after one such call. It keeps the lengths of its capture: a replay with others is NaN.
    The tensors must live as long as the graph; lengths in CPU tensors are those of the capture, whatever is written
    there. `torch.compile` breaks its graph here. `dualkv.attention` has none of these limits.

    Args:
        q: [sum(len_q), H, D] queries, sequence by sequence; bf16, fp16, fp32 or fp64; D a multiple of 8 up to 512.
        k_context, v_context: [P, Hk, D] of the shared context, H a multiple of Hk; dtype and device of q. Values may
            have another head dim Dv, likewise.
        k_decoded, v_decoded: [sum(R), Hk, D] of the sequences' own tokens; Dv for values.
        cu_seqlens_q: [N+1] int32, 0 and the running sums of len_q.
        cu_seqlens_k_decoded: [N+1] int32, 0 and the running sums of R.
        max_seqlen_q: at least the largest len_q.
        context_seqlen: P.
        max_seqlen_k_decoded: at least the largest R.
        softmax_scale: from 2^-100 to 2^100, 1/sqrt(D) by default.
        causal: whether a query is hidden from the positions after its own.

    Returns:
        [sum(len_q), H, Dv] in q's dtype, differentiable in all five tensors.

    Raises:
        ValueError: shapes, devices or lengths that do not match; a scale out of range.
        TypeError: dtypes that differ or are not supported; lengths that are not integers.
    """
    tensors = {
        "q": q, "k_context": k_context, "v_context": v_context, "k_decoded": k_decoded, "v_decoded": v_decoded
    }  # fmt: skip
    _check_tensors(tensors)
    q_lens = _lengths("cu_seqlens_q", cu_seqlens_q, q.device)
    k_lens = _lengths("cu_seqlens_k_decoded", cu_seqlens_k_decoded, q.device)
    _check_lengths(q, k_context, k_decoded, q_lens, k_lens, max_seqlen_q, context_seqlen, max_seqlen_k_decoded)
    if softmax_scale is not None:
        check_scale(softmax_scale)
    changed = _changed(cu_seqlens_q, cu_seqlens_k_decoded, q_lens, k_lens, q.device)
    if not causal:
        out = _unmasked(q, k_context, v_context, k_decoded, v_decoded, q_lens, k_lens, softmax_scale)
        if changed is not None:
            out.detach().masked_fill_(changed, torch.nan)
        return out
    place = _placement(context_seqlen, q_lens.tobytes(), k_lens.tobytes(), q.device)
    k, v = torch.cat([k_context, k_decoded]), torch.cat([v_context, v_decoded])
    if changed is not None:
        # Every query sees the first token of its sequence, and 0 times NaN is NaN. No graph need record the write.
        v.detach()[: 1 if context_seqlen else None].masked_fill_(changed, torch.nan)
    _keep_for_graphs(cu_seqlens_q, q.device, place)
    if place.key_rows is not None:
        k, v = _gathered(k, place.key_rows), _gathered(v, place.key_rows)
    if place.query_rows is None:
        padding = place.layout.num_tokens - q.shape[0]
        packed = F.pad(q, (0, 0, 0, 0, padding, 0)) if padding else q
        return attention(packed, k, v, place.layout, softmax_scale)[padding:]
    packed = q.new_zeros(place.layout.num_tokens, *q.shape[1:]).index_copy(0, place.query_rows, q)
    return attention(packed, k, v, place.layout, softmax_scale)[place.query_rows]


# ---------------------------------------------------------------- where queries and keys go in a packed group
@dataclass(frozen=True)
class Placement:
    """A packed group and what its rows hold.

    Attributes:
        layout: the group.
        query_rows: [sum(len_q)] int64, the packed row of each query; None: queries are the last rows, in order.
        key_rows: [T] int64, the row of `[context | decoded]` that is each packed row's key; None: the same row.
    """

    layout: Layout
    query_rows: torch.Tensor | None
    key_rows: torch.Tensor | None


@lru_cache(LAYOUTS_KEPT)
@outside_inference_mode  # calls that train may come to a placement of calls that do not
def _placement(context: int, q_lens_bytes: bytes, k_lens_bytes: bytes, device: torch.device) -> Placement:
    q_lens, k_lens = np.frombuffer(q_lens_bytes, np.int64), np.frombuffer(k_lens_bytes, np.int64)
    reach = np.maximum(q_lens - k_lens, 0)  # queries of each sequence that are positions of the context
    copied = int(reach[1:].max(initial=0))  # the last context positions, of which every sequence gets a copy
    shared, own = context - copied, k_lens + copied
    layout = Layout.from_lengths([shared], [own], device)
    if reach[:1].sum() <= copied:  # no row of the shared part is a query
        layout = layout.without_prompt_queries()
    # A sequence's position p is packed row p if it is shared, else the row p - shared behind the sequence's first one.
    own_begin = shared + np.cumsum(own) - own
    sequence = np.repeat(np.arange(len(q_lens)), q_lens)
    position = (context + k_lens - q_lens)[sequence] + positions(q_lens)
    rows = np.where(position < shared, position, own_begin[sequence] + position - shared)
    if copied == 0:
        last = np.array_equal(rows, np.arange(layout.num_tokens - len(rows), layout.num_tokens))
        return Placement(layout, None if last else torch.from_numpy(rows).to(device), None)
    owner, within = np.repeat(np.arange(len(own)), own), positions(own)
    decoded_begin = context + np.cumsum(k_lens) - k_lens
    keys = np.where(within < copied, shared + within, decoded_begin[owner] + within - copied)
    keys = np.concatenate([np.arange(shared), keys])
    return Placement(layout, torch.from_numpy(rows).to(device), torch.from_numpy(keys).to(device))


def _gathered(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows]. Its backward adds the gradients of a row's copies in fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))[rows].to(x.dtype)


def _unmasked(
    q: torch.Tensor, k_context: torch.Tensor, v_context: torch.Tensor, k_decoded: torch.Tensor, v_decoded: torch.Tensor,
    q_lens: IntArray, k_lens: IntArray, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Every query against its whole sequence: PyTorch's own attention, one sequence at a time.

    cuDNN's backend is not used: it fails on tensors whose address is no multiple of 16 bytes. The other backends get a
    copy of such tensors.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    contexts = [x.to(wide) for x in (k_context, v_context)]  # gradients of all sequences add up in fp32
    outs = []
    for query, *decoded in zip(
        q.split(q_lens.tolist()), k_decoded.split(k_lens.tolist()), v_decoded.split(k_lens.tolist()), strict=True
    ):
        whole = [torch.cat([x.to(y.dtype), y]) for x, y in zip(contexts, decoded, strict=True)]
        heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (tma_ready(query), *whole)]
        with sdpa_kernel(BACKENDS):
            out = F.scaled_dot_product_attention(
                heads_first[0], heads_first[1], heads_first[2], scale=scale, enable_gqa=True
            )
        out = out.squeeze(0).transpose(0, 1)
        if out.requires_grad:
            out.register_hook(_aligned)
        outs.append(out)
    nothing = q[:0, :, :1].expand(-1, -1, v_context.shape[2])  # differentiable where there are no sequences
    return torch.cat([nothing, *outs])


def _aligned(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else tma_ready(grad)


# ---------------------------------------------------------------- lengths on the host
_READ = WeakTensorKeyDictionary()  # tensors on a device -> (their version when they were read, the lengths)
_IN_GRAPHS = WeakTensorKeyDictionary()  # tensors -> what CUDA graphs that were captured with them read besides


def _on_device(cu_seqlens: Lengths) -> TypeGuard[torch.Tensor]:
    return isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type != "cpu"


def _lengths(name: str, cu_seqlens: Lengths, device: torch.device) -> IntArray:
    """The N lengths behind N+1 running sums. Waits for the device the first time it sees a tensor there."""
    if not _on_device(cu_seqlens):
        return np.diff(cumulative_array(name, cu_seqlens))
    if cu_seqlens.device != device:
        raise ValueError(f"{name} is on {cu_seqlens.device} and q on {device}, expected one device, or the CPU")
    if cu_seqlens.is_inference():
        return np.diff(cumulative_array(name, cu_seqlens))
    known = _READ.get(cu_seqlens)
    if known is None or known[0] != cu_seqlens._version:
        known = _READ[cu_seqlens] = cu_seqlens._version, np.diff(cumulative_array(name, cu_seqlens))
    lengths: IntArray = known[1]
    return lengths


def _changed(
    cu_seqlens_q: Lengths, cu_seqlens_k: Lengths, q_lens: IntArray, k_lens: IntArray, device: torch.device
) -> torch.Tensor | None:
    """[] bool on the device: whether tensors there no longer hold the lengths that were read; None if all are on the
    host, where every call reads them.

    `_version` does not say so: `.data`, collectives and replays of graphs write without counting.
    """
    given = [(x, lens) for x, lens in ((cu_seqlens_q, q_lens), (cu_seqlens_k, k_lens)) if _on_device(x)]
    if not given:
        return None
    planned = _planned(b"".join(lens.tobytes() for _, lens in given), len(given), device)
    _keep_for_graphs(given[0][0], device, planned)
    now = torch.cat([x for x, _ in given]) if len(given) > 1 else given[0][0]
    return now.ne(planned).any()


@lru_cache(LAYOUTS_KEPT)
@outside_inference_mode
def _planned(lens_bytes: bytes, tensors: int, device: torch.device) -> torch.Tensor:
    """[tensors * (N+1)] int64: the running sums behind the lengths [tensors, N]."""
    lens = np.frombuffer(lens_bytes, np.int64).reshape(tensors, -1)
    sums = np.concatenate([np.zeros((tensors, 1), np.int64), np.cumsum(lens, axis=1)], axis=1)
    return torch.from_numpy(sums.reshape(-1)).to(device)


def _keep_for_graphs(cu_seqlens: Lengths, device: torch.device, tensors: object) -> None:
    """Keep what a graph that is captured now will read, as long as the caller keeps the lengths' tensor."""
    if isinstance(cu_seqlens, torch.Tensor) and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        kept = _IN_GRAPHS.setdefault(cu_seqlens, [])
        if not any(x is tensors for x in kept):
            kept.append(tensors)


# ---------------------------------------------------------------- checks: one sentence each, before anything runs
def _check_tensors(tensors: dict[str, torch.Tensor]) -> None:
    for name, x in tensors.items():
        check_local(name, x)
    q, k_context = tensors["q"], tensors["k_context"]
    autocast = casts(q.device)  # then all tensors but those of fp64 are cast to one dtype
    for name, x in tensors.items():
        if x.dim() != 3:
            rows = {"q": "sum(len_q), H", "k_context": "P, Hk", "v_context": "P, Hk"}.get(name, "sum(R), Hk")
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [{rows}, D]")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}, expected bfloat16, float16, float32 or float64")
        if x.dtype != q.dtype and (not autocast or torch.float64 in (x.dtype, q.dtype)):
            raise TypeError(f"{name} is {x.dtype} and q is {q.dtype}, expected one dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}, expected one device")
        like = "v_context" if name.startswith("v") else "q"
        if x.shape[2] != tensors[like].shape[2]:
            raise ValueError(f"{name} has head_dim {x.shape[2]} and {like} {tensors[like].shape[2]}, expected the same")
        if name != "q" and x.shape[1] != k_context.shape[1]:
            raise ValueError(f"{name} has {x.shape[1]} heads and k_context {k_context.shape[1]}, expected the same")
    for part in ("context", "decoded"):
        k_rows, v_rows = tensors[f"k_{part}"].shape[0], tensors[f"v_{part}"].shape[0]
        if k_rows != v_rows:
            raise ValueError(f"v_{part} has {v_rows} tokens and k_{part} {k_rows}, expected the same")
    for name in ("q", "v_context"):
        check_head_dim(name, tensors[name].shape[2])
    heads, kv_heads = q.shape[1], k_context.shape[1]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k_context {kv_heads}, expected q's to be a multiple of k_context's")


def _check_lengths(
    q: torch.Tensor, k_context: torch.Tensor, k_decoded: torch.Tensor, q_lens: IntArray, k_lens: IntArray,
    max_seqlen_q: int, context_seqlen: int, max_seqlen_k_decoded: int,
) -> None:  # fmt: skip
    if context_seqlen != k_context.shape[0]:
        raise ValueError(f"context_seqlen is {context_seqlen}, k_context has {k_context.shape[0]} tokens")
    if len(q_lens) != len(k_lens):
        raise ValueError(
            f"cu_seqlens_q describes {len(q_lens)} sequences, cu_seqlens_k_decoded {len(k_lens)}, expected equally many"
        )
    for name, x, cu_name, lens, max_name, longest in (
        ("q", q, "cu_seqlens_q", q_lens, "max_seqlen_q", max_seqlen_q),
        ("k_decoded", k_decoded, "cu_seqlens_k_decoded", k_lens, "max_seqlen_k_decoded", max_seqlen_k_decoded),
    ):
        if lens.sum() != x.shape[0]:
            raise ValueError(f"{cu_name} ends at {lens.sum()}, {name} has {x.shape[0]} tokens")
        if longest < lens.max(initial=0):
            raise ValueError(f"{max_name} is {longest}, expected at least the longest of {cu_name}, {lens.max()}")
    too_long = q_lens > context_seqlen + k_lens
    if too_long.any():
        at = int(np.argmax(too_long))
        raise ValueError(
            f"cu_seqlens_q gives sequence {at} {q_lens[at]} queries, it has {context_seqlen + k_lens[at]} positions "
            f"(context_seqlen {context_seqlen} and {k_lens[at]} of its own)"
        )

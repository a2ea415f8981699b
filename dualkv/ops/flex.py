"""PyTorch's FlexAttention behind the ops: one compiled kernel a direction, for every card that Triton serves.

The layout is a mask: which blocks of keys a block of queries sees whole or in part, made once from the rows' intervals,
and the visibility rule for blocks that are seen in part. The forward's and backward's operators are called apart, so
that the backward runs on what the ops save. They are compiled once for a dtype, numbers of heads, head dims, a softmax
scale and features, whatever the lengths (up to 128 rows once more). Rows are padded to whole blocks: the kernels are
faster where they need not ask which rows there are (docs/performance.md#other-gpus).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from codegen import packages
from dualkv.arrays import IntArray
from dualkv.ops.compiling import NotCompiled, refusal, refuse_again
from dualkv.ops.features import NONE, Features, Window
from dualkv.ops.intervals import block_runs, transposed
from dualkv.ops.sinks import dsinks, with_sinks
from dualkv.ops.tensors import ALIGNMENT, Plan
from dualkv.segments import Segments

BLOCK = 128  # rows and keys of the mask's blocks; FlexAttention's default
HEAD_DIM_MAX = 256  # its own blocks for larger ones ask for more shared memory than a Hopper GPU has
ELEMENTS = 2**31  # of a tensor, fewer: FlexAttention's kernels count some of them with 32 bits
MIN_HEAD_DIM = 16  # of FlexAttention on a GPU
COMPILER = "inductor"
OPTIONS = {
    "BACKEND": "TRITON", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "IS_DIVISIBLE": True,
}  # fmt: skip


def unsupported(q: torch.Tensor, v: torch.Tensor) -> str | None:
    """Say why FlexAttention cannot serve a call; None if it can. All layouts, windows, caps and sinks are served."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{q.dtype} inputs"
    (rows, heads, head_dim), head_dim_v = q.shape, v.shape[2]
    wider = max(head_dims(head_dim, head_dim_v))
    if wider > HEAD_DIM_MAX:
        return f"head dims above {HEAD_DIM_MAX}"
    if _whole_blocks(rows) * heads * wider >= ELEMENTS:
        return "tensors of 2^31 elements or more"
    return device_unsupported(q.device)


@cache
def device_unsupported(device: torch.device) -> str | None:
    """Say why FlexAttention does not run on this device; None if it does. Imports nothing."""
    if device.type != "cuda":
        return f"{device.type} devices"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8 and not torch.version.hip:
        return f"compute capability {major}.{minor}"
    said = packages.lacking("torch") or packages.lacking("triton")
    return said and f"an environment without {said}"


def head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head dims (of q and k, of v) with which tensors go to FlexAttention."""
    return max(head_dim, MIN_HEAD_DIM), max(head_dim_v, MIN_HEAD_DIM)


def _whole_blocks(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


# ---------------------------------------------------------------- the mask
class Mask(Plan):
    """A layout's mask on one device.

    Attributes:
        blocks: what FlexAttention's operators take as block mask between lengths and block sizes.
        tensors: of the visibility rule: visible_end [T], and with a window position [T] and lowest [T], int32; T padded
            to whole blocks by keys that no row sees.
    """

    def __init__(self, segments: Segments, device: torch.device, window: Window | None) -> None:
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        total = _whole_blocks(segments.total)
        n, (partial, whole) = total // BLOCK, block_runs(segments, window, BLOCK)
        of_keys = _listed(partial, whole, n, device)
        of_queries = _listed(transposed(partial, n), transposed(whole, n), n, device)
        made = BlockMask((total, total), *of_keys, *of_queries, (BLOCK, BLOCK), noop_mask)
        self.blocks = made.as_tuple()[2:-3]
        tables = [segments.visible_end]
        if window is not None:
            tables += [segments.position, window.lowest(segments.position)]
        padding = 0, total - segments.total  # a key whose visible_end is 0 is seen by no row
        self.tensors = tuple(torch.from_numpy(np.pad(x, padding).astype(np.int32)).to(device) for x in tables)
        super().__init__(*of_keys, *of_queries, *self.tensors)


def _listed(
    partial: IntArray, whole: IntArray, n: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs of blocks of n rows as FlexAttention takes them, int32: the number of each row's partial blocks [1, 1, n]
    and their indices [1, 1, n, n], then the same for whole blocks. Indices behind a row's own may be of any block."""

    def listed(runs: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        count = np.bincount(runs[:, 0], runs[:, 2] - runs[:, 1], n).astype(np.int32)
        row, begin, end = runs.T
        place = np.cumsum(end - begin) - (end - begin) - (np.cumsum(count) - count)[row]
        step = begin - np.where(place > 0, np.append(0, end[:-1] - 1), 0)  # from the run before to this one
        which = torch.ones(1, 1, n, n, dtype=torch.int32, device=device)
        at = torch.from_numpy(row * n + place).to(device)
        which.view(-1)[at] = torch.from_numpy(step.astype(np.int32)).to(device)
        which.cumsum_(3).clamp_(max=n - 1)
        return torch.from_numpy(count[None, None]).to(device), which

    return *listed(partial), *listed(whole)


def mask(segments: Segments, device: torch.device, window: Window | None) -> Mask:
    """The mask of a layout and a window, made at their first call, for use on the current stream."""
    found = segments.cached(("flex", device, window), lambda: Mask(segments, device, window))
    if device.type == "cuda":
        found.use(device)
    return found


# Without annotations, as `score` and its gradient are: PyTorch copies them into its graphs, and 2.11 cannot keep a
# compiled graph with one that is a string.
def _visible(_batch, _head, q, k, visible_end):  # type: ignore[no-untyped-def]
    return (k <= q) & (q < visible_end[k])


def _visible_in_window(_batch, _head, q, k, visible_end, position, lowest):  # type: ignore[no-untyped-def]
    return (k <= q) & (q < visible_end[k]) & (position[k] >= lowest[q])


# ---------------------------------------------------------------- the operators
def _operators(scale: float, softcap: float | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """FlexAttention's forward and backward operators for tensors [1, heads, T, D], a mask's blocks and its tensors.

    Their lse is in base 2: lse [1, H, T] of the forward, lse and the gradient of lse of the backward.
    """
    higher_order = torch.ops.higher_order

    def score(s, _batch, _head, _q, _k):  # type: ignore[no-untyped-def]
        return s if softcap is None else softcap * torch.tanh(s / softcap)

    def of_score(s, _batch, _head, _q, _k, grad):  # type: ignore[no-untyped-def]
        """The gradients of `score` by its arguments; behind `grad` and here would come what `score` captures."""
        cut = grad if softcap is None else grad * (1 - torch.tanh(s / softcap) ** 2)
        return [cut, None, None, None, None]

    def whole(q: torch.Tensor, of_blocks: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        rule = _visible if len(tensors) == 1 else _visible_in_window
        return q.shape[2], q.shape[2], *of_blocks, BLOCK, BLOCK, rule

    def forward(q: Any, k: Any, v: Any, of_blocks: Any, tensors: Any) -> Any:
        given = whole(q, of_blocks, tensors)
        out, lse, *_ = higher_order.flex_attention(q, k, v, score, given, scale, OPTIONS, (), tensors)
        return out, lse

    def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, of_blocks: Any, tensors: Any) -> Any:
        given = whole(q, of_blocks, tensors)
        dq, dk, dv, *_ = higher_order.flex_attention_backward(
            q, k, v, out, lse, dout, dlse, score, of_score, given, scale, OPTIONS, (), tensors
        )
        return dq, dk, dv

    return forward, backward


@cache
def _compiled(of: str, scale: float, softcap: float | None, form: tuple[Any, ...]) -> Callable[..., Any]:
    """An operator compiled for any length; `form` is what it is compiled for besides."""
    operator = _operators(scale, softcap)[of == "backward"]
    if COMPILER == "eager":
        return operator
    torch.compiler.allow_in_graph(operator)  # PyTorch's graph takes the operator as it is and looks into it later

    def call(*given: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise NotCompiled("torch.compile is switched off")
        return operator(*given)

    # torch.compile counts compilations by code, up to a limit: each form has a code object of its own.
    call.__code__ = call.__code__.replace()
    return torch.compile(call, fullgraph=True, dynamic=True, backend=COMPILER)


def _run(of: str, scale: float, features: Features, segments: Segments, *tensors: Any) -> Any:
    """The operator's results for rows padded to whole blocks, [1, heads, T, ..].

    tensors: its first arguments, but [T, heads, D] or [heads, T]: q, k, v and others, which may be None.

    Raises:
        NotCompiled: the operator was not compiled. For these rows or for any, which is then not tried again.
    """
    q, k, v, *others = tensors
    # What a graph is made for: an operator compiled for one form meets no other, and PyTorch's limit of graphs is far.
    window = features.reach
    form = (
        q.device, q.dtype, q.shape[1], q.shape[2], k.shape[1], v.shape[2], window is None,
        tuple(x is None for x in others), segments.total <= BLOCK, torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(), tuple(x is not None and x.is_inference() for x in tensors),
    )  # fmt: skip
    key = of, scale, features.softcap, form
    refuse_again(key)
    of_mask, laid_out = mask(segments, q.device, window), [None if x is None else _laid_out(x) for x in tensors]
    for x in laid_out:
        if x is not None:  # [1, heads, T, D] or [1, heads, T]: only T may vary
            torch._dynamo.mark_static(x, [0, 1, *range(3, x.dim())])
    with torch.no_grad():
        try:
            return _compiled(*key)(*laid_out, of_mask.blocks, of_mask.tensors)
        # The second one: too many graphs of one function. Both are looked up only where something is raised.
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as e:
            raise refusal(key, e) from e


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, D] of x [T, heads, D], [1, heads, T] of x [heads, T]; T is padded with zeros to whole blocks.

    Copied where x is not contiguous or not aligned: each order in memory would be another graph.
    """
    of_rows = x.dim() == 3
    missing = -x.shape[0 if of_rows else 1] % BLOCK
    if missing:
        x = torch.nn.functional.pad(x.detach(), (0, 0, 0, 0, 0, missing) if of_rows else (0, missing))
    elif not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        x = x.detach().clone(memory_format=torch.contiguous_format)
    return x.detach().transpose(0, 1)[None] if of_rows else x.detach()[None]


def _rows_first(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows of x [1, heads, T, D], [rows, heads, D]."""
    return x[0].transpose(0, 1)[:rows].contiguous()


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    softmax_scale: float,
    features: Features = NONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out [T, H, Dv] in q's dtype, lse [H, T] fp32; head dims of 16 or more, sinks [H] fp32."""
    out, lse = _run("forward", softmax_scale, features, segments, q, k, v)
    out, lse = _rows_first(out, segments.total), lse[0, :, : segments.total] * math.log(2)
    return with_sinks(out, lse, features.sinks)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    softmax_scale: float,
    features: Features = NONE,
    dlse: torch.Tensor | None = None,
    deterministic: bool = False,
    gradients: str = "qkv",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq [T, H, D], dk [T, Hk, D], dv [T, Hk, Dv] in the dtypes of q, k, v, dsinks [H] fp32 (without sinks [0]).

    Every gradient is summed in one program, in one order: bitwise equal from run to run, `deterministic` or not.
    """
    base_2 = lse / math.log(2), None if dlse is None else dlse * math.log(2)
    given = q, k, v, out, base_2[0], dout, base_2[1]
    found = _run("backward", softmax_scale, features, segments, *given)
    dq, dk, dv = (_rows_first(x, segments.total) for x in found)
    return dq, dk, dv, dsinks(dout, out, lse, features.sinks, dlse)

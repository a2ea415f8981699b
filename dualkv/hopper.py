"""The Hopper kernels behind the ops: which calls they serve, their plan on the device, and the launch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy.typing as npt
import torch

from codegen import store
from codegen.spec import KernelSpec, forward_spec
from codegen.store import Kernel
from codegen.tiles import ForwardTile
from dualkv import plan
from dualkv.layout import Segments

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
CAPABILITY = (9, 0)
ALIGNMENT = 16  # bytes: what the copy engine asks of base addresses and strides
MAX_STRIDE = 2**40  # bytes: likewise


# ---------------------------------------------------------------- which calls
def unsupported(q: torch.Tensor, segments: Segments) -> str | None:
    """Why no kernel serves q [T, H, D] over this layout, or None. All head dims and GQA ratios are served."""
    if segments.max_depth > 2:
        return f"layouts of {segments.max_depth} levels"
    if q.dtype not in DTYPES:
        return f"{q.dtype} inputs"
    return device_unsupported(q.device)


@cache
def device_unsupported(device: torch.device) -> str | None:
    """Why the kernels do not run on this device, or None."""
    if device.type != "cuda":
        return f"{device.type} devices"
    capability = torch.cuda.get_device_capability(device)
    return None if capability == CAPABILITY else f"compute capability {capability[0]}.{capability[1]}"


# ---------------------------------------------------------------- the plan on a device
class ForwardPlan:
    """What the forward reads of a layout on one device, for one tile configuration.

    Attributes:
        work: [n, items.NUM_FIELDS] int32.
        segment_begin: [T] int32.
    """

    def __init__(self, segments: Segments, device: torch.device, tokens: int, tile_n: int) -> None:
        stream = _upload_stream(device)
        self.work = _upload(plan.forward_work(segments, tokens, tile_n), stream)
        self.segment_begin = segments.made(
            ("segment_begin", device), lambda: _upload(plan.segment_begin(segments), stream)
        )
        self._used_on: set[int] = set()

    def use(self, stream: torch.cuda.Stream) -> None:
        """Keep the tensors' memory until `stream` has finished with them, should the layout be dropped before that."""
        if stream.cuda_stream not in self._used_on:
            self.work.record_stream(stream)
            self.segment_begin.record_stream(stream)
            self._used_on.add(stream.cuda_stream)


@cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: the allocator keeps memory apart by stream, so plans can use what dropped ones leave."""
    return torch.cuda.Stream(device)


def _upload(array: npt.NDArray[Any], stream: torch.cuda.Stream) -> torch.Tensor:
    """A copy on `stream`'s device, complete on return. Waits for `stream` alone: no other work is held up."""
    with torch.cuda.stream(stream):
        tensor = torch.from_numpy(array).to(stream.device)
    stream.synchronize()
    return tensor


def forward_plan(segments: Segments, device: torch.device, tile: ForwardTile, packed_heads: int) -> ForwardPlan:
    """The plan, made at a layout's first call and kept with it.

    Raises:
        RuntimeError: the first call is inside a CUDA graph capture.
    """
    tokens, tile_n = tile.tokens(packed_heads), tile.tile_n

    def make() -> ForwardPlan:
        _refuse_capture(device, "this layout has no work plan")
        return ForwardPlan(segments, device, tokens, tile_n)

    return segments.made(("forward plan", device, tokens, tile_n), make)


def _refuse_capture(device: torch.device, lacking: str) -> None:
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise RuntimeError(
            f"a CUDA graph is being captured and {lacking} on {device} yet: "
            "run the same call once before the capture, and keep the layout as long as the graph"
        )


# ---------------------------------------------------------------- launch
@cache
def _kernel(dtype: torch.dtype, head_dim: int, heads_per_kv: int, device: torch.device) -> tuple[KernelSpec, Kernel]:
    """The specialization that serves these; nothing of a batch's lengths is in it."""
    _refuse_capture(device, "the kernel is not loaded")
    spec = forward_spec(DTYPES[dtype], head_dim, heads_per_kv)
    return spec, store.load(spec)


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] itself if the copy engine can read it as it lies (a slice of a wider tensor too), else a copy."""
    unit = ALIGNMENT // x.element_size()
    (st, sh, sd), limit = x.stride(), MAX_STRIDE // x.element_size()
    aligned = x.data_ptr() % ALIGNMENT == 0 and st % unit == 0 and sh % unit == 0
    if aligned and sd == 1 and 0 < st < limit and 0 < sh < limit:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, D] in q's dtype, lse [H, T] fp32) in one launch on the current stream; see :func:`unsupported`.

    A specialization's first call loads its kernel (and compiles it if no store has it), a layout's first call makes its
    plan. Later calls wait for nothing.

    Args:
        q: [T, H, D] bf16 or fp16, D a multiple of 8 up to 256, T at least 1.
        k, v: [T, Hk, D], H a multiple of Hk.
        segments: the layout of the T rows.
        softmax_scale: a positive number.

    Raises:
        RuntimeError: the kernel cannot be compiled or loaded, or a CUDA graph is captured at one of those first calls.
    """
    device, (rows, heads, head_dim) = q.device, q.shape
    spec, kernel = _kernel(q.dtype, head_dim, heads // k.shape[1], device)
    planned = forward_plan(segments, device, spec.tile, spec.packed_heads)
    planned.use(torch.cuda.current_stream(device))
    q, k, v = tma_ready(q), tma_ready(k), tma_ready(v)
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=device)
    kernel(q, k, v, out, lse, planned.work, planned.segment_begin, softmax_scale, _num_sms(device))
    return out, lse

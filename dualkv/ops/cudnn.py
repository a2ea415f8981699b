"""cuDNN's interval-mask attention behind the ops (`cudnn.flex_attention` of nvidia-cudnn-frontend, experimental).

Its kernels run on Hopper and on the Blackwell GPUs of data centres. A row sees a union of intervals of its sequence's
keys, and a layout's rows do (`dualkv.ops.intervals`). cuDNN makes its mask plan on the device, once a layout here, and
compiles kernels at their first use. All that the library uses of the package is in this file; the benchmark calls its
autograd function beside it, as a peer (`dualkv/bench/sides.py`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any

import torch

from codegen import packages, surface
from dualkv.ops.compiling import NotCompiled, refusal, refuse_again
from dualkv.ops.features import NONE, Features, Window
from dualkv.ops.intervals import group_lengths, interval_ends
from dualkv.ops.sinks import dsinks, with_sinks
from dualkv.ops.tensors import tma_ready
from dualkv.segments import Segments

PACKAGE = "nvidia-cudnn-frontend"
CAPABILITIES = (9, 0), (10, 0), (10, 3)
HEAD_DIM_MAX = 256
DTYPES = torch.bfloat16, torch.float16
SPANS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
EXECUTE = "workspace softmax_scale current_stream"
CALLS = (  # as below: what is called, what it is given by position, and by name
    ("create_mask_plan", "mask_func q k v", f"{SPANS} build_backward"),
    ("FlexAttentionFwd", "q k v o mask_plan lse", ""),
    ("FlexAttentionFwd.execute", "self q k v o mask_plan lse", EXECUTE),
    ("FlexAttentionBwd", "q k v o do lse dq dk dv mask_plan dlse", "deterministic"),
    ("FlexAttentionBwd.execute", "self q k v o do lse dq dk dv mask_plan dlse", EXECUTE),
    ("FlexAttentionFwd.check_support", "self", ""),
    ("FlexAttentionFwd.compile", "self", ""),
)
BLACKWELL_WIDE = (256, 256)  # head dims whose backward on Blackwell takes no gradient of lse


# ---------------------------------------------------------------- which calls
def unsupported(q: torch.Tensor, v: torch.Tensor, dlse: torch.Tensor | None = None) -> str | None:
    """Say why cuDNN cannot serve a call; None if it can. All layouts and windows are served, and sinks."""
    if q.dtype not in DTYPES:
        return f"{q.dtype} inputs"
    if max(q.shape[2], v.shape[2]) > HEAD_DIM_MAX:
        return f"head dims above {HEAD_DIM_MAX}"
    if reason := device_unsupported(q.device):
        return reason
    major, _ = torch.cuda.get_device_capability(q.device)
    head_dim, head_dim_v = dims = head_dims(q.shape[2], v.shape[2])
    if major == 9 and head_dim != head_dim_v:  # what the backward has no kernels for there
        if q.shape[1] != v.shape[1]:
            return "grouped queries with values of another head dim on compute capability 9.0"
        if 48 < head_dim <= 64 and head_dim_v > 96:
            return f"head dim {head_dim} with values of {head_dim_v} on compute capability 9.0"
    if major == 10 and dlse is not None and dims == BLACKWELL_WIDE:
        return "gradients of lse with head dims above 192 and 128 on compute capability 10.x"
    return None


@cache
def device_unsupported(device: torch.device) -> str | None:
    """Say why cuDNN's attention does not run on this device; None if it does. Imports nothing."""
    if device.type != "cuda" or torch.version.hip:
        return "ROCm devices" if device.type == "cuda" else f"{device.type} devices"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CAPABILITIES:
        return f"compute capability {capability[0]}.{capability[1]}"
    return not_installed()


def not_installed() -> str | None:
    """Say why the package cannot be used; None if it can."""
    said = packages.lacking(PACKAGE)
    return said and f"an environment without {said}"


def head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head dims (of q and k, of v), at least those given, with which tensors go to cuDNN."""
    if max(head_dim, head_dim_v) <= 128:
        return head_dim, head_dim_v
    return (192, 128) if head_dim <= 192 and head_dim_v <= 128 else (256, 256)


@cache
def _module() -> Any:
    with _compiling("import"):
        module = importlib.import_module("cudnn.flex_attention")
        for call in CALLS:
            if (said := surface.uncallable(module, *call)) is not None:
                raise ImportError(surface.unfit(PACKAGE, said))
        return module


@contextmanager
def _compiling(*what: Any) -> Iterator[None]:
    """Guard what imports or compiles cuDNN. Its DSL looks for options of its own in sys.argv, and ends the program over
    a `-d` of the program's; and cuDNN prints to standard output, which is the program's.

    Raises:
        NotCompiled: cuDNN failed, now or before at the same. Errors of memory and of the device are raised as they are.
    """
    key = "cudnn", *what
    refuse_again(key)
    given = sys.argv
    sys.argv = given[:1]
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (NotCompiled, torch.AcceleratorError):
        raise
    except Exception as e:
        raise refusal(key, e) from e
    finally:
        sys.argv = given


# ---------------------------------------------------------------- plans
class Plan:
    """cuDNN's mask plan of a layout for tensors of one form, and the calls that were compiled for it.

    A single group goes to cuDNN as a batch of one, whose plans are made faster; several are sequences end to end.
    """

    def __init__(
        self, segments: Segments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Window | None
    ) -> None:
        lengths, device = group_lengths(segments), q.device
        ends = torch.from_numpy(interval_ends(segments, window)).to(device)
        self.batched = len(lengths) == 1
        spans: dict[str, Any] = {}
        if not self.batched:
            cu = torch.zeros(len(lengths) + 1, dtype=torch.int32)
            cu[1:] = torch.from_numpy(lengths).cumsum(0)
            longest = int(lengths.max())
            spans = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu.to(device))
            spans |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), longest)
        given = (self.shaped(x) for x in (q, k, v))
        module = _module()
        self._form = device, q.dtype, *q.shape[1:], k.shape[1], v.shape[2], self.batched
        with _compiling("plan", *self._form):
            self.mask = module.create_mask_plan(ends, *given, **spans, build_backward=True)
        self._calls: dict[Any, Any] = {}
        self._home = torch.cuda.current_stream(device)

    def shaped(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, D] as cuDNN takes it, or lse [H, T]."""
        return x[None] if self.batched else x

    def run(self, of: str, *tensors: torch.Tensor | None, scale: float, **options: Any) -> None:
        """One call of cuDNN's class `of` on the current stream: compiled once for tensors of a form."""
        shaped = [None if x is None else self.shaped(x) for x in tensors]
        # The last tensor may be absent, and cuDNN takes it behind the plan.
        *given, last = shaped
        form = tuple(None if x is None else (x.shape, x.stride(), x.dtype) for x in shaped)
        call = self._calls.get((of, form, *options.items()))
        if call is None:
            with _compiling(of, *self._form, last is None, *options.items()):
                call = getattr(_module(), of)(*given, self.mask, last, **options)
                call.check_support()
                call.compile()
            self._calls[of, form, *options.items()] = call
        assert given[0] is not None
        device = given[0].device
        workspace = torch.empty(call.workspace_size, dtype=torch.uint8, device=device)
        call.execute(
            *given, self.mask, last, workspace=workspace, softmax_scale=scale, current_stream=self._stream(device)
        )

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """None, or the current stream where it is not the one that made the plan: cuDNN then keeps the plan's memory
        until that stream has finished with it."""
        current = torch.cuda.current_stream(device)
        return None if current == self._home else current


def plan(segments: Segments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Window | None) -> Plan:
    """The plan for a layout, a window and tensors of these dtypes and shapes, made at their first call."""
    key = "cudnn", q.device, window, q.dtype, q.shape[1:], k.shape[1:], v.shape[2]
    return segments.cached(key, lambda: Plan(segments, q, k, v, window))


def _ready(x: torch.Tensor, alignment: int = 16) -> torch.Tensor:
    """x itself if cuDNN can read it in place, else a contiguous copy."""
    x, unit = tma_ready(x), alignment // x.element_size()
    if x.data_ptr() % alignment == 0 and x.stride(0) % unit == 0 and x.stride(1) % unit == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------- the calls
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    softmax_scale: float,
    features: Features = NONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out [T, H, Dv] in q's dtype, lse [H, T] fp32; head dims those of :func:`head_dims`, sinks [H] fp32."""
    with torch.no_grad(), torch.cuda.device_of(q):
        q, k, v = (_ready(x) for x in (q, k, v))
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
        plan(segments, q, k, v, features.reach).run("FlexAttentionFwd", q, k, v, out, lse, scale=softmax_scale)
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

    cuDNN computes P = exp(S - lse) from the lse that it is given, so that a sink's share of the softmax is left out as
    it should be.
    """
    with torch.no_grad(), torch.cuda.device_of(q):
        alignment = 128 if head_dims(q.shape[2], v.shape[2]) == BLACKWELL_WIDE else 16
        q, k, v, out, dout = (_ready(x, alignment) for x in (q, k, v, out, dout))
        lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        made = plan(segments, q, k, v, features.reach)
        made.run(
            "FlexAttentionBwd", q, k, v, out, dout, lse, *grads, dlse, scale=softmax_scale, deterministic=deterministic
        )  # fmt: skip
        dq, dk, dv = grads
        return dq, dk, dv, dsinks(dout, out, lse, features.sinks, dlse)

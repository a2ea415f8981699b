"""The Hopper kernels behind the ops: which calls they serve, their plans on the device, and their launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from codegen import store
from codegen.spec import BackwardSpecs, KernelSpec, backward_specs, forward_spec
from codegen.store import Kernel
from codegen.tiles import (
    FEW_KEYS_COST,
    FEW_KEYS_ROWS,
    FEW_KEYS_WALK,
    PARTS_COST,
    BackwardTile,
    ForwardTile,
    backward_tile,
    forward_tile,
    head_parts,
    packed_heads,
)
from cute_kernels.abi import STAT_COLUMNS, clears_ahead, lock_words
from dualkv.ops.features import NONE, Features, Window
from dualkv.ops.plan import backward as plan_backward
from dualkv.ops.plan import forward as plan_forward
from dualkv.ops.plan import paths as plan_paths
from dualkv.ops.plan import schedule
from dualkv.ops.plan import windowed as plan_windowed
from dualkv.ops.tensors import Plan, tma_ready
from dualkv.segments import Segments

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
CAPABILITY = (9, 0)
RECOMPUTE_MARKS = 2016  # of a cluster of the forward: 32 * RECOMPUTE_WORDS (cute_kernels/fwd_frame.py)


# ---------------------------------------------------------------- which calls
def unsupported(q: torch.Tensor) -> str | None:
    """Say why no kernel serves q [T, H, D]; None if one does. All layouts, head dims, GQA ratios and features are
    served."""
    if q.dtype not in DTYPES:
        return f"{q.dtype} inputs"
    return device_unsupported(q.device)


@cache
def device_unsupported(device: torch.device) -> str | None:
    """Say why the kernels do not run on this device; None if they do."""
    if device.type != "cuda" or torch.version.hip:  # PyTorch gives AMD's GPUs such capabilities too
        return "ROCm devices" if device.type == "cuda" else f"{device.type} devices"
    capability = torch.cuda.get_device_capability(device)
    return None if capability == CAPABILITY else f"compute capability {capability[0]}.{capability[1]}"


def few_keys_backward(segments: Segments, kv_heads: int, window: Window | None) -> bool:
    """Whether the backward of a call takes CTAs without clusters: it has enough rows, and clusters would walk too many
    of them."""
    if window is not None or segments.total * kv_heads < FEW_KEYS_ROWS:
        return False

    def gains() -> bool:
        of_two, alone = (backward_tile(128, few_keys=few) for few in (False, True))  # other head dims have as many keys
        return plan_backward.rows_walked(segments, of_two) >= FEW_KEYS_WALK * plan_backward.rows_walked(segments, alone)

    return segments.cached("few_keys_backward", gains)


def few_keys_forward(
    segments: Segments, head_dim: int, heads_per_kv: int, kv_heads: int, head_dim_v: int | None = None
) -> bool:
    """Whether the forward of a call of at most two levels takes CTAs without clusters: it has enough rows, and by the
    plan clusters would take too long."""
    if segments.total * kv_heads < FEW_KEYS_ROWS:
        return False

    def gains() -> bool:
        of_two, alone = (forward_tile(head_dim, head_dim_v=head_dim_v, few_keys=few) for few in (False, True))
        if of_two == alone:
            return False
        packed = packed_heads(heads_per_kv)
        cost, least = (plan_forward.cost_walked(segments, tile, packed) for tile in (of_two, alone))
        return cost >= FEW_KEYS_COST * least

    return segments.cached(("few_keys_forward", head_dim, head_dim_v, heads_per_kv), gains)


def forward_launches(
    segments: Segments, trees: bool, head_dim: int, heads_per_kv: int, kv_heads: int, head_dim_v: int | None = None
) -> list[tuple[range, bool]]:
    """The launches of the forward of a call: which query heads of each KV head each of them takes, and whether without
    clusters (`few_keys_forward`).

    One takes all of them. Of a call of at most two levels with enough rows, two take parts that fill tiles better, if
    that takes less time by the plan.

    Args:
        trees: the call runs the kernel for trees.
    """

    def launch(heads: range) -> tuple[range, bool]:
        return heads, not trees and few_keys_forward(segments, head_dim, len(heads), kv_heads, head_dim_v)

    def cost(heads: range, few_keys: bool) -> float:
        tile = forward_tile(head_dim, head_dim_v=head_dim_v, few_keys=few_keys)
        return plan_forward.cost_walked(segments, tile, len(heads))

    whole = launch(range(heads_per_kv))
    if trees or segments.total * kv_heads < FEW_KEYS_ROWS:
        return [whole]

    def made() -> list[tuple[range, bool]]:
        parts = [launch(heads) for heads in head_parts(heads_per_kv)]
        gains = len(parts) > 1 and sum(cost(*part) for part in parts) <= PARTS_COST * cost(*whole)
        return parts if gains else [whole]

    return segments.cached(("forward_launches", head_dim, head_dim_v, heads_per_kv), made)


# ---------------------------------------------------------------- plans on a device
class ForwardPlan(Plan):
    """The forward's plan, for one kernel and one number of heads and KV heads.

    Args:
        taken: of the query heads of each KV head those that the launch takes; None: all.

    Attributes:
        launches: of each launch the tables, int32, in the order of the kernel's arguments: work items, schedule and
            segment_begin [T]; for trees work items, schedule, regions and visible_end [T + tile_n].
        first_key: [T] int32 of a window, else None.
    """

    def __init__(
        self, segments: Segments, device: torch.device, spec: KernelSpec[ForwardTile], heads: int, kv_heads: int,
        window: Window | None = None, by_segment: bool = False, taken: range | None = None,
    ) -> None:  # fmt: skip
        parts = spec.tile.parts if spec.trees else 0  # a work item has fields for each
        key = spec.operation, device, spec.tile.tokens(spec.packed_heads), spec.tile.tile_n, parts, window, by_segment
        tiles = segments.cached(key, lambda: ForwardTiles(segments, device, spec, window, by_segment))
        clusters, kv_bytes = _num_sms(device) // spec.tile.cluster, 2 * sum(spec.head_dims) * segments.total
        per_kv = heads // kv_heads
        first_head = np.arange(0, heads, per_kv)[:, None] + np.array((taken or range(per_kv))[:: spec.packed_heads])
        items = schedule.schedule(tiles.cost, first_head.size, kv_heads, clusters, kv_bytes, tiles.longest_first)
        items[:, 1] = first_head.reshape(-1)[items[:, 1]]
        scheduled = _upload(items, device)
        # A cluster recomputes all items that share a mark. By segment no row may be recomputed for another one's sake.
        marked = clusters * RECOMPUTE_MARKS if by_segment else len(items)
        self.launches = [(tiles.work, some, *tiles.tables) for some in scheduled.split(marked)]
        self.first_key = tiles.first_key
        super().__init__(tiles.work, scheduled, *tiles.tables, *([] if self.first_key is None else [self.first_key]))


class ForwardTiles:
    """The part of a plan that does not depend on numbers of heads, for one operation, tokens a tile, keys a block and
    window, by segment or not.

    Attributes:
        work: work items.
        tables: the kernel's arguments behind the schedule.
        first_key: of a window, else None.
        cost: [n] numpy, time that each item takes for one head group.
        longest_first: whether the items have that order.
    """

    def __init__(
        self, segments: Segments, device: torch.device, spec: KernelSpec[ForwardTile], window: Window | None = None,
        by_segment: bool = False,
    ) -> None:  # fmt: skip
        tokens, tile_n = spec.tile.tokens(spec.packed_heads), spec.tile.tile_n
        self.first_key = None
        if window is not None:
            self.first_key = segments.cached(
                ("first_key", device, window),
                lambda: _upload(plan_paths.first_keys(segments, window).astype(np.int32), device),
            )
        if spec.trees:
            made = plan_paths.path_work(segments, tokens, tile_n, window, spec.tile.parts, by_segment)
            work, self.cost, near_rows = made.items, plan_paths.tile_cost(made.items), plan_paths.NEAR_ROWS
            visible_end = segments.cached(
                ("visible_end", device, tile_n),
                lambda: _upload(np.append(segments.visible_end, np.zeros(tile_n)).astype(np.int32), device),
            )
            self.tables = [_upload(made.regions, device), visible_end]
        else:
            work = plan_forward.made_work(segments, tokens, tile_n)
            self.cost, near_rows = plan_forward.tile_cost(work, tile_n), plan_forward.L2_ROWS
            self.tables = [
                segments.cached(
                    ("segment_begin", device), lambda: _upload(plan_forward.segment_begin(segments), device)
                )
            ]
        self.work, self.longest_first = _upload(work, device), segments.total <= near_rows


class BackwardPlan(Plan):
    """The backward's plan, for one tile configuration and one number of heads and KV heads.

    Attributes:
        work: [n, BackwardFields.NUM_FIELDS] int32.
        sums: [m, BackwardFields.NUM_SUM_FIELDS] int32; m is 0 where no item is split.
        num_partials: partial sums that the items write.
        visible_end: [T] int32.
        tables: with a window, int32 in the order of the kernel's arguments: query blocks [b, BlockFields.NUM_FIELDS],
            position [blocks of rows * tile_m] and end_position [T]. Else empty.
    """

    def __init__(
        self,
        segments: Segments,
        device: torch.device,
        tile: BackwardTile,
        heads: int,
        kv_heads: int,
        window: Window | None = None,
    ) -> None:
        num_sms = _num_sms(device)
        self.tables: list[torch.Tensor] = []
        if window is None:
            made = plan_backward.backward_work(segments, tile, heads, kv_heads, num_sms, tile.deterministic)
        else:
            made = plan_windowed.windowed_work(segments, window, tile, heads, kv_heads, num_sms)
            assert made.blocks is not None
            arrays = made.blocks, *plan_windowed.position_tables(segments, window, tile)
            self.tables = [_upload(array, device) for array in arrays]
        self.num_partials = made.num_partials
        self.work, self.sums = _upload(made.items, device), _upload(made.sums, device)
        self.visible_end = segments.cached(
            ("visible_end", device), lambda: _upload(segments.visible_end.astype(np.int32), device)
        )
        super().__init__(self.work, self.sums, self.visible_end, *self.tables)


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def _planned(segments: Segments, device: torch.device, key: Any, make: Callable[[], AnyPlan]) -> AnyPlan:
    """A layout's plan for the current stream, made at the layout's first call and kept with the layout.

    Raises:
        RuntimeError: the first call is inside a CUDA graph capture.
    """

    def first() -> AnyPlan:
        _refuse_capture(device, "this layout has no work plan")
        return make()

    found = segments.cached((key, device), first)
    found.use(device)
    return found


def forward_plan(
    segments: Segments, device: torch.device, spec: KernelSpec[ForwardTile], heads: int, kv_heads: int,
    window: Window | None = None, by_segment: bool = False, taken: range | None = None,
) -> ForwardPlan:  # fmt: skip
    """The forward's plan; see `_planned`. With a window and by segment, `spec` is a specification for trees."""
    key = "forward", spec.operation, spec.head_dims, spec.tile, heads, kv_heads, window, by_segment, taken

    def make() -> ForwardPlan:
        return ForwardPlan(segments, device, spec, heads, kv_heads, window, by_segment, taken)

    return _planned(segments, device, key, make)


def backward_plan(
    segments: Segments,
    device: torch.device,
    tile: BackwardTile,
    heads: int,
    kv_heads: int,
    window: Window | None = None,
) -> BackwardPlan:
    """The backward's plan; see `_planned`."""
    key = "backward", tile, heads, kv_heads, window
    return _planned(segments, device, key, lambda: BackwardPlan(segments, device, tile, heads, kv_heads, window))


@cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for each device: the allocator reuses memory within a stream, so new plans reuse the memory of old
    ones."""
    return torch.cuda.Stream(device)


def _upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, complete on return. Uses a stream of its own, so that no other work is waited for."""
    stream = _upload_stream(device)
    with torch.cuda.stream(stream):
        tensor = torch.from_numpy(array).to(device)
    stream.synchronize()
    return tensor


def _refuse_capture(device: torch.device, lacking: str) -> None:
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise RuntimeError(
            f"a CUDA graph is being captured and {lacking} on {device} yet: "
            "run the same call once before the capture, and keep the layout as long as the graph"
        )


# ---------------------------------------------------------------- launches
@cache
def _kernel(
    dtype: torch.dtype, head_dim: int, heads_per_kv: int, device: torch.device, trees: bool = False,
    features: tuple[str, ...] = (),
    short: bool = False, head_dim_v: int | None = None, few_keys: bool = False,
) -> tuple[KernelSpec[ForwardTile], Kernel]:  # fmt: skip
    """The specification and the loaded kernel for these; independent of the batch but for `few_keys`."""
    _refuse_capture(device, "the kernel is not loaded")
    spec = forward_spec(DTYPES[dtype], head_dim, heads_per_kv, trees, features, short, head_dim_v, few_keys=few_keys)
    return spec, store.load(spec)


@cache
def _backward_kernels(
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool,
    gradients: str,
    device: torch.device,
    features: tuple[str, ...] = (),
    head_dim_v: int | None = None,
    few_keys: bool = False,
) -> tuple[BackwardSpecs, dict[str, Kernel]]:
    """The specifications and the loaded kernels, by operation; independent of the GQA ratio, and of the batch but for
    `few_keys`."""
    _refuse_capture(device, "the backward's kernels are not loaded")
    specs = backward_specs(DTYPES[dtype], head_dim, deterministic, gradients, features, head_dim_v, few_keys=few_keys)
    operations = [spec.operation for spec in specs.present]
    return specs, dict(zip(operations, store.load_all(specs.present), strict=True))


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x [H, T] itself if its rows are contiguous, else a copy; an expanded [1, 1] would pass for contiguous."""
    return x if x.stride(1) == 1 else x.clone(memory_format=torch.contiguous_format)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    softmax_scale: float,
    features: Features = NONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, Dv] in q's dtype, lse [H, T] fp32) on the current stream; see :func:`unsupported`.

    One launch takes all heads, or each of two some (:func:`forward_launches`). The first call with a dtype, head dims
    and GQA ratio loads the kernel, and compiles it if no store has it. The first call with a layout makes its plan.
    Later calls wait for nothing.

    Args:
        q: [T, H, D] bf16 or fp16, D a multiple of 8 up to 512, T at least 1.
        k: [T, Hk, D], H a multiple of Hk.
        v: [T, Hk, Dv], Dv as `padding.for_kernel` gives it.
        segments: the layout of the T rows.
        softmax_scale: from 2^-100 to 2^100.
        features: see `Features.of_call`.

    Raises:
        RuntimeError: the kernel cannot be compiled or loaded, or a first call is inside a CUDA graph capture.
    """
    device, (rows, heads, head_dim), (_, kv_heads, head_dim_v) = q.device, q.shape, v.shape
    window = features.reach
    by_segment = features.batch_invariant
    trees = segments.max_depth > 2 or window is not None or by_segment
    short = window is not None and window.short
    launches = []
    for taken, few in forward_launches(segments, trees, head_dim, heads // kv_heads, kv_heads, head_dim_v):
        spec, kernel = _kernel(q.dtype, head_dim, len(taken), device, trees, features.names, short, head_dim_v, few)
        planned = forward_plan(segments, device, spec, heads, kv_heads, window, by_segment, taken)
        launches += [(kernel, tables) for tables in planned.launches]
    q, k, v = tma_ready(q), tma_ready(k), tma_ready(v)
    out = q.new_empty((rows, heads, head_dim_v))
    lse = q.new_empty((heads, rows), dtype=torch.float32)
    if segments.silent is not None:  # no tile has the rows without queries
        out.zero_()
        lse.fill_(math.inf)
    given = features.asked | {"window": planned.first_key}
    own = [given[name] for name in spec.features]
    for kernel, tables in launches:
        kernel(q, k, v, out, lse, *tables, softmax_scale, _num_sms(device), *own)
    return out, lse


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
    """(dq [T, H, D], dk [T, Hk, D] and dv [T, Hk, Dv] in q's dtype, dsinks [H] fp32), in two to four launches.

    They run on the current stream. Takes the calls that :func:`forward` takes; first calls load kernels and make plans
    likewise. dk, dv and dsinks are bitwise equal from run to run. dq is a sum over key blocks in fp32; the order of the
    sum is fixed if `deterministic`, and differs from run to run otherwise. Workspace: dq in fp32, and at most a quarter
    of that for partial sums of dk and dv where items are split (half of it with long prompts, and at head dim 512).

    Args:
        dout, out: [T, H, Dv], dtype of q.
        q, k, v, segments, softmax_scale, features: as given to the forward; without sinks, dsinks is [0].
        lse: [H, T] fp32, natural log, from the forward.
        dlse: [H, T] fp32, the gradient of lse; None: 0.
        deterministic: bitwise equal dq from run to run.
        gradients: the ones to compute, letters of "qkv" in that order. The others are empty, [0], and work for them
            alone is skipped.

    Raises:
        RuntimeError: as :func:`forward`.
        ValueError: an unknown value of `gradients`.
    """
    device, (rows, heads, head_dim), kv_heads = q.device, q.shape, k.shape[1]
    window, sinks = features.reach, features.sinks
    named = features.names if dlse is None else (*features.names, "dlse")
    few = few_keys_backward(segments, kv_heads, window)
    specs, kernels = _backward_kernels(q.dtype, head_dim, deterministic, gradients, device, named, v.shape[2], few)
    tile, native = specs.main.tile, specs.main.head_dim
    planned = backward_plan(segments, device, tile, heads, kv_heads, window)
    q, k, v, out, dout = (tma_ready(x) for x in (q, k, v, out, dout))
    lse, dlse = _contiguous_rows(lse), None if dlse is None else _contiguous_rows(dlse)
    dq, dk, dv = (
        torch.empty(x.shape if name in gradients else 0, dtype=x.dtype, device=device)
        for name, x in (("q", q), ("k", k), ("v", v))
    )

    def workspace(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    blocks = -(-rows // tile.tile_m)  # of query rows
    stats = workspace(heads, blocks * tile.tile_m * STAT_COLUMNS, dtype=torch.bfloat16)
    dq_sums = workspace(heads * blocks * tile.tile_m * native if specs.postprocess else 0)
    locked = specs.postprocess and (tile.deterministic or clears_ahead(native))
    locks = workspace(lock_words(heads * blocks) if locked else 0, dtype=torch.int32)
    partials = workspace(planned.num_partials * tile.partial_floats(*specs.main.head_dims) if specs.partial_sum else 0)
    dsinks = None if sinks is None else workspace(heads, blocks)
    given: dict[str, Sequence[Any]] = {name: (x,) for name, x in features.asked.items()}
    given |= {"window": planned.tables, "sinks": (sinks, dsinks), "dlse": (dlse,)}
    of_rows, own = ([x for name in spec.features for x in given[name]] for spec in (specs.preprocess, specs.main))
    kernels["bwd_preprocess"](out, dout, lse, stats, dq_sums, locks, softmax_scale, *of_rows)
    tables = planned.work, planned.visible_end
    kernels["bwd"](q, k, v, dout, stats, dk, dv, dq_sums, partials, locks, *tables, softmax_scale, *own)
    if specs.partial_sum and planned.num_partials:
        kernels["bwd_sum"](partials, planned.sums, dk, dv)
    if specs.postprocess:
        kernels["bwd_postprocess"](dq_sums, locks, dq, softmax_scale)
    return dq, dk, dv, workspace(0) if dsinks is None else dsinks.sum(1)

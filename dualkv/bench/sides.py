"""The ways to compute a workload that the benchmark compares: DualKV, FlashAttention-4, cuDNN, MagiAttention, PyTorch.

All are built from the same packed tensors, and their results are compared in packed order. They run without gradients
enabled; what needs autograd enables it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._functorch import config as functorch_config

import dualkv
from codegen.packages import require
from dualkv.bench import fa4
from dualkv.bench.inputs import Inputs, Side, added, take
from dualkv.ops import backends, composition, hopper
from dualkv.ops.intervals import group_lengths, interval_ends


def _kept(
    call: Callable[[], Sequence[torch.Tensor]],
    packed: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    apart: dict[str, Callable[[], Any]] | None = None,
) -> Side:
    """The side that runs `call` and keeps what it returns; `packed` brings each tensor into packed order."""
    last: list[torch.Tensor] = []

    def run() -> None:
        last[:] = call()

    return Side(run, lambda: tuple(packed(x) for x in last), apart or {}, tuple(apart or ()))


def _attended(
    direction: str,
    attend: Callable[[], torch.Tensor],
    leaves: Sequence[torch.Tensor],
    dout: Callable[[], torch.Tensor],
    packed: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    apart: dict[str, Callable[[], Any]] | None = None,
) -> Side:
    """The side of an attention under autograd: `attend` of `leaves`, `dout` its gradient."""
    if direction == "fwd":
        return _kept(lambda: [attend()], packed, apart)
    given = dout()

    def gradients(out: torch.Tensor, again: bool = False) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, given, retain_graph=again)

    if direction == "both":
        return _kept(torch.enable_grad()(lambda: gradients(attend())), packed, apart)
    # What is compiled must not write into what its forward saved: the backward runs many times over one forward.
    with torch.enable_grad(), functorch_config.patch(donated_buffer=False):
        out = attend()
        gradients(out, again=True)
    return _kept(lambda: gradients(out, again=True), packed, apart)


def ours(inputs: Inputs, direction: str, deterministic: bool = False, backend: str | None = None) -> Side:
    """`dualkv.attention`, both directions under autograd; the backward alone as the op that autograd calls.

    So a backward's launches are all that a user's call makes, and peers are called without autograd too, whose engine
    runs on another thread.

    Raises:
        RuntimeError: this device has no kernel of ours.
        ValueError: the backend asked for does not serve the workload on this device.
    """
    layout = inputs.layout
    reason = hopper.unsupported(inputs.q) if backend is None else None
    if reason:
        raise RuntimeError(f"no kernel for {reason}")
    if backend is None and (other := backends.of_variable()) not in (None, "hopper"):
        raise RuntimeError(f"{backends.VARIABLE} is {other!r}, expected none: this side is our kernels")
    leaves = q, k, v = [x.detach().requires_grad_(direction == "both") for x in (inputs.q, inputs.k, inputs.v)]
    features = {**inputs.features._asdict(), **({"backend": backend} if backend else {})}
    if direction == "bwd":
        out, lse = dualkv.attention(q, k, v, layout, inputs.scale, return_lse=True, **features)
        call = inputs.dout, q, k, v, out, lse, layout.offsets, layout.parent, inputs.scale, deterministic
        return _kept(lambda: torch.ops.dualkv.bwd(*call, **features)[:3])

    def attend() -> torch.Tensor:
        return dualkv.attention(q, k, v, layout, inputs.scale, deterministic, **features)

    return _attended(direction, attend, leaves, lambda: inputs.dout)


def composed(inputs: Inputs, direction: str) -> Side:
    """`dualkv.attention` as the composition of PyTorch's FlashAttention calls; of a forward, its merges too."""
    side = ours(inputs, direction, backend="flash")
    segments, (tokens, heads, head_dim) = inputs.layout._segments, inputs.q.shape
    others = [part for part in composition.parts(segments, inputs.q.device, inputs.workload.reach) if not part.causal]
    if direction != "fwd" or not others:
        return side

    def results(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Make zeros for out and lse of a call with so many query rows."""
        shape = rows, heads, max(head_dim, inputs.v.shape[2])
        return inputs.q.new_zeros(shape, dtype=dtype), inputs.q.new_zeros((heads, rows), dtype=torch.float32)

    whole = results(tokens, inputs.q.dtype if len(others) == 1 else torch.float32)
    of_calls = [results(int(part.cu_q[-1]), inputs.q.dtype) for part in others]

    def merges() -> None:
        for part, found in zip(others, of_calls, strict=True):
            assert part.q_rows is not None
            composition.merge(*whole, *found, part.q_rows)

    return replace(side, parts={"merge": merges})


# Blocks beyond head dim 256, larger ones first: FlexAttention's own ask for more shared memory than a Hopper GPU has.
FLEX_WIDE = [
    {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": stages, "fwd_num_warps": 8, "bwd_num_warps": 8}
    | {"bwd_num_stages": 1, **dict.fromkeys(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), rows)}
    for stages, rows in ((2, 32), (1, 16))
]
TOO_LARGE = "No valid triton configs"  # what its compiler says of blocks that do not fit


def flex_attention(inputs: Inputs, direction: str) -> Side:
    """FlexAttention, compiled, with the visibility rule as its mask; making the block mask apart. No sinks.

    Beyond head dim 256 with the first blocks of FLEX_WIDE that fit.
    """
    if max(inputs.workload.head_dims) <= 256:
        return _flex(inputs, direction, None)
    *others, last = FLEX_WIDE
    for options in others:
        try:
            side = _flex(inputs, direction, options)
            side.call()
            return side
        except RuntimeError as error:
            if TOO_LARGE not in str(error):
                raise
    return _flex(inputs, direction, last)


def _flex(inputs: Inputs, direction: str, options: dict[str, int] | None) -> Side:
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()  # every workload is another shape
    visible_end, total = inputs.layout.visible_end, inputs.layout.num_tokens
    workload, position = inputs.workload, inputs.layout.position_ids
    if workload.sinks:
        raise ValueError(f"computes no sinks, {workload.name} has them")
    cap, lowest = workload.softcap or 1.0, position * 0
    if workload.reach:
        lowest = torch.from_numpy(workload.reach.lowest(position.cpu().numpy())).to(inputs.device)

    def mask(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q < visible_end[k]) & (position[k] >= lowest[q])

    def capped(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return cap * torch.tanh(score / cap)

    def make_mask() -> Any:
        return torch.compile(flex.create_block_mask)(mask, None, None, total, total, device=inputs.device)

    def as_batch(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)[None].contiguous()

    def packed(x: torch.Tensor) -> torch.Tensor:
        return x[0].transpose(0, 1)

    block_mask = make_mask()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    leaves = q, k, v = [as_batch(x).requires_grad_(direction != "fwd") for x in (inputs.q, inputs.k, inputs.v)]

    def attend() -> torch.Tensor:
        score = capped if workload.softcap else None
        more = {"score_mod": score, "block_mask": block_mask, "scale": inputs.scale, "kernel_options": options}
        return compiled(q, k, v, enable_gqa=True, **more)

    return _attended(direction, attend, leaves, lambda: as_batch(inputs.dout), packed, {"mask": make_mask})


def cudnn_intervals(inputs: Inputs, direction: str) -> Side:
    """cuDNN's attention with intervals of visible keys (`cudnn.flex_attention`, which compiles for the device); each
    group is a sequence. Making its mask plan apart."""
    require("nvidia-cudnn-frontend", "this side")
    from cudnn import flex_attention as cudnn

    workload = inputs.workload
    if lacking := {*workload.names} - {"window"}:
        raise ValueError(f"does not compute {' and '.join(sorted(lacking))}, {workload.name} has them")
    segments = inputs.layout._segments
    ends = torch.from_numpy(interval_ends(segments, workload.reach)).to(inputs.device)
    lengths = group_lengths(segments).tolist()
    one, longest = len(lengths) == 1, max(lengths)
    cu = inputs.cumulative(lengths)
    spans = {} if one else {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    leaves = q, k, v = [x[None] if one else x for x in (inputs.q, inputs.k, inputs.v)]
    for x in leaves:
        x.requires_grad_(direction != "fwd")

    def make_plan() -> Any:
        return cudnn.create_mask_plan(ends, q, k, v, **spans, build_backward=direction != "fwd")

    plan = make_plan()

    def attend() -> torch.Tensor:
        return cudnn.flex_attn_func(q, k, v, mask_plan=plan, softmax_scale=inputs.scale)

    def packed(x: torch.Tensor) -> torch.Tensor:
        return x[0] if one else x

    dout = inputs.dout[None] if one else inputs.dout
    return _attended(direction, attend, leaves, lambda: dout, packed, {"plan": make_plan})


def magi_ranges(inputs: Inputs, direction: str) -> Side:
    """MagiAttention's kernels for ranges of rows and keys (`flex_flash_attn_func`): each segment with itself, causal,
    and with every one above it. Ranges of the same rows are merged, so that the forward adds nothing in memory."""
    from magi_attention.functional import flex_flash_attn_func

    inputs.check_plain()
    leaves = q, k, v = [x.detach().requires_grad_(direction != "fwd") for x in (inputs.q, inputs.k, inputs.v)]
    ranges = torch.tensor(inputs.ranges(), dtype=torch.int32, device=inputs.device)
    spans = [ranges[:, :2].contiguous(), ranges[:, 2:4].contiguous(), ranges[:, 4].contiguous()]
    options = {"softmax_scale": inputs.scale, "auto_range_merge": True, "disable_fwd_atomic_reduction": True}
    return _attended(
        direction, lambda: flex_flash_attn_func(q, k, v, *spans, **options)[0], leaves, lambda: inputs.dout
    )


def torch_flash_replicated(inputs: Inputs, direction: str) -> Side:
    """The FlashAttention kernel behind PyTorch's scaled_dot_product_attention, every response behind its own prompt.

    Raises:
        ValueError: a workload with other features, with values of another head dim, or too large for its backward.
    """
    inputs.check_plain()
    if len(set(inputs.workload.head_dims)) > 1:
        raise ValueError(f"takes one head dim, {inputs.workload.name} has {inputs.workload.head_dims}")
    sequences = inputs.replicated()
    rows, lengths = inputs.index(sequences), [len(r) for r in sequences]
    floats = composition.dq_floats(sum(lengths), len(lengths), inputs.q.shape[2]) * inputs.q.shape[1]
    if direction != "fwd" and floats >= composition.ELEMENTS:  # an illegal access would end the other sides too
        raise ValueError(f"its backward counts dq with 32 bits, {inputs.workload.name} has {floats} floats of it")
    qkv = [take(x, rows) for x in (inputs.q, inputs.k, inputs.v)]
    cu, longest = inputs.cumulative(lengths), max(lengths)
    spans = cu, cu, longest, longest, 0.0, True

    def forward() -> tuple[torch.Tensor, ...]:
        """(out, lse, two tensors of the random numbers of dropout)"""
        return torch.ops.aten._flash_attention_forward(*qkv, *spans, False, scale=inputs.scale)[:4]

    def backward(saved: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (out, lse, *dropout), scale = saved, inputs.scale
        return torch.ops.aten._flash_attention_backward(dout, *qkv, out, lse, *spans, *dropout, scale=scale)

    if direction == "fwd":

        def placed(out: torch.Tensor) -> torch.Tensor:
            return inputs.empty().index_copy_(0, rows, out)

        return _kept(lambda: forward()[:1], placed)

    def summed(grad: torch.Tensor) -> torch.Tensor:
        return added(inputs.q if grad.shape[1] == inputs.q.shape[1] else inputs.k, [(rows, grad)])

    dout = inputs.dout_of(rows)
    if direction == "bwd":
        saved = forward()
        return _kept(lambda: backward(saved), summed)
    return _kept(lambda: backward(forward()), summed)


SIDES: dict[str, Callable[[Inputs, str], Side]] = {
    "dualkv": ours,
    "dualkv-deterministic": partial(ours, deterministic=True),
    "fa4-3-calls": fa4.three_calls,
    "fa4-3-calls-deterministic": partial(fa4.three_calls, deterministic=True),
    "fa4-prompt-copied": fa4.prompt_copied,
    "fa4-replicated": fa4.replicated,
    "dualkv-cudnn": partial(ours, backend="cudnn"),
    "cudnn-intervals": cudnn_intervals,
    "magi-ranges": magi_ranges,
    "dualkv-flash": composed,
    "dualkv-flex": partial(ours, backend="flex"),
    "flex": flex_attention,
    "torch-flash-replicated": torch_flash_replicated,
}
BACKWARD_ONLY = {"dualkv-deterministic", "fa4-3-calls-deterministic"}  # a forward is deterministic anyway


def of_direction(names: Sequence[str], direction: str) -> list[str]:
    """Select the sides in `names` that are measured in a direction."""
    return [name for name in names if direction != "fwd" or name not in BACKWARD_ONLY]


def chosen(names: Sequence[str] | None) -> list[str]:
    """The sides asked for, all by default."""
    for name in names or ():
        if name not in SIDES:
            raise ValueError(f"--side is {name!r}, expected one of {', '.join(SIDES)}")
    return list(dict.fromkeys(names or SIDES))

"""The workloads of the benchmark: packed groups and the heads that attend over them."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from codegen.tiles import kernel_head_dims
from dualkv.bench import traces
from dualkv.data.files import Source, name_of
from dualkv.data.microbatch import plan_micro_batches
from dualkv.data.rollouts import load_tokenizer, read_rollouts
from dualkv.layout import Layout
from dualkv.ops.features import Features, Window

DTYPES = ("bf16", "fp16")
ALL_IN_ONE = 2**62  # tokens of a micro-batch that no file exceeds
# Products of a pair of a query and a key, by direction: over the head dim of q and k, over that of v.
PRODUCTS = {"fwd": (1, 1), "bwd": (3, 2), "both": (4, 3)}
DIRECTIONS = tuple(PRODUCTS)


@dataclass(frozen=True)
class Workload:
    """Groups of one micro-batch and the shape of the attention over them.

    Attributes:
        name: short, unique among the named ones.
        prompt_lens: tokens of each group's prompt.
        response_lens: tokens of each group's responses; of a tree, of every segment below the prompt in packed order.
        parent: of trees of more than two levels, the segment that each segment continues, -1 for a prompt; else empty.
        heads, kv_heads, head_dim, dtype: of q, and k and v.
        head_dim_v: of v, None if it is head_dim.
        window, chunk, sinks, softcap: of `dualkv.attention`; sinks: whether there are any.
    """

    name: str
    prompt_lens: tuple[int, ...]
    response_lens: tuple[tuple[int, ...], ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bf16"
    parent: tuple[int, ...] = ()
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    softcap: float | None = None
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected {' or '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads} and kv_heads {self.kv_heads}, expected a multiple of it")
        kernel_head_dims(*self.head_dims)

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dim of q and k, and that of v."""
        return self.head_dim, self.head_dim_v or self.head_dim

    def features(self, sinks: torch.Tensor | None = None) -> Features:
        """The features of its attention, with these sinks."""
        return Features(self.window, self.chunk, sinks, self.softcap)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its features (`Features.names`)."""
        return *self.features().names, *["sinks"] * self.sinks

    @property
    def reach(self) -> Window | None:
        """The keys of its path that a query sees; None: all before it."""
        return self.features().reach

    def with_shape(self, **given: int | str | None) -> Workload:
        """Copy the workload with other heads, kv_heads, head dims or dtype (None: unchanged); the new name says
        which."""
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self, name=" ".join([self.name, *(f"{n}={v}" for n, v in changes.items())]), **changes)

    def layout(self, device: str = "cpu") -> Layout:
        if self.parent:
            lengths = [n for p, below in zip(self.prompt_lens, self.response_lens, strict=True) for n in (p, *below)]
            return Layout.from_segments([0, *itertools.accumulate(lengths)], self.parent, device)
        return Layout.from_lengths(self.prompt_lens, self.response_lens, device)

    def visible_pairs(self) -> int:
        """(query, key) pairs of one head, each token counted once: the row at position p sees the keys up to p."""
        position = self.layout().position_ids.numpy()
        return int((position + 1 - (self.reach.lowest(position) if self.reach else 0)).sum())

    def flops(self, direction: str) -> int:
        """Count the FLOP of the deduplicated work, each prompt once: the unit of every TFLOP/s of the benchmark.

        A product is a multiply and an add for each pair, head, and element of a head:
        fwd:  2 (D + Dv) a pair and head (q k^T, p v).
        bwd:  2 (3 D + 2 Dv) (q k^T again, ds^T q, ds k; dout v^T, p^T dout); 2.5 times the forward's if Dv is D.
        both: the sum of them.
        """
        products = sum(n * head_dim for n, head_dim in zip(PRODUCTS[direction], self.head_dims, strict=True))
        return 2 * products * self.heads * self.visible_pairs()


def _one_group(name: str, prompt: int, responses: list[int], **shape: Any) -> Workload:
    return Workload(name, (prompt,), (tuple(responses),), **shape)


def _drawn_groups(
    name: str,
    groups: int = 64,
    prompt_lens: tuple[int, int] = (256, 2049),
    response_lens: tuple[int, int] = (64, 1025),
    **shape: Any,
) -> Workload:
    """Groups of 8 with lengths drawn at random: short tiles, many of them with rows of two segments."""
    draw = np.random.default_rng(0)
    responses = draw.integers(*response_lens, (groups, 8)).tolist()
    return Workload(name, tuple(draw.integers(*prompt_lens, groups).tolist()), tuple(map(tuple, responses)), **shape)


def _tree(name: str, lengths: Sequence[int], parent: Sequence[int]) -> Workload:
    """One tree of segments in depth-first order."""
    return Workload(name, (lengths[0],), (tuple(lengths[1:]),), parent=tuple(parent))


def _binary_tree(name: str, prompt: int, levels: int, length: int) -> Workload:
    """Make a tree with a prompt and `levels` levels of segments of one length below it, two below each segment."""
    parent = [-1]

    def add(above: int, left: int) -> None:
        for _ in range(2 if left else 0):
            parent.append(above)
            add(len(parent) - 1, left - 1)

    add(0, levels)
    return _tree(name, [prompt] + [length] * (len(parent) - 1), parent)


def _agent_tree(name: str, rollouts: int, turns: int, length: int) -> Workload:
    """Rollouts of so many turns of one length: each leaves an earlier one, drawn at random, after a turn at random."""
    draw = np.random.default_rng(0)
    paths, count = [list(range(turns))], turns
    for _ in range(rollouts - 1):
        shared = paths[draw.integers(len(paths))][: draw.integers(1, turns)]
        paths.append(shared + list(range(count, count := count + turns - len(shared))))
    above = {turn: up for path in paths for up, turn in itertools.pairwise(path)}
    place: dict[int, int] = {}
    parent: list[int] = []
    waiting = [0]
    while waiting:  # depth-first, whatever the order of the rollouts
        turn = waiting.pop()
        parent.append(place[above[turn]] if turn in above else -1)
        place[turn] = len(place)
        waiting += [t for t, up in above.items() if up == turn]
    return _tree(name, [length] * count, parent)


# Heads of models with windows, chunks, sinks and softcapping, by the name that workloads have behind their lengths.
_WINDOWS: dict[str, dict[str, Any]] = {
    "w128-d64-sinks": {"window": 128, "head_dim": 64, "heads": 64, "kv_heads": 8, "sinks": True},  # gpt-oss
    "w128-d64": {"window": 128, "head_dim": 64, "heads": 64, "kv_heads": 8},
    "d64-sinks": {"head_dim": 64, "heads": 64, "kv_heads": 8, "sinks": True},  # gpt-oss, full layers
    "d64": {"head_dim": 64, "heads": 64, "kv_heads": 8},
    "w512-d256": {"window": 512, "head_dim": 256, "heads": 8, "kv_heads": 4},  # Gemma 3
    "w1024-d256": {"window": 1024, "head_dim": 256, "heads": 8, "kv_heads": 4},
    "w4096-d256-cap": {"window": 4096, "head_dim": 256, "heads": 8, "kv_heads": 4, "softcap": 50.0},  # Gemma 2
    "w4096-d256": {"window": 4096, "head_dim": 256, "heads": 8, "kv_heads": 4},
    "w4096": {"window": 4096},  # OLMo 3, Mistral
}
_CHUNKS: dict[str, Any] = {"chunk": 8192, "heads": 40, "kv_heads": 8}  # Llama 4

_D192_V128: dict[str, Any] = {"head_dim": 192, "head_dim_v": 128}  # MLA, MiMo-V2

_UNIFORM = np.random.default_rng(0).integers(131, 2049, 32).tolist()
MAIN = "n32-p8192-r2048"
_MAIN = _one_group(MAIN, 8192, [2048] * 32)
NAMED = {
    workload.name: workload
    for workload in [
        _MAIN,
        _one_group("n28-p4096-r2048", 4096, [2048] * 28),
        _one_group("n28-p16384-r2048", 16384, [2048] * 28),
        _one_group("n28-p32768-r2048", 32768, [2048] * 28),
        _one_group("n16-p32768-r2048", 32768, [2048] * 16),
        _one_group("n64-p4096-r256", 4096, [256] * 64),
        _one_group("n32-p8192-uniform", 8192, _UNIFORM),
        _drawn_groups("g64-n8"),
        _binary_tree("binary-p4096-r1024", 4096, 4, 1024),
        _agent_tree("agent-t10-r512", 32, 10, 512),
        *(
            replace(_MAIN, name=f"{MAIN}-d{head_dim}-gqa{ratio}", head_dim=head_dim, kv_heads=32 // ratio)
            for head_dim in (64, 96, 192, 256)  # those on record: another one joins with a new record
            for ratio in (1, 4, 8)
        ),
        *(
            _one_group(f"{lengths}-{name}", prompt, [2048] * count, **shape)
            for lengths, prompt, count in ((MAIN, 8192, 32), ("n16-p32768-r2048", 32768, 16))
            for name, shape in _WINDOWS.items()
        ),
        *(
            _drawn_groups(f"g64-n8-{name}", **shape)
            for name, shape in _WINDOWS.items()
            if shape.get("window", 4096) < 4096
        ),
        *(  # responses that cross the end of a chunk
            _one_group(f"n{count}-p{prompt}-r2048-c8192", prompt, [2048] * count, **_CHUNKS)
            for prompt, count in ((7168, 32), (30720, 16))
        ),
        *(  # values of another head dim
            replace(lengths, name=f"{lengths.name}-d192v128-h{heads}", heads=heads, kv_heads=kv_heads, **_D192_V128)
            for lengths in (_MAIN, _one_group("n28-p4096-r2048", 4096, [2048] * 28), _drawn_groups("g64-n8"))
            for heads, kv_heads in ((16, 16), (64, 4))  # MLA with tensor parallelism; MiMo-V2, full layers
        ),
        _one_group("n8-p4096-r1024-d192v128-h128", 4096, [1024] * 8, heads=128, kv_heads=128, **_D192_V128),
        *(  # Gemma 4's layers of full attention
            replace(lengths, name=f"{lengths.name}-d512-h{heads}", heads=heads, kv_heads=kv_heads, head_dim=512)
            for lengths in (_MAIN, _one_group("n28-p4096-r2048", 4096, [2048] * 28), _drawn_groups("g64-n8"))
            for heads, kv_heads in ((16, 2), (8, 1))
        ),
        # What tensor parallelism leaves of 32 and 8 heads on one of 8 and of 4 GPUs.
        *(replace(_MAIN, name=f"{MAIN}-tp{tp}", heads=32 // tp, kv_heads=8 // tp) for tp in (8, 4)),
    ]
}


_FOUR = np.random.default_rng(0).integers(50, 1501, (4, 32)).tolist()
_SLOW = [  # shapes whose rates are below those of the main ones
    _drawn_groups("g128-n8-short", 128, (100, 501), (20, 401), heads=16, kv_heads=8),
    Workload("g4-n32-p1500-d64-gqa7", (1500,) * 4, tuple(map(tuple, _FOUR)), heads=14, kv_heads=2, head_dim=64),
    _one_group("n24-p3000-r1500-gqa5", 3000, [1500] * 24, heads=40),
    Workload("g4-n1-p100-r8000", (100,) * 4, ((8000,),) * 4),  # nothing is shared
]
NAMED |= {workload.name: workload for workload in _SLOW}
SLOW = [workload.name for workload in _SLOW]
EIGHT = list(NAMED)[:8]  # the main shapes: full attention, 32 and 8 heads of 128

# Fixed, unlike the table's head dims: an index names the same workload for ever. Few: peers compile for each pair.
RANDOM_HEAD_DIMS, RANDOM_RATIOS = (64, 96, 128, 192, 256), (1, 4, 8, 16)
RANDOM_FLOPS, RANDOM_TOKENS = 2 * 10**13, 2**17  # of a forward, at most


def random_workload(seed: int, index: int) -> Workload:
    """One group with lengths drawn: a prompt of 256..65536 tokens, 1..64 responses of 8..4096.

    Lengths and numbers are as likely to lie in one octave as in another; half of the groups have responses of one
    length, the others from a quarter of the longest on. What is too much for one GPU and a few milliseconds has fewer
    heads, or is drawn again. The index goes through all pairs of a head dim and a GQA ratio in turn.
    """
    draw, places = np.random.default_rng([seed, index]), len(RANDOM_HEAD_DIMS)
    head_dim, ratio = RANDOM_HEAD_DIMS[index % places], RANDOM_RATIOS[index // places % len(RANDOM_RATIOS)]

    def octaves(low: int, high: int) -> int:
        return round(2 ** draw.uniform(np.log2(low), np.log2(high)))

    while True:
        prompt, count, longest = octaves(256, 65536), octaves(1, 64), octaves(32, 4096)
        shortest = longest if draw.integers(2) else longest // 4
        responses = draw.integers(shortest, longest + 1, count).tolist()
        for heads in (32, 16, 8):
            if heads % ratio or prompt + sum(responses) > RANDOM_TOKENS:
                continue
            shape = {"heads": heads, "kv_heads": heads // ratio, "head_dim": head_dim}
            workload = _one_group(f"random-{seed}-{index}", prompt, responses, **shape)
            if workload.flops("fwd") <= RANDOM_FLOPS:
                return workload


def parse(text: str) -> Workload:
    """A workload by name, or by lengths: `P:R,R,NxR;...`, one `P:...` a group (`8192:32x2048`, `700:130,911;40:`).

    `random-SEED-INDEX` names a drawn one (:func:`random_workload`), `trace-KIND-SEED` the rollouts of an agent
    (:func:`dualkv.bench.traces.parse`).

    Raises:
        ValueError: neither a name nor such lengths.
    """
    if text in NAMED:
        return NAMED[text]
    if drawn := re.fullmatch(r"random-(\d+)-(\d+)", text):
        return random_workload(int(drawn[1]), int(drawn[2]))
    if trace := traces.parse(text):
        return of_layout(text, trace.layout())
    prompts, responses = [], []
    for group in text.split(";"):
        match = re.fullmatch(r"\s*(\d+)\s*:((?:\s*(?:\d+\s*x\s*)?\d+\s*(?:,|$))*)", group)
        if match is None:
            raise ValueError(
                f"workload {text!r} is neither a name such as {next(iter(NAMED))} (--list prints all) nor lengths "
                f"such as '8192:32x2048' or '700:130,911;40:5'; {group!r} is not of the form P:R,NxR"
            )
        lens: list[int] = []
        for times, length in re.findall(r"(?:(\d+)\s*x\s*)?(\d+)", match[2]):
            lens += [int(length)] * int(times or 1)
        prompts.append(int(match[1]))
        responses.append(tuple(lens))
    workload = Workload(text, tuple(prompts), tuple(responses))
    if not workload.visible_pairs():
        raise ValueError(f"workload {text!r} has no tokens, expected at least one")
    return workload


def of_layout(name: str, layout: Layout) -> Workload:
    """The segments of a layout of any depth."""
    parent = tuple(layout.parent.tolist()) if layout.depth > 2 else ()
    return Workload(name, tuple(layout.prompt_lens), tuple(map(tuple, layout.response_lens)), parent=parent)


def of_rollouts(path: Source, tokenizer: str | None = None, budget: int | None = None) -> list[Workload]:
    """The groups of a rollouts file: one workload, or one for each micro-batch of at most `budget` packed tokens.

    Only lengths count here. The name says where these are bytes of text that no tokenizer has encoded. A group beyond
    the budget is split and repeats its prompt.

    Raises:
        ValueError: a file that is no such rollouts, a budget below a prompt with one of its responses.
        OSError: a file that cannot be read.
    """
    encoder = load_tokenizer(tokenizer)
    rollouts = read_rollouts(path, encoder, None, rewards=False)
    name = os.path.basename(name_of(path)) + " (bytes)" * getattr(encoder, "used", False)
    prompt_lens = [len(prompt) for prompt in rollouts.prompts]
    response_lens = [[len(response) for response in group] for group in rollouts.responses]
    plans = plan_micro_batches(prompt_lens, response_lens, ALL_IN_ONE if budget is None else budget)
    return [
        Workload(
            name if budget is None else f"{name} {i}/{len(plans)}",
            tuple(prompt_lens[g] for g, _ in plan.parts),
            tuple(tuple(response_lens[g][r] for r in some) for g, some in plan.parts),
        )
        for i, plan in enumerate(plans, start=1)
    ]


def chosen(
    texts: Sequence[str] | None, rollouts: Source | None, tokenizer: str | None, budget: int | None
) -> list[Workload]:
    """The workloads asked for by name or lengths, and from a file.

    Raises:
        ValueError: what is no workload, options of a file without one.
        OSError: a file that cannot be read.
    """
    found = [parse(text) for text in texts or ()]
    if rollouts is not None:
        found += of_rollouts(rollouts, tokenizer, budget)
    elif tokenizer is not None or budget is not None:
        raise ValueError("--tokenizer and --budget go with --rollouts FILE, which is missing")
    return found


def directions(text: str) -> list[str]:
    """Parse a comma-separated part of `fwd,bwd,both`; the result is in this order."""
    given = [part.strip() for part in text.split(",")]
    for part in given:
        if part not in DIRECTIONS:
            raise ValueError(f"--direction is {text!r}, expected some of {','.join(DIRECTIONS)}")
    return [d for d in DIRECTIONS if d in given]

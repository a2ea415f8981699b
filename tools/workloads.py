"""What the benchmarks run: packed groups and the heads that attend over them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dualkv import Layout

DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Workload:
    """Groups of one micro-batch and the shape of the attention over them.

    Attributes:
        name: short, unique among the named ones.
        prompt_lens: tokens of each group's prompt.
        response_lens: tokens of each group's responses.
        heads, kv_heads, head_dim, dtype: of q, and k and v.
    """

    name: str
    prompt_lens: tuple[int, ...]
    response_lens: tuple[tuple[int, ...], ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected {' or '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads} and kv_heads {self.kv_heads}, expected a multiple of it")
        if self.head_dim % 8 or not 8 <= self.head_dim <= 256:
            raise ValueError(f"head_dim is {self.head_dim}, expected a multiple of 8 up to 256")

    def with_shape(self, **given: int | str | None) -> Workload:
        """The same groups with other heads, kv_heads, head_dim or dtype (None: as it is); the name says which."""
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self, name=" ".join([self.name, *(f"{n}={v}" for n, v in changes.items())]), **changes)

    def layout(self, device: str = "cpu") -> Layout:
        return Layout.from_lengths(self.prompt_lens, self.response_lens, device)

    def visible_pairs(self) -> int:
        """(query, key) pairs of one head, each token counted once: the row at position p sees p + 1 keys."""
        return int((self.layout().position_ids + 1).sum())

    def forward_flops(self) -> int:
        """Two products, a multiply and an add for each pair and element of a head: what deduplicated work costs."""
        return 4 * self.head_dim * self.heads * self.visible_pairs()


def _one_group(name: str, prompt: int, responses: list[int]) -> Workload:
    return Workload(name, (prompt,), (tuple(responses),))


_UNIFORM = np.random.default_rng(0).integers(131, 2049, 32).tolist()
_MAIN = _one_group("n32-p8192-r2048", 8192, [2048] * 32)
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
        *(
            replace(_MAIN, name=f"{_MAIN.name}-d{head_dim}-gqa{ratio}", head_dim=head_dim, kv_heads=32 // ratio)
            for head_dim in (64, 96, 192, 256)
            for ratio in (1, 4, 8)
        ),
    ]
}


def parse(text: str) -> Workload:
    """A workload by name, or by lengths: `P:R,R,NxR;...`, one `P:...` a group (`8192:32x2048`, `700:130,911;40:`).

    Raises:
        ValueError: neither a name nor such lengths.
    """
    if text in NAMED:
        return NAMED[text]
    prompts, responses = [], []
    for group in text.split(";"):
        match = re.fullmatch(r"\s*(\d+)\s*:((?:\s*(?:\d+\s*x\s*)?\d+\s*,?)*)", group)
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

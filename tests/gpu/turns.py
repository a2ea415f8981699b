"""`python -m tests.gpu.turns SECONDS WHAT DIGEST ...`: one of several processes between which the GPU switches.

Calls the kernels of each head dim ("128" or "192/128"), or the composition's "merge", in turn. Prints how many calls
there were, and which results differed: the first results from the ones with the digest, later results from the first.
Kernels run for milliseconds, so many calls are interrupted.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable

import torch

from dualkv import Layout
from dualkv.ops import composition, hopper

LAYOUT = [3000, 100], [[400] * 9, [700] * 2]
HEADS, KV_HEADS = 8, 2
NAMES = "out", "lse", "dq", "dk", "dv"
MERGE, MERGED = "merge", 20_000  # rows


def caller(words: str) -> Callable[[], list[torch.Tensor]]:
    """A forward and a deterministic backward: out, lse, dq, dk and dv. Of "merge" out and lse."""
    if words == MERGE:
        return merger()
    head_dim, head_dim_v = of_words(words)
    layout, generator = Layout.from_lengths(*LAYOUT), torch.Generator("cuda").manual_seed(head_dim)
    q, k, v, dout = (
        torch.randn((layout.num_tokens, h, d), device="cuda", generator=generator).bfloat16()
        for h, d in ((HEADS, head_dim), (KV_HEADS, head_dim), (KV_HEADS, head_dim_v), (HEADS, head_dim_v))
    )

    def call() -> list[torch.Tensor]:
        saved = hopper.forward(q, k, v, layout._segments, head_dim**-0.5)
        call = layout._segments, head_dim**-0.5
        return [*saved, *hopper.backward(dout, q, k, v, *saved, *call, deterministic=True)[:3]]

    return call


def merger() -> Callable[[], list[torch.Tensor]]:
    """The composition's merge: rows anywhere, of a head dim that several warps share."""
    generator = torch.Generator("cuda").manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    rows = torch.randperm(MERGED, device="cuda", generator=generator)
    out, part = (drawn(MERGED, HEADS, 256).bfloat16() for _ in range(2))
    lse, part_lse = (5 * drawn(HEADS, MERGED) for _ in range(2))

    def call() -> list[torch.Tensor]:
        merged = [out.clone(), lse.clone()]
        composition.merge(*merged, part, part_lse, rows)
        return merged

    return call


def digest(results: list[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for x in results:
        total.update(x.cpu().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def of_words(words: str) -> tuple[int, int]:
    """Head dims of queries and keys, and of values: "128" or "192/128"."""
    head_dim, _, head_dim_v = words.partition("/")
    return int(head_dim), int(head_dim_v or head_dim)


def differences(got: list[torch.Tensor], want: list[torch.Tensor]) -> str:
    """Describe each result that differs: its name, how many rows differ, and by how much at most; "" if none does."""
    found = []
    for name, x, y in zip(NAMES[: len(want)], got, want, strict=True):
        if not torch.equal(x, y):
            apart = (x.float() - y.float()).abs().flatten(1)  # of a token, or of a head in lse
            found.append(f"{name}: {int((apart != 0).any(1).sum())} rows by up to {apart.max().item():.3g}")
    return ", ".join(found)


def main() -> None:
    seconds, given = float(sys.argv[1]), sys.argv[2:]
    calls = {words: caller(words) for words in given[::2]}
    wants = {words: call() for words, call in calls.items()}
    different: dict[str, list[str]] = {words: [] for words in calls}
    for words, want in zip(*[iter(given)] * 2, strict=True):
        if digest(wants[words]) != want:
            different[words].append("the first call")
    count, end = len(calls), time.monotonic() + seconds
    while time.monotonic() < end:
        for words, call in calls.items():
            if apart := differences(call(), wants[words]):
                different[words].append(apart)
            count += 1
    print(json.dumps({"calls": count, "different": {words: found for words, found in different.items() if found}}))


if __name__ == "__main__":
    main()

"""FlashAttention-4 (the package flash-attn-4) on packed groups, in three ways.

What it needs rearranged (sequences replicated, prompts copied) is rearranged here, outside what is timed, and its cost
is offered as a part of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dualkv.bench.inputs import Inputs, Rows, Side, added, take

Apart = dict[str, dict[str, Callable[[], Any]]]  # what a side times beside its calls: by direction, by name


class Varlen:
    """One call over sequences: query rows and key rows of each, as index arrays; empty ones are left out.

    Attributes:
        q_rows, k_rows: packed rows of all queries and of all keys.
        out, lse: of the last forward, [query rows, H, D] and [H, query rows].
        dq, dk, dv: of the last backward, [query rows, H, D] and [key rows, Hk, D].
    """

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    def __init__(
        self, inputs: Inputs, q_rows: list[Rows], k_rows: list[Rows], causal: bool, deterministic: bool = False
    ) -> None:
        from flash_attn.cute import interface

        kept = [(q, k) for q, k in zip(q_rows, k_rows, strict=True) if len(q) and len(k)]
        self.sequences, self._inputs, self._interface = len(kept), inputs, interface
        self.q_rows, self.k_rows = inputs.index([q for q, _ in kept]), inputs.index([k for _, k in kept])
        if not kept:
            return
        q_lens, k_lens = [len(q) for q, _ in kept], [len(k) for _, k in kept]
        self._qkv = take(inputs.q, self.q_rows), take(inputs.k, self.k_rows), take(inputs.v, self.k_rows)
        self._settings: dict[str, Any] = {
            "cu_seqlens_q": inputs.cumulative(q_lens), "cu_seqlens_k": inputs.cumulative(k_lens),
            "max_seqlen_q": max(q_lens), "max_seqlen_k": max(k_lens),
            "softmax_scale": inputs.scale, "causal": causal,
        }  # fmt: skip
        f = inputs.features
        theirs = {"window_size_left": f.window and f.window - 1, "learnable_sink": f.sinks, "softcap": f.softcap}
        self._settings |= {name: value for name, value in theirs.items() if value is not None}
        self._deterministic = deterministic

    def forward(self) -> None:
        if self.sequences:
            self.out, self.lse = self._interface._flash_attn_fwd(*self._qkv, **self._settings, return_lse=True)[:2]

    def ready(self, out: torch.Tensor | None = None, lse: torch.Tensor | None = None) -> None:
        """Save what the backward reads: out and lse of these queries over all their keys (None: of the last
        forward)."""
        if self.sequences:
            self._saved = (
                self.out if out is None else out,
                self._inputs.dout_of(self.q_rows),
                self.lse if lse is None else lse,
            )

    def backward(self) -> None:
        if self.sequences:
            self.dq, self.dk, self.dv = self._interface._flash_attn_bwd(
                *self._qkv, *self._saved, **self._settings, deterministic=self._deterministic
            )[:3]


def _side(
    inputs: Inputs,
    direction: str,
    calls: dict[str, Varlen],
    out: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]],
    ready: Callable[[], None],
    extra: Apart,
) -> Side:
    """The side that runs all `calls`. After the forwards `out` has (rows, values) of the output, and `ready` makes the
    calls ready for the backward; `extra` has, by direction, what a whole step needs beside the calls."""
    calls = {name: call for name, call in calls.items() if call.sequences}
    runs: list[Callable[[], None]] = []
    if direction != "bwd":
        runs += [call.forward for call in calls.values()]
    if direction != "fwd":
        for call in calls.values():
            call.forward()
        ready()
        runs += [call.backward for call in calls.values()]

    def run() -> None:
        for part in runs:
            part()

    def results() -> tuple[torch.Tensor, ...]:
        if direction == "fwd":
            packed = inputs.empty()
            for rows, values in out():
                packed[rows] = values
            return (packed,)
        dq = added(inputs.q, [(call.q_rows, call.dq) for call in calls.values()])
        dk, dv = (
            added(like, [(call.k_rows, getattr(call, name)) for call in calls.values()])
            for name, like in (("dk", inputs.k), ("dv", inputs.v))
        )
        return dq, dk, dv

    beside = {
        name: part
        for way in (("fwd", "bwd") if direction == "both" else (direction,))
        for name, part in extra.get(way, {}).items()
    }
    parts = {} if direction == "both" else dict(zip(calls, runs, strict=True))
    return Side(run, results, {**parts, **beside}, tuple(beside))


# ---------------------------------------------------------------- three calls
def _merge(
    a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two partial results over different keys, out [n, H, D] and lse [H, n], as one."""
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((x - lse).exp().t().unsqueeze(-1) for x in (lse_a, lse_b))
    return (a * share_a + b * share_b).to(a.dtype), lse


def three_calls(inputs: Inputs, direction: str, deterministic: bool = False) -> Side:
    """Prompts causal, responses against their prompt, responses causal.

    Apart: `merge` of the last two's partial outputs; `sum` of what two of the calls add to one gradient (dq of
    responses; dk and dv of prompts).

    Raises:
        ValueError: windows, chunks, sinks or softcapping.
    """
    inputs.check_plain()
    prompts = [p for p, _ in inputs.groups]
    responses = [r for _, group in inputs.groups for r in group]
    together = [np.concatenate([np.zeros(0, np.int64), *group]) for _, group in inputs.groups]
    prompt = Varlen(inputs, prompts, prompts, True, deterministic)
    context = Varlen(inputs, together, prompts, False, deterministic)
    own = Varlen(inputs, responses, responses, True, deterministic)
    merge = torch.compile(_merge, dynamic=True)  # one compile for all lengths
    # Where the rows of `context` lie among those of `own` and of `prompt`; None: they are the same.
    in_own, in_prompt = (
        None if len(some) == len(every) else torch.searchsorted(every, some)
        for some, every in ((context.q_rows, own.q_rows), (context.k_rows, prompt.k_rows))
    )

    def merged() -> tuple[torch.Tensor, torch.Tensor]:
        partial = (own.out, own.lse) if in_own is None else (own.out[in_own], own.lse[:, in_own])
        return merge(context.out, context.lse, *partial)

    def out() -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = [(call.q_rows, call.out) for call in (prompt, own) if call.sequences]
        return [*parts, (context.q_rows, merged()[0])] if context.sequences else parts

    def ready() -> None:
        prompt.ready()
        own.ready()
        if not context.sequences:
            return
        whole = merged()
        context.ready(*whole)
        if in_own is not None:  # some responses have no context: their own part is the whole
            whole, (part_out, part_lse) = (own.out.clone(), own.lse.clone()), whole
            whole[0][in_own] = part_out
            whole[1][:, in_own] = part_lse
        own.ready(*whole)

    def add(x: torch.Tensor, part: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        return x + part if rows is None else x.index_add(0, rows, part)

    def summed() -> None:
        add(own.dq, context.dq, in_own)
        add(prompt.dk, context.dk, in_prompt)
        add(prompt.dv, context.dv, in_prompt)

    calls = {"prompt": prompt, "context": context, "own": own}
    extra: Apart = {"fwd": {"merge": merged}, "bwd": {"sum": summed}} if context.sequences else {}
    return _side(inputs, direction, calls, out, ready, extra)


# ---------------------------------------------------------------- prompts copied, sequences replicated
def prompt_copied(inputs: Inputs, direction: str) -> Side:
    """Prompts, and every response behind a copy of its prompt's K and V (with a window: of the prompt's tail): causal,
    in one call. Chunks are sequences of their own.

    Apart: `copy` of K and V; `sum` of the copies' dk and dv.
    """
    q_rows, k_rows = zip(*inputs.copied(), strict=True)
    call = Varlen(inputs, list(q_rows), list(k_rows), True)

    def copy() -> None:
        for x in (inputs.k, inputs.v):
            x[call.k_rows]

    def summed() -> None:
        for like, grad in ((inputs.k, call.dk), (inputs.v, call.dv)):
            added(like, [(call.k_rows, grad)])

    extra: Apart = {"fwd": {"copy": copy}, "bwd": {"sum": summed}} if len(call.k_rows) > len(inputs.k) else {}
    return _side(inputs, direction, {"sequences": call}, lambda: [(call.q_rows, call.out)], call.ready, extra)


def replicated(inputs: Inputs, direction: str) -> Side:
    """Every response behind a prompt of its own, with full attention."""
    inputs.check_plain()
    rows = inputs.replicated()
    call = Varlen(inputs, rows, rows, True)
    return _side(inputs, direction, {"sequences": call}, lambda: [(call.q_rows, call.out)], call.ready, {})

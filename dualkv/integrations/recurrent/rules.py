"""Convolutions and gated delta rules of packed rows, of a library's functions for plain sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from dualkv.integrations.recurrent import kernels
from dualkv.integrations.recurrent.ops import convolve, convolve_at_once, padded, scan
from dualkv.integrations.recurrent.walked import Trees
from dualkv.integrations.recurrent.waves import Wave, Windows

Tensor = torch.Tensor


def convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """A causal depthwise convolution of sequences [N, C, L] by weight [C, k], with zeros before each."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"a recurrent layer has the activation {activation!r} behind its convolution, expected silu")
    back = weight.shape[-1] - 1
    out = F.conv1d(F.pad(hidden_states, (back, 0)), weight[:, None], bias, groups=len(weight))
    return out if activation is None else F.silu(out)


def convolution_of_paths(
    trees: Trees,
    conv: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel: Callable[..., Tensor] | None = None,
    **activation: str | None,
) -> Tensor:
    """A causal depthwise convolution along the paths of trees.

    Args:
        trees: of t own rows.
        conv: as for :func:`.ops.convolve`.
        x: [1, C, t].
        weight: [C, k].
        bias: [C] or None.
        kernel: as for :func:`.ops.convolve_at_once`; runs in the place of `conv`.
        activation: a keyword argument of both, or none.

    Returns:
        [1, C, t].
    """

    def run(windows: Windows | None, x: Tensor) -> Tensor:
        if kernel is None:
            return convolve(conv, windows, x, weight, bias, **activation)
        return convolve_at_once(kernel, windows, x, weight, bias, **activation)

    return trees.convolve(run, x, weight.shape[-1] - 1)


def delta_rule(trees: Trees, rows: list[Tensor], rule: Callable[..., Any], kernel: str | None, **given: Any) -> Tensor:
    """The gated delta rule, or Kimi's delta attention, along the paths of trees.

    Args:
        trees: of t own rows.
        rows: query and key [1, t, Hk, K], value [1, t, H, V], g (a logarithm) [1, t, H] or [1, t, H, K], beta
            [1, t, H]; Hk divides H, and a key head serves H / Hk neighbours.
        rule: `(query, key, value, g=, beta=, initial_state=, output_final_state=, **given)` of a batch of sequences,
            whose rows with beta = 0 and g = 0 leave the state as it is. Returns results and states.
        kernel: the name of the function of flash-linear-attention that runs in its place on a GPU; None for none.
        given: further arguments of both.

    Returns:
        [1, t, H, V].
    """
    if not trees.num_tokens:
        return torch.zeros_like(rows[2])
    function = None if kernel is None else kernels.library(kernel, rows[0].device)

    def by_head(rows: list[Tensor]) -> list[Tensor]:
        q, k, v, *gates = rows
        repeats = v.shape[2] // k.shape[2]
        return [*((x.repeat_interleave(repeats, 2) for x in (q, k)) if repeats > 1 else (q, k)), v, *gates]

    def batch(rows: list[Tensor], initial: Tensor | None, keep: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta = by_head(rows)
        found = rule(q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=keep, **given)
        return found[0], found[1]

    def of_wave(rows: list[Tensor], initial: Tensor | None, wave: Wave) -> tuple[Tensor, Tensor | None]:
        assert function is not None
        q, k, v, g, beta = by_head(rows)
        return varlen(function, [q, k, v], {"g": g, "beta": beta}, initial, wave, given)

    out = scan(trees, trees.to_heads(rows), padded(batch) if function is None else of_wave)
    return trees.to_rows(out)


def varlen(
    function: Callable[..., Any],
    rows: list[Tensor],
    gates: dict[str, Tensor],
    initial: Tensor | None,
    wave: Wave,
    given: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """One call of a kernel of flash-linear-attention for a wave. Without cu_seqlens_cpu it would wait for the GPU."""
    q, k, v = rows
    out, states = function(
        q,
        k,
        v,
        **gates,
        initial_state=initial,
        output_final_state=wave.keep,
        cu_seqlens=wave.cu_seqlens,
        cu_seqlens_cpu=wave.cu_seqlens_cpu,
        **given,
    )
    return out, states

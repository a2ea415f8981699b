"""Convolutions, gated delta rules and Mamba-2 of packed rows, by functions for plain sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from dualkv.integrations.recurrent import kernels
from dualkv.integrations.recurrent.ops import contiguous, convolve, convolve_at_once, padded, scan
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
    """A causal depthwise convolution of x [1, C, t] along the paths of trees of t own rows, by weight [C, k]: by `conv`
    as for :func:`.ops.convolve`, or by `kernel` as for :func:`.ops.convolve_at_once`, with the same keyword
    argument."""

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
        kernel: the name of the function of flash-linear-attention that runs in its place on a GPU; None for none. It
            takes fewer key heads than value heads.
        given: further arguments of both.

    Returns:
        [1, t, H, V].
    """
    if not trees.num_tokens:
        return torch.zeros_like(rows[2])
    function = None if kernel is None else kernels.library(kernel, rows[0].device)

    def batch(rows: list[Tensor], initial: Tensor | None, keep: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta = rows
        if (repeats := v.shape[2] // k.shape[2]) > 1:
            q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
        found = rule(q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=keep, **given)
        return found[0], found[1]

    def of_wave(rows: list[Tensor], initial: Tensor | None, wave: Wave) -> tuple[Tensor, Tensor | None]:
        assert kernel is not None
        assert function is not None
        q, k, v, g, beta = rows
        more = given | kernels.chunks(kernel, wave)
        return varlen(function, [q, k, v], {"g": g, "beta": beta}, initial, wave, more)

    rows = trees.to_heads(rows)
    if function is None:
        return trees.to_rows(scan(trees, rows, padded(batch)))
    return trees.to_rows(scan(trees, list(map(contiguous, rows)), of_wave))


def mamba2(
    trees: Trees,
    rows: list[Tensor],
    A: Tensor,
    function: Callable[..., Any],
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    **given: Any,
) -> Tensor:
    """Mamba-2 along the paths of trees.

    Bias, softplus and limits of dt are applied before the padding: a limit from below would make 0 another value.

    Args:
        trees: of t own rows.
        rows: x [1, t, H, P], dt [1, t, H], B and C [1, t, G, S]; H is a multiple of G.
        A: [H], negative.
        function: as :func:`chunk_scan`, whose rows with dt = 0 leave the state as it is.
        D, dt_bias: [H].
        dt_limit: the least and the largest dt.
        given: further arguments of `function`.

    Returns:
        [1, t, H, P].
    """
    if not trees.num_tokens:
        return torch.zeros_like(rows[0])
    x, dt, b, c = trees.to_heads(rows)
    A = trees.share(A)
    if D is not None:
        given["D"] = trees.share(D)
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    if dt_bias is not None:
        dt = dt + trees.share(dt_bias).to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    if dt_limit is not None:
        dt = dt.clamp(*dt_limit)

    def batch(rows: list[Tensor], initial: Tensor | None, keep: bool) -> tuple[Tensor, Tensor | None]:
        x, dt, b, c = rows
        found = function(x, dt, A, b, c, initial_states=initial, return_final_states=keep, **given)
        return found if keep else (found, None)

    return trees.to_rows(scan(trees, [x, dt, b, c], padded(batch)))


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> Any:
    """Mamba-2 (https://arxiv.org/abs/2405.21060, section 6), chunk by chunk of rows, in fp32 at least.

    A row decays the state [P, S] of a head by exp(A dt), adds dt x B^T, and gives C times the state, plus D x.

    Args:
        hidden_states: x, [N, L, H, P].
        dt: [N, L, H].
        A: [H], negative.
        B, C: [N, L, G, S]; H is a multiple of G.
        chunk_size: rows.
        D: [H].
        initial_states: [N, H, P, S].

    Returns:
        [N, L, H, P], and with `return_final_states` the states [N, H, P, S] too.
    """
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    whole, dt, A = hidden_states.to(dtype), dt.to(dtype), A.to(dtype)
    repeats = whole.shape[2] // B.shape[2]
    b, c = (x.to(dtype).repeat_interleave(repeats, 2) for x in (B, C))
    state = None if initial_states is None else initial_states.to(dtype)
    results = []
    for x, steps, b_, c_ in zip(*(x.split(chunk_size, 1) for x in (whole, dt, b, c)), strict=True):
        grown = (x * steps[..., None]).transpose(1, 2)  # [N, H, L, P]
        keys, queries = b_.transpose(1, 2), c_.transpose(1, 2)  # [N, H, L, S]
        age = (steps * A).cumsum(1).transpose(1, 2)  # [N, H, L]
        since = age[..., :, None] - age[..., None, :]
        later = torch.ones(since.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        out = (queries @ keys.transpose(-1, -2) * since.masked_fill(later, -torch.inf).exp()) @ grown
        new = grown.transpose(-1, -2) @ (keys * (age[..., -1:] - age).exp()[..., None])
        if state is not None:
            out = out + (queries * age.exp()[..., None]) @ state.transpose(-1, -2)
            new = new + state * age[..., -1].exp()[..., None, None]
        state = new
        results.append(out.transpose(1, 2))
    found = torch.cat(results, 1)
    if D is not None:
        found = found + whole * D.to(dtype)[:, None]
    return (found, state) if return_final_states else found


def varlen(
    function: Callable[..., Any],
    rows: list[Tensor],
    gates: dict[str, Tensor],
    initial: Tensor | None,
    wave: Wave,
    given: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """One call of a kernel of flash-linear-attention for a wave. Without cu_seqlens_cpu it would wait for the GPU."""
    lens = {"cu_seqlens": wave.cu_seqlens, "cu_seqlens_cpu": wave.cu_seqlens_cpu}
    out, states = function(*rows, **gates, initial_state=initial, output_final_state=wave.keep, **lens, **given)
    return out, states

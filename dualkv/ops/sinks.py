"""Attention sinks around kernels without them: a sink rescales the result, and has a gradient."""

from __future__ import annotations

import torch


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, D] in its dtype, lse [H, T]) with sinks [H], from out and lse without; unchanged if sinks is None."""
    if sinks is None:
        return out, lse
    new_lse = torch.logaddexp(lse, sinks[:, None])
    return (out * (lse - new_lse).exp().t()[..., None]).to(out.dtype), new_lse


def dsinks(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, dlse: torch.Tensor | None
) -> torch.Tensor:
    """[H] fp32: the sum over rows of exp(sink - lse) * (dlse - dout . out); [0] without sinks."""
    if sinks is None:
        return lse.new_empty(0)
    delta = (dout.float() * out).sum(-1).t()
    return ((sinks[:, None] - lse).exp() * (-delta if dlse is None else dlse - delta)).sum(1)

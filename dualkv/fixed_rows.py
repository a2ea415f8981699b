"""Products with weights whose rows have the same bits whatever stands beside them.

A library chooses the algorithm of a product by its number of rows, and algorithms differ in the order of a row's sum.
Here each product takes equally many rows at a time, the last ones filled up with zeros, so one algorithm makes all
rows. A row's place among them does not count: measured on an H200 over the shapes of Qwen3-8B's layers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

ROWS = 2048  # of a product on a GPU: more leave more zeros in the last one, fewer are slower


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int = 0) -> torch.Tensor:
    """`nn.functional.linear` of x [..., C] and weight [V, C], whose rows have the same bits in every call.

    rows: of a product on a GPU, 0 for ROWS. Gradients are those of `nn.functional.linear`.
    """
    distributed = sys.modules.get("torch.distributed.tensor")  # if it is not imported, the weight is no DTensor
    if distributed is not None and isinstance(weight, distributed.DTensor):
        raise ValueError("batch_invariant is True and a weight is a DTensor, expected whole weights: FSDP gathers them")
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        size = (rows or ROWS) if x.is_cuda else 1
        flat: torch.Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, size)
    return flat.view(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    """x [n, C] @ weight [V, C].T + bias [V], `rows` rows at a time in the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        x = x.contiguous()
        x = x.clone() if x.data_ptr() % 16 else x  # addresses count in the choice of an algorithm
        out = x.new_empty(len(x), len(weight))
        whole = len(x) // rows * rows
        for begin in range(0, whole, rows):
            _product(x[begin : begin + rows], weight, bias, out[begin : begin + rows])
        if whole < len(x):
            last = x.new_zeros(rows, x.shape[1])
            last[: len(x) - whole] = x[whole:]
            out[whole:] = _product(last, weight, bias, x.new_empty(rows, len(weight)))[: len(x) - whole]
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            grad @ weight if needs_x else None,
            grad.T @ x if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
        )


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)

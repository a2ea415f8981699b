"""Log-probabilities and entropies of response tokens, without ever holding the logits of all rows.

Only rows that predict a response token meet the head, each once: in the gather style a prompt's last row predicts the
first token of every response of its group, and its logits serve all of them. Rows go through the head in chunks, and
the backward makes the logits of each chunk again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from dualkv.arrays import IntArray
from dualkv.data.packing import PackedBatch
from dualkv.data.parts import TreePart
from dualkv.data.trees import PackedSequences

# Rows u0..u1 of the distinct predicting rows, and tokens t0..t1 (in the order of those rows) that they predict.
Chunk = tuple[int, int, int, int]


def response_logprobs(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    batch: PackedBatch | PackedSequences | TreePart,
    temperature: float = 1.0,
    *,
    softcap: float | None = None,
    chunk_size: int = 1024,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each response token, and entropy of the distribution it was drawn from.

    With `s = hidden @ lm_head_weight.T`, capped to `softcap * tanh(s / softcap)` if asked for, and
    `z = s / temperature` at the row that predicts a token: `log_softmax(z)[token]` and
    `-sum(softmax(z) * log_softmax(z))`. Both are differentiable with respect to `hidden` and `lm_head_weight`.

    The head's matrix products run in the dtype of the inputs (under autocast in its dtype), as a model's own head does;
    everything behind them is fp32, and so is the sum of the head's gradient over chunks. No sum depends on the order
    in which threads finish. At most `chunk_size` rows of V logits exist at a time, in forward and in backward.

    Args:
        hidden: [1, T, C] or [T, C] last hidden states of the packed tokens; bf16, fp16, fp32 or fp64.
        lm_head_weight: [V, C] the head without bias; dtype and device of `hidden`.
        batch: what :func:`dualkv.pack`, `pack_padded` or `pack_sequences` returned, on the device of `hidden`; or
            a part of that in :func:`dualkv.walk`.
        temperature: above 0; divides the logits. A model that scales its logits (Cohere's `logit_scale`, Granite's
            `logits_scaling`) takes the temperature divided by its factor.
        softcap: above 0, of models that cap their logits (Gemma 2's `final_logit_softcapping`); none by default.
        chunk_size: rows of the head at a time. Larger is faster until the head's products fill the device.
        compiled: what is between the head's products runs through `torch.compile`, which reads the logits twice and not
            about thirty times; the first call waits for the compiler.

    Returns:
        logp: [M] fp32 (fp64 for fp64 inputs), in the order of `batch.targets`; `batch.unpack` makes rows of it.
        entropy: [M] the same, in nats.

    Raises:
        ValueError: shapes, dtypes or devices that do not match, a temperature or cap that is not above 0 and finite,
            response tokens outside the vocabulary. Tokens on a GPU are checked there, without waiting for it: the
            failure is a device-side assertion.
        TypeError: tensors that are not floating point.
    """
    states = _checked(hidden, lm_head_weight, batch, temperature, softcap, chunk_size)
    device = states.device.type
    # The casts autocast would make, where autograd sees them; fp64 stays, as autocast leaves it.
    if torch.is_autocast_enabled(device) and states.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        states, lm_head_weight = states.to(dtype), lm_head_weight.to(dtype)
    if states.dtype != lm_head_weight.dtype:
        raise ValueError(f"hidden is {states.dtype}, lm_head_weight {lm_head_weight.dtype}, expected one dtype")

    # Tokens in the order of the rows that predict them; the rows, each once; the place among them of each token's row.
    chunks = _chunks(batch._tokens_of_row, chunk_size)
    predicting, token = batch.predict_rows.sort(stable=True)
    row = torch.zeros_like(predicting)
    torch.cumsum(predicting[1:] != predicting[:-1], 0, out=row[1:])
    rows = predicting.new_empty(len(batch._tokens_of_row)).scatter_(0, row, predicting)
    targets = batch.targets.index_select(0, token)
    return _HeadLogProbs.apply(
        states, lm_head_weight, rows, token, row, targets, chunks, float(temperature), softcap, compiled
    )


def _checked(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    batch: PackedBatch | PackedSequences | TreePart,
    temperature: float,
    softcap: float | None,
    chunk_size: int,
) -> torch.Tensor:
    """hidden as [T, C], once everything is as it should be."""
    for name, tensor in (("hidden", hidden), ("lm_head_weight", lm_head_weight)):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
            raise TypeError(f"{name} must be a floating point tensor, got {found}")
        if tensor.device != batch.device:
            raise ValueError(f"{name} is on {tensor.device}, batch on {batch.device}, expected one device (batch.to)")
    if lm_head_weight.dim() != 2:
        raise ValueError(f"lm_head_weight must have two dimensions [V, C], got shape {tuple(lm_head_weight.shape)}")
    vocabulary, width = lm_head_weight.shape
    total = batch.layout.num_tokens
    if hidden.shape not in ((1, total, width), (total, width)):
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, expected [1, {total}, {width}] or [{total}, {width}] "
            "(packed tokens, columns of lm_head_weight)"
        )
    for name, number in (("temperature", temperature), ("softcap", softcap)):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} is {number}, expected a finite number above 0")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, expected 1 row or more")
    targets = batch.targets
    inside = (targets >= 0) & (targets < vocabulary)
    if targets.device.type == "cpu":
        if not inside.all():
            wrong = int(targets[~inside][0])
            raise ValueError(f"response token {wrong} is outside the vocabulary, lm_head_weight has {vocabulary} rows")
    else:
        torch._assert_async(inside.all(), "a response token is outside the vocabulary of lm_head_weight")
    return hidden.reshape(total, width)


def _chunks(tokens_of_row: IntArray, chunk_size: int) -> list[Chunk]:
    """Chunks of the predicting rows with the tokens they predict; from host numbers only."""
    row_ends = np.append(np.arange(0, len(tokens_of_row), chunk_size), len(tokens_of_row))
    token_ends = np.append(0, np.cumsum(tokens_of_row))[row_ends]
    ends = np.stack([row_ends[:-1], row_ends[1:], token_ends[:-1], token_ends[1:]], 1)
    return [(u0, u1, t0, t1) for u0, u1, t0, t1 in ends.tolist()]


def _wide(logits: torch.Tensor, temperature: float, softcap: float | None) -> torch.Tensor:
    """A copy of the logits in fp32 (fp64 for fp64), capped and divided by the temperature."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if softcap is not None:
        wide.div_(softcap).tanh_().mul_(softcap)
    return wide if temperature == 1.0 else wide.div_(temperature)


def _statistics(
    logits: torch.Tensor, temperature: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [u, V] -> largest [u], log of the sum of exponentials relative to it [u], entropy [u]."""
    z = _wide(logits, temperature, softcap)
    top = z.amax(1)
    z = z.sub_(top[:, None])
    e = z.exp()
    total = e.sum(1)
    log_total = total.log()
    return top, log_total, log_total - e.mul_(z).sum(1) / total


def _logits_gradient(
    logits: torch.Tensor,
    temperature: float,
    softcap: float | None,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    g_logp: torch.Tensor,
    g_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """d loss / d z [u, V], but for the tokens themselves; lse, entropy, g_logp, g_entropy [u].

    d entropy / dz_v = -p_v (log p_v + entropy);  d logp[t] / dz_v = [v = t] - p_v
    """
    z = _wide(logits, temperature, softcap).sub_(lse[:, None])
    if g_entropy is None:
        return z.exp_().mul_(-g_logp[:, None])
    p = z.exp()
    return z.add_(entropy[:, None]).mul_(-g_entropy[:, None]).sub_(g_logp[:, None]).mul_(p)


def _slope_of_cap(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """d (softcap * tanh(s / softcap)) / ds at the logits s."""
    capped = _wide(logits, softcap, None).tanh_()
    return 1.0 - capped * capped


@functools.cache
def _chosen(part: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """`part`, or one compilation of it for all numbers of rows."""
    return torch.compile(part, dynamic=True, fullgraph=True) if compiled else part


def _add_at(into: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """into [K] += values [n] at index [n], where indices repeat, always summed in the same order."""
    if into.device.type == "cpu":
        into.index_add_(0, index, values)  # in sequence
    else:
        into.index_put_((index,), values, accumulate=True)  # sorts; index_add_ would use atomics
    return into


class _HeadLogProbs(torch.autograd.Function):
    """U predicting rows, M tokens in the order of their rows.

    rows [U]: of hidden. token [M]: place of each token in the results. row [M]: place of its row among the U.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [T, C]
        weight: torch.Tensor,  # [V, C]
        rows: torch.Tensor,
        token: torch.Tensor,
        row: torch.Tensor,
        targets: torch.Tensor,  # [M]
        chunks: list[Chunk],
        temperature: float,
        softcap: float | None,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        statistics = _chosen(_statistics, compiled)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # Tensors of their own: FSDP warns of views that a module returns.
        logp, token_entropy = (hidden.new_empty(len(token), dtype=dtype) for _ in range(2))
        lse, entropy = hidden.new_empty(2, len(rows), dtype=dtype).unbind()
        with torch.autocast(hidden.device.type, enabled=False):
            for u0, u1, t0, t1 in chunks:
                logits = hidden.index_select(0, rows[u0:u1]) @ weight.T
                top, log_total, entropy[u0:u1] = statistics(logits, temperature, softcap)
                lse[u0:u1] = top + log_total
                local = row[t0:t1] - u0
                chosen = _wide(logits[local, targets[t0:t1]], temperature, softcap)
                logp[token[t0:t1]] = chosen - top[local] - log_total[local]
                token_entropy[token[t0:t1]] = entropy[u0:u1][local]
                del logits  # before the next chunk makes its own
        ctx.save_for_backward(hidden, weight, rows, token, row, targets, lse, entropy)
        ctx.set_materialize_grads(False)
        ctx.chunks, ctx.temperature, ctx.softcap, ctx.compiled = chunks, temperature, softcap, compiled
        return logp, token_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: torch.Tensor | None, g_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, rows, token, row, targets, lse, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        # Gradients of tokens in the order of their rows, and their sum over the tokens of a row.
        row_logp, row_entropy = torch.zeros_like(lse), None
        if g_logp is not None:
            _add_at(row_logp, row, g_logp.index_select(0, token))
        if g_entropy is not None:
            row_entropy = _add_at(torch.zeros_like(lse), row, g_entropy.index_select(0, token))
        gradient = _chosen(_logits_gradient, ctx.compiled)

        d_hidden = torch.zeros_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for u0, u1, t0, t1 in ctx.chunks:
                at = slice(u0, u1)
                states = hidden.index_select(0, rows[at])
                logits = states @ weight.T
                d = gradient(
                    logits,
                    ctx.temperature,
                    ctx.softcap,
                    lse[at],
                    entropy[at],
                    row_logp[at],
                    None if row_entropy is None else row_entropy[at],
                )
                if g_logp is not None:
                    flat = (row[t0:t1] - u0) * d.shape[1] + targets[t0:t1]
                    _add_at(d.view(-1), flat, g_logp.index_select(0, token[t0:t1]))
                if ctx.softcap is not None:
                    d.mul_(_slope_of_cap(logits, ctx.softcap))
                del logits
                d = (d if ctx.temperature == 1.0 else d.div_(ctx.temperature)).to(hidden.dtype)
                if d_hidden is not None:
                    d_hidden.index_copy_(0, rows[at], d @ weight)
                if d_weight is not None:
                    if d.dtype == d_weight.dtype:
                        d_weight.addmm_(d.T, states)
                    else:
                        d_weight.add_(d.T @ states)
                del d
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden, d_weight, *[None] * 8

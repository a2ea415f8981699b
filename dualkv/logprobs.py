"""Log-probabilities and entropies of response tokens, without ever holding the logits of all rows.

Only rows that predict a response token meet the head, each once: in the gather style a prompt's last row predicts the
first token of every response of its group, and its logits serve all of them. Rows go through the head in chunks, and
the backward makes the logits of each chunk again, but for those of `kept_chunks`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from dualkv.arrays import IntArray, check_bool, positive, to_device
from dualkv.data.packing import PackedBatch
from dualkv.data.parts import TreePart
from dualkv.data.rows import check_used
from dualkv.data.trees import PackedSequences
from dualkv.fixed_rows import linear
from dualkv.heads import MODULE, Head, Rows, apply, autocast_now, check_rows, check_tensor, of_weight


class Chunk(NamedTuple):
    """Rows u0..u1 of the distinct predicting rows, and tokens t0..t1 (in the order of those rows) that they predict.

    several, of_several: on the host, the rows of the chunk that predict several tokens, and these tokens in the chunk.
    """

    u0: int
    u1: int
    t0: int
    t1: int
    several: torch.Tensor
    of_several: torch.Tensor


def response_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor | Head,
    batch: PackedBatch | PackedSequences | TreePart,
    temperature: float = 1.0,
    *,
    chunk_size: int = 1024,
    compiled: bool = False,
    kept_chunks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each response token, and entropy of the distribution it was drawn from.

    With the logits `s` that the head makes of the row that predicts a token, and `z = s / temperature`:
    `log_softmax(z)[token]` and `-sum(softmax(z) * log_softmax(z))`. Both are differentiable with respect to `hidden`
    and to everything in the head that requires a gradient.

    The head's matrix products run in the dtype of the inputs (under autocast in its dtype), as a model's own head does;
    everything behind them is fp32, and so is the sum of the head's gradient over chunks. No sum depends on the order
    in which threads finish. At most `chunk_size` rows of V logits exist at a time, in forward and in backward.

    Args:
        hidden: [1, T, C] or [T, C] last hidden states of the packed tokens; bf16, fp16, fp32 or fp64.
        head: of a transformers model `dualkv.integrations.transformers.head(model)`; of one of your own a
            :class:`dualkv.Head`, or the weight [V, C] where logits are `hidden @ weight.T`. Dtype and device of
            `hidden`.
        batch: what :func:`dualkv.pack`, `pack_padded` or `pack_sequences` returned, on the device of `hidden`; or
            a part of that in :func:`dualkv.walk`.
        temperature: a number above 0 without a gradient; divides the logits.
        chunk_size: rows of the head at a time. Larger is faster until the head's products fill the device.
        compiled: what is between the head's products runs through `torch.compile`, which reads the logits three times
            and not about thirty times; the first call waits for the compiler.
        kept_chunks: chunks of `chunk_size` rows whose logits are kept for the backward and not made again, each
            chunk_size * V * 2 bytes in bf16; all, if there are fewer. Results do not depend on it.

    Returns:
        logp: [M] fp32 (fp64 for fp64 inputs), in the order of `batch.targets`; `batch.unpack` makes rows of it.
        entropy: [M] the same, in nats.

    Raises:
        ValueError: shapes, dtypes or devices that do not match, a temperature that is not above 0 and finite, a weight
            that is known to be only a part of a model's head (then pass the whole head), or of which this rank has a
            part, `kept_chunks` below 0 or with a head that has a `module`, `compiled` with a batch-invariant head, a
            layout that no attention has used (:meth:`Layout.mark_used`), response tokens outside the vocabulary. Tokens
            on a GPU are checked there, without waiting for it: the failure is a device-side assertion.
        TypeError: tensors that are not floating point.
    """
    check_bool("compiled", compiled)
    states, head, divisor = _checked(hidden, head, batch, temperature, chunk_size, kept_chunks)
    if compiled and head.batch_invariant:
        raise ValueError("compiled is True and the head is batch-invariant, which compiled sums are not known to be")
    states = head.in_front(states)
    device = states.device.type
    tensors: Sequence[torch.Tensor | None]
    if head.module is not None:
        called = _Called(head.module, *autocast_now(device))
        vocabulary, tensors = called.probe(states)
    else:
        weight, called = cast(torch.Tensor, head.weight), None
        # The casts autocast would make, where autograd sees them; fp64 stays, as autocast leaves it.
        autocast, wide = torch.is_autocast_enabled(device), torch.float64
        if states.dtype != weight.dtype and (not autocast or wide in (states.dtype, weight.dtype)):
            raise ValueError(f"hidden is {states.dtype}, head {weight.dtype}, expected one dtype")
        tensors = weight, head.bias
        if autocast and states.dtype != wide:
            dtype = torch.get_autocast_dtype(device)
            states, weight = states.to(dtype), weight.to(dtype)
            tensors = weight, None if head.bias is None else head.bias.to(dtype)
        if states.shape[1] != weight.shape[1]:
            raise ValueError(f"head has {weight.shape[1]} columns, and rows of {states.shape[1]} columns come to it")
        vocabulary = weight.shape[0]
    _check_targets(batch.targets, vocabulary)

    # Tokens in the order of the rows that predict them; the rows, each once; the place among them of each token's row.
    chunks = _chunks(batch._tokens_of_row, chunk_size)
    predicting, token = batch.predict_rows.sort(stable=True)
    row = torch.zeros_like(predicting)
    torch.cumsum(predicting[1:] != predicting[:-1], 0, out=row[1:])
    rows = predicting.new_empty(len(batch._tokens_of_row)).scatter_(0, row, predicting)
    targets = batch.targets.index_select(0, token)
    inputs = [states, *(x for x in tensors if x is not None)]
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    divisor, cap, factor = head.scale_over(divisor)
    divides: float | torch.Tensor | None = None if divisor == 1.0 else divisor
    if compiled and divides is not None:  # a tensor: a number would be compiled in
        divides = torch.full((), divisor, dtype=_wider(states.dtype), device=states.device)
    # On a CPU products run row by row, and one row alone is summed by several threads.
    fixed = (chunk_size if states.is_cuda else 2) if head.batch_invariant else None
    settings = (divides, cap, factor), compiled, kept_chunks if differentiable else 0, fixed
    found = _HeadLogProbs.apply(states, rows, token, row, targets, chunks, called, *settings, *tensors)
    return cast(tuple[torch.Tensor, torch.Tensor], found)


def _checked(
    hidden: torch.Tensor,
    head: torch.Tensor | Head,
    batch: PackedBatch | PackedSequences | TreePart,
    temperature: float,
    chunk_size: int,
    kept_chunks: int,
) -> tuple[torch.Tensor, Head, float]:
    """hidden as [T, C], the head and the temperature, once everything is as it should be."""
    if not isinstance(batch, PackedBatch | PackedSequences | TreePart):
        raise TypeError(f"batch is a {type(batch).__name__}, expected a packed batch, such as dualkv.pack returns")
    check_tensor("hidden", hidden, "pass its full_tensor()")
    whole = head if isinstance(head, Head) else of_weight(head)
    for name, tensor in (("hidden", hidden), ("head", whole.weight)):
        if tensor is not None and tensor.device != batch.device:
            raise ValueError(f"{name} is on {tensor.device}, batch on {batch.device}, expected one device (batch.to)")
    width = hidden.shape[-1] if hidden.dim() else 0
    if whole.weight is not None and whole.before is None:
        width = whole.weight.shape[1]
    total = batch.layout.num_tokens
    if hidden.shape not in ((1, total, width), (total, width)):
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, expected [1, {total}, {width}] or [{total}, {width}] "
            "(packed tokens, columns of the head)"
        )
    check_used(batch.seen if isinstance(batch, TreePart) else batch.layout, "hidden is")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float | np.number | torch.Tensor):
        raise TypeError(f"temperature is {temperature!r}, expected a number")
    if isinstance(temperature, torch.Tensor) and temperature.numel() != 1:
        raise ValueError(f"temperature has shape {tuple(temperature.shape)}, expected one number")
    if isinstance(temperature, torch.Tensor) and temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "temperature requires a gradient, expected a number or temperature.detach(): a temperature that is trained"
            " belongs into dualkv.Head(module=...), which divides the logits by it"
        )
    number = float(temperature.detach() if isinstance(temperature, torch.Tensor) else temperature)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"temperature is {temperature}, expected a finite number above 0")
    positive("chunk_size", chunk_size)
    if positive("kept_chunks", kept_chunks, least=0) and whole.module is not None:
        raise ValueError(
            f"kept_chunks is {kept_chunks} and the head has a module, whose logits the backward makes again: expected 0"
        )
    return hidden.reshape(total, width), whole, number


def _check_targets(targets: torch.Tensor, vocabulary: int) -> None:
    inside = (targets >= 0) & (targets < vocabulary)
    if targets.device.type != "cpu":
        torch._assert_async(inside.all(), "a response token is outside the vocabulary of the head")
    elif not inside.all():
        wrong = int(targets[~inside][0])
        raise ValueError(f"response token {wrong} is outside the vocabulary, the head makes {vocabulary} logits")


def _chunks(tokens_of_row: IntArray, chunk_size: int) -> list[Chunk]:
    """Chunks of the predicting rows with the tokens that they predict, from host numbers alone."""
    tokens = np.append(0, np.cumsum(tokens_of_row)).tolist()
    found = []
    for begin in range(0, len(tokens_of_row), chunk_size):
        counts = tokens_of_row[begin : begin + chunk_size]
        end, several = begin + len(counts), counts > 1
        of_chunk = (torch.from_numpy(np.flatnonzero(x)) for x in (several, np.repeat(several, counts)))
        found.append(Chunk(begin, end, tokens[begin], tokens[end], *of_chunk))
    return found


# (temperature, or None for 1; cap; factor in front of it): `z = cap * tanh(s * factor / cap) / temperature`, of
# logits s.
Scale = tuple[float | torch.Tensor | None, float | None, float]
# exp(z) is 0 for any z below it, and z times a number is finite.
LOWEST = -1e3


def _wider(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _wide(logits: torch.Tensor, scale: Scale) -> torch.Tensor:
    """z, in fp32 (fp64 for fp64): a copy of the logits, capped and divided by the temperature."""
    temperature, cap, factor = scale
    wide = logits.to(_wider(logits.dtype), copy=True)
    if cap is not None:
        wide.div_(cap / factor).tanh_().mul_(cap)
    return wide if temperature is None else wide.div_(temperature)


def _statistics(logits: torch.Tensor, scale: Scale) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [u, V] -> largest z [u], log of the sum of exponentials relative to it [u], entropy [u]."""
    z = _wide(logits, scale)
    top = z.amax(1)
    z = z.sub_(top[:, None])
    e = z.exp()
    total = e.sum(1)
    log_total = total.log()
    # 0 times -inf of a logit that is -inf counts as 0. Any other NaN is one in `total` too.
    return top, log_total, log_total - e.mul_(z).nansum(1) / total


def _logits_gradient(
    logits: torch.Tensor,
    scale: Scale,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    g_logp: torch.Tensor,
    g_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """d loss / d z [u, V], but for the tokens themselves; lse, entropy, g_logp, g_entropy [u].

    d entropy / dz_v = -p_v (log p_v + entropy);  d logp[t] / dz_v = [v = t] - p_v
    """
    z = _wide(logits, scale).sub_(lse[:, None])
    if g_entropy is None:
        return z.exp_().mul_(-g_logp[:, None])
    p = z.exp()
    of_row = entropy * g_entropy + g_logp
    return z.clamp_(min=LOWEST).mul_(-g_entropy[:, None]).sub_(of_row[:, None]).mul_(p)


def _compiled_gradient(
    logits: torch.Tensor,
    scale: Scale,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    g_logp: torch.Tensor,
    g_entropy: torch.Tensor | None,
    target: torch.Tensor,
) -> torch.Tensor:
    """d loss / d logits [u, V] in their dtype, for rows that predict one token each, target [u]."""
    d = _logits_gradient(logits, scale, lse, entropy, g_logp, g_entropy)
    column = torch.arange(logits.shape[1], device=logits.device)
    d = d + torch.where(column == target[:, None], g_logp[:, None], 0.0)
    return _through_scale(d, logits, scale)


def _gradient(
    given: Sequence[Any], row: torch.Tensor, targets: torch.Tensor, g_token: torch.Tensor | None
) -> torch.Tensor:
    """d loss / d logits [u, V] in their dtype, by the arguments of :func:`_logits_gradient` and the row, column and
    gradient of each token [t]."""
    d, (logits, scale, *_) = _logits_gradient(*given), given
    if g_token is not None:
        _add_at(d.view(-1), row * d.shape[1] + targets, g_token)
    return _through_scale(d, logits, scale)


def _through_scale(d: torch.Tensor, logits: torch.Tensor, scale: Scale) -> torch.Tensor:
    """d loss / d logits [u, V] in their dtype, of d loss / d z [u, V], which is overwritten."""
    temperature, cap, factor = scale
    if cap is not None:
        capped = _wide(logits, (cap / factor, None, 1.0)).tanh_()
        d.mul_(1.0 - capped * capped)
    if temperature is not None or factor != 1.0:
        d.div_((1.0 if temperature is None else temperature) / factor)
    return d.to(logits.dtype)


def _chosen(part: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """`part`, or what runs a compilation of it for all numbers of rows."""
    if not compiled:
        return part

    def call(logits: torch.Tensor, scale: Scale, *tensors: torch.Tensor | None) -> Any:
        temperature, *constants = scale
        # All that a graph is made for, so that each code meets one form: PyTorch's limit of graphs is far.
        form = [
            (x.dtype, x.device, x.is_inference(), *(min(n, 2) for n in x.shape)) if isinstance(x, torch.Tensor) else x
            for x in (logits, temperature, *tensors)
        ]
        modes = torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
        return _of_form(part, *constants, *modes, *form)(logits, scale, *tensors)

    return call


@functools.cache
def _of_form(part: Callable[..., Any], *_form: Any) -> Callable[..., Any]:
    """`part`, compiled for one form behind code of its own: `torch.compile` counts graphs by code, up to a limit."""

    def call(*given: Any) -> Any:
        return part(*given)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, dynamic=True, fullgraph=True)


def _add_at(into: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """into [K] += values [n] at index [n], where indices repeat, always summed in the same order."""
    if into.device.type == "cpu":
        into.index_add_(0, index, values)  # in sequence
    else:
        into.index_put_((index,), values, accumulate=True)  # sorts; index_add_ would use atomics
    return into


@functools.cache
def _adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this dtype add to an fp32 matrix in place here: one pass over it less, and one rounding."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    x = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        total = _add_product(torch.ones(16, 16, device=device), x, x, True)
    except RuntimeError:
        return False
    return bool((total == 17).all())


def _add_product(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, in_place: bool) -> torch.Tensor:
    """into += a @ b."""
    if a.dtype == into.dtype:
        return into.addmm_(a, b)
    if in_place:
        return torch.ops.aten.addmm.dtype_out(into, a, b, into.dtype, out=into)
    return into.add_(a @ b)


class _Called:
    """A head that is called for its logits, under the autocast of the forward."""

    def __init__(self, module: Rows, device: str, dtype: torch.dtype, enabled: bool) -> None:
        self.module, self._autocast = module, (device, dtype, enabled)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """states [n, C] -> logits [n, V]"""
        # No cache: casts of weights that were made without gradients would stay in it.
        with torch.autocast(*self._autocast, cache_enabled=False):
            return apply(MODULE, self.module, states)

    def probe(self, states: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        """V, and the leaves behind the logits that require gradients, also those that the module does not list."""
        check_rows(MODULE, self.module, states)
        with torch.enable_grad():
            logits = self(states[:1].detach())
        if logits.dim() != 2 or len(logits) != 1 or not logits.is_floating_point():
            raise ValueError(
                f"the head's module makes {logits.dtype} {tuple(logits.shape)} of hidden states [1, {states.shape[1]}],"
                " expected logits [1, V]"
            )
        return logits.shape[1], list(leaves(logits))


def leaves(of: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves of the graph of a tensor: inputs and parameters."""
    found, seen = [of.grad_fn], set[Any]()
    while found:
        node = found.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                yield leaf
            found += [up for up, _ in node.next_functions]


class _HeadLogProbs(torch.autograd.Function):
    """U predicting rows, M tokens in the order of their rows.

    rows [U]: of hidden. token [M]: place of each token in the results. row [M]: place of its row among the U.
    fixed: rows of each of the head's products in the forward, and of the sums over their columns, whose order depends
        on the number of rows too; None: those of the chunk.
    tensors: the weight [V, C] and the bias [V] or None; of a head that is called, the leaves of its graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [T, C]
        rows: torch.Tensor,
        token: torch.Tensor,
        row: torch.Tensor,
        targets: torch.Tensor,  # [M]
        chunks: list[Chunk],
        called: _Called | None,
        scale: Scale,
        compiled: bool,
        kept_chunks: int,
        fixed: int | None,
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        statistics = _chosen(_statistics, compiled)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # Tensors of their own: FSDP warns of views that a module returns.
        logp, token_entropy = (hidden.new_empty(len(token), dtype=dtype) for _ in range(2))
        lse, entropy = hidden.new_empty(2, len(rows), dtype=dtype).unbind()
        ctx.kept = {}  # by the first row of a chunk
        with torch.autocast(hidden.device.type, enabled=False):
            for u0, u1, t0, t1, _, _ in chunks:
                states, n = hidden.index_select(0, rows[u0:u1]), u1 - u0
                if fixed is not None and n < fixed:
                    states = torch.cat([states, states.new_zeros(fixed - n, states.shape[1])])
                logits = _logits(called, states, tensors, fixed)
                if len(ctx.kept) < kept_chunks:
                    ctx.kept[u0] = logits[:n]
                top, log_total, of_rows = (x[:n] for x in statistics(logits, scale))
                entropy[u0:u1] = of_rows
                lse[u0:u1] = top + log_total
                local = row[t0:t1] - u0
                chosen = _wide(logits[local, targets[t0:t1]], scale)
                logp[token[t0:t1]] = chosen - top[local] - log_total[local]
                token_entropy[token[t0:t1]] = entropy[u0:u1][local]
                del logits  # before the next chunk makes its own
        ctx.save_for_backward(hidden, rows, token, row, targets, lse, entropy, *tensors)
        ctx.set_materialize_grads(False)
        ctx.chunks, ctx.called, ctx.scale, ctx.compiled = chunks, called, scale, compiled
        return logp, token_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: torch.Tensor | None, g_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, rows, token, row, targets, lse, entropy, *tensors = ctx.saved_tensors
        wants_hidden, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[11:]
        called, scale = ctx.called, ctx.scale
        # Gradients of tokens in the order of their rows, and their sum over the tokens of a row.
        row_logp, row_entropy = torch.zeros_like(lse), None
        if g_logp is not None:
            _add_at(row_logp, row, g_logp.index_select(0, token))
        if g_entropy is not None:
            row_entropy = _add_at(torch.zeros_like(lse), row, g_entropy.index_select(0, token))
        gradient = _chosen(_compiled_gradient, True) if ctx.compiled else None
        d_hidden = torch.zeros_like(hidden) if wants_hidden else None
        sums = [torch.zeros_like(x, dtype=lse.dtype) if want else None for x, want in zip(tensors, wants, strict=True)]
        in_place = _adds_products(hidden.device, hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for u0, u1, t0, t1, several, of_several in ctx.chunks:
                states = hidden.index_select(0, rows[u0:u1])
                made = d_states = None
                if called is not None:
                    with torch.enable_grad():
                        made = called(states.requires_grad_(wants_hidden))
                logits = ctx.kept.pop(u0, None) if made is None else made.detach()  # kept: gone after a first backward
                if logits is None:
                    logits = _logits(None, states, tensors)
                # Not views: the compiler would compile again for where they lie in what they are views of.
                of_rows = [None if x is None else x[u0:u1].clone() for x in (lse, entropy, row_logp, row_entropy)]
                place, columns = row[t0:t1] - u0, targets[t0:t1]
                g_token = None if g_logp is None else g_logp.index_select(0, token[t0:t1])
                if gradient is None:
                    d = _gradient([logits, scale, *of_rows], place, columns, g_token)
                else:
                    target = place.new_full((u1 - u0,), -1)
                    target[place] = columns  # of rows with several tokens any of them
                    d = gradient(logits, scale, *of_rows, target)
                    if len(several):
                        at, some = (to_device(x, hidden.device) for x in (several, of_several))
                        rank = target.scatter_(0, at, torch.arange(len(at), device=at.device))
                        g_token = None if g_token is None else g_token[some]
                        given = [logits[at], scale, *(None if x is None else x[at] for x in of_rows)]
                        d[at] = _gradient(given, rank[place[some]], columns[some], g_token)
                del logits
                if made is not None:
                    d_states = _add_gradients(made, states, tensors, sums, d)
                elif d_hidden is not None:
                    d_states = d @ tensors[0]
                if d_hidden is not None and d_states is not None:
                    d_hidden.index_copy_(0, rows[u0:u1], d_states)
                d_states = None
                if made is None and sums[0] is not None:
                    _add_product(sums[0], d.T, states, in_place)
                if made is None and sums[1] is not None:
                    sums[1].add_(d.sum(0, dtype=lse.dtype))
                del d
        found = (None if s is None else s.to(x.dtype) for x, s in zip(tensors, sums, strict=True))
        return d_hidden, *[None] * 10, *found


def _logits(
    called: _Called | None, states: torch.Tensor, tensors: Sequence[torch.Tensor | None], fixed: int | None = None
) -> torch.Tensor:
    """states [n, C] -> logits [n, V], without gradients; by a product of a fixed number of rows, if one is given."""
    if called is not None:
        return called(states)
    weight, bias = tensors
    assert weight is not None
    if fixed is not None:
        return linear(states, weight, bias, fixed)
    return states @ weight.T if bias is None else torch.addmm(bias, states, weight.T)


def _add_gradients(
    made: torch.Tensor,
    states: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor | None],
    d: torch.Tensor,
) -> torch.Tensor | None:
    """Adds the gradients of leaves to `sums`, and returns that of states, for d [n, V], the gradient of `made`."""
    wanted = [(x, s) for x, s in zip(leaves, sums, strict=True) if s is not None]
    inputs = [*[states] * states.requires_grad, *(x for x, _ in wanted)]
    found = list(torch.autograd.grad(made, inputs, d, allow_unused=True))
    d_states = found.pop(0) if states.requires_grad else None
    for (_, total), gradient in zip(wanted, found, strict=True):
        if total is not None and gradient is not None:
            total.add_(gradient)
    return d_states

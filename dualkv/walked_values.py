"""Values of all tokens of a walk, for losses that need more than the tokens of one part.

They cost another forward, which :class:`KnownLoss` saves where the loss is a sum over rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dualkv.branches import Branch, Keeping
from dualkv.data.parts import TreePart
from dualkv.data.rows import check_used
from dualkv.data.trees import PackedSequences
from dualkv.heads import autocast_now
from dualkv.walks import (
    Budget,
    Forward,
    Pass,
    State,
    Values,
    check_functions,
    check_loss,
    own_passes,
    parts_of,
    walk_passes,
)


class KnownLoss:
    """A loss of values that is known before its backward, for :func:`walk_values`.

    If it is a sum over rollouts, the gradients of a rollout's values are known while a part runs that predicts its last
    tokens. The backward carries the difference to the gradients that come, so this is exact for any loss. A loss that
    is no such sum costs another walk once; from then on values come first. One object serves a training.

    Attributes:
        of_values: the values of all tokens -> one number. Values of rollouts that are not known yet are 0.
        is_sum: over rollouts, as far as is known.
        factor: gradients that came in the last backward over those of `of_values`.
    """

    def __init__(self, of_values: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.of_values = of_values
        self.is_sum, self.factor = True, 1.0
        self._values = self._used = torch.zeros(0)
        self._waits = False

    def begin(self) -> None:
        """Begin a walk; RuntimeError if the one before had no backward."""
        if self._waits:
            raise RuntimeError(
                "the backward of the values of the walk before did not run, and their loss's gradients are in the"
                " parameters already, expected one backward for each walk: use torch.no_grad where there is none"
            )
        self._values = torch.zeros(0)

    def put(self, own: torch.Tensor, places: torch.Tensor, total: int) -> None:
        """Take values at places, of `total` in all."""
        if not len(self._values):
            self._values, self._used = own.new_zeros(2, total, *own.shape[1:])
        self._values[places] = own

    def gradients(self, places: torch.Tensor) -> torch.Tensor:
        """Compute the gradients of the values at places from those that are known."""
        with torch.enable_grad():
            values = self._values.detach().requires_grad_()
            loss = self.of_values(values)
            check_loss(loss, True)
            (found,) = torch.autograd.grad(loss, values)
        self._used[places] = found[places] * self.factor
        return self._used[places]

    def end(self) -> torch.Tensor:
        """Return all values, whose backward has to follow."""
        self._waits = True
        return self._values

    def rest(self, came: torch.Tensor) -> torch.Tensor | None:
        """Return the gradients that came beyond those that were used, None where that is rounding."""
        used, self._waits = self._used, False
        if _are_close(came, used):
            return None
        if came.isfinite().all():
            ratio = float((came.double() * used).sum() / used.double().square().sum())
            self.is_sum = ratio != 0 and _are_close(came, used * ratio)
            self.factor *= ratio if self.is_sum else 1.0
        return came - used


def _are_close(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether rounding explains the difference."""
    rounding = torch.finfo(x.dtype).eps
    return torch.allclose(x, y, 16 * rounding, rounding * float(y.abs().max()))


def walk_values(
    batch: PackedSequences,
    budget: Budget,
    forward: Callable[[torch.Tensor, Branch], Any],
    values: Callable[[Any, TreePart], torch.Tensor],
    *,
    gradients: torch.dtype = torch.float32,
    on_host: bool = False,
    loss: KnownLoss | None = None,
) -> torch.Tensor:
    """Values of all tokens, log-probs for example, whose backward is a walk: for losses that need whole sequences,
    pairs or groups, and for trainers that call `backward` themselves.

        logp = walk_values(batch, budget, forward, values)
        loss_of(logp).backward()

    A first walk computes the values without a graph. When their gradients arrive, a second walk carries them into the
    model, with the random numbers and the autocast of the first one. This is exact for any differentiable loss. It
    costs one more forward of all rows but those of the first trunks, unless the batch fits into one part. Parameters
    must not change in between. With a `loss` that is a sum over rollouts one walk does both.

    Args:
        batch, budget, gradients, on_host: as for :func:`walk`.
        forward: of a part, as for :func:`walk`; what it returns is handed to `values`.
        values: of a part: (what `forward` returned, part) -> [n] or [n, K], values of `part.places`, such as
            `part.expand(logp)`.
        loss: of the values. Gradients of parameters are added before the values are returned, and a backward must
            follow, which carries the difference to what comes there.

    Returns:
        [N] or [N, K], the values of all tokens, in the order of `torch.cat(batch.unpack(...))`.

    Raises:
        ValueError, TypeError: as :func:`walk`; values of another form, and a batch that counts no token; by the
            backward for a transformers model that was in training mode in one of the walks, and not in the other, or
            whose parameters have been written into in between.
        RuntimeError: no backward followed the walk before, which had added gradients of its loss.
    """
    if not isinstance(loss, KnownLoss | None):
        raise TypeError(f"loss is a {type(loss).__name__}, expected a dualkv.KnownLoss of the function, or None")
    training = torch.is_grad_enabled()
    known = loss if training and loss is not None and loss.is_sum else None
    parts = parts_of(batch, budget, values_first=known is None)
    check_functions(forward=(forward, "(input_ids, branch)"), values=(values, "(what forward returned, part)"))
    keeping, first = Keeping(gradients, on_host), State(known is not None, followed=True)
    if not batch._mask.any():
        raise ValueError("batch counts no token of any sequence, expected at least one: there are no values")

    def checked(one: Pass) -> torch.Tensor:
        own = values(forward(one.input_ids, one.branch), one.part)
        check_used(one.part.seen, "forward returned values", "dualkv=branch")
        if not isinstance(own, torch.Tensor):
            raise TypeError(f"values returned a {type(own).__name__}, expected a tensor, [n] or [n, K]")
        if own.dim() not in (1, 2) or len(own) != len(one.part.places):
            raise ValueError(
                f"values returned a tensor of shape {tuple(own.shape)}, expected {len(one.part.places)} values or rows,"
                " one for each of part.places"
            )
        if one.has_graph and not own.requires_grad:
            raise ValueError("values returned a tensor without a gradient in a walk that has gradients")
        return own

    def compute() -> torch.Tensor:
        """Run the walk without a graph."""
        places, found = list[torch.Tensor](), list[torch.Tensor]()
        for one in own_passes(parts, keeping, first, leaves_trunks=True):
            with one:
                if one.has_loss:
                    found.append(checked(one))
                    places.append(one.part.places)
                else:
                    forward(one.input_ids, one.branch)
            one.backward()
        return torch.cat(found)[torch.cat(places).argsort()]

    def compute_and_carry(known: KnownLoss) -> torch.Tensor:
        """Run the walk with graphs, from the gradients that the loss will have."""
        known.begin()
        for one in own_passes(parts, keeping, first):
            share = None
            with one:
                if one.part.num_trained:
                    own = checked(one)
                    known.put(own.detach(), one.part.places, int(batch._mask.sum()))
                    if one.is_last:
                        share = (own * known.gradients(one.part.places)).sum()
                else:
                    forward(one.input_ids, one.branch)
            one.backward(share)
        return known.end()

    def carry(of_values: torch.Tensor) -> None:
        """Run the walk with graphs, from the gradients of the values."""
        if known is not None:
            rest = known.rest(of_values)
            if rest is None:
                return
            of_values = rest
        for one in own_passes(parts, keeping, first.then()):
            share = None
            with one:
                if one.has_loss:
                    share = (checked(one) * of_values[one.part.places]).sum()
                else:
                    forward(one.input_ids, one.branch)
            one.backward(share)

    if not training:
        return compute()
    if len(parts) == 1:
        one = next(walk_passes(batch, parts, keeping))
        with one:
            own = checked(one)
        batch.layout._segments.use.seen |= one.part.seen._segments.use.seen
        return own[one.part.places.argsort()]
    anchor = torch.zeros((), device=batch.device, requires_grad=True)
    first_walk = compute if known is None else partial(compute_and_carry, known)
    found: torch.Tensor = _Carried.apply(anchor, first_walk, carry)
    return found


class _Carried(torch.autograd.Function):
    """Values that a function computes without a graph, and whose gradients another function takes."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, compute: Callable[[], torch.Tensor], carry: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.carry, ctx.autocast = carry, autocast_now(anchor.device.type)
        return compute()

    @staticmethod
    def backward(ctx: Any, of_values: torch.Tensor) -> Any:
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            ctx.carry(of_values)
        return None, None, None


def walk_whole(
    batch: PackedSequences,
    budget: Budget,
    forward: Forward,
    values: Values,
    loss: Callable[[torch.Tensor], torch.Tensor],
    *,
    gradients: torch.dtype = torch.float32,
    on_host: bool = False,
) -> torch.Tensor:
    """:func:`walk` for a loss that needs whole sequences, pairs or groups: GSPO, means over a sequence, DPO.

    Args:
        batch, budget, forward, values, gradients, on_host: as for :func:`walk_values`, which says what it costs.
        loss: the values of all tokens -> one number.

    Returns:
        The loss, without gradient.

    Raises:
        ValueError, TypeError: as :func:`walk_values`; a loss that is not one number, or has no gradient where the walk
            has them.
    """
    check_functions(loss=(loss, "the values"))
    value = loss(walk_values(batch, budget, forward, values, gradients=gradients, on_host=on_host))
    training = torch.is_grad_enabled()
    check_loss(value, training)
    if training:
        value.backward()
    return value.detach().reshape(())

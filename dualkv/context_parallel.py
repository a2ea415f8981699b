"""Packed groups over ranks that gather keys and values: context parallelism with any number of ranks.

Every rank holds an equal share of the packed rows, such that all ranks compute about equally many visible pairs. It
computes the attention of its own rows, and other ranks send the keys and values that these rows see. The heads go in
several pieces: one is on its way while attention runs on the piece before.

:class:`dualkv.sequence_parallel.Shard` exchanges heads instead and needs at least as many of them as ranks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from dualkv.arrays import IntArray, check_bool
from dualkv.context_plan import Stage, rows_of, shares, stages
from dualkv.layout import Layout
from dualkv.ops.attention import attention
from dualkv.ops.features import FeatureArguments, Features, Window
from dualkv.sequence_parallel import Shard

# Pieces of the KV heads. Fewer would hide less of the exchange, and take more memory for rows of q that have no
# queries; more would make the calls of attention short.
PIECES = 8


class ContextShard(Shard):
    """This rank's rows of packed groups; attention gathers the keys and values that they see.

    It has the interface of :class:`dualkv.sequence_parallel.Shard`; the number of heads may be any.

    Attributes:
        shares: see :func:`shares`.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup | None, multiple: int = 1) -> None:
        super().__init__(layout, group, multiple)
        self.shares = shares(self.layout._segments, self.world_size)

    @cached_property
    def host_order(self) -> IntArray:
        """The packed rows in the order of the ranks, like :attr:`Shard.host_order`."""
        return np.concatenate([rows_of(part) for of_rank in self.shares for part in of_rank])

    def gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Gather the rows of all ranks in packed order, like :meth:`Shard.gather`."""
        return super().gather(x, dim).index_select(dim, self.places.to(x.device))

    def attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run attention like :meth:`Shard.attention`, for any number of heads. The gradient of sinks is that of this
        rank's rows."""
        return self.attention_with_lse(*args, **kwargs)[0]

    def attention_with_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        deterministic: bool = False,
        **features: Unpack[FeatureArguments],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`attention`, and the lse [H, num_tokens] of this rank's rows as :func:`dualkv.attention` returns it."""
        check_bool("deterministic", deterministic)
        call = self._checked(q, k, v, softmax_scale, features)
        if self.world_size == 1:
            return attention(q, k, v, self.layout, call.softmax_scale, deterministic, **features, return_lse=True)
        if call.features.batch_invariant:
            raise ValueError("batch_invariant is True in context parallelism, which merges results: expected False")
        self.layout._segments.use.seen = True  # a rank may have no rows of its own, and runs no op then
        learned = [x for x in (q, k, v, call.features.sinks) if x is not None and x.requires_grad]
        run = _Run(
            self.group,
            self._stages(call.features.reach),
            call.softmax_scale,
            deterministic,
            call.features._replace(sinks=None),
            torch.is_grad_enabled() and bool(learned),
        )
        out, lse = _Attention.apply(call.q, call.k, call.v, call.features.sinks, run)
        return out, lse

    def _stages(self, hiding: Window | None) -> list[Stage]:
        """The stages of attention, made once for a layout, a device and what hides keys."""

        def make() -> list[Stage]:
            return stages(self.layout, self.shares, self.rank, hiding)

        key = "context parallel", self.world_size, self.rank, self.layout.device, hiding
        return self.layout._segments.cached(key, make)


# ---------------------------------------------------------------- the exchange and the attention
class _Run(NamedTuple):
    """The settings of an attention call, the same on all ranks of the group.

    kept: whether a backward may follow, which needs what was received.
    """

    group: dist.ProcessGroup | None
    stages: list[Stage]
    scale: float
    deterministic: bool
    features: Features
    kept: bool

    def of_heads(self, sinks: torch.Tensor | None, heads: slice) -> Features:
        """The features for some query heads; the sinks [H] are passed apart, as autograd follows them."""
        return self.features._replace(sinks=None if sinks is None else sinks[heads])

    def send(self, kv: torch.Tensor, stage: Stage) -> _Exchange:
        """Send rows of this rank to the ranks that need them."""
        return _Exchange(kv.index_select(0, stage.sent), stage.sent_to, stage.received_from, self.group)

    def send_back(self, gradients: torch.Tensor, stage: Stage) -> _Exchange:
        """Send the gradients of received rows back to the ranks that own these rows."""
        return _Exchange(gradients, stage.received_from, stage.sent_to, self.group)


class _Exchange:
    """Rows of x on their way: so many to each rank, in order, and so many from each."""

    def __init__(self, x: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup | None) -> None:
        self._sent = x.contiguous()  # kept until all has left
        self._received = x.new_empty(sum(of), *x.shape[1:])
        self._work = dist.all_to_all_single(self._received, self._sent, of, to, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Wait for the received rows and return them. On a GPU the stream waits, not the host."""
        self._work.wait()
        return self._received


class _Heads(NamedTuple):
    """A piece of the KV heads, and the query heads that read them."""

    kv: slice
    q: slice


def _pieces(heads: int, kv_heads: int) -> list[_Heads]:
    count = next(n for n in range(min(PIECES, kv_heads), 0, -1) if kv_heads % n == 0)
    kv, q = kv_heads // count, heads // count
    return [_Heads(slice(i * kv, (i + 1) * kv), slice(i * q, (i + 1) * q)) for i in range(count)]


class _Attention(torch.autograd.Function):
    """q [n, H, D], k [n, Hk, D], v [n, Hk, Dv], sinks [H] or None -> out [n, H, Dv], lse [H, n].

    While a stage of a piece of the heads is computed, the keys and values of the next one are on their way. In the
    backward, the gradients of the piece before are on their way back to their ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, run: _Run
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv, head_dim = torch.cat((k, v), 2), k.shape[2]
        out = q.new_empty(*q.shape[:2], v.shape[2])
        of_rows = q.new_empty(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
        steps = [(heads, stage) for heads in _pieces(q.shape[1], k.shape[1]) for stage in run.stages]
        received: list[torch.Tensor] = []  # of all pieces of the heads, if they are kept
        known: list[torch.Tensor] = []  # of this piece
        lses = []
        coming = run.send(kv[:, steps[0][0].kv], steps[0][1])
        for number, (heads, stage) in enumerate(steps):
            arrived = coming.wait()
            if number + 1 < len(steps):
                then = steps[number + 1]
                coming = run.send(kv[:, then[0].kv], then[1])
            if stage is run.stages[0]:
                known = []
            known.append(arrived)
            if run.kept:
                received.append(arrived)
            if stage.layout is None:
                lses.append(q.new_empty(0))
                continue
            keys = torch.cat([kv[:, heads.kv], *known]).index_select(0, stage.keys)
            found, lse = attention(
                stage.among_keys(q[:, heads.q]),
                keys[..., :head_dim],
                keys[..., head_dim:],
                stage.layout,
                run.scale,
                run.deterministic,
                **run.of_heads(sinks, heads.q)._asdict(),
                return_lse=True,
            )
            out[stage.own, heads.q] = found.index_select(0, stage.asked)
            of_rows[heads.q, stage.own] = lse.index_select(1, stage.asked)
            lses.append(lse)
        ctx.run, ctx.head_dim = run, head_dim
        if run.kept:
            ctx.save_for_backward(q, kv, sinks, out, *received, *lses)
        ctx.set_materialize_grads(False)
        return out, of_rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        run, head_dim = ctx.run, ctx.head_dim
        q, kv, sinks, out, *saved = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        # Gradients of both k and v or of neither, so that what ranks send each other has one shape.
        wanted = {"q": ctx.needs_input_grad[0], "kv": any(ctx.needs_input_grad[1:3])}
        gradients = "".join(name for name in wanted if wanted[name]) or "q"  # the op computes one at least
        of_step = zip(saved[: len(saved) // 2], saved[len(saved) // 2 :], strict=True)
        wide = torch.promote_types(kv.dtype, torch.float32)
        dq, dkv = torch.empty_like(q), torch.zeros_like(kv, dtype=wide)
        dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        returning: list[tuple[_Exchange, Stage, torch.Tensor]] = []
        for heads in _pieces(q.shape[1], kv.shape[1]):
            received, lses = zip(*(next(of_step) for _ in run.stages), strict=True)
            known = torch.cat([kv[:, heads.kv], *received])
            sums = torch.zeros_like(known, dtype=wide) if wanted["kv"] else None
            for stage, lse in zip(run.stages, lses, strict=True):
                if stage.layout is None:
                    continue
                keys = known.index_select(0, stage.keys)
                of_q, of_k, of_v, of_sinks = torch.ops.dualkv.bwd(
                    stage.among_keys(dout[:, heads.q]),
                    stage.among_keys(q[:, heads.q]),
                    keys[..., :head_dim],
                    keys[..., head_dim:],
                    stage.among_keys(out[:, heads.q]),
                    lse,
                    stage.layout.offsets,
                    stage.layout.parent,
                    run.scale,
                    run.deterministic,
                    gradients,
                    *run.of_heads(sinks, heads.q),
                    None if dlse is None else stage.among_keys(dlse[heads.q].t()).t().contiguous(),
                )
                if wanted["q"]:
                    dq[stage.own, heads.q] = of_q.index_select(0, stage.asked)
                if sums is not None:  # no row twice: a fixed order
                    sums.index_add_(0, stage.keys, torch.cat((of_k, of_v), 2).to(wide))
                if dsinks is not None:
                    dsinks[heads.q] += of_sinks
            if sums is None:
                continue
            mine = dkv[:, heads.kv]
            mine += sums[: len(kv)]
            _add(returning)
            parts = sums[len(kv) :].to(kv.dtype).split([len(x) for x in received])
            returning = [
                (run.send_back(part, stage), stage, mine) for part, stage in zip(parts, run.stages, strict=True)
            ]
        _add(returning)
        dk, dv = dkv.to(kv.dtype).split([head_dim, kv.shape[2] - head_dim], 2)
        found = dq, dk, dv, None if dsinks is None else dsinks.to(sinks.dtype), None
        return tuple(x if need else None for x, need in zip(found, ctx.needs_input_grad, strict=True))


def _add(returning: list[tuple[_Exchange, Stage, torch.Tensor]]) -> None:
    """Adds what other ranks computed for own rows, one rank after the other: several may have the same row."""
    for exchange, stage, sums in returning:
        parts = exchange.wait().to(sums.dtype).split(stage.sent_to)
        for rows, part in zip(stage.sent.split(stage.sent_to), parts, strict=True):
            sums.index_add_(0, rows, part)

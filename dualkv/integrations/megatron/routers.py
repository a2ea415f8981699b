"""Routers of megatron-core that count rollouts where its own count packed rows.

Expert biases, auxiliary losses and the z-loss depend on how many tokens there are of each kind. A packed row stands for
as many tokens as there are rollouts with it. :class:`PackedRouter` counts it so often: for each token of separate
sequences in one micro-batch, also per sequence (`seq_aux_loss`). So biases, losses and their gradients are those of
these sequences. Rows that pad a layout do not count.

megatron-core gives a router hidden states alone. The attention of its layer, which runs just before, leaves what the
call was given in :data:`RUNNING`.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from dualkv.integrations.megatron.rows import PackedGroups, Rollouts


class _Running(threading.local):
    """The layer whose attention ran last in this thread, and what counts rollouts there; None where nothing does.

    The backward may run layers again, in a thread of its own.
    """

    layer: int | None = None
    packed: PackedGroups | None = None


RUNNING = _Running()
# How `attach_and_log_load_balancing_loss` is told that a loss is one of all data-parallel ranks: versions differ.
_PARAMETERS = inspect.signature(TopKRouter.attach_and_log_load_balancing_loss).parameters
OF_ALL_DATA: dict[str, Any] = (
    {"reduce_group_has_dp": True} if "reduce_group_has_dp" in _PARAMETERS else {"needs_dp_avg": False}
)


class _Counts(NamedTuple):
    """The counts of a call of a router.

    Attributes:
        times: [n, 1] int64: rollouts that have each row of the router.
        segment: [n] int64: the segment of each of these rows.
        tokens: tokens of rollouts that a rank has in the mean.
        rollouts: of the call.
    """

    times: torch.Tensor
    segment: torch.Tensor
    tokens: float
    rollouts: Rollouts


class PackedRouter(TopKRouter):
    """Counts rollouts where the call's :class:`PackedGroups` asks for them, else rows, as megatron-core does."""

    config: Any
    layer_number: int
    topk: int
    _counts: _Counts | None = None

    def routing(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = RUNNING.packed
        if packed is None:
            return super().routing(logits, *args, **kwargs)
        if any(x is not None for x in (*args, *kwargs.values())):
            raise ValueError(
                "padding_mask came together with PackedGroups: the layout says which rows pad, leave it out"
            )
        self._counts = self._counts_of(packed, len(logits))
        counts = self.local_tokens_per_expert if self.enable_expert_bias and torch.is_grad_enabled() else None
        before = None if counts is None else counts.clone()
        try:
            probs, routing_map = super().routing(logits, *args, **kwargs)
            if counts is not None:  # here, because veRL's replay of routes has a `routing` that adds them itself
                own = (routing_map * self._counts.times).sum(0)
                counts.copy_(before if packed.runs_again else before + own)
            return probs, routing_map
        finally:
            self._counts = None

    def _counts_of(self, packed: PackedGroups, rows: int) -> _Counts:
        if RUNNING.layer != self.layer_number:
            raise ValueError(
                f"the router of layer {self.layer_number} runs after the attention of layer {RUNNING.layer}, expected"
                " that of its own layer, or PackedGroups(count='rows'): which rollouts share a row is not known"
            )
        rollouts, shard = packed._rollouts, packed.shard
        times, segment, ranks = rollouts.times, rollouts.segment, 1
        if self.config.sequence_parallel:
            ranks, rank = dist.get_world_size(self.tp_group), dist.get_rank(self.tp_group)
            times, segment = (x.chunk(ranks)[rank] for x in (times, segment))
        if len(times) != rows:
            raise ValueError(
                f"the router of layer {self.layer_number} gets {rows} rows, expected {len(times)}, or"
                " PackedGroups(count='rows'): which rollouts share a row is not known"
            )
        return _Counts(times[:, None], segment, rollouts.tokens / (shard.world_size * ranks), rollouts)

    def attach_and_log_load_balancing_loss(self, activation: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._counts is not None:  # losses per token are multiplied by it
            kwargs["valid_token_count"] = self._counts.tokens
        return super().attach_and_log_load_balancing_loss(activation, *args, **kwargs)

    def _balanced(
        self,
        probs: torch.Tensor,
        kind: str,
        scores: torch.Tensor,
        factors: torch.Tensor,
        name: str,
        group: Any,
        **more: Any,
    ) -> torch.Tensor:
        """probs with the loss of scores [n, E] times factors [n, E], in which experts are counted."""
        coefficient = self.get_aux_loss_coeff(kind)
        loss = (scores * factors).sum() * (coefficient * self.config.num_moe_experts / self.topk)
        found: torch.Tensor = self.attach_and_log_load_balancing_loss(probs, coefficient, loss, name, group, **more)
        return found

    def _apply_aux_loss(self, probs: Any, scores_for_aux_loss: Any, routing_map: Any, *args: Any, **kwargs: Any) -> Any:
        counts, group = self._counts, self.tp_cp_group
        if counts is None or not self.get_aux_loss_coeff("aux_loss"):
            return super()._apply_aux_loss(probs, scores_for_aux_loss, routing_map, *args, **kwargs)
        of_experts = _total((routing_map * counts.times).sum(0), group)
        factors = counts.times * self._of_tokens(of_experts, of_experts)
        return self._balanced(probs, "aux_loss", scores_for_aux_loss, factors, "load_balancing_loss", group)

    def _apply_global_aux_loss(
        self, probs: Any, scores_for_aux_loss: Any, routing_map: Any, *args: Any, **kwargs: Any
    ) -> Any:
        counts, group = self._counts, self.tp_dp_cp_group
        if counts is None or not self.get_aux_loss_coeff("global_aux_loss"):
            return super()._apply_global_aux_loss(probs, scores_for_aux_loss, routing_map, *args, **kwargs)
        of_experts = _total((routing_map * counts.times).sum(0), group)
        self.global_tokens_per_expert += of_experts
        self.ga_steps += 1
        factors = counts.times * self._of_tokens(self.global_tokens_per_expert / self.ga_steps, of_experts)
        name = "global_load_balancing_loss"
        return self._balanced(probs, "global_aux_loss", scores_for_aux_loss, factors, name, group, **OF_ALL_DATA)

    def _apply_seq_aux_loss(
        self, probs: Any, scores_for_aux_loss: Any, routing_map: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The mean over rollouts. A rollout's loss is linear in the scores of its rows, so each segment has a factor:
        the sum over the rollouts that have it."""
        counts, group = self._counts, self.tp_cp_group
        if counts is None or not self.get_aux_loss_coeff("seq_aux_loss"):
            return super()._apply_seq_aux_loss(probs, scores_for_aux_loss, routing_map, *args, **kwargs)
        rollouts, experts = counts.rollouts, routing_map.shape[1]
        of_segments = torch.zeros(rollouts.segments, experts, dtype=torch.int64, device=routing_map.device)
        of_segments = _total(of_segments.index_add_(0, counts.segment, routing_map.long()), group)
        of_rollouts = of_segments.new_zeros(rollouts.number, experts)
        of_rollouts.index_add_(0, rollouts.rollout_of_pair, of_segments[rollouts.segment_of_pair])
        each = self._of_tokens(of_rollouts, of_rollouts)
        factors = torch.zeros_like(of_segments, dtype=each.dtype)
        factors.index_add_(0, rollouts.segment_of_pair, each[rollouts.rollout_of_pair])
        factors = factors[counts.segment] / max(rollouts.number, 1)
        return self._balanced(probs, "seq_aux_loss", scores_for_aux_loss, factors, "seq_load_balancing_loss", group)

    def _of_tokens(self, of_experts: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """[..., E]: of_experts by the square of the number of tokens; a token counts for its `topk` experts."""
        return of_experts / (counted.sum(-1, keepdim=True) / self.topk).clamp(min=1).square()

    def apply_z_loss(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts, coefficient = self._counts, self.config.moe_z_loss_coeff
        if counts is None or coefficient is None or not (self.training and torch.is_grad_enabled()):
            return super().apply_z_loss(logits, *args, **kwargs)
        each = torch.logsumexp(logits, -1, keepdim=True).square() * counts.times
        loss = each.sum() * (coefficient / (max(counts.tokens, 1) * self.tp_cp_group.size()))
        return self.attach_and_log_load_balancing_loss(logits, coefficient, loss, "z_loss", self.tp_cp_group)


def _total(counts: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over ranks."""
    if group.size() > 1:
        dist.all_reduce(counts, group=group)
    return counts


ROUTERS: dict[type, type] = {TopKRouter: PackedRouter}

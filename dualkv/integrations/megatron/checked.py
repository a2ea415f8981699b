"""Checks of packed attention and recurrent layers of megatron-core: of a config and of each call."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from dualkv.context_parallel import ContextShard
from dualkv.integrations.megatron.configs import counted, gathers_experts, refuse, refuse_count
from dualkv.integrations.megatron.routers import RUNNING
from dualkv.integrations.megatron.rows import PackedGroups
from dualkv.sequence_parallel import Shard


def refuse_beside(**given: Any) -> None:
    """Raises ValueError for a mask or bias beside PackedGroups."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} came together with PackedGroups: the layout says which rows see each other, leave it out"
            )


class Checked(nn.Module):
    """Checks of a config and of a call that the packed mixers of a layer share."""

    layer_number: int

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        refuse(config)
        super().__init__(config, *args, **kwargs)
        self.config = config

    def _enter(
        self, hidden_states: torch.Tensor, given: Any, others: dict[str, Any], by_place: tuple[Any, ...] = ()
    ) -> PackedGroups | None:
        """Return a call's packed_seq_params (`given`) if they are checked PackedGroups, else None, and tell this
        layer's router. Further arguments come by name; `by_place` no megatron-core gives any."""
        RUNNING.layer, RUNNING.packed = self.layer_number, None
        if any(isinstance(x, PackedGroups) for x in by_place):
            raise ValueError("PackedGroups came by position, expected packed_seq_params=PackedGroups(...)")
        if not isinstance(given, PackedGroups):
            return None
        if any(x is not None for x in by_place):
            raise ValueError("arguments behind attention_mask came by position with PackedGroups, expected names")
        self._check(hidden_states, given, others)
        counts = given.count == "rollouts" and (self.training or torch.is_grad_enabled())
        if counts and counted(self.config):
            refuse_count(self.config)
            given._rollouts  # noqa: B018  (raises an error before anything runs)
            RUNNING.packed = given
        return given

    def _check(self, hidden_states: torch.Tensor, packed: PackedGroups, others: dict[str, Any]) -> None:
        shard = packed.shard
        if self.config.virtual_pipeline_model_parallel_size and packed.length is None:
            raise ValueError(
                f"length of PackedGroups is None and virtual_pipeline_model_parallel_size"
                f" {self.config.virtual_pipeline_model_parallel_size}, expected seq_length of the schedule: interleaved"
                " stages exchange micro-batches of one length"
            )
        if packed.length is None and gathers_experts(self.config) and parallel_state.get_data_parallel_world_size() > 1:
            raise ValueError(
                "length of PackedGroups is None and moe_token_dispatcher_type 'allgather', expected a length, or"
                " 'alltoall' or 'flex': data-parallel ranks gather each other's rows, equally many of each"
            )
        for name in ("inference_context", "inference_params"):
            if others.get(name) is not None:
                raise ValueError(f"{name} came together with PackedGroups: packed groups run without a cache")
        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        rows, batch = hidden_states.shape[0] * ranks, hidden_states.shape[1]
        if self.config.context_parallel_size != shard.world_size:
            raise ValueError(
                f"context_parallel_size of layer {self.layer_number} is {self.config.context_parallel_size}, expected"
                f" {shard.world_size}: the ranks that share the rows of PackedGroups"
            )
        self._check_heads(shard)
        if (rows, batch) != (shard.num_tokens, 1):
            share = "" if shard.world_size == 1 else ", this rank's share of them (PackedGroups.split)"
            raise ValueError(
                f"layer {self.layer_number} gets {batch} sequences of {rows} tokens, expected one of"
                f" {shard.num_tokens}: all groups of the layout in one packed row{share}"
            )

    def _check_heads(self, shard: Shard) -> None:
        heads = self.config.num_attention_heads // self.config.tensor_model_parallel_size
        if not isinstance(shard, ContextShard) and heads % shard.world_size:
            raise ValueError(
                f"{shard.world_size} context-parallel ranks cannot share the {heads} attention heads of a"
                " tensor-parallel rank, expected PackedGroups(..., cp_comm_type='all_gather')"
            )

"""veRL's trainers with groups kept on one rank: `trainer.v1.trainer_mode=dualkv_sync` and its siblings.

veRL's own trainers spread the rollouts of a prompt over all data-parallel ranks, which then pack less. That is the only
difference.
"""

from __future__ import annotations

import warnings
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from dualkv.integrations import losses
from dualkv.integrations.verl import options
from dualkv.integrations.verl.batches import MODEL_TYPE
from dualkv.integrations.verl.engine import FSDP, check_strategy
from dualkv.integrations.verl.work import balance, rank_works, rollouts_by_tag

OBSERVED = f"{MODEL_TYPE}_observe"
TRAINERS = "trainer.v1"  # where veRL's trainers have their settings, by the names of its own
MODES = "sync", "colocate_async", "separate_async"


class _WholeGroups:
    """A mixin for veRL's trainers: orders a batch so that veRL's even cut into ranks and updates keeps groups whole."""

    stock_mode: str  # the mode of veRL's own trainer, which veRL reads in its configuration

    def __init__(self, config: Any) -> None:
        _refuse(config)  # before any worker starts
        config.trainer.v1.trainer_mode = self.stock_mode
        if config.actor_rollout_ref.actor.shuffle:
            warnings.warn(
                "dualkv: actor.shuffle spreads the rollouts of a prompt over updates, which then pack less: set it to"
                " False",
                stacklevel=2,
            )
        losses.warn(losses.verl_settings(config.actor_rollout_ref.actor))
        super().__init__(config)  # type: ignore[call-arg]

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # veRL's order is replaced below; the rollouts that it adds to fill the batch stay.
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)  # type: ignore[misc]
        num_ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1  # type: ignore[attr-defined]
        num_updates = _updates(self.config, len(batch))  # type: ignore[attr-defined]
        rollouts = rollouts_by_tag(
            [key.rsplit("_", 2)[0] for key in batch.keys],  # uid_session_output
            [tag["prompt_len"] for tag in batch.tags],
            [tag["response_len"] for tag in batch.tags],
        )
        order = balance(rollouts, num_ranks, num_updates)
        works = rank_works(rollouts, order, num_updates)
        lengths = (rollouts.prompt_lens + rollouts.response_lens).tolist()
        metrics.update(log_seqlen_unbalance(seqlen_list=lengths, partitions=order, prefix="global_seqlen"))
        loads = [work.workload for work in works]
        metrics["dualkv/tokens_packed_all_ranks"] = sum(work.tokens for work in works)
        metrics["dualkv/balance_slowest_over_mean"] = max(loads) * len(loads) / sum(loads)
        batch.reorder([i for of_rank in order for i in of_rank])
        return batch


def _refuse(config: Any) -> None:
    """Raises ValueError for options that no engine takes or that nothing reads, and warns where nothing is packed."""
    if where := options.misplaced(OmegaConf.to_container(config)):
        places = " or ".join(options.PLACES)
        stock = {f"{TRAINERS}.{MODEL_TYPE}_{mode}": f"{TRAINERS}.{mode}" for mode in MODES}
        raise ValueError(f"{where} is set, where nothing reads it: expected {stock.get(where, places)}")
    model: Any = config.actor_rollout_ref.get("model") or {}
    kind, given = model.get("model_type"), options.read(model.get("fused_kernel_options"))
    if kind == MODEL_TYPE:
        check_strategy(config.actor_rollout_ref.actor.strategy)
    elif kind != OBSERVED:
        given.refuse_alone(options.PLACES[0], f"actor_rollout_ref.model.model_type={MODEL_TYPE}")
    critic: Any = config.get("critic") or {}
    of_critic: Any = critic.get("model") or {}
    given = options.read(of_critic.get("fused_kernel_options"))
    given.refuse_alone(options.PLACES[1], f"{options.PACKED}=True")
    if given.packed:
        if critic.strategy not in FSDP:
            raise ValueError(
                f"{options.PLACES[1]}.{options.PACKED} packs groups on strategy fsdp and fsdp2, not on"
                f" {critic.strategy}: set critic.strategy=fsdp2, or leave the option out"
            )
        given.refuse_of_log_probs()
    elif of_critic.get("model_type") == MODEL_TYPE:
        raise ValueError(
            f"critic.model.model_type is {MODEL_TYPE}, which packs no critic: set"
            f" +{options.PLACES[1]}.{options.PACKED}=True"
        )
    if kind not in (MODEL_TYPE, OBSERVED) and not given.packed:
        warnings.warn(
            f"dualkv: actor_rollout_ref.model.model_type is {kind}, so nothing is packed: set it to {MODEL_TYPE}",
            stacklevel=4,
        )


def _updates(config: Any, size: int) -> int:
    """The number of mini-batches into which the actor cuts `size` rollouts; 1 if it does not cut them."""
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    return size // mini_batch if size % mini_batch == 0 else 1


@register_trainer("dualkv_sync")
class DualKVTrainerSync(_WholeGroups, PPOTrainerSync):
    stock_mode = "sync"


@register_trainer("dualkv_colocate_async")
class DualKVTrainerColocateAsync(_WholeGroups, PPOTrainerColocateAsync):
    stock_mode = "colocate_async"


@register_trainer("dualkv_separate_async")
class DualKVTrainerSeparateAsync(_WholeGroups, PPOTrainerSeparateAsync):
    stock_mode = "separate_async"

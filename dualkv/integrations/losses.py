"""Warnings for losses that depend on which rollouts share a micro-batch. Each setting is named once in a process.

Some losses normalize over a micro-batch, in veRL's and TRL's own training too. Packing puts the rollouts of a prompt
together, so it changes which rollouts share a micro-batch.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

Found = list[tuple[str, str, str]]  # (setting, what the loss does within a micro-batch, remedy)
ONE = "have a micro-batch hold a whole update"


def warn(settings: Found) -> None:
    """Warn of settings that a function here found."""
    for setting, what, remedy in settings:
        _warn(setting, what, remedy)


def verl_settings(config: Any, role: str = "actor") -> Found:
    """Settings of veRL 0.9 (`verl.trainer.ppo.core_algos`) whose losses use statistics of a micro-batch, by
    `actor_rollout_ref.actor` or `critic`, OmegaConf's objects or veRL's own."""
    found, policy_loss = [], config.get("policy_loss") or {}
    mode = policy_loss.get("loss_mode", "vanilla")
    one = f"{ONE} (actor.ppo_max_token_len_per_gpu)"
    if mode == "geo_mean":
        what = "adds up the means of micro-batches, so its scale is their number"
        found.append((f"policy_loss.loss_mode={mode}", what, f"{one}, or take gspo"))
    if mode in ("clip_cov", "kl_cov"):
        what = "picks tokens by covariances within a micro-batch"
        found.append((f"policy_loss.loss_mode={mode}", what, f"{one}, or take another policy loss"))
    correction = policy_loss.get("rollout_correction", None)
    if mode == "bypass_mode" and correction is not None:  # otherwise the trainer computes weights over a whole batch
        weighs = correction.get("loss_type", "ppo_clip") == "reinforce" and correction.get("rollout_is", None)
        if weighs and correction.get("rollout_is_batch_normalize", False):
            name = "policy_loss.rollout_correction.rollout_is_batch_normalize=True"
            what = "divides importance weights by their mean in a micro-batch"
            found.append((name, what, f"{one}, or set it to False"))
    if config.get("loss_agg_mode") == "seq-mean-token-sum-norm" and config.get("loss_scale_factor", None) is None:
        name = "loss_agg_mode=seq-mean-token-sum-norm without loss_scale_factor"
        remedy = f"set {role}.loss_scale_factor, such as to data.max_response_length"
        found.append((name, "divides by the longest response of a micro-batch", remedy))
    return [(f"{role}.{setting}", what, remedy) for setting, what, remedy in found]


def trl_settings(trainer: Any) -> Found:
    """Settings of TRL 1.16 (`_compute_loss`), GRPO or RLOO, whose losses use statistics of a micro-batch.

    RLOO and GMPO average over rollouts, and micro-batches have equally many.
    """
    if trainer.args.steps_per_generation == 1:
        return []  # one micro-batch, which packing does not change
    found, one = [], f"{ONE} (steps_per_generation=1)"
    if getattr(trainer, "loss_type", None) == "bnpo":
        what = "divides by the tokens of a micro-batch"
        found.append(("loss_type='bnpo'", what, f"{one}, or take 'dapo', which divides by the tokens of all"))
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        what = "takes the quantile within a micro-batch"
        found.append((f"top_entropy_quantile={trainer.top_entropy_quantile}", what, f"{one}, or set it to 1.0"))
    if getattr(trainer, "_entropy_bonus_enabled", False):
        name = "use_adaptive_entropy=True" if trainer.use_adaptive_entropy else f"entropy_coef={trainer.entropy_coef}"
        found.append((name, "averages entropies over the tokens of a micro-batch", f"{one}, or do without the bonus"))
    if trainer.aux_loss_enabled:
        what = "balances the experts' load within a micro-batch"
        name = f"router_aux_loss_coef={trainer.router_aux_loss_coef}"
        found.append((name, what, f"{one}, or set it to 0.0"))
    return found


@cache  # once a process
def _warn(setting: str, what: str, remedy: str) -> None:
    warnings.warn(
        f"dualkv: {setting} {what}, and packing changes which rollouts share one, so the loss can differ from that of"
        f" unpacked training: {remedy}",
        stacklevel=4,
    )

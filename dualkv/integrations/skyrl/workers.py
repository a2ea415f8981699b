"""SkyRL's FSDP workers with packed models, and the function that puts them in the place of SkyRL's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from skyrl.backends.skyrl_train.workers import worker
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
from skyrl.backends.skyrl_train.workers.worker_utils import all_reduce_metrics, get_microbatch_iterator

from dualkv.integrations import actions, patching
from dualkv.integrations.patching import Changes
from dualkv.integrations.skyrl.batches import SUMS, WEIGHTS, PackedBatchIterator
from dualkv.integrations.skyrl.models import COUNTED, INSTEAD, REPLAY, PackedModel, packed_critic


class _Packed(worker.Worker):
    """The methods of SkyRL's workers that packed ones of every role replace."""

    def __init__(self, **kwargs: Any) -> None:
        refuse(kwargs["cfg"])
        super().__init__(**kwargs)
        _say_unplanned(self.cfg)

    def init_model(self, *args: Any, **kwargs: Any) -> None:
        with Changes(fsdp_worker) as changed:
            changed.replace("HFModelWrapper", PackedModel)
            changed.replace("get_llm_for_sequence_regression", packed_critic)
            super().init_model(*args, **kwargs)

    def forward(self, data: Any, **kwargs: Any) -> Any:
        with self._plans(self._is_sum(kwargs.get("loss_fn"))):
            return super().forward(data, **kwargs)

    def _is_sum(self, loss_fn: str | None) -> bool:
        """Whether losses do not depend on micro-batches, or can be made so."""
        return True

    @contextmanager
    def _plans(self, regroups: bool, weighted: bool = False) -> Iterator[None]:
        """A context in which SkyRL's budget counts packed tokens, if `regroups`."""
        with Changes(worker) as changed:
            if regroups:
                changed.replace("get_microbatch_iterator", partial(_iterator, weighted=weighted))
            yield


class _Trained(_Packed):
    """The methods of SkyRL's workers that packed ones in training replace."""

    def forward_backward(self, data: Any, **kwargs: Any) -> Any:
        counted = getattr(self.model, COUNTED)
        counted.clear()
        regroups = self._is_sum(kwargs.get("loss_fn"))
        with self._plans(regroups, weighted=regroups and self._has_entropy_loss()):
            output = super().forward_backward(data, **kwargs)
        # On every rank: some may have run nothing packed.
        found = all_reduce_metrics({name: float(counted[name]) for name in ("tokens", "packed")}, self.strategy)
        if found["packed"]:
            ratio = found["tokens"] / found["packed"]
            output.metrics.update({"dualkv/tokens_packed": found["packed"], "dualkv/dedup_ratio": ratio})
        return output

    def _has_entropy_loss(self) -> bool:
        return False


class PackedPolicyWorker(_Trained, fsdp_worker.FSDPPolicyWorkerBase):
    """SkyRL's policy, packed."""

    def _is_sum(self, loss_fn: str | None) -> bool:
        name = loss_fn or self.cfg.algorithm.policy_loss_type
        if name not in SUMS and self.cfg.max_tokens_per_microbatch > 0:
            actions.warn(
                f"the policy loss {name} is not known to be a sum over sequences, so SkyRL's own micro-batches stay, in"
                " which few share their prompt"
            )
        return name in SUMS

    def _has_entropy_loss(self) -> bool:
        return bool(self.cfg.algorithm.use_entropy_loss)

    def _forward_backward_micro(self, experience: Any, microbatch_weight: float, **kwargs: Any) -> Any:
        weights = (experience.metadata or {}).get(WEIGHTS)
        if weights is not None:
            # SkyRL takes the mean over the micro-batch's trained tokens, times microbatch_weight.
            self.model.entropy_scale = weights * experience.loss_mask.sum() / microbatch_weight
        try:
            return super()._forward_backward_micro(experience, microbatch_weight, **kwargs)
        finally:
            self.model.entropy_scale = None


class PackedCriticWorker(_Trained, fsdp_worker.FSDPCriticWorkerBase):
    """SkyRL's critic, packed."""


class PackedRefWorker(_Packed, fsdp_worker.FSDPRefWorkerBase):
    """SkyRL's reference, packed."""


def _iterator(data: Any, micro_batch_size: int, max_tokens_per_microbatch: int, weighted: bool) -> Any:
    """SkyRL's `get_microbatch_iterator`, whose budget counts packed tokens. Images run replicated: theirs stays."""
    if max_tokens_per_microbatch <= 0 or data.get("pixel_values") is not None:
        return get_microbatch_iterator(data, micro_batch_size, max_tokens_per_microbatch)
    return PackedBatchIterator(data, max_tokens_per_microbatch, weighted)


def install(cfg: Any) -> None:
    """Let SkyRL train packed models, in this process: its FSDP workers become packed ones.

    Call this function where SkyRL's trainer is made, which is in the remote function of an entrypoint.

    Args:
        cfg: the `SkyRLTrainConfig`.

    Raises:
        ValueError: the Megatron backend, sequence parallelism, replayed sample support.
        TypeError: a `max_tokens_per_microbatch` that is no integer.
    """
    refuse(cfg.trainer)
    for name, cls in WORKERS.items():
        patching.of(fsdp_worker).replace(name, ray.remote(num_gpus=1)(cls))


WORKERS: dict[str, Callable[..., Any]] = {
    "PolicyWorker": PackedPolicyWorker,
    "CriticWorker": PackedCriticWorker,
    "RefWorker": PackedRefWorker,
}


def refuse(trainer: Any) -> None:
    """Raise ValueError for settings, the part `trainer` of SkyRL's configuration, with which models do not run packed,
    and TypeError for a budget that is no integer."""
    if trainer.strategy != "fsdp":
        raise ValueError(f"trainer.strategy is {trainer.strategy}, expected fsdp: take it, {INSTEAD}")
    for name in ("policy", "ref", "critic"):
        if (size := getattr(trainer, name).sequence_parallel_size) != 1:
            raise ValueError(
                f"trainer.{name}.sequence_parallel_size is {size}, expected 1: ranks that share rows run another"
                f" attention; set it to 1, {INSTEAD}"
            )
    if trainer.algorithm.enable_sample_support_replay:
        raise ValueError(f"trainer.algorithm.enable_sample_support_replay is True{REPLAY}")
    tokens = trainer.max_tokens_per_microbatch
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(f"trainer.max_tokens_per_microbatch is {tokens!r}, expected a number of packed tokens")


def _say_unplanned(trainer: Any) -> None:
    if trainer.max_tokens_per_microbatch <= 0:
        sizes = f"{trainer.micro_train_batch_size_per_gpu} and {trainer.micro_forward_batch_size_per_gpu}"
        actions.warn(
            f"SkyRL cuts batches into micro-batches of {sizes} sequences wherever they end: set"
            " trainer.max_tokens_per_microbatch, which keeps sequences together that share much"
        )

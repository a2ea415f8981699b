"""OpenRLHF's strategy with packed models. Ray hands the strategy to each worker, and each worker's models go through
its `prepare`, so nothing else of OpenRLHF has to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from openrlhf.models import Actor
from openrlhf.utils import deepspeed
from openrlhf.utils.deepspeed import DeepspeedStrategy

from dualkv.integrations import actions, patching
from dualkv.integrations.openrlhf.batches import keep_groups_together
from dualkv.integrations.openrlhf.models import pack_model


class PackedStrategy(DeepspeedStrategy):
    """A `DeepspeedStrategy` whose models compute once what rollouts of a micro-batch begin with in common.

    Raises:
        ValueError: by the constructor for arguments whose models do not run packed: ring attention, tensor parallelism,
            DeepCompile, Liger's kernels; by `prepare` for a model that
            :func:`dualkv.integrations.openrlhf.pack_model` refuses.
    """

    boundaries: Iterator[int] | None = None  # of dynamic batches: whether a micro-batch is the last of its update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse(self.args)
        say(self.args)
        keep_groups_together()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set up a worker of Ray."""
        self.__dict__.update(state)
        keep_groups_together()

    def prepare(self, *models: Any) -> Any:
        """Pack models, then prepare them as `DeepspeedStrategy` does."""
        for entry in models:
            model = entry[0] if isinstance(entry, tuple) else entry
            if model is not None:
                pack_model(model)
        return super().prepare(*models)

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """Sum the gradients of an update's micro-batches. With dynamic batches and ZeRO-1 or 2, OpenRLHF's own method
        leaves the last micro-batch's alone (its issue 1131), because DeepSpeed does not learn which one is the last."""
        if self.boundaries is not None:
            engine = model.model if isinstance(model, Actor) else model
            engine.set_gradient_accumulation_boundary(bool(next(self.boundaries)))
        super().backward(loss, model, optimizer, **kwargs)


def install() -> None:
    """Make OpenRLHF's `get_strategy` return a :class:`PackedStrategy`, in this process."""
    patching.of(deepspeed).replace("DeepspeedStrategy", PackedStrategy)


def refuse(args: Any) -> None:
    """Raise ValueError for arguments of `openrlhf.cli.train_ppo_ray` whose models do not run packed, or budgets without
    a token."""
    expected_of = {"ring_attn_size": 1, "tensor_parallel_size": 1, "deepcompile": False, "use_liger_kernel": False}
    for name, expected in expected_of.items():
        if (came := getattr(args.ds, name, expected)) != expected:
            raise ValueError(
                f"--ds.{name} is {came}, expected {expected}: use openrlhf.cli.train_ppo_ray, or leave it out"
            )
    if args.train.dynamic_batch_enable:
        for part in ("train", "rollout"):
            if (budget := getattr(args, part).max_tokens_per_gpu) is not None and budget < 1:
                raise ValueError(f"--{part}.max_tokens_per_gpu is {budget}, expected at least 1 packed token")


def say(args: Any) -> None:
    """Warn of arguments with which little is shared, each once a process."""
    if not args.train.dynamic_batch_enable:
        actions.warn(
            f"OpenRLHF shuffles rollouts over micro-batches of {args.train.micro_batch_size}, so few of a micro-batch"
            " share their prompt: add --train.dynamic_batch_enable, which keeps them together"
        )

"""The metric `dualkv/ratio_at_equal_weights`: how far an update's first log-probs are from the old ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from dualkv.arrays import to_device
from dualkv.integrations.metrics import furthest_ratio, log_ratios
from dualkv.integrations.transformers import adapters
from dualkv.integrations.verl.data import Rollouts

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weights:
    """The weights of forward passes without gradients, by the adapters that were active.

    They are told apart by the sum of each parameter's bits, so that steps count, checkpoints, and weights that veRL's
    trainers put in place for a while.
    """

    def __init__(self) -> None:
        self._sums: dict[Any, list[int]] = {}

    def note(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Note the weights of a wrapped model, and its optimizer."""
        self._sums[_active(module)] = _sums(module, optimizer)

    def are(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> bool | None:
        """Whether a model has the weights that it had; None if there was no pass with its adapters."""
        noted = self._sums.get(_active(module))
        return None if noted is None else noted == _sums(module, optimizer)


def _active(module: nn.Module) -> tuple[Any, ...]:
    """Whether the adapters of each of PEFT's layers are off, and the names of active ones."""
    layers: list[Any] = [x for x in module.modules() if adapters.is_layer(x)]
    return tuple((x.disable_adapters, tuple(x.active_adapters)) for x in layers)


def _sums(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Add up the bits of each parameter on this rank, as integers."""
    found = [x.detach().view(INTEGERS[x.element_size()]).sum(dtype=torch.int64) for x in _local(module, optimizer)]
    return [int(x) for x in torch.stack(found).tolist()]


def _local(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """This rank's part of every parameter. FSDP2's module may have gathered ones, so its optimizer is asked."""
    if isinstance(module, FSDP):
        for part in FSDP.fsdp_modules(module):
            if part._handle is not None:
                yield part._handle.flat_param._local_shard
        return
    for group in optimizer.param_groups:
        for x in group["params"]:
            yield x.to_local() if isinstance(x, DTensor) else x


class Ratio:
    """The ratio of one update that is furthest from 1, over its micro-batches and all data-parallel ranks. The batch
    has `old_log_probs`; `differs` says whether the weights are others than theirs."""

    def __init__(self, data: Any, rollouts: Rollouts, device: Any, differs: bool) -> None:
        self.rollouts = rollouts
        self._old, self._counts = (data[name].unbind() for name in ("old_log_probs", "loss_mask"))
        self._found = [torch.zeros(2, device=device)]
        self._differs = torch.tensor([float(differs)], device=device)

    def add(self, some: list[int], log_probs: torch.Tensor) -> None:
        """Add the log-probs of some rollouts, nested [n, tokens of sequences]."""
        p, r = self.rollouts.prompt_lens[some].tolist(), self.rollouts.response_lens[some].tolist()
        new = [x[a - 1 : a - 1 + b] for x, a, b in zip(log_probs.unbind(), p, r, strict=True)]
        old, counts = (
            to_device(torch.cat([of[i][:b] for i, b in zip(some, r, strict=True)]), log_probs.device)
            for of in (self._old, self._counts)
        )
        self._found.append(log_ratios(torch.cat(new), old, counts))

    def value(self, group: dist.ProcessGroup) -> float | None:
        """Return the ratio, None at other weights. All ranks of the group call together."""
        low, high = torch.stack(self._found).unbind(1)
        found = torch.cat([-low.min()[None], high.max()[None], self._differs])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return None if found[2] else furthest_ratio(torch.stack([-found[0], found[1]]))

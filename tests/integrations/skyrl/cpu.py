"""SkyRL on the CPU.

Its own code runs here, from what a generator returns to updated weights: configuration, trainer, dispatch, workers,
models, FSDP2 strategy, losses. Stand-ins are
- `flash_attn`, which is imported for a packing with which nothing is compared;
- CUDA's names, and "cuda" as the device of a mesh and of buffers;
- Ray: a group's worker of this rank is in this process (`Group`), and results of others are gathered.

Import this module before SkyRL.
"""

from __future__ import annotations

import os
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist

from tests.integrations.trainings import stand_in, without_cuda

stand_in({"flash_attn": "", "flash_attn.bert_padding": "pad_input unpad_input"})
without_cuda(torch.device("cpu"))

import ray  # noqa: E402
from loguru import logger  # noqa: E402
from skyrl.backends.skyrl_train.distributed import fsdp_utils  # noqa: E402
from skyrl.backends.skyrl_train.distributed.dispatch import ActorInfo, DispatchRegistry  # noqa: E402

logger.remove()
_mesh = torch.distributed.device_mesh.init_device_mesh


def _cpu_mesh(_device: str, *args: Any, **kwargs: Any) -> Any:
    return _mesh("cpu", *args, **kwargs)


setattr(torch.distributed.device_mesh, "init_device_mesh", _cpu_mesh)  # noqa: B010
fsdp_utils.init_device_mesh = _cpu_mesh


def _sync_buffers(model: Any, _loaded: Any) -> None:
    """The stand-in of a function whose tensors are on "cuda"."""
    for module in model.modules():
        for name in sorted(module._non_persistent_buffers_set):
            own = module._buffers[name]
            sent = own.detach() if dist.get_rank() == 0 else torch.empty(own.shape, dtype=own.dtype)
            dist.broadcast(sent, src=0)
            module._buffers[name] = sent


fsdp_utils._sync_non_persistent_buffers = _sync_buffers


class Group:
    """A `PPORayActorGroup` whose worker of this rank is in this process."""

    def __init__(self, cls: type, cfg: Any, path: str, *more: Any) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        place = {"rank": rank, "local_rank": rank, "world_size": ranks, "sequence_parallel_size": 1}
        self.worker = cls(cfg=cfg, master_addr=os.environ["MASTER_ADDR"], master_port="0", **place)
        self.worker.init_worker_process_group()
        self.worker.init_model(path, *more)
        ranks_of: list[Any] = [None] * ranks
        dist.all_gather_object(ranks_of, self.worker.get_mesh_rank())
        self.actor_infos = [ActorInfo(Handle(self.worker if of == rank else None), r) for of, r in enumerate(ranks_of)]

    def get_dp_size(self) -> int:
        return dist.get_world_size()

    def async_run_ray_method(self, dispatch_type: str, method_name: str, *args: Any, **kwargs: Any) -> Any:
        kind = DispatchRegistry.get(dispatch_type)
        args, kwargs = kind.validate_dispatch_args(*args, **kwargs)
        return kind.dispatch(self.actor_infos, method_name, *args, **kwargs)


class Handle:
    """The handle of a worker: in this process, or elsewhere."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return _Method(None if self.worker is None else getattr(self.worker, name))


class _Method:
    def __init__(self, function: Any) -> None:
        self.function = function

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return ELSEWHERE if self.function is None else self.function(*args, **kwargs)


ELSEWHERE = object()


def _get(found: Any) -> Any:
    """The results of the workers of all ranks, from lists of each group's one on this rank."""
    if not isinstance(found, list) or ELSEWHERE not in found:
        return found
    made: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(made, [one for one in found if one is not ELSEWHERE])
    return [one for of_group in zip(*made, strict=True) for one in of_group]


ray.put, ray.get = (lambda value: value), _get

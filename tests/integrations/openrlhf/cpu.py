"""OpenRLHF on the CPU.

Its own code runs here, from rollouts to updated weights: arguments, strategy, workers, experience maker, replay buffer,
losses and DeepSpeed. Stand-ins are
- modules that need a GPU and are only imported: `flash_attn` (its packing, with which nothing is compared) and `vllm`;
- CUDA's names, and "cuda" as the device of a mesh;
- DeepSpeed's fused Adam, by the AdamW of PyTorch, and its shared memory op, by nothing: both would be compiled;
- bf16, by fp32: OpenRLHF has no name for it;
- Ray's groups of actors, by a worker in this process (`Group`).

Import this module before OpenRLHF.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from typing import Any
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist

from tests.integrations.trainings import stand_in, without_cuda

ABSENT = {
    "flash_attn": "",
    "flash_attn.bert_padding": "index_first_axis pad_input rearrange unpad_input",
    "flash_attn.utils": "",
    "flash_attn.utils.distributed": "all_gather",
    "vllm": "SamplingParams",
    "vllm.inputs": "TokensPrompt",
    "vllm.utils": "random_uuid",
}


class Cpu(str):
    """The current device: "cpu" as an argument, and 0 in names such as "cuda:0"."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


stand_in(ABSENT)
without_cuda(Cpu("cpu"))

import deepspeed.ops.adam  # noqa: E402
import openrlhf.utils  # noqa: E402
import ray  # noqa: E402
from openrlhf.utils import utils as openrlhf_utils  # noqa: E402
from openrlhf.utils.deepspeed import deepspeed as strategies  # noqa: E402

_mesh = strategies.init_device_mesh
strategies.init_device_mesh = lambda _device, *args, **kwargs: _mesh("cpu", *args, **kwargs)
_backend: Any = import_module("deepspeed.comm.torch")  # the attribute of this name is PyTorch
_backend.build_shm_op = lambda: None
deepspeed.ops.adam.FusedAdam = lambda params, adam_w_mode, **kwargs: torch.optim.AdamW(params, **kwargs)
openrlhf_utils.convert_to_torch_dtype = lambda _name: torch.float32
ray.put, ray.get = (lambda value: value), (lambda value: value)


class _Parsed(Exception):
    """Carries the arguments out of OpenRLHF's command line, which has no function that parses them."""


def arguments(*flags: str, module: str = "openrlhf.cli.train_ppo_ray") -> Any:
    """The arguments that OpenRLHF's command line hands to its strategy."""

    def caught(args: Any) -> None:
        raise _Parsed(args)

    with (
        patch.object(ray, "is_initialized", lambda: True),
        patch.object(openrlhf.utils, "get_strategy", caught),
        patch.object(sys, "argv", [module, *flags]),
    ):
        try:
            runpy.run_module(module, run_name="__main__")
        except _Parsed as found:
            args = found.args[0]
    args.local_rank = -1
    args.ds.param_dtype = "fp32"
    return args


class Group:
    """A `RayActorGroup` whose worker of this rank is in this process."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def async_run_method(self, method_name: str, **kwargs: Any) -> list[Any]:
        return [getattr(self.worker, method_name)(**kwargs)]

    def async_run_method_batch(self, method_name: str, **kwargs: Any) -> list[Any]:
        """Each worker takes its part of the batches, as with Ray; all get the results of all."""
        number, ranks = len(next(iter(kwargs.values()))), dist.get_world_size()
        size = -(-number // ranks)
        begin, end = (min(size * rank, number) for rank in (dist.get_rank(), dist.get_rank() + 1))
        done = self.worker.execute_batch(method_name, kwargs, begin, end)
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, done)
        return found


def worker(decorated: Any) -> Any:
    """An instance of a class of Ray's actors, in this process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return decorated.__ray_metadata__.modified_class(ranks, rank, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])

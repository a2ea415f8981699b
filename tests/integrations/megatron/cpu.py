"""megatron-core on the CPU: it names CUDA devices and saves CUDA's random state, for which nothing here has a use."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Tensors that are made on a CUDA device are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def start() -> None:
    """Once in a process: as many gloo ranks as torchrun says, or one."""
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = torch.cuda.current_stream = MagicMock()  # type: ignore[misc]
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment,return-value]
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, **_: x.numpy() if as_numpy else x
    _OnCpu().__enter__()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def parallel(tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Groups of ranks of these sizes in the place of those before."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)

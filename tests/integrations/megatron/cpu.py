"""megatron-core on the CPU: it names CUDA devices, streams and random states, for which nothing here has a use."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch._dynamo.config
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher


def _made_on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory of tensors that takes "cuda" for the CPU."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _on_host(x: torch.Tensor | None, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Copy a tensor to the host, a stand-in for megatron-core's function for tensors of a GPU."""
    return x.numpy() if as_numpy and x is not None else x


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """The gated delta rule row by row: q, k [N, L, H, K], v [N, L, H, V], g and beta [N, L, H] -> [N, L, H, V]."""
    state, found = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3]), []
    for q_, k_, v_, g_, beta_ in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        state = state * g_.exp()[..., None, None]
        missing = (v_ - torch.einsum("nhk,nhkv->nhv", k_, state)) * beta_[..., None]
        state = state + k_[..., None] * missing[..., None, :]
        found.append(torch.einsum("nhk,nhkv->nhv", q_, state) / q.shape[3] ** 0.5)
    return torch.stack(found, 1), None


def conv1d(x: torch.Tensor, weight: torch.Tensor, bias: Any, **_: Any) -> tuple[torch.Tensor, None]:
    """A causal convolution and SiLU: x [N, L, C], weight [C, k] -> [N, L, C]."""
    before = torch.nn.functional.pad(x, (0, 0, weight.shape[1] - 1, 0)).unfold(1, weight.shape[1], 1)
    found = (before * weight).sum(-1)
    return torch.nn.functional.silu(found if bias is None else found + bias), None


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


# Of flash-linear-attention, without which megatron-core makes no gated delta net.
LIBRARY = {"HAVE_FLA": True, "chunk_gated_delta_rule": delta_rule, "causal_conv1d": conv1d, "l2norm": l2norm}
NETS = {sys.modules[c.__module__] for c in gated_delta_net.GatedDeltaNet.__mro__ if "gated_delta" in c.__module__}

STAND_INS: list[tuple[Any, str, Any]] = [
    *((torch, name, _made_on_cpu(getattr(torch, name))) for name in ("empty", "ones", "tensor", "zeros")),
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    (torch.cuda, "synchronize", lambda device=None: None),
    (torch.cuda, "Stream", MagicMock()),
    (torch.cuda, "current_stream", MagicMock()),
    (torch.cuda, "stream", lambda stream: nullcontext()),
    (random, "_get_cuda_rng_state", lambda *_, **__: None),
    (random, "_set_cuda_rng_state", lambda *_, **__: None),
    (random.CudaRNGStatesTracker, "fork", lambda self, name="": nullcontext()),
    (multi_latent_attention, "HAVE_TE", False),  # megatron-core 0.16 takes its absence for its presence
    (token_dispatcher, "maybe_move_tensor_to_cpu", _on_host),
]


@contextmanager
def on_cpu() -> Iterator[None]:
    """Run with the stand-ins, and without compilation."""
    with ExitStack() as stack:
        for owner, name, value in STAND_INS:
            stack.enter_context(patch.object(owner, name, value))
        for module in NETS | {gated_delta_net}:  # versions differ in where they have them
            for name, value in LIBRARY.items():
                stack.enter_context(patch.object(module, name, value, create=True))
        # megatron-core 0.16 forgets this name where Transformer Engine is not installed.
        stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        yield


@contextmanager
def rank(store: dist.Store | None = None) -> Iterator[None]:
    """The only rank, with a store; or one of the ranks of tests/ranks.py."""
    alone = {} if store is None else {"store": store, "rank": 0, "world_size": 1}
    with on_cpu():
        dist.init_process_group("gloo", **alone)
        yield
        close_groups()
        dist.destroy_process_group()


def close_groups() -> None:
    """Ends megatron-core's groups of ranks, which `destroy_model_parallel` leaves open: each has threads that poll."""
    parallel_state.destroy_model_parallel()
    gc.collect()  # models hold groups, too
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def parallel(tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1, interleaved: int | None = None) -> None:
    """Groups of ranks of these sizes in the place of those before."""
    close_groups()
    parallel_state.initialize_model_parallel(
        tp, pp, interleaved, context_parallel_size=cp, expert_model_parallel_size=ep
    )

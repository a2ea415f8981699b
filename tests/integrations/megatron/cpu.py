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
from megatron.core.transformer.torch_norm import WrappedTorchNorm

try:
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
except ImportError:  # before 0.19
    hybrid_block = None


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


def mamba(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dt_bias: torch.Tensor, A: torch.Tensor, **given: Any
) -> torch.Tensor:
    """Mamba-2 row by row, with its convolution and gate: z, x, B, C and dt [N, L, ...] -> [N, L, H * P]."""
    heads, inner, groups = len(A), len(A) * given["headdim"], given["ngroups"]
    states = (len(weight) - inner) // 2
    z, rows, dt = rows.split([inner, inner + 2 * states, heads], -1)
    rows, _ = conv1d(rows, weight, bias)
    x, b, c = rows.split([inner, states, states], -1)
    x, dt = x.unflatten(-1, (heads, -1)), torch.nn.functional.softplus(dt + dt_bias)
    b, c = (each.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 2) for each in (b, c))
    state, found = x.new_zeros(len(x), heads, x.shape[3], b.shape[3]), []
    for x_, dt_, b_, c_ in zip(*(each.unbind(1) for each in (x, dt, b, c)), strict=True):
        state = state * (dt_ * A).exp()[..., None, None] + (dt_[..., None] * x_)[..., None] * b_[..., None, :]
        found.append((state * c_[..., None, :]).sum(-1) + given["D"][:, None] * x_)
    return torch.stack(found, 1).flatten(2) * torch.nn.functional.silu(z)


class GroupedNorm(torch.nn.Module):
    """RMSNorm of each group of columns."""

    def __init__(self, size: int, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps, self.group_size = torch.nn.Parameter(torch.ones(size)), eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return torch.nn.functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def rearrange(x: torch.Tensor, pattern: str) -> torch.Tensor:
    """Compute the patterns of einops that Mamba's layer uses in training."""
    return x.squeeze(1) if pattern == "d 1 w -> d w" else x.transpose(0, 1)


def norm(config: Any, **sizes: Any) -> Any:
    """The norm behind all layers of a HybridModel, which is Transformer Engine's."""
    return torch.nn.Identity() if config.sequence_parallel else WrappedTorchNorm(config, **sizes)


# Of mamba-ssm and einops, without which megatron-core makes no Mamba layer.
MAMBA = {
    "HAVE_MAMBA_SSM": True,
    "HAVE_EINOPS": True,
    "rearrange": rearrange,
    "mamba_split_conv1d_scan_combined": mamba,
    "ExtendedRMSNorm": GroupedNorm,
}
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
        if hybrid_block is not None:
            stack.enter_context(patch.object(hybrid_block, "TENorm", norm))
            for module in (mamba_mixer, mamba_context_parallel):
                for name, value in MAMBA.items():
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


def parallel(
    tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1, interleaved: int | None = None, etp: int | None = None
) -> None:
    """Groups of ranks of these sizes in the place of those before."""
    close_groups()
    more = {"context_parallel_size": cp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    parallel_state.initialize_model_parallel(tp, pp, interleaved, **more)

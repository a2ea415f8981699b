"""veRL knows no CPU platform; this one lets its workers run without a GPU (`VERL_USE_EXTERNAL_MODULES` names it)."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _zero(*_: Any) -> int:
    return 0


def _nothing(*_: Any, **__: Any) -> None:
    return None


DEVICE = types.SimpleNamespace(
    max_memory_allocated=_zero,
    max_memory_reserved=_zero,
    memory_allocated=_zero,
    memory_reserved=_zero,
    mem_get_info=lambda *_: (1, 1),
    reset_peak_memory_stats=_nothing,
    empty_cache=_nothing,
    synchronize=_nothing,
    ipc_collect=_nothing,
    is_available=lambda: False,
    get_device_name=lambda *_: "CPU",
    current_device=lambda: "cpu",
    device_count=_zero,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = property(lambda _: "cpu")
    vendor_name = property(lambda _: "cpu")
    device_module = property(lambda _: DEVICE)
    is_available = is_platform_available = lambda *_, **__: True
    current_device = lambda _: "cpu"  # noqa: E731
    device_count = lambda _: 1  # noqa: E731
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing
    manual_seed = manual_seed_all = lambda _, seed: torch.manual_seed(seed)
    get_device_capability = lambda *_, **__: (None, None)  # noqa: E731
    communication_backend_name = lambda _: "gloo"  # noqa: E731
    visible_devices_envvar = lambda _: "CUDA_VISIBLE_DEVICES"  # noqa: E731
    nvtx_range = lambda *_: contextlib.nullcontext()  # noqa: E731
    ray_resource_name = lambda _: "CPU"  # noqa: E731
    ray_noset_envvars = lambda _: []  # noqa: E731
    is_ipc_supported = lambda _: False  # noqa: E731
    cudart = _nothing

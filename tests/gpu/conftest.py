"""The fixtures that GPU tests share: the GPU they need, a watchdog, and kernels compiled side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from codegen import folders, store
from codegen.spec import KernelSpec
from dualkv.ops import hopper
from tests.watchdog import watchdog

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == hopper.CAPABILITY
HANG_SECONDS = 300.0


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that run on any GPU have the mark `any_gpu`; the others skip without a Hopper GPU."""
    if item.get_closest_marker("any_gpu") is None:
        item.add_marker(pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"))


@pytest.fixture(scope="session")
def uncaptured_stderr(pytestconfig) -> Iterator[int]:
    """Descriptor of the terminal's stderr: while tests run, pytest has its own file in the place of number 2."""
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        descriptor = os.dup(2)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def no_hang(request, uncaptured_stderr) -> Iterator[None]:
    """A kernel that hangs ends the run: the process waits for it inside the driver and cannot be interrupted."""
    with watchdog(request.node.nodeid, HANG_SECONDS, uncaptured_stderr):
        yield


@pytest.fixture(scope="session")
def compile_all() -> Callable[[Iterable[KernelSpec]], None]:
    """Compiles what is not found of some kernels, all processors at work, so that tests need not wait one by one."""

    def fill(specs: Iterable[KernelSpec]) -> None:
        missing = [spec for spec in dict.fromkeys(specs) if store.where(spec) is None]
        if missing and store.may_compile():
            folders.make_cache_dir()
            for _ in store.fill(missing, store.cache_dir(), os.cpu_count() or 1):
                pass

    return fill

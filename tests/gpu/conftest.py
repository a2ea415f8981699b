"""What the GPU tests share: a watchdog, and kernels compiled side by side."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable

import pytest

from codegen import store
from codegen.spec import KernelSpec

HANG_SECONDS = 300.0


@pytest.fixture(autouse=True)
def watchdog(request):
    """A kernel that hangs ends the run: the process waits for it inside the driver and cannot be interrupted."""

    def end():
        sys.__stderr__.write(f"\n{request.node.nodeid} has hung for {HANG_SECONDS:.0f} s: ending the run\n")
        sys.__stderr__.flush()
        os._exit(3)

    timer = threading.Timer(HANG_SECONDS, end)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


@pytest.fixture(scope="session")
def compile_all() -> Callable[[Iterable[KernelSpec]], None]:
    """Compiles what is not found of some kernels, all processors at work, so that tests need not wait one by one."""

    def fill(specs: Iterable[KernelSpec]) -> None:
        missing = [spec for spec in dict.fromkeys(specs) if store.where(spec) is None]
        if missing and os.environ.get("DUALKV_JIT") != "0":
            store.cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
            for _ in store.fill(missing, store.cache_dir(), os.cpu_count() or 1):
                pass

    return fill

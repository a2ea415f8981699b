"""`python -m tools.gpu_kernels FOLDER`: compile what the GPU tests call, and the recorded kernels, without a GPU.

The tests run here as if there were a Hopper GPU. They ask the store for their kernels first, and fail after that, at
the first tensor on the GPU. The kernels are noted, then compiled. With the folder as `DUALKV_KERNEL_DIR`, `make
test-gpu` has little to compile on a GPU machine.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import pytest
import torch
import typer

from codegen import KernelError, store
from codegen.manifest import recorded_specs
from codegen.spec import KernelSpec
from dualkv.ops import hopper
from tools.process import ROOT


class Noting:
    """A plugin of pytest that notes the kernels which tests ask for, and stands in for the GPU and the store."""

    def __init__(self) -> None:
        self.specs: dict[KernelSpec, None] = {}

    def _note(self, specs: Iterable[KernelSpec]) -> None:
        self.specs.update(dict.fromkeys(specs))

    def _fill(self, specs: list[KernelSpec], folder: Path, jobs: int = 1) -> Iterator[tuple[KernelSpec, Path]]:
        self._note(specs)
        return ((spec, folder) for spec in specs)

    def _where(self, spec: KernelSpec) -> None:
        self._note([spec])

    def _refuse(self, asked: Any) -> Any:
        self._note([asked] if isinstance(asked, KernelSpec) else asked)
        raise KernelError("kernels are noted, not loaded")

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in (
                ("is_available", lambda: True),
                ("device_count", lambda: 1),
                ("get_device_capability", lambda *device: hopper.CAPABILITY),
                ("get_device_name", lambda *device: "no GPU"),
            ):
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            replaced = {"fill": self._fill, "where": self._where}
            replaced |= dict.fromkeys(("entry", "load", "load_all"), self._refuse)
            for name, function in replaced.items():
                stack.enter_context(mock.patch.object(store, name, function))
            yield


def noted(tests: list[str]) -> list[KernelSpec]:
    """The kernels that GPU tests ask for before they touch the GPU.

    Raises:
        ValueError: there is a GPU, on which the tests would run for real; there are no such tests, or none asks for a
            kernel.
    """
    if torch.cuda.is_available():
        raise ValueError("this machine has a GPU, expected one without: there `make test-gpu` compiles what it needs")
    plugin = Noting()
    with plugin.standing_in(), open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        pytest.main(["-q", "--tb=no", "-o", "addopts=", "-p", "no:cacheprovider", *tests], plugins=[plugin])
    if not plugin.specs:
        raise ValueError(f"no kernel is asked for by {' '.join(tests)}, expected tests of tests/gpu")
    return list(plugin.specs)


def main(
    folder: Annotated[Path, typer.Argument(help="Where the compiled kernels go.")],
    test: Annotated[list[str] | None, typer.Option(help="Some tests, as pytest takes them. Default: all.")] = None,
    jobs: Annotated[int, typer.Option("-j", help="Compiles at a time.")] = os.cpu_count() or 1,
    recorded: Annotated[bool, typer.Option(help="The kernels of the manifest too.")] = True,
) -> None:
    """Compile the kernels of the GPU tests."""
    try:
        specs = noted(test or [str(ROOT / "tests" / "gpu")])
        specs = list(dict.fromkeys([*specs, *(recorded_specs() if recorded else [])]))
        for n, (spec, _) in enumerate(store.fill(specs, folder, jobs), 1):
            print(f"{n}/{len(specs)} {spec}", flush=True)
    except (ValueError, KernelError) as e:
        sys.exit(f"gpu_kernels: {e}")


if __name__ == "__main__":
    typer.run(main)

"""The fixtures that tests in several folders share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from codegen import compile, toolchain
from codegen.spec import TILES
from dualkv.cli import commands
from dualkv.models import CONFIGS
from tests.codegen import stand_in

TESTS = Path(__file__).parent
# By folder of tests/integrations: the modules that its tests need.
NEEDS = {name: [name] for name in ("megatron", "openrlhf", "skyrl", "swift", "trl", "verl")}
NEEDS["verl_megatron"] = ["verl", "mbridge"]
ABSENT = [
    TESTS / "integrations" / name for name, modules in NEEDS.items() if not all(find_spec(module) for module in modules)
]
GPU = TESTS / "gpu"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Garbage collection leaves out what tests import: half a million objects, with which one takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Tests of a library that is missing cannot be imported."""
    return True if any(map(collection_path.is_relative_to, ABSENT)) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are imported everywhere, because a broken import should show without a GPU, too."""
    if not torch.cuda.is_available():
        items[:] = [item for item in items if not item.path.is_relative_to(GPU)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line for a folder that does not run here."""
    asked = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    for folder in [*ABSENT, *([] if torch.cuda.is_available() else [GPU])]:
        if any(folder.is_relative_to(path) or path.is_relative_to(folder) for path in asked):
            target = f"make test-{folder.name.replace('_', '-')}"
            terminalreporter.write_line(f"{folder.relative_to(TESTS.parent)} is left out here ({target})")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Freezes what tests leave for good, such as PyTorch's compiler: with it a collection takes a second, and the
    demo and benchmarks collect before each measurement."""
    yield
    if len(gc.get_objects(generation=2)) > 100_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are small: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def smaller_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the demo's model `tiny` smaller, for tests that do not depend on its size."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setitem(CONFIGS, "tiny", CONFIGS["tiny"] | sizes | {"head_dim": 32})


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """List what stand-ins compiled so far, in this process and its children; the cache is an empty folder."""
    for name in ("DUALKV_KERNEL_DIR", "DUALKV_JIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DUALKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COMPILES", str(tmp_path / "compiles"))
    monkeypatch.setattr(compile, "compile_kernel", stand_in.compile_kernel)
    digests = {operation: toolchain.source_digest(operation) for operation in TILES}
    monkeypatch.setattr(toolchain, "read_source_digest", digests.get)  # held still, whoever edits kernels meanwhile
    return stand_in.compiles


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a `dualkv` command line in this process: exit code, standard output, standard error."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dualkv", *words])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as caught:
            commands.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call

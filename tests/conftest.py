"""What tests in several folders share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from codegen import compile, toolchain
from codegen.spec import TILES
from dualkv.cli import commands
from tests.codegen import stand_in


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """What was compiled so far, by stand-ins, in this process and its children; the cache is an empty folder."""
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

"""What tests in several folders share."""

from __future__ import annotations

import pytest

from codegen import compile, toolchain
from codegen.spec import TILES
from tests.codegen import stand_in


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

"""What tests of the store share."""

from __future__ import annotations

import pytest

from codegen import compile, toolchain
from tests.codegen import stand_in


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """What was compiled so far, by stand-ins, in this process and its children; the cache is an empty folder."""
    for name in ("DUALKV_KERNEL_DIR", "DUALKV_JIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DUALKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COMPILES", str(tmp_path / "compiles"))
    monkeypatch.setattr(compile, "compile_kernel", stand_in.compile_kernel)
    digest = toolchain.source_digest("fwd")  # held still, whoever edits kernels while this runs
    monkeypatch.setattr(toolchain, "read_source_digest", lambda operation: digest)
    return stand_in.compiles

"""Compare what a cubin says of itself with what ptxas said, and the CTAs that an SM holds with CUDA's own rules."""

from __future__ import annotations

import json

import pytest

from codegen import KernelError, cubin
from codegen.spec import backward_specs
from tests.codegen.real import copied

SPEC = backward_specs("bf16", 64).postprocess


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    """A real compile, of a small kernel."""
    return copied(SPEC, tmp_path_factory.mktemp("kernels"))


def test_a_cubin_says_what_ptxas_said(entry):
    record = json.loads((entry / "kernel.json").read_text())
    code = (entry / "kernel.cubin").read_bytes()
    own = cubin.resources(code)
    assert (own.registers, own.stack, own.threads) == (record["registers"], record["stack"], record["threads"])
    assert "kernel" in own.function
    assert own.function.encode() in (entry / "kernel.ptx").read_bytes()
    assert f".reqntid {own.threads}".encode() in (entry / "kernel.ptx").read_bytes().replace(b", 1, 1", b"")
    assert code in (entry / "kernel.so").read_bytes()


def test_no_cubin(entry):
    good = (entry / "kernel.cubin").read_bytes()
    for bad in (b"", b"\x7fELF", good[:100], good[: len(good) // 2], b"text" * 100):
        with pytest.raises(ValueError, match="the cubin"):
            cubin.resources(bad)
    # Each section header's name is its first field: without a .text there is no kernel.
    renamed = good.replace(b".text.", b".txet.")
    with pytest.raises(ValueError, match="has 0 kernels, expected 1"):
        cubin.resources(renamed)


@pytest.mark.parametrize(
    ("registers", "threads", "shared_memory", "ctas", "because"),
    [
        (168, 384, 227 * 1024, 1, "all the shared memory there is"),
        (128, 512, 64 * 1024, 1, "512 threads of 128 registers are all registers"),
        (128, 256, 64 * 1024, 2, "registers"),
        (32, 256, 512, 8, "2048 threads"),
        (33, 256, 512, 6, "33 registers count as 40: 12 warps in each of 4 parts"),
        (16, 32, 0, 32, "32 CTAs, whatever they ask"),
        (64, 128, 113 * 1024, 2, "114 KiB each with what the system takes"),
        (64, 128, 113 * 1024 + 1, 1, "a byte more"),
        (255, 64, 0, 4, "2 warps each, 8 of 255 registers"),
    ],
)
def test_ctas_of_an_sm(registers, threads, shared_memory, ctas, because):
    assert cubin.ctas_per_sm(registers, threads, shared_memory) == ctas, because


def test_reading_back_without_a_driver_or_cuda_bindings(monkeypatch):
    monkeypatch.setattr(cubin.toolchain, "driver_cuda", lambda: None)
    assert cubin.unreadable() == "there is no NVIDIA driver"
    with pytest.raises(KernelError, match="there is no NVIDIA driver"):
        cubin.on_device(b"", 32, 0)
    monkeypatch.setattr(cubin.toolchain, "driver_cuda", lambda: 13)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    assert "cuda-bindings 13.0 or newer (not installed: pip install 'cuda-bindings" in cubin.unreadable()

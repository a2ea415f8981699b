"""TRL's trainers in bf16: ratios at equal weights are exactly 1, in one process and in two on one card."""

from __future__ import annotations

import subprocess
import sys

import pytest

from codegen.spec import backward_specs, forward_spec

pytest.importorskip("trl")


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    """The processes take what is compiled here."""
    compile_all(
        [*(forward_spec("bf16", 128, 4, trees) for trees in (False, True)), *backward_specs("bf16", 128).present]
    )


@pytest.mark.parametrize("arguments", [[], ["--ranks", "2"]], ids=["one process", "two ranks"])
def test_ratios_at_equal_weights_are_one(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "tests.gpu.trl_bits", *arguments], check=True, timeout=280)

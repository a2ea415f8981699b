"""TRL's trainers in bf16: ratios at equal weights are exactly 1, in one process and in two on one card."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("trl")


@pytest.mark.parametrize("arguments", [[], ["--ranks", "2"]], ids=["one process", "two ranks"])
def test_ratios_at_equal_weights_are_one(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "tests.gpu.trl_bits", *arguments], check=True, timeout=280)

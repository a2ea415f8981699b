"""Recurrent layers of the transformers that veRL asks for, by the tests of newer versions."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.transformers import test_recurrent as newer
from tests.integrations.transformers.test_recurrent import (
    test_calls_without_a_layout_do_not_change,
    test_copies_and_pickles_run_packed,
    test_kernels_of_the_library_run_a_call_a_wave,
    test_the_self_check_finds_wrong_states_and_convolutions,
    test_what_goes_past_the_seams_is_refused,
)

__all__ = [
    "test_calls_without_a_layout_do_not_change",
    "test_copies_and_pickles_run_packed",
    "test_kernels_of_the_library_run_a_call_a_wave",
    "test_the_self_check_finds_wrong_states_and_convolutions",
    "test_what_goes_past_the_seams_is_refused",
]


@pytest.mark.parametrize("family", newer.FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "recompute"), [pytest.param(torch.float64, False, marks=pytest.mark.slow), (torch.float32, True)]
)
def test_packed_equals_replicated(family: str, dtype: torch.dtype, recompute: bool) -> None:
    newer.test_packed_equals_replicated(family, dtype, recompute)

"""A smaller `tiny`, for all tests but those that depend on its size."""

import pytest

from dualkv.models import CONFIGS

TINY = CONFIGS["tiny"]


@pytest.fixture(autouse=True)
def smaller(smaller_tiny: None) -> None:
    """Asks for it."""


@pytest.fixture
def whole(smaller: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the command."""
    monkeypatch.setitem(CONFIGS, "tiny", TINY)

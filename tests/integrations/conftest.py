"""Tiny models everywhere here."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def tiny(one_thread: None) -> None:
    """Asks for one thread."""

"""The fixtures of tests on tiny models."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def tiny(one_thread: None) -> None:
    """Asks for one thread."""

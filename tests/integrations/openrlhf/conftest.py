"""A process group of one rank, which OpenRLHF's strategy asks for, and tiny models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ranks
from tests.integrations.openrlhf.runs import save


@pytest.fixture(scope="session", autouse=True)
def one_rank() -> Iterator[None]:
    with ranks.one_rank():
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has tiny models: "model" and "experts"."""
    made = tmp_path_factory.mktemp("openrlhf")
    save(made / "model")
    save(made / "experts", "qwen3_moe")
    return made

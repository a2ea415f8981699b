"""Stand-ins of what needs a GPU come before OpenRLHF; a process group of one rank, which its strategy asks for."""

from collections.abc import Iterator
from pathlib import Path

import tests.integrations.openrlhf.cpu as cpu  # isort: skip

import pytest

from tests.integrations.openrlhf.runs import save


@pytest.fixture(scope="session", autouse=True)
def one_rank() -> Iterator[None]:
    with cpu.one_rank():
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has tiny models: "model" and "experts"."""
    made = tmp_path_factory.mktemp("openrlhf")
    save(made / "model")
    save(made / "experts", "qwen3_moe")
    return made

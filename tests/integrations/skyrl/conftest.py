"""A process group of one rank, which SkyRL's workers ask for, and tiny models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ranks
from tests.integrations.skyrl.runs import save


@pytest.fixture(scope="session", autouse=True)
def one_rank() -> Iterator[None]:
    with ranks.one_rank():
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has tiny models: "model", and "critic" with one weight for tokens and logits.

    On several ranks SkyRL's critic of another model imports a name that transformers 5.16 lacks.
    """
    made = tmp_path_factory.mktemp("skyrl")
    save(made / "model")
    save(made / "critic", tie_word_embeddings=True)
    return made

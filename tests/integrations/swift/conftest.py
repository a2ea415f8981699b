"""ms-swift asks ModelScope and the Hugging Face Hub about models, unless they are offline; read at its import."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

CACHE = TemporaryDirectory(prefix="modelscope")
os.environ |= {"HF_HUB_OFFLINE": "1", "USE_HF": "1", "MODELSCOPE_CACHE": CACHE.name}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the data set, which all tests read."""
    from tests.integrations.swift.runs import prepare

    return prepare(tmp_path_factory.mktemp("swift"))

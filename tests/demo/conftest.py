"""A smaller `tiny`, for all tests but those that depend on its size."""

import pytest

from dualkv.models import CONFIGS

TINY = CONFIGS["tiny"]


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setitem(CONFIGS, "tiny", TINY | sizes | {"head_dim": 32})


@pytest.fixture
def whole(smaller: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the command."""
    monkeypatch.setitem(CONFIGS, "tiny", TINY)

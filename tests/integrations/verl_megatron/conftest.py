"""veRL's workers on its Megatron engine, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integrations.verl.conftest import each_once


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    from tests.integrations.verl_megatron.scenarios import SCENARIOS

    return each_once(tmp_path_factory.mktemp("verl_megatron"), SCENARIOS)

"""veRL's workers run in processes of their own; each scenario runs once, however many tests look at it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import on_ranks

# Read when veRL is imported, here and in the workers.
os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # engines are registered for GPUs
    "VERL_ENGINE_VENDOR": "nvidia",
    "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl.cpu_platform",
    "TOKENIZERS_PARALLELISM": "false",
}


def each_once(folder: Path, entries: dict[str, Any]) -> Callable[[str], list[dict[str, Any]]]:
    """Make a function from the name of a scenario to the results of each rank. The scenarios of an entry run
    together."""
    import torch

    from tests.integrations.verl.rollouts import save_models

    save_models(folder)
    ran: set[str] = set()

    def result(name: str) -> list[dict[str, Any]]:
        together, (ranks, scenarios) = next((k, v) for k, v in entries.items() if name in v[1])
        if together not in ran:
            ran.add(together)
            listed = folder / f"{together}.json"
            listed.write_text(json.dumps(scenarios))
            on_ranks(ranks, "tests.integrations.verl.worker:main", str(listed), str(folder))
        return [torch.load(folder / f"{name}.{rank}", weights_only=False) for rank in range(ranks)]

    return result


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    from tests.integrations.verl.scenarios import SCENARIOS

    return each_once(tmp_path_factory.mktemp("verl"), SCENARIOS)

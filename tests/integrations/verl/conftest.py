"""veRL's workers run in processes of their own; each scenario runs once, however many tests look at it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# Read when veRL is imported, here and in the workers.
os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # engines are registered for GPUs
    "VERL_ENGINE_VENDOR": "nvidia",
    "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl.cpu_platform",
}
SECONDS = 3600  # ranks that wait for each other forever end here; other work on the machine does not


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _run(folder: Path, together: str, scenarios: dict[str, Any], ranks: int) -> None:
    """Runs the scenarios on `ranks` processes; raises with the end of their output if one of them fails."""
    listed = folder / f"{together}.json"
    listed.write_text(json.dumps(scenarios))
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    shared |= {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.verl.worker", str(listed), str(folder)]
    with subprocess.Popen(command, env=os.environ | shared, cwd=ROOT, start_new_session=True) as process:
        try:
            failed = process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the ranks, if there are any left
    if failed:
        tail = "".join((folder / f"log-{together}-{rank}").read_text()[-3000:] for rank in range(ranks))
        raise RuntimeError(f"one of {ranks} ranks failed:\n{tail}")


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
            _run(folder, together, scenarios, ranks)
        return [torch.load(folder / f"{name}.{rank}", weights_only=False) for rank in range(ranks)]

    return result


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    from tests.integrations.verl.scenarios import SCENARIOS

    return each_once(tmp_path_factory.mktemp("verl"), SCENARIOS)

"""Commands that start programs of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_limited(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """(exit code, what it printed on both streams) of a command in the project's folder.

    After `seconds` it is stopped, with what it started and what holds its output, and the exit code is None.
    """
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, stopped = process.communicate(timeout=seconds)[0], False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, stopped = process.communicate()[0], True
    return None if stopped else process.returncode, output.decode(errors="replace")

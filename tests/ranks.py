"""Ranks of gloo on this host, for tests: forks of a process that imports packages once for all tests of a process.

`on_ranks` calls a function on each rank, with its number and the arguments. The environment is that of torchrun, so
that `dist.init_process_group("gloo")` needs no more.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

ROOT = Path(__file__).parents[1]
SECONDS = 1800  # ranks that wait for each other forever end here; other work on the machine does not
# What gloo says when a rank finds a connection closed while a group is made: once in dozens of runs, on a busy machine.
UNCONNECTED = "Gloo connectFullMesh failed"


def on_ranks(count: int, function: str, *arguments: str) -> str:
    """Run the ranks. Returns what they printed to standard output and, after it, to standard error. If gloo does not
    connect them, they are started once more.

    Args:
        count: of ranks.
        function: `MODULE:FUNCTION`, which each of them calls with its number and the arguments.
    """
    done, said = _started(count, function, *arguments)
    if not done and UNCONNECTED in said:
        done, said = _started(count, function, *arguments)
    assert done, said[-5000:]
    return said


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with patch.dict(os.environ, names):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class _Forks:
    """A fresh process that forks ranks. It has no threads: a lock that another thread holds would stay locked."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        once = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, "-m", "tests.ranks"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment | once, text=True, start_new_session=True, **pipes
        )
        atexit.register(self.close)

    def run(self, *request: object) -> bool:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answers, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        return bool(answers) and self.process.stdout.readline() == "True\n"

    def close(self) -> None:
        """End the process, and its ranks, if there are any left."""
        atexit.unregister(self.close)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


_forks: list[_Forks] = []  # at most one


def _started(count: int, function: str, *arguments: str) -> tuple[bool, str]:
    """(whether all ranks succeeded, what they printed)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    if _forks and _forks[0].environment != environment:
        _forks.pop().close()
    if not _forks:
        _forks.append(_Forks(environment))
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        done = False
        try:
            done = _forks[0].run(log.name, count, function, *arguments)
        finally:
            if not done:
                _forks.pop().close()
        return done, log.read()


def script(rank: int, path: str, *options: str) -> None:
    """Runs a program, as torchrun does."""
    sys.argv = [path, *options]
    runpy.run_path(path, run_name="__main__")


def _rank(rank: int, count: int, function: Callable[..., None], arguments: list[str], pipe: tuple[int, int]) -> None:
    gc.enable()
    torch.set_num_threads(1)
    # The first rank has the store, on a port that the system chooses. (With a FileStore ranks wait busily.)
    more = {"timeout": timedelta(seconds=SECONDS), "wait_for_workers": False}
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, **more)
        os.write(pipe[1], store.port.to_bytes(2, "big") * (count - 1))
        port = store.port
    else:
        port = int.from_bytes(os.read(pipe[0], 2), "big")
        store = dist.TCPStore("127.0.0.1", port, **more)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # the store is there
    function(rank, *arguments)
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {other}" for other in range(count)])


def main() -> None:
    """Fork the ranks of each line of standard input; answer with a line that says whether they succeeded."""
    gc.disable()  # half a million objects of the imports, which none collects
    answers = os.fdopen(os.dup(1), "w")
    for request in sys.stdin:
        log, count, function, *arguments = json.loads(request)
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2), os.close(file)
        module, name = function.split(":")
        done = False
        pipe = os.pipe()
        try:
            given = count, getattr(importlib.import_module(module), name), arguments, pipe
            gc.freeze()
            start_processes(_rank, given, count, start_method="fork")
            done = True
        except Exception:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush(), os.close(pipe[0]), os.close(pipe[1])
        print(done, file=answers, flush=True)


if __name__ == "__main__":
    main()

"""Ends a test run that hangs in a place nothing can interrupt, such as the wait for a GPU kernel, with a failure."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 3
GRACE = 5.0  # seconds that the thread which knows the test's name has before the one that needs no interpreter


@contextmanager
def watchdog(name: str, seconds: float, stderr: int) -> Iterator[None]:
    """Ends the process unless the body is done after `seconds`: says `name` and where every thread stands.

    Args:
        name: of the test.
        seconds: its limit.
        stderr: file descriptor that pytest does not capture, or what is said dies with the process.
    """

    def end() -> None:
        os.write(stderr, f"\n{name} has hung for {seconds:g} s: ending the run\n".encode())
        faulthandler.dump_traceback(stderr)
        os._exit(EXIT_CODE)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    # A call that hangs with the interpreter's lock held keeps that thread from running; this one needs no lock.
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()

"""Measure how fast the core of a test is."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

TRIES, WRITTEN = 20, 2**17


def against_writing(milliseconds: Callable[[], float], count: int, fields: int) -> tuple[float, float]:
    """The best of a few calls, and of sorting `count` keys and writing as many items in that order, in turns with them.

    WRITTEN items are, and their time is scaled: about as long as a call, so that other work of this core or its caches
    meets both alike, and so many whatever `count` is, as the memory of fewer may be at hand from the turn before.

    Args:
        milliseconds: makes the call and says what it took.
        count, fields: of the items.

    Returns:
        Milliseconds of a call, and of writing.
    """

    def writing() -> float:
        start = time.thread_time()
        order, column = np.arange(WRITTEN).astype(np.uint16).argsort(kind="stable"), np.arange(WRITTEN, dtype=np.int32)
        table = np.empty((WRITTEN, fields), np.int32)
        for field in range(fields):
            table[:, field] = column.take(order)
        return (time.thread_time() - start) * 1e3 * count / WRITTEN

    calls, writes = zip(*[(milliseconds(), writing()) for _ in range(TRIES)], strict=True)
    return min(calls), min(writes)

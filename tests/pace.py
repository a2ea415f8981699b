"""How fast the core is that a test has got."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

TRIES, TIMES = 20, 5


def against_writing(milliseconds: Callable[[], float], count: int, fields: int) -> tuple[float, float]:
    """The best of a few calls, and of sorting `count` keys and writing as many items in that order, in turns with them.

    What a call is held against runs about as long at a time, TIMES in a row: other work that this core or its caches
    have to do then meets both alike.

    Args:
        milliseconds: makes the call and says what it took.
        count, fields: of the items.

    Returns:
        Milliseconds of a call, and of writing once.
    """

    def writing() -> float:
        start = time.thread_time()
        for _ in range(TIMES):
            order, column = np.arange(count).astype(np.uint16).argsort(kind="stable"), np.arange(count, dtype=np.int32)
            table = np.empty((count, fields), np.int32)
            for field in range(fields):
                table[:, field] = column.take(order)
        return (time.thread_time() - start) * 1e3 / TIMES

    calls, writes = zip(*[(milliseconds(), writing()) for _ in range(TRIES)], strict=True)
    return min(calls), min(writes)

"""How fast the core is that a test has got."""

from __future__ import annotations

import time

import numpy as np


def writing_ms(count: int, fields: int) -> float:
    """Milliseconds of this thread to sort so many keys and write so many items in that order; the best of a few."""

    def once() -> float:
        start = time.thread_time()
        order, column = np.arange(count).astype(np.uint16).argsort(kind="stable"), np.arange(count, dtype=np.int32)
        table = np.empty((count, fields), np.int32)
        for field in range(fields):
            table[:, field] = column.take(order)
        return (time.thread_time() - start) * 1e3

    return min(once() for _ in range(20))

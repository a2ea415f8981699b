"""Choices between integers of Python or of the DSL, so that tests compute what the kernels do. No CuTe."""

from typing import Any


def select(condition: Any, a: Any, b: Any) -> Any:
    """a if the condition holds, else b."""
    return b + condition * (a - b)


def smaller(a: Any, b: Any) -> Any:
    return select(a < b, a, b)


def larger(a: Any, b: Any) -> Any:
    return select(a < b, b, a)

"""Choices between integers of Python or of the DSL, so that tests compute what the kernels do. No CuTe."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from cutlass import Boolean, Int32

Integer: TypeAlias = "int | Int32"
Condition: TypeAlias = "bool | Boolean"


def select(condition: Condition, a: Integer, b: Integer) -> Integer:
    """a if the condition holds, else b."""
    return b + condition * (a - b)


def smaller(a: Integer, b: Integer) -> Integer:
    return select(a < b, a, b)


def larger(a: Integer, b: Integer) -> Integer:
    return select(a < b, b, a)

"""Numbers that kernels compute with, and what lanes of a warp do differently.

Integers are Python's; a number of each lane is an array of 32; of data only their origin is known (`Scalar`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.protocol.machine import Machine
from tests.protocol.state import Agent

NO_TERMS: frozenset[Any] = frozenset()


class Now:
    """The machine that runs."""

    machine: Machine = None  # type: ignore[assignment]


def agent() -> Agent:
    return Now.machine.agent


# ---------------------------------------------------------------- numbers
class Scalar:
    """A number that is not known, made of these terms."""

    __slots__ = ("prov",)
    __array_ufunc__ = None  # arrays leave operations to it

    def __init__(self, prov: frozenset[Any]) -> None:
        self.prov = prov

    def __bool__(self) -> bool:
        raise TypeError("a number that is not known decides")

    def to(self, _: Any) -> Scalar:
        return self

    def _with(self, other: Any) -> Scalar:
        if not isinstance(other, Scalar) or other.prov is self.prov:
            return self
        kind = Data if isinstance(self, Data) or isinstance(other, Data) else Scalar
        return kind(self.prov | other.prov if self.prov and other.prov else self.prov or other.prov)

    def __neg__(self) -> Scalar:
        return self

    __hash__ = None  # type: ignore[assignment]


for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"]:
    setattr(Scalar, f"__{_name}__", Scalar._with)
    setattr(Scalar, f"__r{_name}__", Scalar._with)
for _name in ["lt", "le", "gt", "ge", "eq", "ne"]:
    setattr(Scalar, f"__{_name}__", Scalar._with)


class Data(Scalar):
    """A number from memory that several warps read: it decides alike for all of them."""

    __slots__ = ()


UNKNOWN = Scalar(NO_TERMS)


def decide(x: Any) -> bool:
    """Decide a condition on a number that is not known, for a warp."""
    random = Now.machine.schedule.random
    if isinstance(x, Data):
        return answer(x.prov, Now.machine.schedule.seed)
    return random.random() < 0.3


@functools.lru_cache(maxsize=100_000)
def answer(prov: frozenset[Any], seed: int) -> bool:
    return zlib.crc32(repr((sorted(map(repr, prov)), seed)).encode()) % 8 == 0


def known(x: Any) -> Any:
    return x if isinstance(x, Scalar | np.ndarray) else int(x)


class Number(type):
    def __call__(cls, x: Any = 0) -> Any:  # type: ignore[override]
        return cls.convert(x)


class Numeric(metaclass=Number):
    convert = staticmethod(known)


class Int16(Numeric): ...


class Int32(Numeric): ...


class Int64(Numeric): ...


class Boolean(Numeric):
    convert = staticmethod(lambda x: x if isinstance(x, Scalar | np.ndarray) else bool(x))


def _float(x: Any) -> Any:
    return x if isinstance(x, Scalar | np.ndarray) else float(x)


class Float32(Numeric):
    convert, inf = staticmethod(_float), math.inf


class BFloat16(Numeric):
    convert, width = staticmethod(_float), 16


class Float16(Numeric):
    convert, width = staticmethod(_float), 16


def first_lane(x: Any) -> int:
    """Return a number's value in the first active lane."""
    if not isinstance(x, np.ndarray):
        return int(x)
    mask = agent().mask
    return int(x[0] if mask is None else x[mask.argmax()])


# ---------------------------------------------------------------- lanes: what sources.Rewrite makes of conditions
def cond(x: Any) -> Any:
    """True or False if all lanes that take part agree, else which of the 32 do."""
    if x is True or x is False:
        return x
    if isinstance(x, np.ndarray) and x.shape == (32,):
        mask = agent().mask
        taking = x if mask is None else x[mask]
        if taking.all():
            return True
        return x.astype(bool) if taking.any() else False
    if isinstance(x, Scalar):
        return decide(x)
    return bool(x)


@contextlib.contextmanager
def lanes(which: Any) -> Iterator[None]:
    a = agent()
    old = a.mask
    a.mask = which if old is None else old & which
    try:
        yield
    finally:
        a.mask = old


def take(scope: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(scope.get(name) for name in names)


def merge(which: Any, a: Any, b: Any) -> Any:
    if a is b:
        return a
    if isinstance(a, Scalar) or isinstance(b, Scalar) or a is None or b is None:
        return UNKNOWN
    return np.where(which, a, b)


def if_expression(which: Any, a: Callable[[], Any], b: Callable[[], Any]) -> Any:
    if isinstance(which, Scalar):
        x, y = a(), b()
        return x if isinstance(x, Scalar) else y if isinstance(y, Scalar) else UNKNOWN
    which = cond(which)
    if which is True:
        return a()
    if which is False:
        return b()
    with lanes(which):
        x = a()
    with lanes(~which):
        y = b()
    return x if isinstance(x, Scalar) else y if isinstance(y, Scalar) else np.where(which, x, y)


def invert(x: Any) -> Any:
    return not x if isinstance(x, bool | np.bool_) else x if isinstance(x, Scalar) else ~x


def invert_truth(x: Any) -> Any:
    return ~x if isinstance(x, np.ndarray) else x if isinstance(x, Scalar) else not x


def ir_value(x: Any) -> Any:
    return x


def first(rounds: Any) -> Iterator[Any]:
    for x in rounds:
        yield x
        return

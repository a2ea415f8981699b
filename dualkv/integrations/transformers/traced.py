"""Functions that a compiled model runs once, where torch.compile traces it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any


def where_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of a module and of constants as it is, also in a compiled model, which takes its result for a
    constant. A call that is not compiled runs it every time.

    PyTorch 2.11 hands no module to a function marked by `assume_constant_result`. So the function gets a module by its
    id; the caller keeps the module alive.
    """

    def run(number: int, *constants: Any) -> Any:
        return function(ctypes.cast(number, ctypes.py_object).value, *constants)

    of_numbers: Any = run
    of_numbers._dynamo_marked_constant = True  # what assume_constant_result sets

    @functools.wraps(function)
    def call(module: Any, *constants: Any) -> Any:
        return of_numbers(id(module), *constants)

    return call

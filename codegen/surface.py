"""Probes of what this project borrows of other packages: names, arguments of calls, methods that subclasses replace.

:mod:`codegen.packages` knows versions, and refuses none because it is new. So each borrowing place compares what it
uses with what is installed. What fits runs; else one sentence says what was found, and the newest version tried.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from codegen import packages


def unfit(package: str, what: str) -> str:
    """Say that an installed package of PACKAGES differs from what is borrowed of it.

    Args:
        package: its name on PyPI.
        what: was found, a clause.
    """
    tried = packages.PACKAGES[package].tried
    remedy = f" (tried up to {tried}: pip install '{package}<={tried}')" if tried else ""
    return f"{package} {packages.found(package)} does not fit{remedy}: {what}"


@contextmanager
def borrowing(package: str, by: str) -> Iterator[None]:
    """A context for imports of modules that borrow names of a package.

    Args:
        package: of PACKAGES.
        by: what needs it, the subject of the sentence.

    Raises:
        ImportError: a module or name is missing.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing and importlib.util.find_spec(missing) is None:  # no version of the package would help
            said = f"{package} {packages.found(package)} imports {missing}, which is not installed"
            raise ImportError(f"{by} cannot run: {said}", name=missing) from error
        said = " ".join(str(error).split())
        raise ImportError(f"{by} cannot run: {unfit(package, said)}", name=packages.PACKAGES[package].module) from error


def uncallable(module: Any, function: str, positional: str, keywords: str = "") -> str | None:
    """Say why a function of a module does not take a call; None if it does.

    Args:
        module: of the package.
        function: its name, or that of a method with its class, or of a class.
        positional: what is passed by position, separated by spaces: "q" is a parameter `q`, `sample_q` or `q_tensor`.
        keywords: names of the others, separated by spaces.
    """
    try:
        found: Any = functools.reduce(getattr, function.split("."), module)
    except AttributeError:
        return f"{module.__name__} has no {function}"
    signature, names = inspect.signature(found), positional.split()
    try:
        signature.bind(*names, **dict.fromkeys(keywords.split()))
    except TypeError as error:
        return f"{module.__name__}.{function}{signature} does not take the call of dualkv ({error})"
    if swallowed := [name for name in keywords.split() if name not in signature.parameters]:
        return f"{module.__name__}.{function}{signature} has no argument {', '.join(swallowed)}"
    for name, parameter in zip(names, signature.parameters.values(), strict=False):
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and f"_{name}_" not in f"_{parameter.name}_":
            return f"{module.__name__}.{function}{signature} has {parameter.name} where dualkv passes {name}"
    return None


def irreplaceable(theirs: type, ours: type, methods: str, reads: str = "") -> str | None:
    """Say why methods of a class cannot be replaced by those of our subclass or mixin; None if they can.

    A replaced method takes the same positional arguments by the same names, has no more than ours takes, and is called
    by other methods of the class. Attributes that ours reads occur in the class.

    Args:
        theirs: a class of the package.
        ours: has the methods, in its own body or that of a base.
        methods: names of methods that ours replaces, separated by spaces.
        reads: names of attributes and methods that ours uses.
    """
    used = _names(theirs)
    for name in methods.split():
        own = getattr(theirs, name, None)
        if own is None:
            return f"{theirs.__name__} has no method {name}"
        if said := _other_arguments(own, inspect.getattr_static(ours, name)):
            return f"{theirs.__name__}.{name}{inspect.signature(own)} {said}"
        if not name.startswith("__") and name != "forward" and name not in used:
            return f"{theirs.__name__} does not call its method {name}"
    missing = next((name for name in reads.split() if name not in used and not hasattr(theirs, name)), None)
    return missing and f"{theirs.__name__} has no {missing}"


def _other_arguments(theirs: Callable[..., Any], ours: Callable[..., Any]) -> str | None:
    given, taken = (inspect.signature(f).parameters for f in (theirs, ours))
    by_place = [p.name for p in taken.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if list(given)[: len(by_place)] != by_place:
        return f"does not begin with the arguments {', '.join(by_place)}"
    takes_any = any(p.kind is p.VAR_KEYWORD for p in given.values())
    by_name = [p.name for p in taken.values() if p.kind is p.KEYWORD_ONLY]
    if missing := [name for name in by_name if name not in given and not takes_any]:
        return f"has no argument {', '.join(missing)}"
    if not any(p.kind is p.VAR_KEYWORD for p in taken.values()) and (more := [x for x in given if x not in taken]):
        return f"has the arguments {', '.join(more)} more"
    return None


def _names(cls: type) -> set[str]:
    """Names that the methods of a class and of its bases use: attributes, methods, globals."""
    names: set[str] = set()
    for base in cls.__mro__:
        for value in vars(base).values():
            value = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
            codes = [getattr(inspect.unwrap(value), "__code__", None)] if callable(value) else []
            while codes:
                code = codes.pop()
                if isinstance(code, CodeType):
                    names.update(code.co_names)
                    codes += code.co_consts
    return names

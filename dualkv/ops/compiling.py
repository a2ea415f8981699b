"""Errors of a backend's compiler, which is not tried again."""

from __future__ import annotations

from typing import Any

import torch


class NotCompiled(RuntimeError):
    """A backend could not compile a call, or was told not to compile. Uncompiled, FlexAttention would be dense."""


failures: dict[tuple[Any, ...], str] = {}  # by what was compiled


def refuse_again(key: tuple[Any, ...]) -> None:
    """Raises NotCompiled for what failed before."""
    if key in failures:
        raise NotCompiled(failures[key])


def refusal(key: tuple[Any, ...], error: Exception) -> BaseException:
    """Make the error to raise where `key` was not compiled. A failure that would come again is kept; failures of
    memory, files and other graphs may pass."""
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return cause
    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if not any(isinstance(cause, (OSError, torch._dynamo.exc.FailOnRecompileLimitHit)) for cause in causes):
        failures[key] = why
    return NotCompiled(why)


def _causes(error: BaseException | None) -> list[BaseException]:
    """The error and those that it was raised from, which may name each other in a circle."""
    found: list[BaseException] = []
    while error is not None and not any(error is other for other in found):
        found.append(error)
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return found

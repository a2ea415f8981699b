"""Report the progress of a long loop: to a bar of the command line, or to nobody."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

Item = TypeVar("Item", covariant=True)


class Track(Protocol):
    """Reports the progress of a loop: `for x in track(items, "what it does", how_many)`."""

    def __call__(self, items: Iterable[Item], what: str, total: int) -> Iterable[Item]: ...


def untracked(items: Iterable[Item], what: str, total: int) -> Iterable[Item]:
    """A loop without a progress report."""
    return items

"""Packed groups in other libraries. Each integration is imported at its first use."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["experts", "megatron", "transformers", "trl", "verl"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dualkv.integrations' has no attribute {name!r}")
    return import_module(f"dualkv.integrations.{name}")


def require(name: str) -> None:
    """Checks that a library is installed; an integration calls this before it imports the library.

    Raises:
        ModuleNotFoundError: the library is not installed. The message names the extra that installs it.
    """
    if find_spec(name) is None:
        says = f"dualkv.integrations.{name} needs {name}: pip install 'dualkv[{name}]'"
        raise ModuleNotFoundError(says, name=name)

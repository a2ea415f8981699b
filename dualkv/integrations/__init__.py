"""What carries packed groups into other libraries; each is imported when it is used."""

from importlib import import_module
from typing import Any

__all__ = ["transformers", "trl", "verl"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dualkv.integrations' has no attribute {name!r}")
    try:
        return import_module(f"dualkv.integrations.{name}")
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"dualkv.integrations.{name} needs {name}: pip install 'dualkv[{name}]'") from None

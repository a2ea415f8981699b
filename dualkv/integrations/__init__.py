"""Packed groups in other libraries. Each integration is imported at its first use."""

from importlib import import_module
from typing import Any

__all__ = ["megatron", "openrlhf", "skyrl", "swift", "transformers", "trl", "verl"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dualkv.integrations' has no attribute {name!r}")
    return import_module(f"dualkv.integrations.{name}")

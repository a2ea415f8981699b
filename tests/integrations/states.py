"""The state of a model and of a library's files that DualKV may change, to be compared before and after."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn


def of_model(model: nn.Module) -> dict[str, Any]:
    """Collect classes, attributes and hooks of all modules of a model, and its configurations."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name}: class"] = type(module)
        found |= _by_identity(name, vars(module))
        config = getattr(module, "config", None)
        found[f"{name}: attention"] = getattr(config, "_attn_implementation", None)
    return found


def of_files(names: str) -> dict[str, Any]:
    """Collect functions and classes of the modules with such names (a regular expression), and attributes of these
    classes."""
    found: dict[str, Any] = {}
    for name, file in [*sys.modules.items()]:
        if re.fullmatch(names, name):
            found |= _by_identity(name, {key: x for key, x in vars(file).items() if callable(x)})
            for cls in [x for x in vars(file).values() if isinstance(x, type) and x.__module__ == name]:
                found |= _by_identity(f"{name}.{cls.__name__}", vars(cls))
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name all that differs, also by its identity."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name, _Lacks) != after.get(name, _Lacks))


class _Lacks:
    """Stands for what one state lacks."""


class _Same:
    """An object that equals only itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _by_identity(name: str, attributes: Any) -> Iterator[tuple[str, Any]]:
    for key, value in [*attributes.items()]:
        if key == "_global_mapping":  # registries, whose names do nothing unless a configuration has them
            continue
        plain = type(value) in (dict, OrderedDict)  # mappings of transformers import what they are asked for
        yield f"{name}.{key}", {k: _Same(x) for k, x in value.items()} if plain else _Same(value)

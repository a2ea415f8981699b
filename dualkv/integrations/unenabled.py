"""Models of transformers that get a layout and were not enabled: each attention function would ignore `dualkv=`.

So the registry's `get_interface` returns functions that raise an error for a layout. This module takes the registry
from `sys.modules` when a layout is made, because `import dualkv` does not import transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from dualkv import layout
from dualkv.integrations import patching


def watch() -> None:
    """Make transformers' registry refuse layouts for models that are not enabled, if transformers is imported."""
    interface: Any = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    own = getattr(interface, "get_interface", None)
    if own is None or patching.is_marked(own):
        return

    @wraps(own)
    def get_interface(*args: Any, **kwargs: Any) -> Any:
        function = own(*args, **kwargs)
        return function if patching.is_marked(function) else partial(_without_layout, function)

    patching.of(interface).replace("get_interface", patching.marked(get_interface))


def _without_layout(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls an attention function of transformers, unless it is causal and would get a layout (ValueError)."""
    if kwargs.get("dualkv") is not None:
        module = args[0] if args else kwargs["module"]
        if getattr(module, "is_causal", False):
            raise ValueError(
                f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__}) got dualkv="
                f"{type(kwargs['dualkv']).__name__}, and its model is not enabled: call"
                " dualkv.integrations.transformers.enable(model) first"
            )
    return function(*args, **kwargs)


layout.AT_NEW_LAYOUT.append(watch)

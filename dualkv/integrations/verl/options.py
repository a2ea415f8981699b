"""DualKV's entries of veRL's `model.fused_kernel_options`, which veRL leaves free."""

from __future__ import annotations

from typing import Any

PACKED = "dualkv"  # whether a critic is packed
TREES = "dualkv_trees"  # true, or the fewest tokens to share, to pack trees; false to pack prompts only
KEEP, KEEP_LAYERS = "dualkv_keep", "dualkv_keep_layers"  # what checkpointed layers keep, and how many layers do
FAST = "dualkv_fast"  # whether what surrounds attention is fused
CANARY = "dualkv_canary"  # updates from one canary to the next
BATCH_INVARIANT = "dualkv_batch_invariant"  # whether log-probs have equal bits in all micro-batches
# Whether to walk, the dtype of sums of gradients of keys and values, and whether these wait in host memory.
WALK, GRADIENTS, ON_HOST = "dualkv_walk", "dualkv_walk_gradients", "dualkv_walk_on_host"
SWITCHES = (PACKED, FAST, BATCH_INVARIANT, WALK, ON_HOST)
NAMES = (*SWITCHES, TREES, KEEP, KEEP_LAYERS, CANARY, GRADIENTS)


def of(model_config: Any) -> dict[str, Any]:
    """The options of a model.

    Raises:
        ValueError: a name that begins like DualKV's and is none of them; a switch that is neither true nor false.
    """
    found = dict(model_config.fused_kernel_options or {})
    if wrong := [name for name in found if name.startswith(PACKED) and name not in NAMES]:
        raise ValueError(f"fused_kernel_options has {wrong[0]}, expected names among {', '.join(NAMES)}")
    for name in SWITCHES:
        if not isinstance(value := found.get(name, False), bool):
            raise ValueError(f"fused_kernel_options.{name} is {value!r}, expected true or false")
    return found

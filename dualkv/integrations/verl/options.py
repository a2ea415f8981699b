"""DualKV's entries of veRL's `model.fused_kernel_options`, which veRL leaves free."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from dualkv.arrays import positive
from dualkv.integrations.transformers.checkpointing import KINDS

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
PLACES = "actor_rollout_ref.model.fused_kernel_options", "critic.model.fused_kernel_options"


def of(model_config: Any) -> dict[str, Any]:
    """The options of a model, as :func:`read` checks them."""
    return read(model_config.fused_kernel_options)


def read(given: Any) -> dict[str, Any]:
    """Check the names, and the values of switches and of what layers keep.

    Raises:
        ValueError: a name that begins like DualKV's, or almost is one, and is none of them; a switch that is neither
            true nor false; a `dualkv_keep` or `dualkv_keep_layers` that no model takes.
        TypeError: options that are no mapping; a `dualkv_keep_layers` that is no integer.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"fused_kernel_options is {given!r}, expected names and values such as {TREES}=True")
    found = dict(given or {})
    for name in found:
        if name not in NAMES and (begins_like(name) or get_close_matches(str(name).lower(), NAMES, 1, 0.8)):
            raise ValueError(f"fused_kernel_options has {name}, expected names among {', '.join(NAMES)}")
    for name in SWITCHES:
        if not isinstance(value := found.get(name, False), bool):
            raise ValueError(f"fused_kernel_options.{name} is {value!r}, expected true or false")
    _check_kept(found)
    return found


def alone(given: dict[str, Any]) -> str | None:
    """The name of an option that does nothing, because packing is not chosen, and not switched off either."""
    return None if PACKED in given else next((name for name in NAMES if given.get(name)), None)


def begins_like(name: Any) -> bool:
    """Whether a name in a configuration begins as DualKV's options do."""
    return isinstance(name, str) and name.lower().startswith(PACKED)


def _check_kept(given: dict[str, Any]) -> None:
    keep = given.get(KEEP, "attention" if given.get(FAST, False) else "nothing")
    if not isinstance(keep, str) or keep not in KINDS:
        raise ValueError(f"fused_kernel_options.{KEEP} is {keep!r}, expected one of {', '.join(KINDS)}")
    if (layers := given.get(KEEP_LAYERS)) is None:
        return
    layers = positive(f"fused_kernel_options.{KEEP_LAYERS}", layers)
    if keep == "nothing":
        raise ValueError(
            f"fused_kernel_options.{KEEP_LAYERS} is {layers} and {KEEP} is 'nothing', expected one of"
            f" {', '.join(KINDS[1:])}"
        )


def misplaced(config: Any, path: str = "") -> str | None:
    """Find a name like DualKV's options in the configuration of veRL's trainer, or in its part at `path`, where nothing
    reads one."""
    for name, value in config.items() if isinstance(config, Mapping) else ():
        where = f"{path}.{name}" if path else str(name)
        if begins_like(name) and path not in PLACES:
            return where
        if found := misplaced(value, where):
            return found
    return None

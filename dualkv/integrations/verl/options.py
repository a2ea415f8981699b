"""DualKV's entries of veRL's `model.fused_kernel_options`, which veRL leaves free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from dualkv.arrays import positive
from dualkv.branches import Keeping
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
MIN_SHARED = 64  # tokens: sampled texts often begin alike by chance, and attention reads whole blocks of keys
SUMS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """The checked options of a model.

    Attributes:
        given: all names and values, veRL's own too.
        min_shared: the fewest tokens to share in trees; None to share prompts only.
        keeping: how walks keep the tensors of trunks; None where nothing is walked.
    """

    given: dict[str, Any]
    packed: bool | None
    fast: bool
    batch_invariant: bool
    min_shared: int | None
    keep: str
    keep_layers: int | None
    canary: int | None
    keeping: Keeping | None

    def refuse_alone(self, place: str, line: str) -> None:
        """Raise ValueError for an option at a place that does nothing, because the line that switches packing on is
        missing, and packing is not switched off either."""
        for name in NAMES if self.packed is None else ():
            if self.given.get(name):
                raise ValueError(f"{place}.{name} is set without {line}, expected both")

    def refuse_of_log_probs(self) -> None:
        """Raise ValueError for options of log-probs, which a critic does not have."""
        for name in (BATCH_INVARIANT, CANARY):
            if value := self.given.get(name):
                raise ValueError(f"{PLACES[1]}.{name} is {value}, expected none: it is of log-probs")


def of(model_config: Any) -> Options:
    """Read the options of a model (:func:`read`)."""
    return read(model_config.fused_kernel_options)


def read(given: Any) -> Options:
    """Check names and values.

    Raises:
        ValueError: a name that begins like DualKV's, or almost is one, and is none of them; a value that its option
            does not take; an option without the one that it belongs to.
        TypeError: options that are no mapping, a number that is no integer.
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
    fast, canary = found.get(FAST, False), found.get(CANARY)
    keep, layers = found.get(KEEP, "attention" if fast else "nothing"), found.get(KEEP_LAYERS)
    if not isinstance(keep, str) or keep not in KINDS:
        raise ValueError(f"fused_kernel_options.{KEEP} is {keep!r}, expected one of {', '.join(KINDS)}")
    if layers is not None:
        layers = positive(f"fused_kernel_options.{KEEP_LAYERS}", layers)
        if keep == "nothing":
            raise ValueError(
                f"fused_kernel_options.{KEEP_LAYERS} is {layers} and {KEEP} is 'nothing', expected one of"
                f" {', '.join(KINDS[1:])}"
            )
    return Options(
        given=found,
        packed=found.get(PACKED),
        fast=fast,
        batch_invariant=found.get(BATCH_INVARIANT, False),
        min_shared=_min_shared(found.get(TREES, False)),
        keep=keep,
        keep_layers=layers,
        canary=None if canary is None else positive(f"fused_kernel_options.{CANARY}", canary),
        keeping=_keeping(found),
    )


def begins_like(name: Any) -> bool:
    """Whether a name in a configuration begins as DualKV's options do."""
    return isinstance(name, str) and name.lower().startswith(PACKED)


def _min_shared(trees: Any) -> int | None:
    if isinstance(trees, bool):
        return MIN_SHARED if trees else None
    if not isinstance(trees, int) or trees < 1:
        raise ValueError(f"fused_kernel_options.{TREES} is {trees!r}, expected true, false or 1 token or more to share")
    return trees


def _keeping(given: dict[str, Any]) -> Keeping | None:
    sums = given.get(GRADIENTS, "fp32")
    if not isinstance(sums, str) or sums not in SUMS:
        raise ValueError(f"fused_kernel_options.{GRADIENTS} is {sums!r}, expected {' or '.join(SUMS)}")
    if given.get(WALK, False):
        return Keeping(SUMS[sums], given.get(ON_HOST, False))
    for name in (GRADIENTS, ON_HOST):
        if name in given:
            raise ValueError(f"fused_kernel_options.{name} is set without {WALK}=True, expected both")
    return None


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

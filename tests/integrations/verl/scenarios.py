"""What veRL's workers run, by the number of ranks (see worker.py for the settings)."""

from __future__ import annotations

from typing import Any

# Packed tokens a micro-batch may hold: the longest rollout (35) fits, the group of five (54) has to be split.
TIGHT, ROOMY = 44, 1000

STOCK: dict[str, Any] = {"packed": False}
PACKED: dict[str, Any] = {"packed": True}
MOE = {"model": "moe"}

ONE: dict[str, dict[str, Any]] = {
    "stock": STOCK,
    "stock-moe": STOCK | MOE,
    "stock-ragged-temperature": STOCK | {"temperature": "ragged"},
    "stock-bf16": STOCK | {"param_dtype": "bf16"},
    "fixed": PACKED,
    "fixed-one-by-one": PACKED | {"rollouts": 1},
    "dynamic-tight": PACKED | {"budget": TIGHT},
    "dynamic-roomy": PACKED | {"budget": ROOMY},
    "moe": PACKED | MOE | {"budget": TIGHT},
    "fused": PACKED | {"fused": "torch"},
    "moe-fused": PACKED | MOE | {"fused": "torch", "budget": ROOMY},
    "fsdp1": PACKED | {"strategy": "fsdp", "budget": TIGHT},
    "no-checkpointing": PACKED | {"checkpointing": False},
    "bucket": PACKED | {"pad_to": 64},
    "offload": PACKED | {"engine": {"param_offload": True, "optimizer_offload": True}},
    "no-remove-padding": PACKED | {"remove_padding": False},
    "padded": PACKED | {"padded": True, "budget": TIGHT},
    "ragged-temperature": PACKED | {"temperature": "ragged", "budget": TIGHT},
    "bf16": PACKED | {"param_dtype": "bf16", "budget": ROOMY},
}

# Ranks hold rollouts 0 to 3 and 4 to 7 of each eight: in the second update one rank has a group of one beside others.
TWO: dict[str, dict[str, Any]] = {
    "stock-dp2": STOCK,
    "dp2-fixed": PACKED,
    "dp2-dynamic": PACKED | {"budget": TIGHT},
    "dp2-moe-fused": PACKED | MOE | {"fused": "torch", "budget": TIGHT},
    "dp2-fsdp1": PACKED | {"strategy": "fsdp"},
    "sp2-fixed": PACKED | {"sp": 2},
    "sp2-dynamic": PACKED | {"sp": 2, "budget": TIGHT // 2},
    "sp2-fused": PACKED | {"sp": 2, "fused": "torch"},
    "sp2-moe": PACKED | MOE | {"sp": 2},
    "sp2-bucket": PACKED | {"sp": 2, "pad_to": 33},
}

SCENARIOS = {1: ONE, 2: TWO}

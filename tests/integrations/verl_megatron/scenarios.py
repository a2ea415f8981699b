"""The scenarios of workers on veRL's Megatron engine, and on DualKV's (see tests/integrations/verl/worker.py for the
settings).

`tp`, `pp`, `ep` and `cp` are sizes of parallelism, `transformer` and `engine` settings of veRL's configuration.
"""

from __future__ import annotations

from typing import Any

from tests.integrations.verl.scenarios import (
    LONG,
    MOE,
    ONE_GROUP_AND_FOUR,
    ROOMY,
    SECOND_RANK_LONG,
    SUM_PI_SQUARED,
    TIGHT,
    TREES,
    TURNS,
)

MEGATRON = {"strategy": "megatron"}
STOCK: dict[str, Any] = MEGATRON | {"packed": False}
PACKED: dict[str, Any] = MEGATRON | {"packed": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
R2 = MOE | {"run": "replayed", "router_replay": "R2"}
R3 = MOE | {"run": "replayed", "router_replay": "R3"}
TWO_HEADS = {"model": "two_heads"}
# Losses of routers; all rollouts are in one micro-batch, of which they are.
COUNTED = MOE | {
    "counted": True,
    "budget": ROOMY,
    "transformer": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1.0,
        "moe_z_loss_coeff": 0.1,
    },
}
ONE: dict[str, dict[str, Any]] = {
    "stock": STOCK,
    "stock-moe": STOCK | MOE,
    "stock-ragged-temperature": STOCK | {"temperature": "ragged"},
    "stock-sum-pi-squared": STOCK | SUM_PI_SQUARED,
    "stock-one-group-and-four": STOCK | ONE_GROUP_AND_FOUR,
    "stock-turns": STOCK | TURNS,
    "stock-counted": STOCK | COUNTED,
    "stock-counted-turns": STOCK | TURNS | COUNTED,
    "stock-r2": STOCK | R2,
    "stock-r3": STOCK | R3,
    "stock-two-heads-r2": STOCK | R2 | TWO_HEADS,
    "fixed": PACKED,
    "tight": PACKED | {"budget": TIGHT, "transformer": RECOMPUTED},
    "roomy": PACKED | {"budget": ROOMY, "pad_to": 64},
    "moe": PACKED | MOE | {"budget": TIGHT},
    "fused": PACKED | {"fused": "triton", "budget": TIGHT},
    "ragged-temperature": PACKED | {"temperature": "ragged", "budget": TIGHT},
    "sum-pi-squared": PACKED | SUM_PI_SQUARED | {"budget": TIGHT},
    "offload": PACKED | {"engine": {"param_offload": True, "optimizer_offload": True}},
    "padded": PACKED | {"padded": True, "budget": TIGHT},
    "trees": TREES | PACKED | {"budget": LONG},
    "counted": PACKED | COUNTED,
    "counted-trees": TREES | PACKED | COUNTED | {"pad_to": 64},
    "r2": PACKED | R2 | {"budget": TIGHT, "transformer": RECOMPUTED},
    "r3": PACKED | R3 | {"budget": TIGHT, "transformer": RECOMPUTED},
    "r3-differing": PACKED | R3 | {"budget": LONG, "differing": [5, 7, 12]},
}
TWO: dict[str, dict[str, Any]] = {
    "stock-tp2": STOCK | {"tp": 2},
    "tp2": PACKED | {"tp": 2, "budget": TIGHT},
    "tp2-whole-rows": PACKED | {"tp": 2, "transformer": {"sequence_parallel": False}},
    "tp2-fused": PACKED | {"tp": 2, "fused": "triton", "budget": TIGHT},
    "tp2-trees": TREES | PACKED | {"tp": 2, "budget": LONG, "pad_to": 7},
    "pp2": PACKED | {"pp": 2, "budget": TIGHT},
    "pp2-moe-fused": PACKED | MOE | {"pp": 2, "fused": "triton"},
    "ep2": PACKED | MOE | {"ep": 2, "budget": TIGHT},
    "dp2": PACKED | ONE_GROUP_AND_FOUR | {"budget": 30},
    "cp2": PACKED | {"cp": 2, "budget": TIGHT},
    "cp2-trees-padded": TREES | PACKED | {"cp": 2, "budget": LONG, "pad_to": 7},
    "cp2-counted": PACKED | COUNTED | {"cp": 2},
    "cp2-fused": PACKED | {"cp": 2, "fused": "triton", "budget": TIGHT},
    "cp2-per-token": PACKED | {"cp": 2, "budget": TIGHT, "transformer": {"calculate_per_token_loss": True}},
    "cp2-r3": PACKED | R3 | {"cp": 2, "budget": TIGHT},
    "tp2-r2": PACKED | R2 | {"tp": 2, "budget": TIGHT},
    "pp2-r2": PACKED | R2 | {"pp": 2, "budget": TIGHT},
}
FOUR: dict[str, dict[str, Any]] = {
    "tp2-pp2": PACKED | {"tp": 2, "pp": 2, "budget": TIGHT},
    "pp2-dp2": PACKED | ONE_GROUP_AND_FOUR | {"pp": 2, "budget": 30},
    "cp4": PACKED | {"cp": 4, "budget": TIGHT},
    "cp4-two-heads-r2": PACKED | R2 | TWO_HEADS | {"cp": 4, "budget": TIGHT},
    "cp2-tp2": PACKED | {"cp": 2, "tp": 2, "budget": TIGHT},
    "cp2-dp2-per-token": PACKED
    | ONE_GROUP_AND_FOUR
    | {"cp": 2, "budget": 30, "transformer": {"calculate_per_token_loss": True}},
    "cp2-ep2-r2": PACKED | R2 | {"cp": 2, "ep": 2, "budget": TIGHT},
}

MORE: dict[str, dict[str, Any]] = {
    "reference-policy": PACKED | {"run": "scored", "budget": TIGHT, "engine": {"forward_only": True}},
    "too-long": PACKED | {"run": "scored", "budget": 20},
    "prompt-in-loss": PACKED | {"run": "prompt_in_loss"},
    "stock-prompt-in-loss": STOCK | {"run": "prompt_in_loss"},
    "saved-packed": PACKED | {"run": "restarted", "budget": TIGHT, "after": {"packed": False}},
    "saved-stock": STOCK | {"run": "restarted", "budget": TIGHT, "after": {"packed": True}},
    "fused-ragged-temperature": PACKED | {"run": "scored", "fused": "triton", "temperature": "ragged", "budget": ROOMY},
    "dropout": PACKED | {"transformer": {"attention_dropout": 0.1}},
    "gated-delta-nets": PACKED
    | {"transformer": {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}},
    "interleaved-stages": PACKED | {"engine": {"virtual_pipeline_model_parallel_size": 2}},
    "dynamic-context-parallel": PACKED
    | {"engine": {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 64}},
    "keep": PACKED | {"keep": "attention"},
    "batch-invariant": PACKED | {"equal_bits": True},
    "replay-without-experts": PACKED | {"router_replay": "R2"},
    "replay-without-routes": PACKED | MOE | {"run": "not_routed", "router_replay": "R3", "budget": ROOMY},
}
TWO_MORE: dict[str, dict[str, Any]] = {
    "one-rank-too-long": PACKED | {"run": "scored", "budget": 33, "groups": SECOND_RANK_LONG},
}

SCENARIOS = {
    "megatron-one": (1, ONE | MORE),
    "megatron-two": (2, TWO | TWO_MORE),
    "megatron-four": (4, FOUR),
}

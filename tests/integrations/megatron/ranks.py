"""Four ranks of one host: each saves what it found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.ssm import gated_delta_net

from dualkv.integrations.megatron import PackedGroups, enable
from dualkv.layout import Layout
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import (
    AGAIN,
    COUNTED,
    EXPERTS,
    HYBRID,
    LATENT,
    MULTIMODAL,
    RECURRENT,
    build,
    layer_spec,
    packed_against_replicated,
    packed_on_ranks,
)

COUNT = 4  # ranks; those that a scenario does not ask for are data parallel
SEQUENCE = {"tp": 2, "sequence_parallel": True, "norms": False}
WINDOWS = {"window_size": (3, 0), "window_attn_skip_freq": 2}
SINKS = {"softmax_type": "learnable"}
GATHERED = {"cp_comm_type": "all_gather"}
FEW_HEADS = {"num_attention_heads": 2, "num_query_groups": 1}
INTERLEAVED = {"pp": 2, "virtual_pipeline_model_parallel_size": 2, "num_layers": 4, "variable_seq_lengths": False}
SCENARIOS: dict[str, dict[str, Any]] = {
    "tensor": {"tp": 2},
    "one KV head": {"tp": 2, "num_query_groups": 1},
    "sequence": SEQUENCE | {"init_method_std": 0.1},
    "pipeline": {"pp": 2},
    "expert": {"ep": 2, **EXPERTS},
    "context": {"cp": 2, **SINKS, **WINDOWS},
    "context, a head each": {"cp": 4, **EXPERTS},
    "context, tensor": {"cp": 2, "tp": 2},
    "context, tensor, sequence": SEQUENCE | {"cp": 2, "init_method_std": 0.1},
    "context, multimodal, pipeline": {"cp": 2, "pp": 2, **MULTIMODAL},
    "context, latent": {"cp": 2, "tp": 2, **LATENT},
    "gathered": {"cp": 4, **GATHERED, **SINKS, **EXPERTS},
    "gathered, more ranks than heads": {"cp": 4, **GATHERED, **FEW_HEADS, **WINDOWS},
    "context, pipeline": {"cp": 2, "pp": 2, "num_query_groups": 1},
    "interleaved": INTERLEAVED | {"init_method_std": 0.2},
    "tensor, sequence, recurrent": SEQUENCE | RECURRENT | {"linear_attention_freq": [1, 1, 0], "num_layers": 3},
    "recurrent, pipeline": {"pp": 2, **RECURRENT, "linear_attention_freq": [0, 1]},
    "tensor and pipeline": {"tp": 2, "pp": 2, **SINKS, "window_size": (3, 0)},
}
if hasattr(gated_delta_net, "tensor_a2a_cp2hp"):  # configs of earlier versions refuse such layers
    SCENARIOS |= {
        "context, recurrent": {"cp": 2, **RECURRENT},
        "gathered, recurrent, each layer again": {"cp": 2, **GATHERED, **RECURRENT, **AGAIN},
        "context of four, hybrid": {"cp": 4, **HYBRID},
        "hybrid, context, latent": {"cp": 2, **HYBRID, **LATENT, "pattern": "+MG-"},
        "hybrid, tensor, sequence": SEQUENCE | HYBRID,
        "hybrid, context, pipeline": {"cp": 2, "pp": 2, **HYBRID, "pattern": "*-|MG"},
    }
# What routers count, against one rank. A loss of all data-parallel ranks differs with their number.
WITHOUT_GLOBAL = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.3, 0.5]}
COUNTS: dict[str, dict[str, Any]] = {
    "heads": {"cp": 2},
    "tensor, sequence, keys": {"tp": 2, "sequence_parallel": True, "cp": 2, "cp_comm_type": "all_gather"},
}


def main(number: int, folder: str, *names: str) -> None:
    with cpu.rank():
        found: dict[str, Any] = {name: tuple(packed_against_replicated(**SCENARIOS[name])) for name in names}
        found["counts"] = {name: packed_on_ranks(**COUNTED | WITHOUT_GLOBAL | sizes) for name, sizes in COUNTS.items()}
        found["refused"] = refused()
    torch.save(found, Path(folder) / f"{number}.pt")


def refused() -> list[str]:
    """Return the errors of each of two context-parallel ranks, for the same reason or for what the other one has."""

    def said(call: Any, *args: Any, **kwargs: Any) -> str:
        try:
            call(*args, **kwargs)
        except ValueError as error:
            return str(error)
        return "nothing raised"

    cpu.parallel(cp=2)
    settings = {"context_parallel_size": 2}
    model = build(enable(layer_spec()), settings)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    lonely = build(enable(layer_spec()), settings | {"num_attention_heads": 1, "num_query_groups": 1})
    layout = Layout.from_lengths([3], [[2, 3]])
    longer = Layout.from_lengths([3], [[2, 2 + dist.get_rank() % 2]])
    packed = PackedGroups(layout)
    rows = torch.zeros(3, 4, 1, 4, 16)
    whole = torch.zeros(1, 8, dtype=torch.int64)
    found = [
        said(PackedGroups, longer),
        said(model, whole, whole, None, packed_seq_params=packed),
        said(model.decoder.layers[0].self_attention.core_attention, *rows, None),
        said(lonely, whole[:, :4], whole[:, :4], None, packed_seq_params=packed),
        said(PackedGroups, layout, cp_comm_type="p2p"),
    ]
    cpu.parallel()
    one = build(enable(layer_spec()), {})
    return [*found, said(one, ids, ids, None, packed_seq_params=packed)]

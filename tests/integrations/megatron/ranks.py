"""Ranks of one host: `torchrun -m tests.integrations.megatron.ranks FOLDER` saves there what each rank found."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import EXPERTS, packed_against_replicated

SCENARIOS = {
    2: {
        "tensor": {"tp": 2},
        "one KV head": {"tp": 2, "num_query_groups": 1},
        "sequence": {"tp": 2, "sequence_parallel": True, "norms": False, "init_method_std": 0.1},
        "pipeline": {"pp": 2},
        "expert": {"ep": 2, **EXPERTS},
    },
    4: {"tensor and pipeline": {"tp": 2, "pp": 2}},
}

if __name__ == "__main__":
    cpu.start()
    found = {name: packed_against_replicated(**given) for name, given in SCENARIOS[dist.get_world_size()].items()}
    torch.save({name: tuple(one) for name, one in found.items()}, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()

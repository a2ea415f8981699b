"""Four ranks of one host: `python -m tests.integrations.megatron.ranks FOLDER` saves there what each of them found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import EXPERTS, packed_against_replicated

COUNT = 4  # ranks; those that a scenario does not ask for are data parallel
SCENARIOS: dict[str, dict[str, Any]] = {
    "tensor": {"tp": 2},
    "one KV head": {"tp": 2, "num_query_groups": 1},
    "sequence": {"tp": 2, "sequence_parallel": True, "norms": False, "init_method_std": 0.1},
    "pipeline": {"pp": 2},
    "expert": {"ep": 2, **EXPERTS},
    "context": {"cp": 2, "softmax_type": "learnable", "window_size": (3, 0), "window_attn_skip_freq": 2},
    "context, a head each": {"cp": 4, **EXPERTS},
    "context, tensor": {"cp": 2, "tp": 2},
    "context, tensor, sequence": {"cp": 2, "tp": 2, "sequence_parallel": True, "norms": False, "init_method_std": 0.1},
    "context, pipeline": {"cp": 2, "pp": 2, "num_query_groups": 1},
    "tensor and pipeline": {"tp": 2, "pp": 2, "softmax_type": "learnable", "window_size": (3, 0)},
}


def main(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with cpu.rank(dist.FileStore(str(folder / "store"), COUNT), number, COUNT):
        found = {name: tuple(packed_against_replicated(**given)) for name, given in SCENARIOS.items()}
    torch.save(found, folder / f"{number}.pt")


if __name__ == "__main__":
    start_processes(main, (Path(sys.argv[1]),), COUNT, start_method="fork")  # megatron-core is imported once

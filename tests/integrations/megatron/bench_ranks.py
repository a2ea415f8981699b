"""The benchmark of megatron-core on two ranks: `python -m tests.integrations.megatron.bench_ranks FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import torch
from megatron.core import tensor_parallel

from tests.integrations.megatron import cpu
from tools.bench import megatron as bench
from tools.bench.megatron_costs import Group, Model

TINY = Model(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocabulary=64)


def main(number: int, file: Path) -> None:
    run = bench.Run(TINY, 2, 2, 1, 1, 4, torch.float32, False, torch.device("cpu"))
    with (
        mock.patch.object(tensor_parallel, "model_parallel_cuda_manual_seed"),
        mock.patch.object(bench, "SMALL", TINY),
        mock.patch.object(bench, "SMALL_GROUP", Group(3, 6, 4, groups=4)),
    ):
        *_, (figures, _) = bench.measure_ranks(run, Group(3, 5, 4))
    if number == 0:
        file.write_text(json.dumps(figures))


if __name__ == "__main__":
    cpu.start_ranks(main, 2, Path(sys.argv[1]))

"""The benchmark of megatron-core on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import torch
from megatron.core import tensor_parallel

from tests.integrations.megatron import cpu
from tools.bench import megatron as bench
from tools.bench.megatron_costs import Group, Model

TINY = Model(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocabulary=64)


def main(number: int, file: str) -> None:
    run = bench.Run(TINY, 2, 1, 1, 4, torch.float32, False, torch.device("cpu"))
    with (
        cpu.rank(),
        mock.patch.object(tensor_parallel, "model_parallel_cuda_manual_seed"),
        mock.patch.object(bench, "SMALL", TINY),
        mock.patch.object(bench, "SMALL_GROUP", Group(3, 6, 4, groups=4)),
    ):
        *_, (figures, _) = bench.measure_ranks(run, Group(3, 5, 4))
    if number == 0:
        Path(file).write_text(json.dumps(figures))

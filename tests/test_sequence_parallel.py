"""Attention over the rows of four ranks against the same attention in one process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dualkv
from dualkv.sequence_parallel import Shard, padded

RANKS = 4
HEADS, HEAD_DIM = 12, 8
KV_HEADS = (1, 2, 3, 4, 6, 12)  # fewer than ranks, more, and neither a multiple nor a divisor of them
LAYOUT = dualkv.Layout.from_lengths([7, 1, 5, 0], [[4, 0, 9], [2, 6], [3], [3, 2]])  # 42 rows: two more are needed


def inputs(kv_heads: int) -> list[torch.Tensor]:
    """q, k, v and the output's gradient, fp64, two rows of nothing behind them."""
    generator = torch.Generator().manual_seed(kv_heads)
    rows = LAYOUT.num_tokens + 2
    shapes = [(rows, h, HEAD_DIM) for h in (HEADS, kv_heads, kv_heads, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {}
    shard = Shard(LAYOUT, dist.group.WORLD)
    for kv_heads in KV_HEADS:
        q, k, v, dout = (x.chunk(RANKS)[rank].clone() for x in inputs(kv_heads))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = shard.attention(*leaves, softmax_scale=0.3)
        out.backward(dout)
        found[kv_heads] = [out.detach(), *(x.grad for x in leaves)]
    found["positions"] = shard.position_ids
    found["errors"] = [
        refusal(shard, torch.zeros(11, 6, 8), torch.zeros(11, 2, 8)),
        refusal(shard, torch.zeros(11, 12, 8), torch.zeros(11, 5, 8)),
        refusal(shard, torch.zeros(10, 12, 8), torch.zeros(10, 2, 8)),
    ]
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def refusal(shard: Shard, q: torch.Tensor, kv: torch.Tensor) -> str:
    try:
        shard.attention(q, kv, kv)
    except ValueError as error:
        return str(error)
    return "nothing raised"


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), RANKS)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_as_in_one_process(kv_heads: int, ranks: list[dict]) -> None:
    *leaves, dout = inputs(kv_heads)
    rows = LAYOUT.num_tokens
    leaves = [x[:rows].clone().requires_grad_() for x in leaves]
    out = dualkv.attention(*leaves, LAYOUT, softmax_scale=0.3)
    out.backward(dout[:rows])
    for i, expected in enumerate((out, *(x.grad for x in leaves))):
        got = torch.cat([found[kv_heads][i] for found in ranks])
        torch.testing.assert_close(got[:rows], expected.detach(), rtol=1e-12, atol=1e-12)


def test_positions_are_those_of_each_ranks_rows(ranks: list[dict]) -> None:
    positions = torch.cat([found["positions"] for found in ranks])
    assert positions.tolist() == [*LAYOUT.position_ids.tolist(), 0, 1]


def test_refusals_name_heads_and_rows(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["errors"] == [
            "q has 6 heads, expected a multiple of the 4 sequence-parallel ranks",
            "q has 12 heads and k 5, expected q's to be a multiple of k's",
            "q has 10 rows, each rank of this layout holds 11",
        ]


def test_padding_sees_itself_alone() -> None:
    longer = padded(LAYOUT, 3)
    assert longer.num_tokens == LAYOUT.num_tokens + 3
    assert longer.position_ids.tolist()[-3:] == [0, 1, 2]
    assert longer.region_bounds.tolist()[-1] == [42, 42, 42]
    assert padded(LAYOUT, 0) is LAYOUT

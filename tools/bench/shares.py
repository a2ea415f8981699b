"""The share of one rank of those that share packed rows, on a machine where the other ranks do not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from dualkv import sequence_parallel
from dualkv.layout import Layout


def share_of(layout: Layout, rank: int, ranks: int) -> sequence_parallel.Shard:
    """Make the shard of one rank."""
    shard = sequence_parallel.Shard(layout, None, ranks)
    shard.rank, shard.world_size = rank, ranks
    shard.num_tokens //= ranks
    return shard


def _kept(x: torch.Tensor, group: None) -> torch.Tensor:
    """The stand-in for the exchange between ranks, of rows that are in the order in which ranks would send them."""
    return x


def _nothing(rows: torch.Tensor, to: list[int], of: list[int], group: None) -> torch.Tensor:
    """The stand-in for the exchange of some rows: as many zeros as rows would come."""
    return rows.new_zeros(sum(of), *rows.shape[1:])


@contextmanager
def alone() -> Iterator[None]:
    """Nothing is sent in this context; a rank puts its rows in order for the others, and what comes in its own."""
    with mock.patch.multiple(sequence_parallel, all_to_all=_kept, sent=_nothing):
        yield

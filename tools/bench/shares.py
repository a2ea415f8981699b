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


class _Kept:
    """A stand-in for the exchange between ranks: it copies the rows that this rank would send."""

    @staticmethod
    def apply(x: torch.Tensor, group: None) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)


def _nothing(rows: torch.Tensor, to: list[int], of: list[int], group: None) -> torch.Tensor:
    """The stand-in for the exchange of some rows: as many zeros as rows would come."""
    return rows.new_zeros(sum(of), *rows.shape[1:])


@contextmanager
def alone() -> Iterator[None]:
    """Nothing is exchanged in this context; what ranks would send is copied."""
    with mock.patch.multiple(sequence_parallel, _Exchange=_Kept, sent=_nothing):
        yield

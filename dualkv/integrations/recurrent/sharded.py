"""Recurrent layers whose packed rows lie on several ranks (:class:`dualkv.sequence_parallel.Shard`, or one of its
kinds).

All that is computed row by row stays with a rank's own rows. A scan needs all rows: one exchange gives each rank all
rows for its share of the heads, waves run there, another exchange brings the results back. A convolution needs the few
rows before each piece of a segment that lies on the rank. Some come from other ranks, in an exchange of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from dualkv.arrays import IntArray
from dualkv.integrations.recurrent import waves
from dualkv.integrations.recurrent.walked import Trees
from dualkv.packed_rows import packed_rows
from dualkv.segments import Segments
from dualkv.sequence_parallel import Shard, check_heads

Tensor = torch.Tensor

# The attribute of a recurrent layer that counts the heads whose states it carries: of gated delta nets, of Mamba-2 and
# Kimi's delta attention, of MiniMax. Short convolutions have none.
HEADS = ("num_v_heads", "num_heads", "num_attention_heads")


def refuse(mixers: list[tuple[str, nn.Module]], ranks: int) -> None:
    """Raises ValueError for recurrent layers (name, module) whose heads so many ranks cannot share."""
    for name, mixer in mixers:
        if heads := next((getattr(mixer, names) for names in HEADS if hasattr(mixer, names)), 0):
            check_heads(f"recurrent layer {name} ({type(mixer).__name__})", heads, ranks)


class Sharded(Trees):
    """The trees of the rows of two ranks or more in one call of a recurrent layer, which gets a rank's own rows."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard.layout)
        self.shard = shard

    @property
    def num_tokens(self) -> int:
        """Rows of one rank."""
        return self.shard.num_tokens

    # ------------------------------------------------------------------ scans
    def to_heads(self, rows: list[Tensor]) -> list[Tensor]:
        # The gradient of a squeeze is a view, that of an index a copy.
        return [x[None] for x in self.shard.to_heads([x.squeeze(0) for x in rows])]

    def to_rows(self, x: Tensor) -> Tensor:
        return self.shard.to_rows(x.squeeze(0))[None]

    def share(self, weight: Tensor) -> Tensor:
        return self.shard.share(weight)

    def order(self, device: torch.device) -> waves.Order:
        """The waves of all rows, which are in the order of the ranks."""
        found, arrived = super().order(device), self.shard.host_order
        if np.array_equal(arrived, np.arange(len(arrived))):
            return found

        def make() -> waves.Order:
            places = torch.from_numpy(np.argsort(arrived)).to(device)
            rows = places if found.rows is None else places[found.rows.order]
            return waves.Order(found.waves, waves.Permutation(rows, rows.argsort()))

        return self.layout._segments.cached(("recurrent order", *self._key(device)), make)

    # ------------------------------------------------------------------ convolutions
    def convolve(self, run: Callable[[waves.Windows | None, Tensor], Tensor], x: Tensor, back: int) -> Tensor:
        if not back or not self.num_tokens:
            return run(None, x)
        key = "recurrent halo", back, *self._key(x.device)
        return run(self.layout._segments.cached(key, lambda: windows(self.shard, back, x.device)), x)

    def _key(self, device: torch.device) -> tuple[object, ...]:
        shard = self.shard
        return type(shard), shard.group, shard.world_size, shard.rank, device


def trees_of(dualkv: object) -> Trees:
    """The trees of a call that got `dualkv`.

    Raises:
        ValueError: some rows of a layout that no shard holds, as a part of a walk that :func:`.walked.at_layer` did not
            see.
        TypeError: neither a layout nor packed rows.
    """
    if isinstance(dualkv, Trees):
        return dualkv
    packed = packed_rows(dualkv)
    if isinstance(packed, Shard):
        return Sharded(packed) if packed.world_size > 1 else Trees(packed.layout)
    if packed.rows is not None:
        raise ValueError(f"dualkv is a {type(dualkv).__name__}, expected a dualkv.Layout or a Shard of one")
    return Trees(packed.whole)


# ---------------------------------------------------------------- the plan of a convolution
def windows(shard: Shard, back: int, device: torch.device) -> waves.Windows:
    """Plan a convolution of a rank's own rows that reads `back` rows back: the windows of all pieces of segments whose
    rows are consecutive there. Every rank plans for all of them, so that none has to send numbers of rows first."""
    t, ranks, rank = shard.num_tokens, shard.world_size, shard.rank
    first, places = rank * t, np.argsort(shard.host_order)
    breaks = 1 + np.flatnonzero((np.diff(places) != 1) | (places[1:] % t == 0))
    pieces = waves.windows_of(_cut(shard.layout._segments, breaks), back, torch.device("cpu"))
    around, missing = places[pieces.around.numpy()], pieces.missing.numpy()
    begin = around[:, back]  # of each piece
    read = [np.unique(around[owned][~missing[owned]]) for owned in (begin // t == r for r in range(ranks))]
    coming = [rows[rows // t != r] for r, rows in enumerate(read)]
    sent = [rows[rows // t == rank] - first for rows in coming]

    here = np.flatnonzero(begin // t == rank)
    here = here[np.argsort(begin[here])]
    own = read[rank][read[rank] // t == rank]
    index = np.zeros(len(places), np.int64)  # of each row among those that are read
    index[np.concatenate([own, coming[rank]])] = np.arange(len(read[rank]))
    there = ~missing[here, back:]
    cu_seqlens = np.append(begin[here] - first, t)
    arrays = index[around[here]], missing[here], np.flatnonzero(there), around[here, back:][there] - first, cu_seqlens
    on_device = (torch.from_numpy(x).to(device) for x in (*arrays, own - first, np.concatenate(sent)))
    *of_windows, own_rows, sent_rows = on_device
    received_from = np.bincount(coming[rank] // t, minlength=ranks).tolist()
    halo = waves.Halo(own_rows, sent_rows, [len(rows) for rows in sent], received_from, shard.group)
    return waves.Windows._make([*of_windows, torch.from_numpy(cu_seqlens), halo])


def _cut(segments: Segments, breaks: IntArray) -> Segments:
    """The segments, those with breaks inside cut into chains before the rows `breaks`."""
    inside = np.setdiff1d(breaks, segments.offsets)
    offsets = np.sort(np.concatenate([segments.offsets, inside]))
    begin = np.arange(len(segments.offsets)) + np.searchsorted(inside, segments.offsets)  # the first piece of each
    parent = np.arange(-1, len(offsets) - 2)
    parent[begin[:-1]] = np.where(segments.parent < 0, -1, begin[segments.parent + 1] - 1)
    return Segments(offsets, parent)

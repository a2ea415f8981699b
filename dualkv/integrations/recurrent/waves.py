"""The order in which recurrent layers run the segments of a layout, made once a layout and device and kept with it.

A *wave* holds all segments with tokens that have equally many ancestors with tokens. The segments of the first wave
start from nothing, those of a later wave from the final states of segments of the wave before. An empty segment leaves
the state as it is, so its children start from the nearest ancestor that has tokens.

A causal convolution of k taps reads k - 1 rows back, along the path. It gets the rows before each segment gathered
(:class:`Windows`): as initial states, or, from a function without such states, in windows from which the first k - 1
rows of each segment are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dualkv.arrays import IntArray, outside_inference_mode
from dualkv.layout import Layout
from dualkv.segments import Segments, segments_of

# Shorter segments are padded together: transformers' functions pad a sequence to a chunk of 64 rows or more anyway, and
# a call has a price of its own.
SHORTEST = 64
CHUNK = 64  # rows that flash-linear-attention's kernels take at once


class Gather(NamedTuple):
    """The states from which the segments of a wave take their initial states.

    Attributes:
        parents: [N] int64, ascending: a segment's place in the wave before.
        counts: [M] int64: the children of each of the M segments of the wave before.
    """

    parents: torch.Tensor
    counts: torch.Tensor


@dataclass(eq=False)
class Wave:
    """N segments that run as one batch.

    Attributes:
        begin, end: its rows, in wave order.
        lengths: [N] tokens of each segment, 1 or more.
        gather: of the initial states; None for the first wave.
        keep: whether a segment has children, which need its final state.
        device: of the tensors.
    """

    begin: int
    end: int
    lengths: IntArray
    gather: Gather | None
    keep: bool
    device: torch.device

    @cached_property
    @outside_inference_mode
    def cu_seqlens_cpu(self) -> torch.Tensor:
        """[N + 1] int64: the first row of each segment within the wave, then the number of rows."""
        return torch.from_numpy(np.append(0, np.cumsum(self.lengths)))

    @cached_property
    @outside_inference_mode
    def cu_seqlens(self) -> torch.Tensor:
        """The cumulative lengths of the segments on the device."""
        return self.cu_seqlens_cpu.to(self.device)

    @cached_property
    @outside_inference_mode
    def chunks(self) -> torch.Tensor:
        """[C, 2] int64: the segment of each chunk and its number within it, on the device. flash-linear-attention would
        make them too, but keeps those of four waves, and waits for the GPU where it copies them there."""
        counts = -(-self.lengths // CHUNK)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        chunks = np.stack([np.repeat(np.arange(len(counts)), counts), np.arange(len(first)) - first], 1)
        return torch.from_numpy(chunks).to(self.device)

    @cached_property
    @outside_inference_mode
    def buckets(self) -> Buckets:
        """Group the segments by length, for functions that take padded batches only."""
        longest = SHORTEST << np.ceil(np.log2(np.maximum(self.lengths / SHORTEST, 1))).astype(np.int64)
        order = np.argsort(longest, kind="stable")
        batches: list[Batch] = []
        for chosen in np.split(order, np.flatnonzero(np.diff(longest[order])) + 1):
            lengths = self.lengths[chosen]
            at = np.arange(int(lengths.max()))
            there = at < lengths[:, None]
            first = np.cumsum(lengths) - lengths
            places = np.where(there, first[:, None] + at, 0)
            of_batch = (torch.from_numpy(x).to(self.device) for x in (places, there))
            batches.append(Batch(int(lengths.sum()), *of_batch))
        if len(batches) == 1:
            return Buckets(batches, None, None)
        first = np.cumsum(self.lengths) - self.lengths
        ends = np.cumsum(self.lengths[order])
        rows = np.arange(int(ends[-1])) + np.repeat(first[order] - ends + self.lengths[order], self.lengths[order])
        return Buckets(batches, Permutation.of(order, self.device), Permutation.of(rows, self.device))


class Permutation(NamedTuple):
    """Attributes:
    order: [N] int64, what comes first, second and so on.
    places: [N] int64, its inverse.
    """

    order: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, order: IntArray, device: torch.device) -> Permutation:
        return cls(torch.from_numpy(order).to(device), torch.from_numpy(np.argsort(order)).to(device))

    @property
    def inverse(self) -> Permutation:
        return Permutation(self.places, self.order)


class Batch(NamedTuple):
    """n segments padded on the right to the longest of them, L rows.

    Attributes:
        rows: their number, without padding.
        at: [n, L] int64: the row at each place, counted from the batch's first; 0 at padding.
        there: [n, L] bool: which places hold a row.
    """

    rows: int
    at: torch.Tensor
    there: torch.Tensor


class Buckets(NamedTuple):
    """The segments of a wave in batches whose lengths differ by less than a factor of two, or are up to `SHORTEST`.

    Padded all together, a wave of one long segment and many short ones would compute mostly zeros.

    Attributes:
        batches: short segments before long ones.
        segments: the wave's segments in the order of the batches; None if there is one batch.
        rows: the wave's rows in this order; None if there is one batch.
    """

    batches: list[Batch]
    segments: Permutation | None
    rows: Permutation | None


class Order(NamedTuple):
    """All waves of a layout.

    Attributes:
        waves: parents before children.
        rows: the packed rows in wave order; None if packed rows have this order.
    """

    waves: list[Wave]
    rows: Permutation | None


class Halo(NamedTuple):
    """The rows that convolutions of a rank read, some of which come from other ranks.

    Attributes:
        own: [n] int64: the rank's own rows among them, each once.
        sent: [m] int64: own rows that other ranks read, in the order of these ranks.
        sent_to, received_from: rows for each rank.
        group: the ranks.
    """

    own: torch.Tensor
    sent: torch.Tensor
    sent_to: list[int]
    received_from: list[int]
    group: dist.ProcessGroup | None


class Windows(NamedTuple):
    """The rows that a convolution reads before each of M segments, b = k - 1 rows back, and those computed again.

    Attributes:
        around: [M, 2b] int64: packed rows, b of the path before each segment and the first b of the segment.
        missing: [M, 2b] bool: places before the path begins, or behind a segment's end; they count as zeros.
        results: [R] int64: the rows that exist, in the flattened [M * b] results.
        rows: [R] int64: the packed rows that these replace.
        cu_seqlens: [M + 1] int64: the first packed row of each segment that has tokens, then the number of rows.
        cu_seqlens_cpu: the same on the host.
        halo: where rows lie on several ranks; `around` counts its own rows and the received ones behind them then.
    """

    around: torch.Tensor
    missing: torch.Tensor
    results: torch.Tensor
    rows: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_cpu: torch.Tensor
    halo: Halo | None = None


def order(layout: Layout, device: torch.device, keep: bool = False) -> Order:
    """The waves of a layout. keep: all of them keep their final states."""
    segments = segments_of(layout.offsets, layout.parent)
    return segments.cached(("recurrent order", device, keep), lambda: _order(segments, device, keep))


def of_first_wave(segments: Segments) -> IntArray:
    """The segments with tokens that have no ancestor with tokens."""
    return np.flatnonzero(_depths(segments)[1][:-1] == 0)


def windows(layout: Layout, back: int, device: torch.device) -> Windows | None:
    """Find the rows that a convolution which reads `back` rows back computes again; None if there are none."""
    if not back or not layout.num_tokens:
        return None
    segments = segments_of(layout.offsets, layout.parent)
    return segments.cached(("recurrent windows", back, device), lambda: windows_of(segments, back, device))


def _depths(segments: Segments) -> tuple[IntArray, IntArray]:
    """[S + 1] the nearest ancestor with tokens of each segment, and the number of such ancestors; -1: none, and for an
    empty segment."""
    parent, n, filled = segments.parent, len(segments.parent), segments.lengths > 0
    above = np.full(n + 1, -1)  # the nearest ancestor with tokens; the last entry is of -1
    depth = np.full(n + 1, -1)  # ancestors with tokens; -1 for an empty segment
    for level in segments.levels:
        up = parent[level]
        above[level] = np.where((up >= 0) & filled[up], up, above[up])
        depth[level] = np.where(filled[level], depth[above[level]] + 1, -1)
    return above, depth


def _order(segments: Segments, device: torch.device, keep: bool) -> Order:
    lengths, n = segments.lengths, len(segments.parent)
    filled = lengths > 0
    above, depth = _depths(segments)
    waves: list[Wave] = []
    rows: list[IntArray] = []
    place = np.zeros(n, np.int64)  # of each segment in its wave
    begin, before = 0, 0
    has_children = np.isin(np.arange(n), above[:-1][filled])
    for at in range(int(depth.max(initial=-1)) + 1):
        chosen = np.flatnonzero(depth[:-1] == at)
        place[chosen] = np.arange(len(chosen))
        gather = None
        if at:
            parents = place[above[chosen]]
            counts = np.bincount(parents, minlength=before)
            gather = Gather(torch.from_numpy(parents).to(device), torch.from_numpy(counts).to(device))
        end = begin + int(lengths[chosen].sum())
        waves.append(Wave(begin, end, lengths[chosen], gather, keep or bool(has_children[chosen].any()), device))
        first = np.cumsum(lengths[chosen]) - lengths[chosen]
        rows.append(np.arange(end - begin) + np.repeat(segments.offsets[chosen] - first, lengths[chosen]))
        begin, before = end, len(chosen)
    packed = np.concatenate([np.zeros(0, np.int64), *rows])
    if np.array_equal(packed, np.arange(len(packed))):
        return Order(waves, None)
    return Order(waves, Permutation.of(packed, device))


def windows_of(segments: Segments, back: int, device: torch.device) -> Windows:
    """Make the windows of a convolution that reads `back` rows back, one or more."""
    offsets, parent, lengths, n = segments.offsets, segments.parent, segments.lengths, len(segments.parent)
    # [S + 1, back] the last rows of each segment's path, the last one first; -1 before the path begins.
    tail = np.full((n + 1, back), -1)
    behind = np.arange(back)
    for level in segments.levels:
        length = lengths[level][:, None]
        inherited = np.take_along_axis(tail[parent[level]], np.maximum(behind - length, 0), 1)
        tail[level] = np.where(behind < length, offsets[level + 1][:, None] - 1 - behind, inherited)

    filled = np.flatnonzero(lengths > 0)
    there = behind < lengths[filled][:, None]
    own = np.where(there, offsets[filled][:, None] + behind, -1)
    around = np.concatenate([tail[parent[filled]][:, ::-1], own], 1)
    cu_seqlens = np.append(offsets[filled], offsets[-1]).astype(np.int64)
    found = around.clip(0), around < 0, np.flatnonzero(there), own[there], cu_seqlens
    return Windows._make([*(torch.from_numpy(x).to(device) for x in found), torch.from_numpy(cu_seqlens), None])

"""Find the segments of each rollout, and count the rollouts that share each packed row.

Packed rows hold a shared token once, separate sequences once a rollout. What counts tokens counts alike where each row
weighs as many rollouts as share it.
"""

from __future__ import annotations

import numpy as np

from dualkv.arrays import IntArray
from dualkv.data.packing import PackedBatch
from dualkv.data.trees import PackedSequences
from dualkv.layout import Layout

Batch = PackedBatch | PackedSequences


def layout_of(batch: object) -> Layout:
    """The layout of a batch, or `batch` itself if that is one.

    Raises:
        TypeError: neither a batch nor a layout.
    """
    layout = batch.layout if isinstance(batch, Batch) else batch
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is a {type(layout).__name__}, expected a dualkv.Layout or a batch that has one")
    return layout


def last_segments(batch: Batch | Layout) -> IntArray:
    """[N] the segment that each rollout ends with. A rollout has the rows of that segment and of those above it.

    Args:
        batch: or the layout of prompts with responses, where a response is a rollout. In a layout without responses
            each segment is one.

    Raises:
        ValueError: a layout of more than two levels, which does not say where rollouts end.
    """
    if isinstance(batch, PackedSequences):
        return batch.layout._segments.segment_of_row[batch._rows[np.cumsum(batch._lens) - 1]]
    layout = layout_of(batch)
    if layout.depth > 2:
        raise ValueError(f"the layout has {layout.depth} levels, expected the result of dualkv.pack_sequences")
    nested = layout._segments.depth > 0
    return np.flatnonzero(nested if nested.any() else ~nested)


def rollouts_of_segments(layout: Layout, last: IntArray) -> IntArray:
    """[S] the number of rollouts that have each segment, of the segments [N] that they end with."""
    segments = layout._segments
    times = np.bincount(last, minlength=len(segments.parent))
    for level in reversed(segments.levels[1:]):
        np.add.at(times, segments.parent[level], times[level])
    return times


def paths(layout: Layout, last: IntArray) -> tuple[IntArray, IntArray]:
    """[K] rollouts and [K] segments: a pair for each segment of each rollout, of the segments [N] they end with."""
    rollout, segment = np.arange(len(last)), last
    pairs = [(rollout, segment)]
    while len(segment):
        segment = layout._segments.parent[segment]
        rollout, segment = rollout[segment >= 0], segment[segment >= 0]
        pairs.append((rollout, segment))
    return np.concatenate([r for r, _ in pairs]), np.concatenate([s for _, s in pairs])

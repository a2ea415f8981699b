"""Random layouts for property tests."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from dualkv.ops.features import Window

LENGTH = st.one_of(st.integers(0, 3), st.integers(0, 40))


def examples(count: int) -> settings:
    """Run so many examples of a property, times EXAMPLES of the environment, without a deadline."""
    return settings(max_examples=round(count * float(os.environ.get("EXAMPLES", "1"))), deadline=None)


@st.composite
def groups(draw, max_groups: int = 4, max_responses: int = 5, length=LENGTH):
    """prompt_lens, response_lens of depth two: ragged, with empty responses, prompts of 0 and 1, groups of one."""
    prompts = draw(st.lists(length, min_size=1, max_size=max_groups))
    responses = [draw(st.lists(length, max_size=max_responses)) for _ in prompts]
    return prompts, responses


@st.composite
def trees(draw, max_segments: int = 10, length=LENGTH):
    """offsets, parent of trees of any depth, in depth-first order."""
    lengths = draw(st.lists(length, min_size=1, max_size=max_segments))
    parent, path = [], []  # path: the segments from the root to the last one
    for s in range(len(lengths)):
        keep = draw(st.integers(0, len(path)))
        del path[keep:]
        parent.append(path[-1] if path else -1)
        path.append(s)
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n)
    return offsets, parent


@st.composite
def windows(draw, longest: int = 90):
    """{}, {"window": n} or {"chunk": n}, from 1 to beyond every path."""
    name = draw(st.sampled_from([None, "window", "chunk"]))
    return {} if name is None else {name: draw(st.one_of(st.integers(1, 4), st.integers(1, longest)))}


def window_of(drawn: dict[str, int]) -> Window | None:
    """The window that :func:`windows` drew."""
    return Window(drawn.get("window"), drawn.get("chunk")) if drawn else None


def random_tree(seed: int, segments: int, depth: int, longest: int):
    """offsets, parent of one tree of so many segments of 0 to `longest` tokens, `depth` levels if they are enough."""
    rng = np.random.default_rng(seed)
    parent, path = [-1], [0]
    for s in range(1, segments):
        del path[max(1, min(len(path), depth - 1) - rng.choice([0, 0, 0, 0, 0, 1, 1, 2])) :]
        parent.append(path[-1])
        path.append(s)
    return [0, *np.cumsum(rng.integers(0, longest + 1, segments)).tolist()], parent


def binary_tree(levels: int, root: int, length: int):
    """offsets, parent of a tree whose root has `levels` levels of segments with two children each below it."""
    lengths, parent = [root], [-1]

    def add(up: int, left: int) -> None:
        for _ in range(2 if left else 0):
            lengths.append(length)
            parent.append(up)
            add(len(parent) - 1, left - 1)

    add(0, levels)
    return [0, *np.cumsum(lengths).tolist()], parent

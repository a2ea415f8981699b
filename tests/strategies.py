"""Random layouts for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

LENGTH = st.one_of(st.integers(0, 3), st.integers(0, 40))


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

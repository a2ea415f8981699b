"""Tests of the rows of each rank, what they see, and what is sent. For attention of ranks see
test_sequence_parallel.py."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv import Layout
from dualkv.context_plan import part_of, shares, stages
from dualkv.ops.features import Window
from dualkv.sequence_parallel import padded
from tests.strategies import groups, trees

LAYOUTS = st.one_of(
    trees(length=st.integers(0, 9)).map(lambda tree: Layout.from_segments(*tree)),
    groups(length=st.integers(0, 9)).map(lambda lens: Layout.from_lengths(*lens)),
)
WINDOWS = st.one_of(
    st.none(), st.integers(1, 12).map(lambda n: Window(size=n)), st.integers(1, 12).map(lambda n: Window(chunk=n))
)
RANKS = st.integers(1, 6)


def shared(layout: Layout, ranks: int) -> Layout:
    """The layout with rows behind it, for a multiple of the ranks."""
    return padded(layout, -layout.num_tokens % ranks)


def visible(layout: Layout, window: Window | None) -> np.ndarray:
    """[T, T]: whether a row sees a key."""
    row, position = np.arange(layout.num_tokens), layout.position_ids.numpy()
    lowest = np.zeros_like(position) if window is None else window.lowest(position)
    on_path = (row <= row[:, None]) & (row[:, None] < layout.visible_end.numpy())
    return on_path & (position >= lowest[:, None])


def rows_of(ranges: list[tuple[int, int]]) -> list[int]:
    return [row for begin, end in ranges for row in range(begin, end)]


@settings(deadline=None)
@given(LAYOUTS, RANKS)
def test_each_row_is_on_one_rank(layout: Layout, ranks: int) -> None:
    layout = shared(layout, ranks)
    found = shares(layout._segments, ranks)
    rows = [rows_of(first) + rows_of(second) for first, second in found]
    assert {len(some) for some in rows} == {layout.num_tokens // ranks}
    assert sorted(row for some in rows for row in some) == list(range(layout.num_tokens))
    group = layout._segments.group_of_row
    for part in (part for of_rank in found for part in of_rank):
        assert part == sorted(part)
        of_range = [set(group[slice(*one)]) for one in part]
        assert all(len(one) == 1 for one in of_range)
        assert len(set().union(*of_range)) == len(of_range), "a range of each group at most"


DRAWN = random.Random(0)
LARGE = {
    "a group": ([8192], [[2048] * 32]),
    "a prompt": ([30000], [[]]),
    "large groups": ([30000, 20000, 10000], [[500] * 4, [2000] * 4, [3000] * 10]),
    "prompts": ([30000, 20000, 10000, 30000], [[], [], [], []]),
    "a large group, then a small one": ([30000, 100], [[500] * 4, [100] * 200]),
    "short groups": (
        [DRAWN.randint(100, 500) for _ in range(128)],
        [[DRAWN.randint(20, 400) for _ in range(8)] for _ in range(128)],
    ),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_ranks_have_equally_many_pairs(name: str, ranks: int) -> None:
    layout = shared(Layout.from_lengths(*LARGE[name]), ranks)
    keys = layout.position_ids.numpy() + 1
    pairs = [sum(keys[rows_of(part)].sum() for part in of_rank) for of_rank in shares(layout._segments, ranks)]
    assert max(pairs) < 1.02 * sum(pairs) / ranks
    if name == "short groups" and ranks == 2:
        ranges = [one for of_rank in shares(layout._segments, ranks) for part in of_rank for one in part]
        assert len(ranges) < 128 + 4, "groups stay whole"


@settings(deadline=None)
@given(LAYOUTS, RANKS, WINDOWS)
def test_a_part_sees_what_its_rows_see(layout: Layout, ranks: int, window: Window | None) -> None:
    """A part has only rows of its paths that one of its rows sees, and the rows between them."""
    layout = shared(layout, ranks)
    whole = visible(layout, window)
    for ranges in (part for of_rank in shares(layout._segments, ranks) for part in of_rank if part):
        part = part_of(layout, ranges, window)
        assert part.layout is not None
        assert part.keys[part.asked].tolist() == rows_of(ranges)
        seen = visible(part.layout, window)[part.asked]
        found = np.zeros((len(part.asked), layout.num_tokens), int)
        np.add.at(found, (slice(None), part.keys), seen)
        assert (found == whole[part.keys[part.asked]]).all()
        first = np.delete(np.arange(len(part.keys)), part.asked)
        assert window is None or part.layout.position_ids.numpy()[first].max(initial=0) < layout._segments.longest_path
        silent = part.layout._segments.silent
        assert silent is None or silent.sum() == len(first)


@settings(deadline=None)
@given(LAYOUTS, RANKS, WINDOWS)
def test_what_is_needed_arrives_once(layout: Layout, ranks: int, window: Window | None) -> None:
    layout = shared(layout, ranks)
    of_ranks = shares(layout._segments, ranks)
    known = [np.array(rows_of(first) + rows_of(second), int) for first, second in of_ranks]
    own = [rows.copy() for rows in known]
    plans = [stages(layout, of_ranks, rank, window) for rank in range(ranks)]
    for number in range(2):
        at_once = [plan[number] for plan in plans]
        sent = [np.split(own[r][stage.sent.numpy()], np.cumsum(stage.sent_to)[:-1]) for r, stage in enumerate(at_once)]
        for rank, stage in enumerate(at_once):
            arrived = [from_rank[rank] for from_rank in sent]
            assert [len(rows) for rows in arrived] == stage.received_from
            known[rank] = np.concatenate([known[rank], *arrived])
            assert len(set(known[rank])) == len(known[rank]), "nothing comes twice, or is its own"
            part = of_ranks[rank][number]
            assert own[rank][stage.own].tolist() == rows_of(part)
            if part:
                assert known[rank][stage.keys.numpy()].tolist() == part_of(layout, part, window).keys.tolist()
                assert stage.keys.numpy()[stage.asked.numpy()].tolist() == list(range(stage.own.start, stage.own.stop))


def test_a_window_shortens_what_is_sent() -> None:
    layout = Layout.from_lengths([4096], [[64] * 4])
    of_ranks = shares(layout._segments, 4)

    def sent(window: Window | None) -> int:
        return sum(len(stage.sent) for rank in range(4) for stage in stages(layout, of_ranks, rank, window))

    assert sent(None) > 4096
    assert sent(Window(size=16)) < 150
    assert sent(Window(chunk=16)) < 150

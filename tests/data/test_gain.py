"""The rule that says whether packing pays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv import Layout
from dualkv.data.gain import MIN_GAIN, PAIRS_A_BORDER, PAIRS_A_ROW, Gain, if_it_pays, pays_over
from dualkv.prefixes import shared_prefixes

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(SEQUENCES)
def test_counts_against_the_visibility_rule(sequences):
    found = Gain.of(shared_prefixes([np.array(s) for s in sequences]))
    layout = Layout.from_token_sequences(sequences)
    position = layout.position_ids.numpy()
    assert found.rows == layout.num_tokens
    assert found.pairs == (position + 1).sum()
    assert found.borders == (layout._segments.depth * layout._segments.lengths).sum()
    assert found.replicated_rows == sum(map(len, sequences))
    assert found.replicated_pairs == sum(i + 1 for s in sequences for i in range(len(s)))
    after = found.rows + (found.pairs + PAIRS_A_BORDER * found.borders) / PAIRS_A_ROW
    assert found.saved == pytest.approx(1 - after / (found.replicated_rows + found.replicated_pairs / PAIRS_A_ROW))


def group(prompt, responses, length):
    random = np.random.default_rng(0)
    first = random.integers(1000, size=prompt)
    return shared_prefixes(
        [np.append(first, np.append(1000 + i, random.integers(1000, size=length))) for i in range(responses)]
    )


@pytest.mark.parametrize(("prompt", "pays"), [(1, False), (20, False), (60, True), (2000, True)])
def test_a_prompt_must_be_worth_sharing(prompt, pays):
    shared = group(prompt, 16, 1000)
    kept, gain = if_it_pays(shared)
    assert gain.pays is pays
    assert (gain.saved >= MIN_GAIN) is pays
    assert kept.tokens == (shared.tokens if pays else shared.lengths.sum())
    assert ("rollouts stay as they are" in str(gain)) is not pays
    assert f"{shared.tokens:,} rows in place of {shared.lengths.sum():,}" in str(gain)


@settings(max_examples=100, deadline=None)
@given(SEQUENCES)
def test_segments_pay_over_the_same_sequences_one_by_one_where_sharing_does(sequences):
    shared = shared_prefixes([np.array(s) for s in sequences])
    tree, alone = shared.tree(), np.full(len(shared), -1)
    assert pays_over(tree.parent, tree.length, (alone, shared.lengths)) is Gain.of(shared).pays


def test_an_empty_segment_is_no_border():
    """A prompt of one token leaves an empty segment, because its responses have copies of it. A border would cost 3.4
    rows here."""
    longer = np.array([-1, -1]), np.array([103, 103])
    assert pays_over(np.array([-1, 0, 0]), np.array([0, 100, 100]), longer)
    assert not pays_over(np.array([-1, 0, 0]), np.array([1, 100, 100]), longer)


def test_nothing_shared_costs_nothing():
    gain = Gain.of(group(0, 4, 50))
    assert (gain.saved, gain.ratio, gain.borders) == (0, 1, 0)
    assert not gain.pays


def test_many_short_segments_cost_more_than_they_save():
    """Pairs of sequences share ever shorter parts of a long common one: deep, with next to nothing below."""
    base = np.arange(3000)
    deep = shared_prefixes([np.append(base[:n], [5000 + n] * 3000) for n in range(30, 90)])
    assert Gain.of(deep).borders > 20 * 3000 * 60
    assert not Gain.of(deep).pays

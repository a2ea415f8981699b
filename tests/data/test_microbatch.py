from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv.data.microbatch import MicroBatch, plan_micro_batches
from dualkv.data.packing import pack
from dualkv.layout import Layout


@st.composite
def cases(draw):
    """prompt_lens, response_lens, budget, labels; some groups may exceed the budget alone."""
    labels = draw(st.sampled_from(["gather", "roll"]))
    prompts = draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    responses = [draw(st.lists(st.integers(0, 20), min_size=1, max_size=8)) for _ in prompts]
    least = max(cost([p], [[max(r)]], labels) for p, r in zip(prompts, responses, strict=True))
    return prompts, responses, draw(st.integers(least, least + 100)), labels


def cost(prompts, responses, labels) -> int:
    """Packed tokens, from the layout the groups are packed in."""
    copies = int(labels == "roll")
    return Layout.from_lengths([p - copies for p in prompts], [[n + copies for n in r] for r in responses]).num_tokens


def parts_of(plan: list[MicroBatch]) -> Counter:
    """Parts each group is in."""
    return Counter(g for m in plan for g, _ in m.parts)


def check(plan, prompts, responses, budget, labels):
    """Every response once, the tokens that packing makes, none above the budget, none empty."""
    assert sorted((g, i) for m in plan for g, part in m.parts for i in part) == [
        (g, i) for g, r in enumerate(responses) for i in range(len(r))
    ]
    for m in plan:
        assert m.parts
        assert all(part for _, part in m.parts)
        assert list(m.parts) == sorted(m.parts)
        assert len({g for g, _ in m.parts}) == len(m.parts)
        packed = cost(
            [prompts[g] for g, _ in m.parts], [[responses[g][i] for i in part] for g, part in m.parts], labels
        )
        assert m.tokens == packed <= budget


def fewest_bins(costs, capacity, bins=()) -> int:
    """The optimum, by trying everything."""
    if not costs:
        return len(bins)
    first, rest = costs[0], costs[1:]
    tries = {(*bins[:i], b + first, *bins[i + 1 :]) for i, b in enumerate(bins) if b + first <= capacity}
    return min(fewest_bins(rest, capacity, t) for t in tries | {(*bins, first)})


@settings(max_examples=200, deadline=None)
@given(cases())
def test_whole_groups_in_few_micro_batches(case):
    prompts, responses, budget, labels = case
    plan = plan_micro_batches(prompts, responses, budget, labels=labels)
    check(plan, prompts, responses, budget, labels)
    assert {m.rank for m in plan} == {0}
    assert [m.tokens for m in plan] == sorted((m.tokens for m in plan), reverse=True)

    whole = [cost([p], [r], labels) for p, r in zip(prompts, responses, strict=True)]
    for g, parts in parts_of(plan).items():
        if whole[g] <= budget:
            assert parts == 1
        else:
            # More than half of every part's room is used: at most twice as many as any split has.
            room = budget - (prompts[g] - (labels == "roll"))
            assert parts * room < 2 * (whole[g] - (budget - room))
    # So for micro-batches: fewer than twice the trivial bound.
    assert len(plan) == 1 or len(plan) * budget < 2 * sum(m.tokens for m in plan)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(30, 80))
def test_not_more_micro_batches_than_first_fit_decreasing_allows(groups, budget):
    plan = plan_micro_batches(groups, [[0]] * len(groups), budget)
    assert len(plan) <= 11 / 9 * fewest_bins(tuple(groups), budget) + 6 / 9


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 4), st.integers(1, 3))
def test_equal_counts_on_ranks(case, num_ranks, min_count):
    prompts, responses, budget, labels = case
    options = {"num_ranks": num_ranks, "min_count": min_count, "labels": labels}
    alone = plan_micro_batches(prompts, responses, budget, labels=labels)
    count = max(-(-len(alone) // num_ranks), min_count)
    total = sum(map(len, responses))
    if total < count * num_ranks:
        with pytest.raises(ValueError, match=f"need {count * num_ranks} responses at least, got {total}"):
            plan_micro_batches(prompts, responses, budget, **options)
        return
    plan = plan_micro_batches(prompts, responses, budget, **options)
    check(plan, prompts, responses, budget, labels)
    assert [m.rank for m in plan] == [r for r in range(num_ranks) for _ in range(count)]
    for r in range(num_ranks):
        tokens = [m.tokens for m in plan if m.rank == r]
        assert tokens == sorted(tokens, reverse=True)

    # Groups are split beyond what the budget asks only as often as there are too few pieces, and the shortest prompts
    # are repeated.
    before, after = parts_of(alone), parts_of(plan)
    more = after - before
    assert sum(more.values()) == max(0, count * num_ranks - sum(before.values()))
    extra = sorted(prompts[g] for g in more.elements())
    possible = sorted(prompts[g] for g, r in enumerate(responses) for _ in range(len(r) - before[g]))
    assert extra == possible[: len(extra)]


@settings(max_examples=50, deadline=None)
@given(cases(), st.integers(1, 3))
def test_same_plan_from_lists_arrays_and_tensors(case, num_ranks):
    prompts, responses, budget, labels = case
    responses = [r * num_ranks for r in responses]  # enough for any count
    options = {"num_ranks": num_ranks, "labels": labels}
    plan = plan_micro_batches(prompts, responses, budget, **options)
    assert plan == plan_micro_batches(prompts, responses, budget, **options)
    assert plan == plan_micro_batches(np.array(prompts), list(map(np.array, responses)), np.int64(budget), **options)
    assert plan == plan_micro_batches(torch.tensor(prompts), map(torch.tensor, responses), budget, **options)


def test_ranks_are_balanced_by_packed_tokens():
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 4096, 64)
    responses = [rng.integers(10, 2048, 16) for _ in prompts]
    for budget in (20_000, 65_536):
        plan = plan_micro_batches(prompts, responses, budget, num_ranks=8)
        tokens = np.bincount([m.rank for m in plan], [m.tokens for m in plan])
        assert tokens.max() - tokens.min() <= budget / 8


def test_a_group_above_the_budget_repeats_its_prompt():
    plan = plan_micro_batches([10, 4], [[8, 8, 8, 8], [1]], budget=26)
    assert plan == [MicroBatch(((0, (0, 1)),), 26), MicroBatch(((0, (2, 3)),), 26), MicroBatch(((1, (0,)),), 5)]
    # One copied token a response, one shared token less.
    assert [m.tokens for m in plan_micro_batches([10], [[8, 8]], budget=27, labels="roll")] == [27]
    with_room_for_one = plan_micro_batches([10], [[8, 8]], budget=26, labels="roll")
    assert [m.tokens for m in with_room_for_one] == [18, 18]


def test_micro_batches_pack():
    prompts = [[1, 2, 3], [4]]
    responses = [[[5, 6], [7]], [[8, 9, 10], []]]
    lens = [[len(r) for r in group] for group in responses]
    for labels in ("gather", "roll"):
        for m in plan_micro_batches([3, 1], lens, budget=7, min_count=3, labels=labels):
            picked = [[responses[g][i] for i in part] for g, part in m.parts]
            assert pack([prompts[g] for g, _ in m.parts], picked, labels=labels).layout.num_tokens == m.tokens


BAD = {
    "budget": (
        ([4, 10], [[1], [2, 5]], 14),
        {},
        ValueError,
        "budget is 14 tokens, group 1 needs 15 .* response 1 alone",
    ),
    "budget of roll": (([10], [[5]], 14), {"labels": "roll"}, ValueError, "group 0 needs 15"),
    "budget 0": (([1], [[1]], 0), {}, ValueError, "budget is 0"),
    "budget type": (([1], [[1]], 8.5), {}, TypeError, "budget is 8.5, expected an integer"),
    "ranks": (([1], [[1]], 9), {"num_ranks": 0}, ValueError, "num_ranks is 0"),
    "count": (([1], [[1]], 9), {"min_count": -1}, ValueError, "min_count is -1"),
    "too few responses": (([1], [[1, 1, 1]], 9), {"num_ranks": 4}, ValueError, "need 4 responses at least, got 3"),
    "labels": (([1], [[1]], 9), {"labels": "both"}, ValueError, "labels is 'both'"),
    "empty prompt": (([1, 0], [[1], [1]], 9), {}, ValueError, r"prompt_lens\[1\] is 0"),
    "empty prompt of roll": (([1, 0], [[1], [1]], 9), {"labels": "roll"}, ValueError, r"prompt_lens\[1\] is 0"),
    "no responses": (([1], [[]], 9), {}, ValueError, r"response_lens\[0\] is empty"),
    "no groups": (([], [], 9), {}, ValueError, "prompt_lens is empty"),
    "numbers": (([1], [[1], [2]], 9), {}, ValueError, "response_lens has 2 lists for 1 prompts"),
    "negative": (([1], [[-1]], 9), {}, ValueError, r"response_lens\[0\]\[0\] is -1"),
    "fraction": (([1.5], [[1]], 9), {}, TypeError, "prompt_lens must hold integers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_sentence(name):
    arguments, options, error, match = BAD[name]
    with pytest.raises(error, match=match) as caught:
        plan_micro_batches(*arguments, **options)
    assert "\n" not in str(caught.value)

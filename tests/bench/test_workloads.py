"""Workloads of the benchmark: work counted against brute force, names, lengths, files."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv.bench.inputs import Inputs
from dualkv.bench.workloads import NAMED, RANDOM_HEAD_DIMS, RANDOM_RATIOS, Workload, of_rollouts, parse, random_workload
from tests.bench.fake import ROLLOUTS

LENS = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=4)


@settings(deadline=None)
@given(LENS)
def test_flops_against_brute_force(groups):
    workload = Workload("x", tuple(p for p, _ in groups), tuple(tuple(r) for _, r in groups), 6, 2, 40)
    pairs, row = 0, 0
    for prompt, responses in groups:
        prompt_rows = range(row, row + prompt)
        row += prompt
        pairs += sum(1 for q in prompt_rows for k in prompt_rows if k <= q)
        for length in responses:
            own = range(row, row + length)
            row += length
            pairs += sum(1 for q in own for k in (*prompt_rows, *own) if k <= q)
    assert workload.visible_pairs() == pairs
    assert workload.flops("fwd") == pairs * 6 * 40 * 4
    assert workload.flops("bwd") == pairs * 6 * 40 * 10  # five products instead of two
    assert workload.flops("both") == pairs * 6 * 40 * 14
    pair = workload.with_shape(head_dim=192, head_dim_v=128)
    assert [pair.flops(way) for way in ("fwd", "bwd")] == [pairs * 6 * 2 * (192 + 128), pairs * 6 * 2 * (576 + 256)]


def test_trees_have_the_known_shape():
    binary, agent = NAMED["binary-p4096-r1024"].layout(), NAMED["agent-t10-r512"].layout()
    assert (binary.depth, binary.num_tokens, binary.nominal_tokens) == (5, 4096 + 30 * 1024, 16 * 8 * 1024)
    assert (agent.depth, agent.nominal_tokens) == (10, 32 * 10 * 512), "32 rollouts of 10 turns"
    assert agent.num_segments < 200, "which share turns"
    assert set(NAMED["agent-t10-r512"].response_lens[0]) == {512}


def test_drawn_workloads_are_the_same_every_time_and_of_all_kinds():
    drawn = [parse(f"random-1-{i}") for i in range(40)]
    assert drawn == [random_workload(1, i) for i in range(40)]
    assert drawn[0] != replace(parse("random-2-0"), name=drawn[0].name)
    kinds = {(w.head_dim, w.heads // w.kv_heads) for w in drawn}
    assert kinds == set(itertools.product(RANDOM_HEAD_DIMS, RANDOM_RATIOS))
    for w in drawn:
        [prompt], [responses] = w.prompt_lens, w.response_lens
        assert 256 <= prompt <= 65536
        assert 1 <= len(responses) <= 64
        assert 8 <= min(responses) <= max(responses) <= 4096
        assert w.flops("fwd") <= 2e13  # some ms
        assert prompt + sum(responses) <= 2**17  # some GB of tensors
    assert max(w.prompt_lens[0] for w in drawn) > 32768
    assert any(len(set(w.response_lens[0])) > 1 for w in drawn)


@pytest.mark.parametrize(
    ("text", "prompts", "responses"),
    [
        ("8192:32x2048", (8192,), ((2048,) * 32,)),
        ("700:130,911;40:", (700, 40), ((130, 911), ())),
        (" 5 : 2 x 3 , 4", (5,), ((3, 3, 4),)),
        ("0:7", (0,), ((7,),)),
    ],
)
def test_workloads_by_lengths(text, prompts, responses):
    workload = parse(text)
    assert (workload.prompt_lens, workload.response_lens) == (prompts, responses)


@pytest.mark.parametrize(
    "text", ["n32", "5", "a:1", "5:1,,2", "5:x3", "5:2x", ";", "5:-1", "5:1.5", "5:1 2", f"5:{'1' * 60}z"]
)
def test_bad_workloads(text):
    with pytest.raises(ValueError, match=re.escape(f"workload {text!r} is neither a name such as")):
        parse(text)


def test_workloads_of_a_rollouts_file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(json.dumps(group) for group in ROLLOUTS))
    (whole,) = of_rollouts(path)
    assert (whole.name, whole.prompt_lens, whole.response_lens) == (
        "rollouts.jsonl (bytes)",
        (5, 9),
        ((3, 2), (0, 2, 1)),
    )
    batches = of_rollouts(path, budget=13)
    assert [b.name for b in batches] == ["rollouts.jsonl (bytes) 1/2", "rollouts.jsonl (bytes) 2/2"]
    assert sorted(zip([b.prompt_lens for b in batches], [b.response_lens for b in batches], strict=True)) == [
        ((5,), ((3, 2),)), ((9,), ((0, 2, 1),)),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="budget"):
        of_rollouts(path, budget=5)


FEATURES = [{}, {"window": 1}, {"window": 6}, {"window": 100}, {"chunk": 8}]
GROUPS = Workload("w", (20, 7, 0), ((9, 0, 30), (5, 6), (3,)), heads=2, kv_heads=1, head_dim=8)
TREE = replace(GROUPS, parent=(-1, 0, 1, 1, -1, 4, 5, -1, 7))


@pytest.mark.parametrize("features", [*FEATURES, "tree"], ids=str)
def test_what_peers_are_given_is_the_visibility_rule(features):
    """Sequences behind copied keys and the count of pairs, against the rule pair by pair."""
    workload = TREE if features == "tree" else replace(GROUPS, **features)
    made = Inputs(workload, "cpu")
    position, visible_end = made.layout.position_ids.numpy(), made.layout.visible_end.numpy()
    lowest = workload.reach.lowest(position) if workload.reach else position * 0
    rows = np.arange(len(position))
    q, k = rows[:, None], rows[None]
    visible = (k <= q) & (q < visible_end[k]) & (position[k] >= lowest[q])
    assert visible.sum() == workload.visible_pairs()

    copied = np.zeros_like(visible, int)
    for queries, keys in made.copied():
        for i, row in enumerate(queries):
            seen = keys[: len(keys) - len(queries) + i + 1]
            copied[row, seen[-(workload.window or len(seen)) :]] += 1
    assert (copied == visible).all()

"""Whole sequences packed as trees against the same sequences one by one."""

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkv
from dualkv import Layout, pack_sequences
from dualkv.layout import Segments
from dualkv.prefixes import prefix_tree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def prefixes(sequences):
    return {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}


# ---------------------------------------------------------------- the trie
@settings(max_examples=500, deadline=None)
@given(SEQUENCES, st.integers(1, 4))
def test_every_sequence_is_a_path(sequences, min_shared):
    tree = prefix_tree([np.array(s) for s in sequences], min_shared)
    Segments(tree.offsets, tree.parent)  # depth-first, or it raises
    assert (tree.length > 0).all()
    path, counts = tree.paths()
    passes = np.bincount(path, minlength=len(tree.parent))
    ends = np.cumsum(counts)
    for i, s in enumerate(sequences):
        segments = path[ends[i] - counts[i] : ends[i]]
        assert segments[-1] == tree.last[i]
        assert list(tree.parent[segments]) == [-1, *segments[:-1]]
        parts = [sequences[tree.source[a]][tree.begin[a] : tree.begin[a] + tree.length[a]] for a in segments]
        assert list(itertools.chain(*parts)) == s
    assert (tree.length[passes > 1] >= min_shared).all()
    if min_shared == 1:
        assert tree.length.sum() == len(prefixes(sequences)), "every prefix once"
    # Trees and branches in the order of their first sequences.
    for up in {-1, *tree.parent.tolist()}:
        sources = tree.source[tree.parent == up]
        assert (np.diff(sources) > 0).all()


def test_what_is_shared_by_hand():
    tree = prefix_tree([np.array(s) for s in ([7, 1, 2, 3], [9], [7, 1, 5], [7, 1, 2], [9])])
    assert tree.parent.tolist() == [-1, 0, 1, 0, -1]
    assert tree.length.tolist() == [2, 1, 1, 1, 1]
    assert tree.last.tolist() == [2, 4, 3, 1, 4]
    held = prefix_tree([np.array(s) for s in ([7, 1, 2, 3], [9], [7, 1, 5], [7, 1, 2], [9])], 2)
    assert held.parent.tolist() == [-1, 0, 0, 0, -1, -1]  # 2 alone and 9 are too short to share
    assert held.length.tolist() == [2, 2, 1, 1, 1, 1]


def test_a_million_tokens_take_less_than_a_second():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 150_000, 8192)
    for sequences in (
        [np.concatenate([prompt, rng.integers(0, 150_000, 250)]) for _ in range(120)],
        [rng.integers(0, 2, 100) for _ in range(10_000)],  # 20,000 segments
        [np.zeros(n, np.int64) for n in range(1, 1414)],  # as deep as a million tokens can be
    ):
        assert sum(map(len, sequences)) > 990_000
        best = min(timed(lambda s=sequences: prefix_tree(s).paths()) for _ in range(3))
        assert best < 1.0


def timed(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# ---------------------------------------------------------------- packing
@settings(max_examples=200, deadline=None)
@given(SEQUENCES, st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_way_back(sequences, min_shared, random):
    masks = [[False, *(random.random() < 0.6 for _ in s[1:])] for s in sequences]
    if not any(map(any, masks)):
        return
    batch = pack_sequences(sequences, masks, min_shared=min_shared)
    assert batch.layout == Layout.from_token_sequences(sequences, min_shared)
    assert batch.layout.nominal_tokens >= max(map(len, sequences))
    assert [x.tolist() for x in batch.unpack_sequences(batch.input_ids)] == sequences
    assert [x.tolist() for x in batch.unpack_sequences(batch.position_ids)] == [list(range(len(s))) for s in sequences]
    want = [[t for t, m in zip(s, mask, strict=True) if m] for s, mask in zip(sequences, masks, strict=True)]
    assert batch.trained_lens == list(map(len, want))
    assert [x.tolist() for x in batch.unpack(batch.targets)] == want
    assert [x.tolist() for x in batch.unpack(batch.targets, "nested").unbind()] == want
    table = batch.unpack(batch.targets, "padded", padding_value=-1)
    assert table.tolist() == [row + [-1] * (table.shape[1] - len(row)) for row in want]
    # The row before a trained token on its own path predicts it.
    before = [
        [p for p, m in zip([None, *s[:-1]], mask, strict=True) if m] for s, mask in zip(sequences, masks, strict=True)
    ]
    assert [x.tolist() for x in batch.unpack(batch.input_ids[0][batch.predict_rows])] == before
    counts = torch.unique(batch.predict_rows, return_counts=True)[1]
    assert counts.tolist() == batch._tokens_of_row.tolist()


def test_attention_and_gradients_are_those_of_the_sequences_alone():
    """A shared token takes part in every sequence that passes it: gradients of all of them add up."""
    torch.manual_seed(0)
    sequences = [[5, 6, 7, 1, 2, 3], [5, 6, 7, 1, 2, 4, 4], [5, 6, 8], [5, 6, 7], [9, 9], [5, 6, 7, 1, 2, 3]]
    masks = [[i >= 2 for i in range(len(s))] for s in sequences[:-2]] + [[False, True], [False] * 5 + [True]]
    batch = pack_sequences(sequences, masks)
    assert batch.layout.depth == 4
    embedding, head = (torch.randn(10, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.randn(sum(map(sum, masks)), dtype=torch.float64)  # as advantages: another one for every rollout

    def hidden(ids, layout):
        x = embedding[ids].view(-1, 4, 8)
        k, v = x[:, :2] * 0.7, x[:, 2:] + 0.1
        return dualkv.attention(x, k, v, layout).flatten(1)

    logp, entropy = dualkv.response_logprobs(hidden(batch.input_ids[0], batch.layout), head, batch)
    rows = [torch.cat(batch.unpack(x)) for x in (logp, entropy)]
    got = torch.autograd.grad((weights * (rows[0] + 0.3 * rows[1])).sum(), (embedding, head))

    want_logp, want_entropy = [], []
    for s, mask in zip(sequences, masks, strict=True):
        ids = torch.tensor(s)
        z = torch.log_softmax(hidden(ids, Layout.from_lengths([len(s)], [[]])) @ head.T, -1)[:-1][mask[1:]]
        want_logp.append(z.gather(1, ids[1:][mask[1:]][:, None])[:, 0])
        want_entropy.append(-(z.exp() * z).sum(1))
    want_rows = [torch.cat(want_logp), torch.cat(want_entropy)]
    want = torch.autograd.grad((weights * (want_rows[0] + 0.3 * want_rows[1])).sum(), (embedding, head))
    for a, b in zip((*rows, *got), (*want_rows, *want), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([],), ValueError, "sequences is empty, expected at least one entry"),
        (([[1], []],), ValueError, r"sequences\[1\] is empty, expected at least one token"),
        (([[1, -2]],), ValueError, r"sequences\[0\] has token -2, expected 0 to 4294967295"),
        (([[1, 2**32]],), ValueError, r"sequences\[0\] has token 4294967296"),
        (([[0.5]],), TypeError, r"sequences\[0\] must hold integers"),
        (([[1, 2]], [[0, 1], [1]]), ValueError, "loss_masks has 2 entries for 1 sequences"),
        (([[1, 2]], [[0]]), ValueError, r"loss_masks\[0\] has shape \(1,\), sequences\[0\] 2 tokens"),
        (([[1, 2]], [[1, 1]]), ValueError, r"loss_masks\[0\] counts the first token"),
        (([[1, 2]], [[0, 0]]), ValueError, "loss_masks counts no token of any sequence"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        pack_sequences(*arguments)


def test_min_shared_is_checked():
    with pytest.raises(ValueError, match="min_shared is 0, expected 1 token or more"):
        pack_sequences([[1, 2]], min_shared=0)

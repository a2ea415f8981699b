"""Whole sequences packed as trees against the same sequences one by one."""

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkv
from dualkv import Layout, pack, pack_sequences, plan_sequences
from dualkv.data.rows import IGNORED
from dualkv.data.trees import PackedSequences, tree_rows, tree_tokens
from dualkv.prefixes import shared_prefixes
from dualkv.segments import Segments
from tests.strategies import examples

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def prefix_tree(sequences, min_shared=1):
    return shared_prefixes(sequences).at_least(min_shared).tree()


def prefixes(sequences):
    return {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}


# ---------------------------------------------------------------- the trie
@examples(150)
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


@examples(100)
@given(SEQUENCES, st.integers(1, 4), st.data())
def test_some_of_the_sequences_are_a_tree_too(sequences, min_shared, data):
    shared = shared_prefixes([np.array(s) for s in sequences]).at_least(min_shared)
    chosen = np.array(data.draw(st.permutations(range(len(sequences))))[: data.draw(st.integers(1, len(sequences)))])
    some = shared.select(chosen)
    tree = some.tree()
    assert some.tokens == tree.length.sum() <= shared.tokens
    rows = np.split(tree_rows(tree), np.cumsum(some.lengths)[:-1])
    tokens = tree_tokens(tree, [np.array(sequences[i]) for i in chosen])
    assert [tokens[r].tolist() for r in rows] == [sequences[i] for i in chosen]
    if min_shared == 1:
        assert some.tokens == len(prefixes([sequences[i] for i in chosen]))


@examples(100)
@given(SEQUENCES, st.integers(1, 4), st.integers(0, 20), st.integers(1, 8))
def test_micro_batches_hold_every_sequence_once(sequences, min_shared, more, min_count):
    budget, min_count = max(map(len, sequences)) + more, min(min_count, len(sequences))
    plan = plan_sequences(sequences, budget, min_shared=min_shared, min_count=min_count)
    assert sorted(itertools.chain(*plan)) == list(range(len(sequences)))
    assert len(plan) >= min_count
    for run in plan:
        assert (
            pack_sequences([sequences[i] for i in run] + [[9, 9]], min_shared=min_shared).layout.num_tokens
            <= budget + 2
        )
    if min_shared == min_count == 1:
        assert (len(plan) == 1) == (len(prefixes(sequences)) <= budget)


@examples(100)
@given(SEQUENCES, st.integers(0, 20))
def test_micro_batches_repeat_as_little_as_possible(sequences, more):
    """The micro-batches are as good as the best of all ways to cut the sequences in the order of the tree."""
    shared = shared_prefixes([np.array(s) for s in sequences])
    budget = max(map(len, sequences)) + more
    found = []
    for cuts in itertools.product([False, True], repeat=len(sequences) - 1):
        runs = np.split(shared.order, 1 + np.flatnonzero(cuts))
        tokens = [len(prefixes([sequences[i] for i in run])) for run in runs]
        if max(tokens) <= budget:
            found.append((sum(tokens), len(runs), max(tokens)))
    tokens = [shared.select(run).tokens for run in shared.runs(budget)]
    assert (sum(tokens), len(tokens), max(tokens)) == min(found)


@st.composite
def cut_sequences(draw):
    """Sequences, many of them alike, the cuts of each, and some of them in any order."""
    sequences = draw(SEQUENCES)
    cuts = [np.array(sorted(draw(st.sets(st.integers(1, len(s) - 1)))) if len(s) > 1 else [], int) for s in sequences]
    chosen = draw(st.permutations(range(len(sequences))))[: draw(st.integers(1, len(sequences)))]
    return sequences, cuts, np.array(chosen)


def parts_of(sequence, cuts):
    ends = [*cuts.tolist(), len(sequence)]
    return tuple(tuple(sequence[a:b]) for a, b in itertools.pairwise([0, *ends]))


@examples(300)
@given(cut_sequences(), st.integers(1, 4))
def test_cuts_depend_on_no_other_sequence(drawn, min_shared):
    """Each path has the segments of its own cuts, in every selection; equal beginnings of paths are stored once."""
    sequences, cuts, chosen = drawn
    shared = shared_prefixes([np.array(s) for s in sequences]).cut_at(cuts)
    some = shared.select(chosen).at_least(min_shared)
    tree = some.tree()
    Segments(tree.offsets, tree.parent)
    assert some.tokens == tree.length.sum()
    tokens = tree_tokens(tree, [np.array(sequences[i]) for i in chosen])
    path, counts = tree.paths()
    for i, segments in zip(chosen, np.split(path, np.cumsum(counts)[:-1]), strict=True):
        own = tuple(tuple(tokens[tree.offsets[s] : tree.offsets[s + 1]].tolist()) for s in segments)
        assert own == parts_of(sequences[i], cuts[i])
    if min_shared == 1:
        of_all = [parts_of(sequences[i], cuts[i]) for i in chosen]
        stored = {parts[: n + 1]: len(parts[n]) for parts in of_all for n in range(len(parts))}
        assert tree.length.sum() == sum(stored.values())


@examples(200)
@given(SEQUENCES, st.data(), st.integers(1, 4), st.sampled_from(["gather", "roll"]))
def test_fixed_cuts_lie_where_trained_tokens_begin(sequences, data, min_shared, labels):
    masks = [[False, *data.draw(st.lists(st.booleans(), min_size=len(s) - 1, max_size=len(s) - 1))] for s in sequences]
    chosen = data.draw(st.permutations(range(len(sequences))))[: data.draw(st.integers(1, len(sequences)))]
    batch = pack_sequences(
        [sequences[i] for i in chosen], [masks[i] for i in chosen], min_shared=min_shared, labels=labels,
        fixed_cuts=True,
    )  # fmt: skip
    assert [x.tolist() for x in batch.unpack_sequences(batch.input_ids)] == [sequences[i] for i in chosen]
    segment = np.repeat(np.arange(batch.layout.num_segments), np.diff(batch.layout.offsets.numpy()))
    for i, on_path in zip(chosen, batch.unpack_sequences(torch.from_numpy(segment)), strict=True):
        begins = [n - (labels == "roll") for n in range(1, len(masks[i])) if masks[i][n] and not masks[i][n - 1]]
        assert (1 + np.flatnonzero(np.diff(on_path.numpy()))).tolist() == [n for n in begins if n > 0]
    if labels == "roll":
        for i, asked in zip(chosen, batch.unpack_sequences(batch.labels), strict=True):
            wanted = [t for t, m in zip(sequences[i], masks[i], strict=True) if m]
            assert asked[:-1][torch.tensor(masks[i][1:], dtype=torch.bool)].tolist() == wanted


@pytest.mark.parametrize("labels", ["gather", "roll"])
@pytest.mark.parametrize("counts", [[3, 2], [1], [1, 4]])
def test_prompts_with_responses_have_fixed_cuts(labels, counts):
    """`pack` cuts each path where its response begins, also that of a prompt with one response."""
    prompts = [[g, 1, 2, 3] for g in range(len(counts))]
    responses = [[[5, 6, r][: 1 + r] for r in range(n)] for n in counts]
    packed = pack(prompts, responses, labels=labels)
    masks = [[0] * 4 + [1] * len(r) for group in responses for r in group]
    sequences = [p + r for p, group in zip(prompts, responses, strict=True) for r in group]
    assert pack_sequences(sequences, masks, labels=labels, fixed_cuts=True).layout == packed.layout
    assert packed.layout.num_segments == len(counts) + sum(counts)


@pytest.mark.parametrize("labels", ["gather", "roll"])
def test_fixed_cuts_share_turns_and_leave_images_whole(labels):
    mask = [0, 0, 0, 1, 1, 0, 0, 1, 1]  # prompt, answer, tool, answer
    sequences = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 8], [1, 2, 3, 4, 4, 6, 7, 1, 1]]
    batch = pack_sequences(sequences, [mask] * 3, labels=labels, fixed_cuts=True)
    ends = [3, 4, 2] if labels == "gather" else [2, 4, 3]
    assert np.diff(batch.layout.offsets.numpy()).tolist() == [*ends, ends[-1], *ends[1:]]
    assert batch.layout.depth == 3
    # The second turn follows an image, and with one label a row its last placeholder would have a copy.
    kinds = [0] * 5 + [1, 1, 0, 0]
    image = {"pixel_values": torch.ones(2, 4), "image_grid_thw": torch.tensor([[1, 1, 2]])}
    media = [image | {"mm_token_type_ids": torch.tensor(kinds)} for _ in sequences]
    batch = pack_sequences(sequences, [mask] * 3, labels=labels, fixed_cuts=True, media=media)
    if labels == "roll":
        ends = [2, 3, 4]
    assert np.diff(batch.layout.offsets.numpy()).tolist() == [*ends, ends[-1], *ends[1:]]
    assert len(batch.media["pixel_values"]) == (4 if labels == "gather" else 6)


def test_micro_batches_keep_what_is_shared_together():
    sequences = [[*[i % 4] * 10, 7, i, i] for i in range(16)]  # 10 + 1 + 4 * 2 tokens a prompt
    plan = plan_sequences(sequences, 19)
    assert sorted(map(sorted, plan)) == [[p, p + 4, p + 8, p + 12] for p in range(4)]
    assert [len(run) for run in plan_sequences(sequences, 75)] == [8, 8]  # 76 tokens in all
    assert [len(run) for run in plan_sequences(sequences, 1000, min_count=3)] == [4, 4, 8]
    assert [len(run) for run in plan_sequences(sequences, 1000, min_count=5)] == [2, 2, 4, 4, 4]
    with pytest.raises(ValueError, match="budget is 12 tokens, rollout 0 needs 13 for itself alone"):
        plan_sequences(sequences, 12)
    with pytest.raises(ValueError, match="17 micro-batches need 17 rollouts at least, got 16"):
        plan_sequences(sequences, 99, min_count=17)


def test_parts_too_short_to_share_in_a_micro_batch_alone_count():
    """Shared parts [:5] and [5:10] are long enough among all; without the first sequence [:7] is, and [7:10] is too
    short."""
    sequences = [[0] * 5 + [1] * 9, [0] * 7 + [2], [0] * 10 + [3], [0] * 10 + [4]]
    alone = pack_sequences(sequences[1:], min_shared=5).layout.num_tokens
    among_all = shared_prefixes([np.array(s) for s in sequences]).at_least(5).select(np.array([1, 2, 3])).tokens
    assert (among_all, alone) == (15, 16)
    for run in plan_sequences(sequences, 15, min_shared=5):
        assert pack_sequences([sequences[i] for i in run], min_shared=5).layout.num_tokens <= 15


def test_a_million_tokens_take_less_than_a_second():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 150_000, 8192)
    for sequences in (
        [np.concatenate([prompt, rng.integers(0, 150_000, 250)]) for _ in range(120)],
        [rng.integers(0, 2, 100) for _ in range(10_000)],  # 20,000 segments
        [np.zeros(n, np.int64) for n in range(1, 1414)],  # as deep as a million tokens can be
    ):
        assert sum(map(len, sequences)) > 990_000
        assert min(timed(lambda s=sequences: Layout.from_token_sequences(s)) for _ in range(3)) < 1.0
        assert min(timed(lambda s=sequences: pack_sequences(s).predict_rows) for _ in range(3)) < 1.5


def timed(run):
    start = time.process_time()  # of this process: the machine may be busy
    run()
    return time.process_time() - start


# ---------------------------------------------------------------- packing
@examples(100)
@given(SEQUENCES, st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_way_back(sequences, min_shared, random):
    masks = [[False, *(random.random() < 0.6 for _ in s[1:])] for s in sequences]
    batch = pack_sequences(sequences, masks, min_shared=min_shared)
    assert batch.layout == Layout.from_token_sequences(sequences, min_shared)
    assert batch.layout.nominal_tokens == sum(map(len, sequences))
    assert [x.tolist() for x in batch.unpack_sequences(batch.input_ids)] == sequences
    assert [x.tolist() for x in batch.unpack_sequences(batch.position_ids)] == [list(range(len(s))) for s in sequences]
    want = [[t for t, m in zip(s, mask, strict=True) if m] for s, mask in zip(sequences, masks, strict=True)]
    assert batch.trained_lens == list(map(len, want))
    assert [x.tolist() for x in batch.unpack(batch.targets)] == want
    assert [x.tolist() for x in batch.unpack(batch.targets, "nested").unbind()] == want
    table = batch.unpack(batch.targets, "padded", padding_value=-1)
    assert table.tolist() == [row + [-1] * (table.shape[1] - len(row)) for row in want]
    kept = [[t if m else -1 for t, m in zip(s, mask, strict=True)] for s, mask in zip(sequences, masks, strict=True)]
    assert [x.tolist() for x in batch.unpack(batch.targets, padding_value=-1, whole=True)] == kept
    table = batch.unpack(batch.targets, "padded", -1, whole=True)
    assert table.tolist() == [row + [-1] * (table.shape[1] - len(row)) for row in kept]
    # The row before a trained token on its own path predicts it.
    before = [
        [p for p, m in zip([None, *s[:-1]], mask, strict=True) if m] for s, mask in zip(sequences, masks, strict=True)
    ]
    assert [x.tolist() for x in batch.unpack(batch.input_ids[0][batch.predict_rows])] == before
    counts = torch.unique(batch.predict_rows, return_counts=True)[1]
    assert counts.tolist() == batch._tokens_of_row.tolist()


@examples(100)
@given(SEQUENCES, st.integers(1, 3), st.randoms(use_true_random=False))
def test_one_label_a_row(sequences, min_shared, random):
    """A head with one label a row computes what each sequence alone asks for."""
    masks = [[False, *(random.random() < 0.6 for _ in s[1:])] for s in sequences]
    batch = pack_sequences(sequences, masks, min_shared=min_shared, labels="roll")
    assert [x.tolist() for x in batch.unpack_sequences(batch.input_ids)] == sequences
    assert [x.tolist() for x in batch.unpack_sequences(batch.position_ids)] == [list(range(len(s))) for s in sequences]
    asked = batch.unpack_sequences(batch.labels)
    for labels, s, mask in zip(asked, sequences, masks, strict=True):
        for label, token, counts in zip(labels.tolist(), s[1:], mask[1:], strict=False):
            assert label == token or (label == IGNORED and not counts)
    want = [[t for t, m in zip(s, mask, strict=True) if m] for s, mask in zip(sequences, masks, strict=True)]
    assert [x.tolist() for x in batch.unpack(batch.labels[0][batch.predict_rows])] == want
    gathered = pack_sequences(sequences, masks, min_shared=min_shared)
    more = batch.layout.num_tokens - gathered.layout.num_tokens
    assert 0 <= more < len(sequences)
    with pytest.raises(ValueError, match=r"labels needs a batch packed with labels='roll', this one has labels='gath"):
        gathered.labels  # noqa: B018
    assert batch.to("meta").label_style == "roll"


@pytest.mark.parametrize("seed", range(5))
def test_one_label_a_row_takes_the_rows_of_pack(seed):
    """Sharing prompts alone takes one row more for each response, one less for each prompt."""
    rng = np.random.default_rng(seed)
    prompts = [[p, *rng.integers(0, 9, n).tolist()] for p, n in enumerate(rng.integers(0, 6, 3))]
    responses = [[[r, *rng.integers(0, 9, n).tolist()] for r, n in enumerate(rng.integers(0, 4, 3))] for _ in prompts]
    packed = pack(prompts, responses, labels="roll")
    batch = pack_sequences([p + r for p, group in zip(prompts, responses, strict=True) for r in group], labels="roll")
    assert batch.layout == packed.layout or any(len(p) == 1 for p in prompts)
    assert torch.equal(batch.input_ids, packed.input_ids)


@pytest.mark.parametrize("labels", ["gather", "roll"])
def test_attention_and_gradients_are_those_of_the_sequences_alone(labels):
    """A shared token takes part in every sequence that passes it: gradients of all of them add up."""
    torch.manual_seed(0)
    sequences = [[5, 6, 7, 1, 2, 3], [5, 6, 7, 1, 2, 4, 4], [5, 6, 8], [5, 6, 7], [9, 9], [5, 6, 7, 1, 2, 3]]
    masks = [[i >= 2 for i in range(len(s))] for s in sequences[:-2]] + [[False, True], [False] * 5 + [True]]
    batch = pack_sequences(sequences, masks, labels=labels)
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


def dense_logps(embedding, head, ids):
    """[length - 1] log-probs of all tokens but the first of one sequence, by a small attention model."""
    x = embedding[ids].view(len(ids), 4, 8)
    k, v = (y.repeat_interleave(2, 1) for y in (x[:, :2] * 0.7, x[:, 2:] + 0.1))
    scores = torch.einsum("qhd,khd->hqk", x, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1), float("-inf"))
    hidden = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return torch.log_softmax(hidden @ head.T, -1)[:-1].gather(1, ids[1:, None])[:, 0]


def packed_logps(embedding, head, batch):
    x = embedding[batch.input_ids[0]].view(-1, 4, 8)
    hidden = dualkv.attention(x, x[:, :2] * 0.7, x[:, 2:] + 0.1, batch.layout).flatten(1)
    return dualkv.response_logprobs(hidden, head, batch)[0]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
@pytest.mark.parametrize("prompt_only", [False, True])
def test_policy_losses_are_those_of_the_rollouts_alone(algorithm, prompt_only):
    """Masks, advantages, old log-probs and weights are each rollout's own, on tokens that several of them share too."""
    torch.manual_seed(1)
    prompt, turns = [3, 1, 4], [[[5, 6, 6], [5, 6, 2]], [[8, 8], [8, 0]], [[7], [2, 2], [7]]]
    sequences = [[*prompt, *a, 9, *b, 9, *c] for a in turns[0] for b in turns[1] for c in turns[2]]
    masks = [[False] * 3 + [t != 9 for t in s[3:]] for s in sequences]  # 9 is the environment's answer
    masks[1][4] = masks[7][5] = False  # a shared token that one rollout trains on and its neighbours do not
    objective = dualkv.grpo.ALGORITHMS[algorithm]
    advantages = dualkv.grpo.group_advantages(torch.randn(12, dtype=torch.float64), [12])
    lens = [sum(m) for m in masks]
    weights = dualkv.grpo.token_weights(lens, objective.mean)
    noise, away = (0.3 * torch.randn(sum(lens), dtype=torch.float64) for _ in range(2))
    embedding, head = (torch.randn(10, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def loss_and_gradients(logps):
        rows = torch.cat(logps)
        loss, metrics = dualkv.grpo.policy_loss(
            rows, old, advantages.repeat_interleave(torch.tensor(lens)), weights, objective.clip_low,
            objective.clip_high, old + away, 0.1,
        )  # fmt: skip
        return loss, *torch.autograd.grad(loss, (embedding, head)), *metrics.values()

    alone = [
        dense_logps(embedding, head, torch.tensor(s))[torch.tensor(m[1:])]
        for s, m in zip(sequences, masks, strict=True)
    ]
    old = (torch.cat(alone) + noise).detach()  # other ratios in every rollout, for the same token too
    want = loss_and_gradients(alone)
    assert want[3] > 0, "nothing was clipped"
    if prompt_only:
        batch = PackedSequences.from_batch(pack([prompt] * 12, [s[3:] for s in sequences]), [m[3:] for m in masks])
    else:
        batch = pack_sequences(sequences, masks)
        assert batch.layout.depth == 4
    got = loss_and_gradients(batch.unpack(packed_logps(embedding, head, batch)))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("labels", ["gather", "roll"])
def test_a_packed_batch_with_masks_of_its_responses(labels):
    prompts, responses = [[1, 2], [3], [1, 2], [3]], [[4, 5, 6], [7], [], [8, 8]]
    masks = [[1, 0, 1], [1], [], [0, 1]]
    packed = pack(prompts, responses, labels=labels)
    batch = PackedSequences.from_batch(packed, masks)
    assert [x.tolist() for x in batch.unpack(batch.targets)] == [[4, 6], [7], [], [8]]
    assert [x.tolist() for x in batch.unpack(batch.input_ids[0][batch.predict_rows])] == [[2, 5], [3], [], [8]]
    everything = PackedSequences.from_batch(packed)
    assert [x.tolist() for x in everything.unpack(everything.targets)] == responses
    assert set(everything.predict_rows.tolist()) == set(packed.predict_rows.tolist())
    for wrong, says in (([[1], [1], [], [0, 1]], r"loss_masks\[0\] has shape \(1,\), responses\[0\] 3 tokens"),
                        ([[1, 0, 1], [1], [], [0.3, 1]], r"loss_masks\[3\]\[0\] is 0\.3, expected 0")):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            PackedSequences.from_batch(packed, wrong)


@pytest.mark.parametrize("labels", ["gather", "roll"])
@pytest.mark.parametrize("masked", [False, True])
def test_tokens_of_prompts_count_once_a_rollout(labels, masked):
    """Supervised fine-tuning on prompts and answers has the log-probs and gradients of the separate sequences."""
    torch.manual_seed(2)
    prompts, answers = [[1, 2, 7], [3], [1, 2, 7], [3], [1, 2, 7]], [[4, 5, 6], [7], [], [8, 8], [4, 5]]
    sequences = [p + a for p, a in zip(prompts, answers, strict=True)]
    masks = [[i > 0 and (not masked or (i + n) % 3 > 0) for i in range(len(s))] for n, s in enumerate(sequences)]
    weights = [torch.randn(sum(m), dtype=torch.float64) for m in masks]
    embedding, head = (torch.randn(10, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))
    batch = PackedSequences.from_batch(pack(prompts, answers, labels=labels), masks if masked else None, whole=True)
    rows = batch.unpack(packed_logps(embedding, head, batch))
    alone = [
        dense_logps(embedding, head, torch.tensor(s))[torch.tensor(m[1:])]
        for s, m in zip(sequences, masks, strict=True)
    ]
    got, want = (
        (
            loss := sum((w * r).sum() for w, r in zip(weights, of, strict=True)),
            *torch.autograd.grad(loss, (embedding, head)),
        )
        for of in (rows, alone)
    )
    for a, b in zip((*rows, *got), (*alone, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    first = [[1, *m[1:]] for m in masks]
    with pytest.raises(ValueError, match=r"loss_masks\[0\] counts the first token of its sequence"):
        PackedSequences.from_batch(pack(prompts, answers, labels=labels), first, whole=True)


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
        (([[1, 2]], [[0, 0.5]]), ValueError, r"loss_masks\[0\]\[1\] is 0\.5, expected 0 or 1"),
        (([[1, 2], [1, 3]], [[0, 1], torch.tensor([0, 0.9])]), ValueError, r"loss_masks\[1\]\[1\] is 0\.89"),
        (([[1, 2]], [np.array([0, 2])]), ValueError, r"loss_masks\[0\]\[1\] is 2, expected 0 or 1"),
        (([[1, 2]], [[-100, 2]]), ValueError, r"loss_masks\[0\]\[0\] is -100, expected 0 or 1"),
        (([[1, 2]], [[-float("inf"), 0.0]]), ValueError, r"loss_masks\[0\]\[0\] is -inf, expected 0 or 1"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        pack_sequences(*arguments)


@pytest.mark.parametrize(
    "form",
    [list, np.array, torch.tensor, lambda m: torch.tensor(m, dtype=torch.bool), lambda m: [bool(x) for x in m],
     lambda m: torch.tensor(m, dtype=torch.float64), lambda m: torch.tensor(m, dtype=torch.uint8)],
)  # fmt: skip
def test_masks_of_any_dtype_count_the_same(form):
    batch = pack_sequences([[1, 2, 3], [1, 4]], [form([0, 0, 1]), form([0, 1])])
    assert [x.tolist() for x in batch.unpack(batch.targets)] == [[3], [4]]


def test_fixed_cuts_are_checked():
    with pytest.raises(ValueError, match="fixed_cuts is True and loss_masks is None"):
        pack_sequences([[1, 2]], fixed_cuts=True)
    with pytest.raises(TypeError, match="fixed_cuts"):
        pack_sequences([[1, 2]], [[0, 1]], fixed_cuts=1)


def test_min_shared_is_checked():
    with pytest.raises(ValueError, match="min_shared is 0, expected 1 or more"):
        pack_sequences([[1, 2]], min_shared=0)

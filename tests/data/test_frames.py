"""Padded batches and padding-free rows against the same sequences as lists."""

import itertools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkv
from dualkv import Layout, grpo, pack, pack_sequences, plan_sequences
from dualkv.data import trees
from dualkv.data.trees import PackedSequences
from dualkv.prefixes import shared_prefixes
from tests.strategies import examples

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6)


def padded(sequences, masks, side, random, pad=-7):
    """ids, attention_mask and loss mask [B, L] with padding on a side, on both, or anywhere."""
    width = max(map(len, sequences)) + random.randrange(3)
    ids, own, counts = torch.full((len(sequences), width), pad), *torch.zeros(2, len(sequences), width).long()
    for i, (s, mask) in enumerate(zip(sequences, masks, strict=True)):
        room = width - len(s)
        shift = {"left": room, "right": 0, "both": random.randrange(room + 1)}.get(side)
        at = sorted(random.sample(range(width), len(s))) if shift is None else range(shift, shift + len(s))
        ids[i, list(at)], own[i, list(at)], counts[i, list(at)] = torch.tensor(s), 1, torch.tensor(mask)
    return ids, own, counts


def same(batch, other):
    assert batch.layout == other.layout
    for name in ("input_ids", "predict_rows", "targets"):
        assert torch.equal(getattr(batch, name), getattr(other, name)), name


@examples(120)
@given(SEQUENCES, st.sampled_from(["left", "right", "both", "inner"]), st.randoms(use_true_random=False))
def test_a_padded_batch_packs_its_sequences(sequences, side, random):
    """Masks may have holes and may count nothing; values come back to the places of their tokens."""
    masks = [[0, *(int(random.random() < 0.6) for _ in s[1:])] for s in sequences]
    ids, own, counts = padded(sequences, masks, side, random)
    batch = pack_sequences(ids, counts, attention_mask=own)
    same(batch, pack_sequences(sequences, masks))
    assert torch.equal(batch.unpack(batch.targets, like=ids, padding_value=-7), ids.where(counts == 1, -7))
    # [B, L - 1]: column t is about token t + 1.
    shifted = pack_sequences(ids, counts[:, 1:].bool(), attention_mask=own.bool())
    same(shifted, batch)
    assert torch.equal(shifted.unpack(batch.targets, like=ids[:, 1:]), (ids * counts)[:, 1:])
    two = torch.stack([batch.targets, -batch.targets], 1)
    assert torch.equal(batch.unpack(two, like=ids)[..., 1], -ids * counts)
    assert torch.equal(batch.to("cpu").unpack(batch.targets, like=ids), ids * counts)
    # As many columns as hold the counted tokens, such as those of responses.
    columns = np.flatnonzero(counts.any(0))
    width = ids.shape[1] - int(columns[0]) if len(columns) else 1
    few = pack_sequences(ids, counts[:, -width:], attention_mask=own)
    same(few, batch)
    assert torch.equal(few.unpack(batch.targets, like=counts[:, -width:]), (ids * counts)[:, -width:])
    budget = max(map(len, sequences)) + 2
    assert plan_sequences(ids, budget, attention_mask=own) == plan_sequences(sequences, budget)
    everything = pack_sequences(ids, attention_mask=own)
    same(everything, pack_sequences(sequences))


@examples(60)
@given(SEQUENCES, st.randoms(use_true_random=False))
def test_padding_free_rows_pack_their_sequences(sequences, random):
    masks = [[0, *(int(random.random() < 0.6) for _ in s[1:])] for s in sequences]
    ids, counts = (torch.tensor([list(itertools.chain(*x))]) for x in (sequences, masks))
    ends = np.cumsum([0, *map(len, sequences)])
    positions = torch.tensor([[i for s in sequences for i in range(len(s))]])
    other = pack_sequences(sequences, masks)
    for how in ({"cu_seqlens": ends.tolist()}, {"cu_seqlens": torch.tensor(ends).int()}, {"position_ids": positions}):
        batch = pack_sequences(ids, counts, **how)
        same(batch, other)
        assert torch.equal(batch.unpack(batch.targets, like=ids), ids * counts)
        assert torch.equal(batch.unpack(batch.targets, like=ids[:, 1:]), (ids * counts)[:, 1:])
        flat = {name: value.flatten() if name == "position_ids" else value for name, value in how.items()}
        batch = pack_sequences(ids[0], counts[0], **flat)
        same(batch, other)
        assert torch.equal(batch.unpack(batch.targets, like=ids[0]), (ids * counts)[0])
    # Two rows of several sequences each.
    twice = pack_sequences(ids.repeat(2, 1), counts.repeat(2, 1), position_ids=positions.repeat(2, 1))
    same(twice, pack_sequences(sequences * 2, masks * 2))
    assert torch.equal(twice.unpack(twice.targets, like=ids.repeat(2, 1)), (ids * counts).repeat(2, 1))


IDS, OWN = torch.tensor([[9, 5, 6], [5, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2], [0, 1, 0]])


@pytest.mark.parametrize(
    ("ids", "named", "error", "names"),
    [
        (IDS, {}, ValueError, "(2, 3)|attention_mask|cu_seqlens|position_ids"),
        (IDS, {"attention_mask": OWN, "position_ids": POSITIONS}, ValueError, "attention_mask and position_ids"),
        (IDS.float(), {"attention_mask": OWN}, TypeError, "sequences|float32"),
        (IDS[None], {"attention_mask": OWN[None]}, ValueError, "sequences|(1, 2, 3)"),
        (IDS[:0], {"attention_mask": OWN[:0]}, ValueError, "sequences|(0, 3)"),
        (IDS, {"attention_mask": OWN[:, 1:]}, ValueError, "attention_mask|(2, 2)|(2, 3)"),
        (IDS, {"attention_mask": OWN.tolist()}, TypeError, "attention_mask|list"),
        (IDS, {"attention_mask": OWN * 0.5}, ValueError, "attention_mask[0][1]|0.5"),
        (IDS, {"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, ValueError, "attention_mask|sequence 0"),
        (-IDS, {"attention_mask": OWN}, ValueError, "sequences[0]|-6"),
        (IDS, {"cu_seqlens": [0, 3, 6]}, ValueError, "cu_seqlens|(2, 3)"),
        (IDS[:1], {"cu_seqlens": [0, 2]}, ValueError, "cu_seqlens|2|3"),
        (IDS[:1], {"cu_seqlens": [0, 3, 3]}, ValueError, "cu_seqlens|sequence 1"),
        (IDS, {"position_ids": POSITIONS.flip(1)}, ValueError, "position_ids[0, 0]|2|0"),
        (IDS, {"position_ids": POSITIONS + OWN - 1}, ValueError, "position_ids[0, 0]|-1"),
        (IDS, {"attention_mask": OWN, "loss_masks": [[0, 0, 1], [0, 0, 1]]}, TypeError, "loss_masks|list"),
        (IDS, {"attention_mask": OWN, "loss_masks": torch.tensor(1.5)}, ValueError, "loss_masks|shape|()"),
        (IDS, {"attention_mask": OWN, "loss_masks": OWN[:1]}, ValueError, "loss_masks|(1, 3)|(2, 3)"),
        (IDS, {"attention_mask": OWN, "loss_masks": OWN[0]}, ValueError, "loss_masks|(3,)|(2, 3)"),
        (IDS, {"attention_mask": OWN, "loss_masks": torch.ones(2, 4)}, ValueError, "loss_masks|(2, 4)|(2, 3)"),
        (IDS, {"attention_mask": OWN, "loss_masks": OWN * 2}, ValueError, "loss_masks[0][1]|2"),
        (IDS, {"attention_mask": OWN, "loss_masks": torch.tensor([[1, 0, 0], [0, 0, 0]])}, ValueError,
         "sequences[0, 0]|attention_mask"),
        (IDS, {"attention_mask": OWN, "loss_masks": OWN}, ValueError, "loss_masks|sequences[0, 1]|first"),
        (IDS, {"position_ids": POSITIONS, "loss_masks": torch.tensor([[0, 1, 1], [0, 1, 1]])}, ValueError,
         "loss_masks|sequences[1, 2]|first"),
        ([[1, 2]], {"attention_mask": OWN}, ValueError, "attention_mask"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(ids, named, error, names):
    with pytest.raises(error) as caught:
        pack_sequences(ids, named.pop("loss_masks", None), **named)
    for name in names.split("|"):
        assert name in str(caught.value)


def test_tensors_to_unpack_like():
    batch = pack_sequences(IDS, torch.tensor([[0, 0, 1], [0, 1, 1]]), attention_mask=OWN)
    values = torch.ones(2)  # two rows train on token 6
    for like, names in ((IDS[:, 2:], ["like", "1 of 3", "column 1", "row 1"]), (IDS[0], ["like", "(3,)", "(2, 3)"]),
                        (torch.ones(2, 4), ["like", "(2, 4)"]), (torch.ones(2, 3, 1), ["(2, 3, 1)"])):  # fmt: skip
        with pytest.raises(ValueError, match="like") as caught:
            batch.unpack(values, like=like)
        assert all(name in str(caught.value) for name in names), caught.value
    for more in ({"form": "padded"}, {"whole": True}):
        with pytest.raises(ValueError, match="like"):
            batch.unpack(values, like=IDS, **more)
    with pytest.raises(TypeError, match=r"like.*list"):
        batch.unpack(values, like=IDS.tolist())
    with pytest.raises(ValueError, match=r"values.*\[2, \.\.\.\]"):
        batch.unpack(values[1:], like=IDS)
    with pytest.raises(ValueError, match=r"like.*\(2, 3\).*list"):
        pack_sequences([[1, 2]]).unpack(torch.ones(1), like=IDS)


# ---------------------------------------------------------------- batches that train on nothing
@pytest.mark.parametrize("labels", ["gather", "roll"])
@pytest.mark.parametrize("form", ["list", "mask", "one token", "responses"])
def test_a_batch_without_trained_tokens_runs_backward(labels, form):
    """Data-parallel ranks without work run the forward and backward of the others, and every parameter gets zeros."""
    sequences = [[1, 2, 3], [1, 2]]
    batch = {
        "list": lambda: pack_sequences(sequences, [[0] * 3, [0] * 2], labels=labels),
        "mask": lambda: pack_sequences(IDS, torch.zeros(2, 3), attention_mask=OWN, labels=labels),
        "one token": lambda: pack_sequences([[1]], labels=labels),
        "responses": lambda: PackedSequences.from_batch(pack([[1, 2]], [[[3], [4]]], labels=labels), [[0], [0]]),
    }[form]()
    assert batch.trained_lens == [0] * batch.num_rollouts
    assert len(batch.predict_rows) == len(batch.targets) == 0
    embedding, head = (torch.randn(10, 32, requires_grad=True) for _ in range(2))
    x = embedding[batch.input_ids[0]].view(-1, 4, 8)
    hidden = dualkv.attention(x, x[:, :2], x[:, 2:], batch.layout).flatten(1)
    for of in (head, dualkv.Head(module=lambda states: states @ head.T)):
        logp, entropy = dualkv.response_logprobs(hidden, of, batch)
        assert logp.shape == entropy.shape == (0,)
        loss = torch.cat(batch.unpack(logp)).sum() + entropy.sum() + batch.unpack(logp, whole=True)[0].sum()
        loss = loss + batch.unpack(logp, "padded").sum()
        policy, _ = grpo.policy_loss(logp, logp.detach(), logp.detach(), logp.detach(), 0.2, 0.2)
        loss = loss + policy
        if form == "mask":
            placed = batch.unpack(logp, like=IDS[:, 1:])
            assert placed.shape == (2, 2)
            loss = loss + placed.sum()
        assert loss == 0
        for gradient in torch.autograd.grad(loss, (embedding, head), retain_graph=True):
            assert (gradient == 0).all()
    if labels == "roll":
        assert (batch.labels == -100).all()


# ---------------------------------------------------------------- a soft budget
@examples(100)
@given(SEQUENCES, st.integers(1, 8), st.integers(1, 3))
def test_a_soft_budget_gives_long_sequences_a_micro_batch(sequences, budget, min_shared):
    plan = plan_sequences(sequences, budget, min_shared=min_shared, soft=True)
    assert sorted(itertools.chain(*plan)) == list(range(len(sequences)))
    for run in plan:
        tokens = pack_sequences([sequences[i] for i in run], min_shared=min_shared).layout.num_tokens
        longest = max((sequences[i] for i in run), key=len)
        assert tokens <= max(budget, len(longest))
        if tokens > budget:
            assert all(longest[: len(sequences[i])] == sequences[i] for i in run)
    longest = max(map(len, sequences))
    if budget >= longest:
        assert plan == plan_sequences(sequences, budget, min_shared=min_shared)
    else:
        with pytest.raises(ValueError, match=f"budget is {budget}"):
            plan_sequences(sequences, budget, min_shared=min_shared)


@examples(60)
@given(SEQUENCES, st.integers(1, 8))
def test_a_soft_budget_repeats_as_little_as_possible(sequences, budget):
    shared = shared_prefixes([np.array(s) for s in sequences])
    found = []
    for cuts in itertools.product([False, True], repeat=len(sequences) - 1):
        runs = np.split(shared.order, 1 + np.flatnonzero(cuts))
        tokens = [shared.select(run).tokens for run in runs]
        if all(n <= max(budget, shared.lengths[run].max()) for n, run in zip(tokens, runs, strict=True)):
            found.append((sum(tokens), len(runs)))
    tokens = [shared.select(run).tokens for run in shared.runs(budget, soft=True)]
    assert (sum(tokens), len(tokens)) == min(found)


def test_a_soft_budget_keeps_steps_of_a_long_rollout_together():
    steps = [[1] * n for n in (4, 8, 12)] + [[2] * 3, [2] * 4]
    assert sorted(map(sorted, plan_sequences(steps, 5, soft=True))) == [[0, 1, 2], [3, 4]]
    assert len(plan_sequences(steps, 5, soft=True, min_count=4)) == 4
    with pytest.raises(TypeError, match="soft is a int"):
        plan_sequences(steps, 5, soft=1)


# ---------------------------------------------------------------- a word
def test_micro_batches_that_share_nothing_are_said_once(caplog, monkeypatch):
    def said(batches):
        monkeypatch.setattr(trees, "NOTICE", trees.Notice())
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dualkv"):
            for sequences in batches:
                pack_sequences(sequences)
        return [r.getMessage() for r in caplog.records]

    alone, group = [[1, 2, 3]], [[1, 2], [1, 3]]
    (text,) = said([alone] * 40)
    assert "plan_sequences" in text
    assert "8" in text
    assert said([alone] * 7 + [group] + [alone] * 40) == []
    assert said([alone] * 7) == []
    assert said([alone * 4] * 40) == said([[[1], [1, 2]]] * 40) == [], "equal sequences, and one within another"
    # Ranks without work pack a token that is not trained.
    monkeypatch.setattr(trees, "NOTICE", trees.Notice())
    for _ in range(40):
        pack_sequences([[1, 2]], [[0, 0]])
    assert trees.NOTICE.left == 8
    assert Layout.from_token_sequences(alone).num_tokens == 3

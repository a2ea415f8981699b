"""A layout that no attention has used is refused where log-probs are computed of it."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dualkv
from dualkv import Layout
from dualkv.context_parallel import ContextShard
from dualkv.data.parts import plan_parts
from dualkv.sequence_parallel import Shard, padded

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS, RESPONSES = [[1, 2, 3], [4, 5]], [[[6], [7, 8]], [[9], [3]]]
HEAD = torch.randn(10, 8)


def batches():
    """A group with responses, and a tree."""
    sequences = [p + r for p, responses in zip(PROMPTS, RESPONSES, strict=True) for r in responses]
    return dualkv.pack(PROMPTS, RESPONSES), dualkv.pack_sequences(sequences)


def attended(layout, attention=dualkv.attention):
    q, k, v = (torch.randn(layout.num_tokens, h, 8, requires_grad=True) for h in (2, 1, 1))
    return attention(q, k, v, layout)


def is_used(batch) -> bool:
    """Ask `response_logprobs` and both ways to unpack whether the layout was used; they agree."""
    hidden = torch.randn(1, batch.layout.num_tokens, 8, requires_grad=True)
    said = []
    for call in (
        lambda: dualkv.response_logprobs(hidden, HEAD, batch),
        lambda: batch.unpack(hidden[0, batch.predict_rows]),
        lambda: batch.unpack_sequences(hidden),
    ):
        try:
            call()
        except ValueError as error:
            said.append(re.search(r"transformers\.enable\(model\).* layout\.mark_used\(\)", str(error)) is None)
        else:
            said.append(True)
    assert len(set(said)) == 1
    return said[0]


def compiled(*args):
    return torch.compile(dualkv.attention, backend="aot_eager", fullgraph=True)(*args)


def op(q, k, v, layout):
    return torch.ops.dualkv.fwd(q, k, v, layout.offsets, layout.parent, 1.0)


def checkpointed(q, k, v, layout):
    return checkpoint(dualkv.attention, q, k, v, layout, use_reentrant=True)


def without_gradients(*args):
    with torch.no_grad():
        return dualkv.attention(*args)


@pytest.mark.parametrize("attention", [dualkv.attention, op, compiled, checkpointed, without_gradients])
def test_attention_notes_the_layout(attention):
    for batch in batches():
        assert not is_used(batch)
        attended(batch.layout, attention)
        assert is_used(batch)


@pytest.mark.parametrize(
    "made",
    [
        lambda layout: layout.to("cpu"),
        lambda layout: Layout(layout._segments, layout.offsets, layout.parent),  # as `to` another device makes it
        Layout.without_prompt_queries,
        lambda layout: layout.without_queries([1] * layout.num_groups),
        lambda layout: padded(layout, 3),
        lambda layout: padded(padded(layout, 3), 2).without_prompt_queries(),
        lambda layout: Shard(layout, None, 16).layout,
        lambda layout: ContextShard(layout, None, 16).layout,
    ],
)
def test_a_layout_made_of_it_stands_for_it(made):
    for batch in batches():
        attended(made(batch.layout))
        assert is_used(batch)


def test_every_batch_is_asked_by_itself():
    """Copies and pickles are new: a saved batch may be loaded by a program that forgets the layout."""
    for batch in batches():
        attended(batch.layout)
        assert is_used(dualkv.pack(PROMPTS, RESPONSES)) is False
        for other in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
            assert not is_used(other)
            attended(other.layout)
            assert is_used(other)


def test_what_needs_no_attention():
    for batch in batches():
        assert [len(row) for row in batch.unpack(batch.targets)] == [len(x) for x in batch.unpack(batch.targets * 1.0)]
        assert len(batch.unpack_sequences(batch.input_ids)) == 4
        assert not batch.layout._segments.use.seen
        batch.layout.mark_used()
        assert is_used(batch)
    # One sequence: causal attention computes it without a layout.
    assert is_used(dualkv.pack([[1, 2]], [[[3, 4]]]))
    assert is_used(dualkv.pack_sequences([[1, 2, 3], [1, 2, 3]]))
    # Rotary embeddings may depend on the length of a sequence.
    assert not is_used(dualkv.pack([[1, 2]], [[[3, 4], []]]))
    assert not is_used(dualkv.pack_sequences([[1, 2, 3], [1, 2]]))
    assert not is_used(dualkv.pack([[1, 2], [3]], [[[3, 4]], [[5]]]))


def test_parts_of_a_walk():
    _, batch = batches()
    hidden = torch.randn(batch.layout.num_tokens, 8)
    parts = plan_parts(batch, 2)
    assert [part.path_rows > 0 for part in parts].count(True) > 1
    for part in parts:
        if part.path_rows and part.num_trained:
            own = hidden[torch.from_numpy(part.rows)]
            with pytest.raises(ValueError, match="no attention has used"):
                dualkv.response_logprobs(own, HEAD, part)
            attended(part.seen)
            dualkv.response_logprobs(own, HEAD, part)
    assert not is_used(batch), "parts are asked each by itself"


def test_walks():
    _, batch = batches()
    embedding = torch.randn(10, 8, requires_grad=True)

    def right(ids, branch):
        x = embedding[ids[0]][:, None]
        return branch.attention(x, x, x, layer=0).transpose(0, 1)

    with pytest.raises(ValueError, match="dualkv=branch"):
        dualkv.walk(batch, 2, lambda ids, branch: embedding[ids])
    assert not is_used(batch)
    with pytest.raises(ValueError, match="dualkv=branch"):  # one branch is forgotten
        dualkv.walk(batch, 2, lambda ids, branch: embedding[ids] if branch.part.index == 2 else right(ids, branch))
    dualkv.walk(batch, 2, right)
    assert is_used(batch), "log-probs of its parts may be unpacked"


@pytest.mark.parametrize("uses", [True, False])
def test_a_compiled_step(uses):
    """Attention has not run when a compiled step is traced."""
    batch, _ = batches()

    def step(x, batch):
        hidden = attended_by(x, batch.layout) if uses else x
        return dualkv.response_logprobs(hidden.flatten(1), HEAD, batch)[0].sum()

    def attended_by(x, layout):
        return dualkv.attention(x, x, x, layout)

    x = torch.randn(batch.layout.num_tokens, 1, 8, requires_grad=True)
    run = torch.compile(step, backend="aot_eager")
    if not uses:
        with pytest.raises(ValueError, match="no attention has used"):
            run(x, batch)
    else:
        run(x, batch).backward()
        assert x.grad is not None

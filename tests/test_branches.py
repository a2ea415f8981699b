"""Trees walked a part at a time against one pass over the whole tree."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualkv
from dualkv import Layout
from dualkv.branches import Branch
from dualkv.data import memory
from dualkv.data.parts import fitting, plan_parts
from dualkv.data.trees import PackedSequences
from tests.strategies import trees

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)
pytestmark = pytest.mark.usefixtures("one_thread")


def of_layout(layout: Layout) -> PackedSequences:
    """Make a batch of a layout's full sequences, every token but the first counted; nothing if it has no rows."""
    ids = torch.arange(layout.num_tokens)[None]
    s = layout._segments
    paths: list[list[int]] = []
    for a, b, up in zip(s.offsets, s.offsets[1:], s.parent, strict=False):
        paths.append((paths[up] if up >= 0 else []) + list(range(a, b)))
    leaves = [p for p, leaf in zip(paths, s.is_leaf, strict=True) if leaf and p]
    rows = np.array([r for p in leaves for r in p], np.int64)
    lens = np.array([len(p) for p in leaves], np.int64)
    mask = np.ones(len(rows), bool)
    mask[np.cumsum(lens) - lens] = False
    return PackedSequences(ids, layout, rows, lens, mask)


def check_plan(batch: PackedSequences, budget: int | dualkv.Memory) -> None:
    """Every row once, each sees its path and nothing else; and no more than a path and a part is held."""
    layout, parts = batch.layout, plan_parts(batch, budget)
    total, ends = layout.num_tokens, layout.visible_end.numpy()
    assert sorted(r for part in parts for r in part.rows) == list(range(total))
    done: set[int] = set()
    for at, part in enumerate(parts):
        assert part.index == at
        assert len(part.rows) > 0
        if isinstance(budget, int):
            assert len(part.rows) <= budget
        for above, rows in part.path:
            assert parts[above].is_trunk
            assert above < at
            assert 0 < rows <= len(parts[above].rows)
            assert above not in done, "a trunk is open until all below it is done"
        done |= set(range(at)) - {above for above, _ in part.path}
        held = sum(len(parts[above].rows) for above, _ in part.path)
        assert held <= layout._segments.longest_path, "trunks that wait lie on one path"
        rows = np.array([*(r for above, n in part.path for r in parts[above].rows[:n]), *part.rows])
        seen = part.seen
        assert seen.num_tokens == len(rows)
        assert (seen.position_ids.numpy() == layout.position_ids.numpy()[rows]).all()
        q, k = rows[:, None], rows[None]
        mine = np.arange(len(rows))
        by_part = (mine[None] <= mine[:, None]) & (mine[:, None] < seen.visible_end.numpy())
        wanted = (k <= q) & (q < ends[rows])
        assert (by_part == wanted)[part.path_rows :].all()
        if part.path_rows:
            assert seen._segments.first_query[0] == part.path_rows
    places = np.concatenate([part.places.numpy() for part in parts])
    assert sorted(places) == list(range(int(batch._mask.sum())))
    assert sum(part.num_trained for part in parts) == len(batch._trained)


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.integers(1, 30), st.sampled_from(["gather", "roll"]))
def test_plans_of_sequences(sequences, budget, labels):
    masks = [[i > 0 and (i + k) % 3 > 0 for i in range(len(s))] for k, s in enumerate(sequences)]
    if any(map(any, masks)):
        check_plan(dualkv.pack_sequences(sequences, masks, labels=labels), budget)


@settings(max_examples=150, deadline=None)
@given(trees(max_segments=14, length=st.integers(0, 5)), st.integers(1, 20))
def test_plans_of_trees_with_empty_segments(tree, budget):
    layout = Layout.from_segments(*tree)
    batch = of_layout(layout)
    if layout.num_tokens and batch._mask.any():
        check_plan(batch, budget)


@settings(max_examples=60, deadline=None)
@given(trees(max_segments=14, length=st.integers(0, 40)), st.integers(20, 200), st.sampled_from([0, 500]))
def test_plans_in_memory(tree, rows, head):
    """Each part has the rows that its own place leaves room for; what the plan counts is within the limit."""
    layout = Layout.from_segments(*tree)
    batch = of_layout(layout)
    if not layout.num_tokens or not batch._mask.any():
        return
    row = dualkv.RowCosts(10, 5, 400, 100, head=head, beside_path=(300, 60), saved=(350, 30))
    limit = dualkv.Memory(100 * rows, row)
    if (found := fitting(batch, limit)) is None:
        with pytest.raises(ValueError, match=r"expected [\d,]+ at least"):
            plan_parts(batch, limit)
        return
    assert found.bytes <= limit.bytes
    check_plan(batch, limit)


def test_side_leaves_of_a_trunk_share_a_part():
    """A caterpillar of 20 turns: few parts, although every turn has a leaf of its own."""
    offsets, parent, up = [0, 10], [-1], 0
    for _ in range(20):
        parent += [up, up]  # a leaf, and the trunk's next piece
        offsets += [offsets[-1] + 7, offsets[-1] + 12]
        up = len(parent) - 1
    batch = of_layout(Layout.from_segments(offsets, parent))
    parts = plan_parts(batch, 60)
    assert batch.layout.num_tokens == 10 + 20 * 12
    assert len(parts) <= 8
    longest = max(part.path_rows + len(part.rows) for part in parts)
    assert longest <= 10 + 20 * 5 + 7 + 60, "the longest path, and a part"


# ---------------------------------------------------------------- attention
@settings(max_examples=40, deadline=None)
@given(
    trees(max_segments=10, length=st.integers(0, 6)),
    st.integers(1, 15),
    st.sampled_from([{}, {"window": 4}, {"chunk": 3}, {"softcap": 2.0}, {"sinks": True, "window": 5}]),
    st.sampled_from([1, memory.ROWS_AT_ONCE]),
)
def test_attention_of_parts_is_that_of_the_tree(tree, budget, features, at_once):
    layout = Layout.from_segments(*tree)
    batch = of_layout(layout)
    if not layout.num_tokens or not batch._mask.any():
        return
    random = torch.Generator().manual_seed(budget)
    given_ = dict(features)
    q, k, v, dout = (torch.randn(layout.num_tokens, h, 8, dtype=torch.float64, generator=random) for h in (4, 2, 2, 4))
    if "sinks" in given_:
        given_["sinks"] = torch.randn(4, dtype=torch.float64, generator=random)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = dualkv.attention(q, k, v, layout, **given_)
    wanted = torch.autograd.grad((whole * dout).sum(), leaves)
    found = torch.zeros_like(whole)

    for one in dualkv.walk_passes(batch, budget):
        rows = one.input_ids[0]  # the ids of this batch are its rows
        with one:
            out = one.branch.attention(q[rows], k[rows], v[rows], layer="only", **given_)
            found[rows] = out.detach()
        # Parts without trained tokens have a loss too: it goes through an identity whose gradient is dout.
        with mock.patch.object(memory, "ROWS_AT_ONCE", at_once):  # 1: a KV head after the other
            one.backward((out * dout[rows]).sum() if one.is_last else None)
    torch.testing.assert_close(found, whole.detach(), rtol=0, atol=1e-12)
    for leaf, want in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, want, rtol=0, atol=1e-12)


def some(part):
    return [torch.randn(len(part.rows), heads, 8) for heads in (4, 2, 2)]


def test_what_a_branch_refuses():
    first, second, *_ = plan_parts(dualkv.pack_sequences([[1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9]]), 3)
    trunk = Branch(first)
    trunk.attention(*some(first), layer="a")
    below, inputs = Branch(second, [trunk]), some(second)
    with pytest.raises(ValueError, match="no keys of layer 'b'"):
        below.attention(*inputs, layer="b")
    with pytest.raises(ValueError, match=f"q has 9 rows, this part has {len(second.rows)}"):
        below.attention(torch.randn(9, 4, 8), *inputs[1:], layer="a")
    below.attention(*inputs, layer="a")
    with pytest.raises(ValueError, match=r"no keys of layer 'a': .* 2 times"):
        below.attention(*inputs, layer="a")
    below.begin(has_graph=True)
    with torch.no_grad(), pytest.raises(ValueError, match="use_reentrant=False"):
        below.attention(*inputs, layer="a")


class Looped(nn.Module):
    """Two layers that run three times, or in one checkpointed region each, or all of them in one."""

    def __init__(self, regions: str) -> None:
        super().__init__()
        self.regions = regions
        self.layers = nn.ModuleList(nn.Linear(8, 3 * 8) for _ in range(2))
        self.embed = nn.Embedding(12, 8)

    def layer(self, layer, x, branch):
        q, k, v = (y.unflatten(1, (1, 8)) for y in layer(x).chunk(3, 1))
        return x + branch.attention(q, k, v, layer=layer).flatten(1).sin()

    def loop(self, x, branch):
        for layer in self.layers:
            x = self.checkpointed("layer", self.layer, layer, x, branch)
        return x

    def rounds(self, x, branch):
        for _ in range(3):
            x = self.checkpointed("loop", self.loop, x, branch)
        return x

    def checkpointed(self, name, function, *args):
        return checkpoint(function, *args, use_reentrant=False) if name in self.regions else function(*args)

    def forward(self, ids, branch):
        return self.checkpointed("rounds", self.rounds, self.embed(ids[0]), branch)[None]


def gradients_of_loops(batch, budget, regions):
    """Compute the gradients of a model that loops over regions; trunks have no loss of their own: only the last tokens
    count."""
    torch.manual_seed(0)
    model = Looped(regions).double()
    loss = dualkv.walk(batch, budget, model, lambda hidden, part: hidden[0, part.predict_rows].pow(3).sum())
    return loss, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("regions", ["", "layer", "loop", "rounds"])
@pytest.mark.parametrize("budget", [2, 4, 7])
def test_layers_that_run_several_times(budget, regions):
    sequences = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 8, 7, 6], [1, 2, 3, 9, 8, 5], [10, 11]]
    batch = dualkv.pack_sequences(sequences, [[0] * (len(s) - 1) + [1] for s in sequences])
    wanted, expected = gradients_of_loops(batch, 100, "")
    loss, found = gradients_of_loops(batch, budget, regions)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    for mine, gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, gradient, rtol=0, atol=1e-12)


def test_a_call_that_cannot_be_known_is_refused():
    """A checkpoint in a checkpoint makes its regions anew when it runs again."""
    batch = dualkv.pack_sequences([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 8, 7, 6]])
    with pytest.raises(ValueError, match=r"Linear.* ran 3 times .*use_reentrant=False"):
        gradients_of_loops(batch, 4, "layer loop")


def test_a_checkpointed_part_keeps_nothing_behind_its_backward():
    """The recomputation in the backward comes to `keep` once more."""
    first, *_ = plan_parts(dualkv.pack_sequences([[1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9]]), 3)
    trunk = Branch(first)
    q, k, v = (x.requires_grad_() for x in some(first))
    with torch.no_grad():
        trunk.attention(q, k, v, layer=0)
    trunk.reserve()
    assert trunk.kept_bytes == 2 * k.nbytes + 2 * v.nbytes, "sums have the size of what is kept"
    trunk.begin(has_graph=True)
    assert trunk.kept_bytes == k.nbytes + v.nbytes, "sums alone: nothing below reads what is kept any more"
    out = checkpoint(lambda *x: trunk.attention(*x, layer=0).sin(), q, k, v, use_reentrant=False)
    trunk.backward(out.sum())
    assert q.grad is not None
    assert not trunk._kept


BATCH, EMBEDDING = dualkv.pack_sequences([[1, 2, 3, 4], [1, 2, 5]]), torch.eye(8, requires_grad=True)


def attend(input_ids, branch):
    x = EMBEDDING[input_ids[0]][:, None]
    return branch.attention(x, x, x, layer=0)[None, :, 0]


def walked(loss, forward=attend):
    return dualkv.walk(BATCH, 2, forward, loss)


@pytest.mark.parametrize(
    ("loss", "error", "why"),
    [
        (lambda hidden, part: hidden[0, :2].sum(-1), ValueError, r"loss returned a tensor of shape \(2,\).*one number"),
        (lambda hidden, part: hidden.sum().item(), TypeError, "loss returned a float, expected a tensor"),
        (lambda hidden, part: None, TypeError, "loss returned a NoneType, expected a tensor"),
        (lambda hidden, part: hidden.sum().detach(), ValueError, "loss returned a tensor without a gradient"),
        (7, TypeError, r"loss is a int, expected a function of \(hidden states, part\)"),
    ],
)
def test_losses_that_walk_refuses(loss, error, why):
    with pytest.raises(error, match=why):
        walked(loss)


def test_what_walk_takes_for_a_loss():
    """Shapes of one number; without gradients any number, and no loss at all."""
    wanted = walked(lambda hidden, part: hidden.sum())
    assert wanted.shape == ()
    assert torch.equal(walked(lambda hidden, part: hidden.sum().view(1, 1) if part.index else hidden.sum()), wanted)
    with torch.no_grad():
        assert torch.equal(walked(lambda hidden, part: hidden.sum()), wanted)
        assert walked(None) == 0
    with pytest.raises(TypeError, match=r"forward is a str, expected a function of \(input_ids, branch\)"):
        walked(None, "model")
    with pytest.raises(TypeError, match=r"batch is a PackedBatch.*from_batch"):
        dualkv.walk(dualkv.pack([[1]], [[[2]]]), 2, lambda input_ids, branch: None)


def test_parts_that_are_planned_already():
    def loss(hidden, part):
        return hidden[0, part.predict_rows].pow(2).sum()

    parts = plan_parts(BATCH, 2)
    assert len(parts) > 2
    assert torch.equal(dualkv.walk(BATCH, parts, attend, loss), walked(loss))
    other = dualkv.pack_sequences([[1, 2], [1, 3]])
    for of, some in ((other, parts), (BATCH, []), (BATCH, parts[1:]), (BATCH, parts * 2), (BATCH, parts[::-1])):
        with pytest.raises(ValueError, match=f"budget is a list of {len(some)} entries, expected all parts of this"):
            dualkv.walk(of, some, attend, loss)


def test_arguments_of_walks_that_are_refused():
    with pytest.raises(ValueError, match="budget"):
        plan_parts(BATCH, 0)
    with pytest.raises(TypeError, match=r"loss is a str, expected a dualkv\.KnownLoss"):
        dualkv.walk_values(BATCH, 2, lambda ids, branch: ids, lambda hidden, part: hidden, loss="sum")
    for name in ("forward", "loss"):
        with pytest.raises(TypeError, match=f"{name} is a int, expected a function of"):
            dualkv.measure_rows(**{"forward": lambda ids, branch: ids, name: 3}, input_ids=torch.ones(2).long())
    with pytest.raises(TypeError, match="loss is a NoneType, expected a function of the values"):
        dualkv.walk_whole(BATCH, 2, lambda ids, branch: ids, lambda hidden, part: hidden, None)
    with pytest.raises(TypeError, match="on_host is a str, expected True or False"):
        dualkv.walk(BATCH, 2, lambda ids, branch: ids, on_host="no")
    for ids, error in ((torch.zeros(1, 0, dtype=torch.int64), ValueError), ([[1, 2]], TypeError)):
        with pytest.raises(error, match="input_ids"):
            dualkv.measure_rows(lambda ids, branch: ids, ids)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_writes_into_what_trunks_keep(context):
    """A layer adds to its input, which was key and value too: an error, or what copies give, but no other result."""
    embedding = torch.randn(8, 1, 8, generator=torch.Generator().manual_seed(0))

    def run(copies):
        def forward(input_ids, branch):
            x = embedding[input_ids[0]]
            keys = x.clone() if copies else x
            x += branch.attention(x, keys, keys, layer=0)
            return x[None, :, 0]

        with context():
            return walked(lambda hidden, part: hidden.sum(), forward)

    if context is torch.no_grad:
        with pytest.raises(RuntimeError, match="written in place after the layer read them"):
            run(copies=False)
    else:
        torch.testing.assert_close(run(copies=False), run(copies=True))


def test_a_layer_that_the_second_pass_leaves_out():
    """A gradient that has nowhere to go is not lost."""

    def forward(input_ids, branch):
        x = EMBEDDING[input_ids[0]][:, None]
        for layer in range(1 if branch.part.is_trunk and torch.is_grad_enabled() else 2):
            x = x + branch.attention(x, x, x, layer=layer)
        return x[None, :, 0]

    with pytest.raises(ValueError, match="second pass of a trunk left out a layer"):
        walked(lambda hidden, part: hidden.sum(), forward)


def test_a_zero_loss_of_infinite_values_has_zeros_for_gradients():
    """0 times infinity would be NaN, in the gradients of all ranks."""
    batch = of_layout(Layout.from_lengths([4], [[2]]))
    hidden = torch.full((1, 6, 3), torch.inf, requires_grad=True)
    one = next(iter(dualkv.walk_passes(batch, 8)))
    loss = one.zero_loss(hidden)
    loss.backward()
    assert loss == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))

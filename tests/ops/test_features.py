"""Windows, chunks, sinks, softcapping and gradients of lse: exact, paid for only where they are used, refused where
wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkv
from dualkv import Layout
from dualkv.ops import reference
from dualkv.ops.features import Window
from tests import strategies
from tests.dispatched import Dispatched
from tests.ops.test_attention import BOUND, check, qkv
from tests.ops.test_gradients import asked_of_backward

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

LAYOUT = Layout.from_lengths([5, 2], [[3, 0, 4], []])
TREE = Layout.from_segments([0, 3, 5, 5, 9, 10, 12], [-1, 0, 1, 2, 0, -1])
ALL = {"window": 3, "softcap": 1.5}
OTHERS = st.fixed_dictionaries(
    {}, optional={"sinks": st.sampled_from([-3.0, 0.0, 4.0]), "softcap": st.sampled_from([0.3, 2.0, 50.0])}
)


@settings(max_examples=80, deadline=None)
@given(
    strategies.groups(), strategies.windows(), OTHERS, st.booleans(), st.sampled_from(list(BOUND)),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (5, 1)]), st.sampled_from([8, 24]),
)  # fmt: skip
def test_groups_agree_with_the_replicated_sequences(groups, window, others, with_dlse, dtype, heads, head_dim_v):
    shape = {"heads": heads[0], "kv_heads": heads[1], "head_dim": 8, "head_dim_v": head_dim_v}
    check(Layout.from_lengths(*groups), dtype, features=window | others, with_dlse=with_dlse, **shape)


@settings(max_examples=50, deadline=None)
@given(strategies.trees(), strategies.windows(), OTHERS, st.booleans())
def test_trees_agree_with_the_replicated_sequences(tree, window, others, with_dlse):
    check(Layout.from_segments(*tree), features=window | others, with_dlse=with_dlse, head_dim=8)


@pytest.mark.parametrize("window", [{"window": 100}, {"window": 300}, {"chunk": 190}], ids=str)
def test_chunks_of_rows(window):
    """Prompts, responses and windows longer than the reference's chunks of rows."""
    check(Layout.from_lengths([300, 3], [[1] * 5, [300]]), features=window | {"sinks": 0.0}, with_dlse=True)


@pytest.mark.parametrize("features", [{}, {"window": 3}, {"chunk": 4}, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize("layout", [LAYOUT, TREE], ids=["groups", "tree"])
def test_gradcheck(layout, features):
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, sinks):
        return dualkv.attention(q, k, v, layout, sinks=sinks, return_lse=True, **features)

    torch.autograd.gradcheck(attend, (*qkv(layout, 2, 1, 8, head_dim_v=16), sinks), fast_mode=True)


def test_parts_merge_and_a_sink_belongs_to_one():
    """A prompt and what follows it, apart: attention over the prompt by hand, over each response by a layout."""
    layout, P = Layout.from_lengths([6], [[4, 3]]), 6
    alone = Layout.from_lengths([4, 3], [[], []])
    sinks = torch.randn(6, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv(layout)
    out, lse = dualkv.attention(q, k, v, layout, sinks=sinks, return_lse=True)
    own, own_lse = dualkv.attention(q[P:], k[P:], v[P:], alone, sinks=sinks, return_lse=True)
    key, value = (x[:P].repeat_interleave(3, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[P:], key) * 0.25
    context, context_lse = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)
    whole = torch.logaddexp(own_lse, context_lse)
    merged = sum(
        part * (of - whole).exp().T[..., None] for part, of in ((own, own_lse), (context, context_lse))
    )  # fmt: skip
    torch.testing.assert_close(merged, out[P:])
    torch.testing.assert_close(whole, lse[:, P:])
    dout, dlse = torch.randn_like(merged), torch.randn_like(whole)
    leaves = q, k, v, sinks
    want = torch.autograd.grad((out[P:], lse[:, P:]), leaves, (dout, dlse))
    torch.testing.assert_close(torch.autograd.grad((merged, whole), leaves, (dout, dlse)), want)


def test_a_nan_stays_in_its_response_and_in_the_keys_that_it_sees():
    leaves = *qkv(LAYOUT), torch.randn(6, dtype=torch.float64, requires_grad=True)
    clean = torch.autograd.grad(step(*leaves), leaves)
    broken = [x.detach().clone().requires_grad_() for x in leaves]
    with torch.no_grad():
        broken[1][5:8] = float("nan")  # keys of the first response, which sees the prompt's rows 3 and 4
    for name, got, want in zip("qkv", torch.autograd.grad(step(*broken), broken), clean, strict=False):
        assert got[5:8].isnan().any()
        for rows in (slice(0, 5 if name == "q" else 3), slice(8, None)):
            torch.testing.assert_close(got[rows], want[rows])


# ---------------------------------------------------------------- what is paid
def test_windows_cost_their_keys():
    """A chunk of rows reads the keys that its rows see, at any depth: here in all 4 windows a row, of 8000 keys."""
    layout, window = Layout.from_segments([0, 7000, 7500, 8000, 8500], [-1, 0, 1, 0]), Window(50)
    read = sum(len(c.keys) for c in reference.chunks(layout._segments, torch.device("cpu"), False, window))
    assert read < layout.num_tokens / reference.CHUNK * (reference.CHUNK + 50) * 1.1
    q, k, v = (x.detach() for x in qkv(layout, 1, 1, 8, torch.float32))
    with Dispatched() as seen:
        dualkv.attention(q, k, v, layout, window=50)
    assert seen.largest <= max(reference.CHUNK * (reference.CHUNK + 50), q.numel())


def test_a_window_that_hides_nothing_is_none(monkeypatch):
    seen, real = [], reference.forward
    monkeypatch.setattr(reference, "forward", lambda **call: seen.append(call["features"].reach) or real(**call))
    q, k, v = qkv(TREE)
    for features in ({"window": 8}, {"window": 9}, {"chunk": 9}, {"window": 2**62}, {"chunk": 8}):
        dualkv.attention(q, k, v, TREE, **features)
    assert TREE._segments.longest_path == 9
    assert seen == [Window(8), None, None, None, Window(chunk=8)]


@pytest.mark.parametrize("seed", range(10))
def test_batch_invariant_rows_do_not_depend_on_the_number_of_heads(seed):
    """A CPU with several threads orders the sums of one product in another way than those of two."""
    draw = np.random.default_rng(seed)
    lens = draw.integers(1, 98, 12).tolist()
    layout = Layout.from_segments(np.cumsum([0, *lens]).tolist(), [-1, *[0] * 11])
    q, k, v = (torch.randn(sum(lens), h, 16, generator=torch.Generator().manual_seed(seed)) for h in (4, 2, 2))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = dualkv.attention(q, k, v, layout, batch_invariant=True, return_lse=True)
        half = dualkv.attention(q[:, :2], k[:, :1], v[:, :1], layout, batch_invariant=True, return_lse=True)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole[0][:, :2], half[0])
    assert torch.equal(whole[1][:2], half[1])


@pytest.mark.parametrize("features", [{}, {"window": 40}, {"chunk": 30}, {"softcap": 2.0}], ids=str)
def test_batch_invariant_rows_have_the_bits_of_their_path_alone(features):
    """Groups and a tree, whose segments are packed again with fewer others and in another order."""
    layout = Layout.from_segments([0, 60, 70, 75, 220, 221, 250, 300, 450], [-1, 0, 1, 1, 0, -1, 5, 5])
    q, k, v = (x.detach() for x in qkv(layout, dtype=torch.float32))
    asked = {"batch_invariant": True, "return_lse": True, **features}
    out, lse = dualkv.attention(q, k, v, layout, **asked)
    differ = False
    for segments, parent in (([5, 7, 0, 1, 3], [-1, 0, -1, 2, 3]), ([0, 4], [-1, 0]), ([0], [-1])):
        rows = torch.cat([torch.arange(*layout.offsets[s : s + 2].tolist()) for s in segments])
        some = Layout.from_segments([0, *layout._segments.lengths[segments].cumsum().tolist()], parent)
        its_out, its_lse = dualkv.attention(q[rows], k[rows], v[rows], some, **asked)
        assert torch.equal(its_out, out[rows])
        assert torch.equal(its_lse, lse[:, rows])
        plain = dualkv.attention(q, k, v, layout, **features)[rows]
        differ |= not torch.equal(dualkv.attention(q[rows], k[rows], v[rows], some, **features), plain)
    assert differ, "or the test could not fail"
    want = dualkv.attention(q, k, v, layout, **features)
    torch.testing.assert_close(out, want, atol=2e-6, rtol=2e-6)


def test_a_batch_invariant_call_keeps_a_window_that_hides_nothing_here(monkeypatch):
    seen, real = [], reference.forward
    monkeypatch.setattr(reference, "forward", lambda **call: seen.append(call["features"]) or real(**call))
    q, k, v = qkv(TREE)
    dualkv.attention(q, k, v, TREE, window=2**20, batch_invariant=True).sum().backward()
    assert [(x.window, x.batch_invariant) for x in seen] == [(2**20, True)]


def test_backwards_get_what_is_asked(monkeypatch):
    """A gradient of lse where there is one; of q, k and v those that are needed, dq at least."""
    calls, real = [], reference.backward

    def backward(**call):
        calls.append((call["dout"].any().item(), call["dlse"] is not None))
        return real(**call)

    monkeypatch.setattr(reference, "backward", backward)
    q, k, v = qkv(LAYOUT)
    sinks = torch.zeros(6, requires_grad=True)
    out, lse = dualkv.attention(q, k, v, LAYOUT, sinks=sinks, return_lse=True)
    for loss in (out.sum(), lse.sum(), out.sum() + lse.sum()):
        loss.backward(retain_graph=True)
    assert calls == [(True, False), (False, True), (True, True)]
    assert sinks.grad.dtype == torch.float32
    fixed, alone = [x.detach() for x in (q, k, v)], sinks.detach().bfloat16().float().requires_grad_()
    assert asked_of_backward(lambda: dualkv.attention(*fixed, LAYOUT, sinks=alone).sum().backward()) == ["q"]
    want = torch.autograd.grad(dualkv.attention(q, k, v, LAYOUT, sinks=alone).sum(), alone)[0]
    assert torch.equal(alone.grad, want)


# ---------------------------------------------------------------- transforms
def arguments(dtype, window=3, chunk=None, softcap=1.5):
    q, k, v = qkv(LAYOUT, dtype=dtype, head_dim_v=24)
    sinks = torch.randn(6).to(dtype).requires_grad_()
    return q, k, v, LAYOUT.offsets, LAYOUT.parent, 0.25, False, window, chunk, sinks, softcap


@pytest.mark.parametrize("changes", [{}, {"window": None, "chunk": 4, "softcap": None}], ids=["window", "chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype, changes):
    given = arguments(dtype, **changes)
    torch.library.opcheck(torch.ops.dualkv.fwd, given)
    with torch.no_grad():
        out, lse = torch.ops.dualkv.fwd(*given)
        backward = (
            torch.randn_like(out),
            *given[:3],
            out,
            lse,
            *given[3:7],
            "qkv",
            *given[7:],
            False,
            torch.randn_like(lse),
        )
        torch.library.opcheck(torch.ops.dualkv.bwd, backward)
    assert torch.ops.dualkv.bwd(*backward)[3].dtype == torch.float32


def step(q, k, v, sinks):
    out, lse = dualkv.attention(q * 2, k, v, LAYOUT, sinks=sinks, return_lse=True, **ALL)
    return out.square().sum() + (lse * torch.arange(lse.shape[1])).sum()


def test_compile_checkpoint_and_torch_func_agree_with_autograd():
    leaves = *qkv(LAYOUT, head_dim_v=8), torch.randn(6, dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    checkpointed = torch.utils.checkpoint.checkpoint(step, *leaves, use_reentrant=False)
    for value in (compiled(*leaves), checkpointed):
        for got, right in zip(torch.autograd.grad(value, leaves), want, strict=True):
            torch.testing.assert_close(got, right)
    plain = [x.detach() for x in leaves]
    assert all(map(torch.equal, torch.func.grad(step, (0, 1, 2, 3))(*plain), want))
    batch = [torch.stack([x, x]) for x in plain]
    for got, right in zip(torch.func.vmap(torch.func.grad(step, (0, 1, 2, 3)))(*batch), want, strict=True):
        assert torch.equal(got[1], right)


def test_autocast_takes_sinks_of_any_dtype():
    q, k, v = qkv(LAYOUT, dtype=torch.float32)
    wide = torch.randn(6).half()
    want = dualkv.attention(*(x.bfloat16() for x in (q, k, v)), LAYOUT, sinks=wide.float())
    with torch.autocast("cpu", torch.bfloat16):
        for sinks in (wide, wide.float(), wide.double()):
            assert torch.equal(dualkv.attention(q, k, v, LAYOUT, sinks=sinks), want)


@pytest.mark.parametrize(("features", "seen"), [({"window": 32}, range(280, 312)), ({"chunk": 32}, range(280, 288))])
def test_a_nan_stays_with_the_rows_that_the_window_lets_see_it(features, seen):
    layout = Layout.from_lengths([300], [[100]])
    q, k, v = torch.randn(3, layout.num_tokens, 2, 8)
    v[280] = float("nan")
    broken = dualkv.attention(q, k, v, layout, **features).isnan().any(-1).any(-1)
    assert broken.nonzero().flatten().tolist() == list(seen)

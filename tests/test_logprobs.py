from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from dualkv import heads, logprobs
from dualkv.data import packing
from dualkv.data.packing import PackedBatch
from dualkv.heads import Head
from dualkv.logprobs import response_logprobs
from tests.dispatched import Dispatched

WIDTH, VOCABULARY = 6, 11
STYLES = ["gather", "roll"]


@st.composite
def batches(draw):
    tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=5)
    prompts = draw(st.lists(tokens.filter(bool), min_size=1, max_size=3))
    responses = [draw(st.lists(tokens, min_size=1, max_size=4)) for _ in prompts]
    return pack(prompts, responses, labels=draw(st.sampled_from(STYLES)))


def pack(*args, **options) -> PackedBatch:
    """A batch whose hidden states these tests make without any attention."""
    batch = packing.pack(*args, **options)
    batch.layout.mark_used()
    return batch


def some_batch(style="gather") -> PackedBatch:
    """Two groups, an empty response, two responses that start with the same token."""
    return pack([[1, 2, 3], [4]], [[[5, 6, 7], [], [5], [8, 9]], [[10, 0]]], labels=style)


def inputs(batch, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, batch.layout.num_tokens, WIDTH, generator=rng, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=rng, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def whole(weight, softcap=None, kind="weight"):
    """A head of `weight` and more, and what else of it has gradients."""
    more = [torch.linspace(-1, 1, VOCABULARY, dtype=weight.dtype, requires_grad=True)]
    norm = torch.linspace(0.5, 1.5, WIDTH, dtype=weight.dtype, requires_grad=True)
    if kind == "weight":
        return (weight if softcap is None else Head(weight, softcap=softcap)), []
    if kind == "bias":
        return Head(weight, more[0], softcap=softcap), more
    if kind == "all":
        return Head(weight, more[0], scale=-0.7, softcap=softcap, before=lambda x: x * norm), [*more, norm]
    # A leaf that is in no list of parameters, and one in float64 whatever the rest is in.
    return Head(module=lambda x: (x * norm) @ weight.T + more[0], scale=1.3, softcap=softcap), [*more, norm]


KINDS = ["weight", "bias", "all", "module"]


def dense(hidden, head, batch, temperature=1.0):
    """Compute log-probs and entropies from whole logits of every unpacked sequence, a list of rows each."""
    logps, entropies = [], []
    head = head if isinstance(head, Head) else Head(head)
    for states, ids, r in zip(
        batch.unpack_sequences(hidden), batch.unpack_sequences(batch.input_ids), batch.response_lens, strict=True
    ):
        states = states if head.before is None else head.before(states)
        bias = 0.0 if head.bias is None else head.bias
        logits = (states @ head.weight.T + bias if head.module is None else head.module(states)) * head.scale
        logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
        logp = torch.log_softmax(logits / temperature, -1)[len(ids) - r - 1 : -1]
        logps.append(logp.gather(1, ids[len(ids) - r :, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(1))
    return torch.cat(logps), torch.cat(entropies)


def ours(hidden, weight, batch, temperature=1.0, **options):
    """Compute log-probs and entropies by `response_logprobs`, in the order of `dense`."""
    return tuple(torch.cat(batch.unpack(v)) for v in response_logprobs(hidden, weight, batch, temperature, **options))


@settings(max_examples=100, deadline=None)
@given(
    batches(), st.integers(1, 7), st.sampled_from([0.3, 1.0, torch.tensor(2.5)]), st.sampled_from([None, 2.0]),
    st.integers(0, 100), st.sampled_from(KINDS),
)  # fmt: skip
def test_values_and_gradients_are_those_of_whole_logits(batch, chunk_size, temperature, softcap, seed, kind):
    hidden, weight = inputs(batch, seed=seed)
    head, more = whole(weight, softcap, kind)
    got = ours(hidden, head, batch, temperature, chunk_size=chunk_size)
    want = dense(hidden, head, batch, temperature)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)
    scale = [torch.randn_like(w) for w in want]
    for used in ((0,), (1,), (0, 1)):
        grads = [
            torch.autograd.grad(sum((v[i] * scale[i]).sum() for i in used), (hidden, weight, *more), retain_graph=True)
            for v in (got, want)
        ]
        for g, w in zip(*grads, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_dtypes(dtype, tolerance):
    batch = some_batch()
    hidden, weight = inputs(batch, dtype)
    logp, entropy = response_logprobs(hidden, weight, batch, chunk_size=4)
    assert logp.dtype == entropy.dtype == torch.float32
    (2 * logp + entropy).sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    want = response_logprobs(*exact, batch)
    (2 * want[0] + want[1]).sum().backward()
    for g, w in ((logp, want[0]), (entropy, want[1]), (hidden.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance * w.abs().max().item())


@pytest.mark.parametrize("style", STYLES)
def test_logits_never_exist_whole(style):
    vocabulary, chunk_size = 500, 8
    batch = pack([[1] * 20], [[[2] * 40] * 10], labels=style)
    hidden = torch.randn(batch.layout.num_tokens, WIDTH, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH, requires_grad=True)
    with Dispatched() as forward:
        logp, entropy = response_logprobs(hidden, weight, batch, chunk_size=chunk_size)
    with Dispatched() as backward:
        (logp.sum() + entropy.sum()).backward()
    # The head's gradient and packed hidden states are smaller than a chunk here.
    assert forward.largest == backward.largest == chunk_size * vocabulary
    # The gather style computes a prompt's last row once: 40 + 9 * 39 rows, not 10 * 40.
    rows = 400 if style == "roll" else 391
    assert forward.products == -(-rows // chunk_size)


@pytest.fixture
def backend(request, monkeypatch):
    """Set the backend of `torch.compile` for a test. The GPU suite has the default's kernels, which take long."""
    logprobs._of_form.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))
    yield
    logprobs._of_form.cache_clear()


@pytest.mark.parametrize(
    ("backend", "temperature", "softcap"),
    [pytest.param("inductor", 1.0, None, marks=pytest.mark.slow), ("aot_eager", 0.7, 2.0)],
    indirect=["backend"],
)
@pytest.mark.parametrize("kind", ["weight", "all", "module"])
def test_compiled_is_the_same(backend, temperature, softcap, kind):
    """Gradients of log-probs alone too, for which the backward has a shorter way; chunks of two sizes."""
    for loss in (lambda logp, entropy: logp.sum(), lambda logp, entropy: (logp * entropy).sum()):
        grads = []
        for compiled in (False, True):
            hidden, weight = inputs(some_batch())
            head, more = whole(weight, softcap, kind)
            values = response_logprobs(hidden, head, some_batch(), temperature, chunk_size=4, compiled=compiled)
            loss(*values).backward()
            grads.append([*values, hidden.grad, weight.grad, *(x.grad for x in more)])
        for eager, compiled in zip(*grads, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


GRAPHS: list[str] = []


def counting(graph, _inputs):
    GRAPHS.append("")
    return graph.forward


@pytest.mark.parametrize("backend", [counting], indirect=True)
def test_compiled_in_every_form_one_after_another(backend):
    """PyTorch gives up after eight graphs of one code. A number of the temperature is no form."""
    batches_of_rows = pack([[1, 2], [3]], [[[4, 5, 6], [4, 7]], [[8]]]), pack([[1, 2]], [[[3]]])
    axes = (torch.float64, torch.bfloat16), batches_of_rows, ((None, 1.0), (2.0, 0.7)), ("logp", "entropy", "inference")
    for dtype, batch, (softcap, temperature), wanted in product(*axes):
        found, near = [], 1e-2 if dtype == torch.bfloat16 else 1e-12
        for compiled in (False, True):
            hidden, weight = inputs(batch, dtype)
            with torch.inference_mode(wanted == "inference"):
                head = Head(weight, softcap=softcap)
                values = response_logprobs(hidden, head, batch, temperature, compiled=compiled)
            grads = []
            if wanted != "inference":
                grads = torch.autograd.grad(values[0].sum() + (values[1].sum() if wanted == "entropy" else 0), hidden)
            found.append([*values, *grads])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=near, atol=near)
    graphs = len(GRAPHS)
    for temperature in np.linspace(0.5, 3, 12):
        hidden, weight = inputs(batch, dtype)
        sum(x.sum() for x in response_logprobs(hidden, weight, batch, temperature, compiled=True)).backward()
    assert len(GRAPHS) == graphs + 2  # a temperature without a cap, forward and backward


@pytest.mark.parametrize("backend", ["aot_eager"], indirect=True)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_kept_logits_are_not_made_again_and_change_nothing(backend, style, compiled):
    batch = some_batch(style)
    found, products = [], []
    for keep in (0, 2, 99):
        hidden, weight = inputs(batch, torch.float32)
        logp, entropy = response_logprobs(hidden, weight, batch, chunk_size=2, compiled=compiled, kept_chunks=keep)
        loss = (2 * logp + entropy).sum()
        with nullcontext() if compiled else Dispatched() as backward:
            grads = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        again = torch.autograd.grad(loss, (hidden, weight))  # its logits are made again
        assert all(map(torch.equal, grads, again))
        found.append([logp.detach(), *grads])
        products.append(backward and backward.products)
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))
    if not compiled:  # the compiler takes no mode that counts
        assert products[0] - products[2] > 2
        assert products[0] - products[1] == 2


@pytest.mark.parametrize("backend", ["eager"], indirect=True)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_logits_of_minus_infinity(backend, compiled, softcap):
    """A token that is never drawn adds nothing to the entropy, and has no gradient."""
    batch = some_batch()
    hidden, weight = inputs(batch)
    bias = torch.zeros(VOCABULARY, dtype=torch.float64)
    bias[2] = -float("inf")
    head = Head(weight, bias.requires_grad_(), softcap=softcap)
    logp, entropy = response_logprobs(hidden, head, batch, 0.7, chunk_size=4, compiled=compiled)
    grads = torch.autograd.grad((logp * entropy).sum(), (hidden, weight, bias))
    finite = torch.full_like(bias, 0).index_fill(0, torch.tensor(2), -1e5).requires_grad_()
    head = Head(weight, finite, softcap=softcap)
    want = response_logprobs(hidden, head, batch, 0.7, chunk_size=4)
    assert torch.isfinite(want[1]).all()
    torch.testing.assert_close((logp, entropy), want, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad((want[0] * want[1]).sum(), (hidden, weight, finite))
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)


def test_not_a_number_stays_one():
    hidden, weight = inputs(some_batch())
    for bad in (float("nan"), float("inf")):
        bias = torch.zeros(VOCABULARY, dtype=torch.float64)
        bias[2] = bad
        values = response_logprobs(hidden, Head(weight, bias), some_batch())
        grads = torch.autograd.grad(sum(x.sum() for x in values), hidden)
        assert all(torch.isnan(x).any() for x in (*values, *grads))


def test_only_rows_that_predict_touch_the_head():
    batch = some_batch()
    hidden, weight = inputs(batch)
    with torch.no_grad():
        poisoned = hidden.clone()
        silent = torch.ones(batch.layout.num_tokens, dtype=torch.bool)
        silent[batch.predict_rows] = False
        poisoned[0, silent] = torch.nan
    poisoned.requires_grad_()
    want = response_logprobs(hidden, weight, batch)
    got = response_logprobs(poisoned, weight, batch)
    assert torch.equal(got[0], want[0])
    (got[0] + got[1]).sum().backward()
    assert weight.grad.isfinite().all()
    assert (poisoned.grad[0, silent] == 0).all()


@pytest.mark.parametrize("needs", ["hidden", "weight", "neither"])
def test_only_gradients_that_are_required_are_made(needs):
    batch = some_batch()
    hidden, weight = inputs(batch)
    hidden.requires_grad_(needs == "hidden")
    weight.requires_grad_(needs == "weight")
    logp, _ = response_logprobs(hidden, weight, batch)
    assert logp.requires_grad == (needs != "neither")
    if needs == "neither":
        return
    with Dispatched() as backward:
        logp.sum().backward()
    assert backward.products == (2 if needs == "hidden" else 1)  # logits again, and one gradient (addmm for the head)
    assert (hidden.grad is not None) == (needs == "hidden")
    assert (weight.grad is not None) == (needs == "weight")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_head_are_those_of_its_log_probs(kind, dtype):
    """A module and a linear layer round alike in low precision; entropies too."""
    batch = some_batch()
    hidden, weight = inputs(batch, dtype)
    head, _ = whole(weight, 2.0, kind)
    head = head if isinstance(head, Head) else Head(head)
    z = head.logits(hidden[0, batch.predict_rows]).log_softmax(-1)
    logp, entropy = response_logprobs(hidden, head, batch)
    assert z.dtype == logp.dtype == torch.float32
    torch.testing.assert_close(logp, z.gather(1, batch.targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(z.exp() * z).sum(1), rtol=1e-5, atol=1e-5)


def test_a_module_runs_under_the_autocast_of_the_forward():
    """The casts of a module's weights are made anew, so that gradients reach them, and sums over chunks are in fp32."""
    batch, linear = some_batch(), torch.nn.Linear(WIDTH, VOCABULARY)
    hidden, _ = inputs(batch, torch.float32)
    grads = []
    for head in (Head(linear.weight, linear.bias), Head(module=linear)):
        for inside in (True, False):
            with torch.autocast("cpu", torch.bfloat16):
                logp, entropy = response_logprobs(hidden, head, batch, chunk_size=2)
                if inside:
                    (logp + entropy).sum().backward()
            if not inside:
                (logp + entropy).sum().backward()
            grads.append([logp.detach(), hidden.grad, linear.weight.grad, linear.bias.grad])
            hidden.grad = linear.weight.grad = linear.bias.grad = None
    for other in grads[1:]:
        assert torch.equal(other[0], grads[0][0])
        for x, y in zip(other[1:], grads[0][1:], strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * y.abs().max().item())


def test_callables_that_make_other_shapes_are_refused():
    hidden, weight = inputs(some_batch())
    with pytest.raises(ValueError, match=r"module makes torch.float64 \(1, 2, 11\) of hidden states \[1, 6\]"):
        response_logprobs(hidden, Head(module=lambda x: (x @ weight.T)[:, None].expand(-1, 2, -1)), some_batch())
    with pytest.raises(ValueError, match="head has 6 columns, and rows of 3 columns"):
        response_logprobs(hidden, Head(weight, before=lambda x: x[:, :3]), some_batch())
    with pytest.raises(ValueError, match="response token 9 is outside the vocabulary, the head makes 9 logits"):
        response_logprobs(hidden, Head(module=lambda x: x @ weight[:9].T), some_batch())


def test_a_part_of_a_head_is_refused_where_it_is_known():
    batch, (hidden, weight) = some_batch(), inputs(some_batch())

    def refuse(found):
        assert found is weight
        raise ValueError("no")

    heads.KNOWN[weight] = refuse
    with pytest.raises(ValueError, match="no"):
        response_logprobs(hidden, weight, batch)
    assert response_logprobs(hidden, Head(weight), batch)  # a caller that makes a Head says what it is
    assert response_logprobs(hidden, weight.detach().clone(), batch)


def test_autocast_runs_the_head_in_its_dtype_and_its_backward_alike():
    batch = some_batch()
    hidden, weight = inputs(batch, torch.float32)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    want = response_logprobs(*low, batch)
    (want[0] + want[1]).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        got = response_logprobs(hidden, weight, batch)
        assert got[0].dtype == torch.float32
        (got[0] + got[1]).sum().backward()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(hidden.grad, low[0].grad.float())
    assert torch.equal(weight.grad, low[1].grad.float())
    # A backward inside autocast makes the logits again in the dtype of its forward.
    grads = []
    for enabled in (True, False):
        logp, entropy = response_logprobs(hidden, weight, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad((logp + entropy).sum(), (hidden, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert response_logprobs(hidden.double(), weight.double(), batch)[0].dtype == torch.float64


def test_under_autocast_errors_name_the_dtypes_that_came():
    hidden, weight = inputs(some_batch(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for x, w, names in (
            (hidden.double(), weight, "64, head torch.float32"),
            (hidden, weight.double(), "32, head .*64"),
        ):
            with pytest.raises(ValueError, match=f"hidden is torch.float{names}, expected one dtype"):
                response_logprobs(x, w, some_batch())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    batch = some_batch()
    grads = []
    for wrap in (lambda f, *a: f(*a), lambda f, *a: checkpoint(f, *a, use_reentrant=reentrant)):
        hidden, weight = inputs(batch)
        logp, entropy = wrap(lambda h, w: response_logprobs(h.tanh(), w, batch, chunk_size=2), hidden, weight)
        (logp + entropy).sum().backward()
        grads.append((hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_runs_are_bitwise_equal():
    # Enough tokens on one row that sums over them are spread over threads.
    batch = pack([[1]], [[[2]] * 100_000])
    scale = torch.randn(batch.num_response_tokens, generator=torch.Generator().manual_seed(0))
    runs = []
    for _ in range(5):
        hidden, weight = inputs(batch, torch.float32)
        logp, entropy = response_logprobs(hidden, weight, batch)
        (logp * scale + entropy).sum().backward()
        runs.append((logp, entropy, hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def test_a_dtensor_anywhere_is_named():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        batch = some_batch()
        hidden, weight = (x.detach() for x in inputs(batch, torch.float32))
        there, bias, states = (
            distribute_tensor(x, mesh, [Shard(x.dim() - 1)], src_data_rank=None)
            for x in (weight, torch.zeros(VOCABULARY), hidden)
        )
        linear, norm = torch.nn.Linear(WIDTH, VOCABULARY, bias=False), torch.nn.LayerNorm(WIDTH)
        linear.weight = torch.nn.Parameter(there)
        norm.bias = torch.nn.Parameter(distribute_tensor(torch.zeros(WIDTH), mesh, [Shard(0)], src_data_rank=None))
        whole = r"is a DTensor \(11, 6\).*gathers its weights.*logits_to_keep.*docs/fsdp\.md"
        for head, why in (
            (lambda: there, "head " + whole),
            (lambda: Head(there), "the head's weight " + whole),
            (lambda: Head(weight, bias), r"the head's bias is a DTensor \(11,\)"),
            (lambda: Head(module=linear), r"weight of the head's module \(Linear\) " + whole),
            (lambda: Head(module=lambda x: x @ there.T), "the head's module meets a DTensor"),
            (lambda: Head(module=lambda x: bias.expand(len(x), -1)), "the result of the head's module is a DTensor"),
            (lambda: Head(weight, before=norm), r"bias of what is before the head \(LayerNorm\) is a DTensor \(6,\)"),
        ):
            for compiled in (False, True):
                with pytest.raises(ValueError, match=why):
                    response_logprobs(hidden, head(), batch, compiled=compiled)
        with pytest.raises(ValueError, match=r"weight of the head's module \(Linear\) " + whole):
            Head(module=linear).logits(hidden)
        with pytest.raises(ValueError, match=r"hidden is a DTensor \(1, 12, 6\).*full_tensor"):
            response_logprobs(states, weight, batch)
    finally:
        torch.distributed.destroy_process_group()

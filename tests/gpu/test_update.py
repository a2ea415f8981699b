"""Packing, log-probs and the transformers integration on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dualkv
from dualkv.integrations.transformers import enable
from tests.integrations.tiny import LAYOUT, TREE, Losses, gradients, make_model, token_ids

pytestmark = pytest.mark.any_gpu

VOCAB, WIDTH = 5000, 64


def rollouts(device: str):
    generator = torch.Generator().manual_seed(3)

    def draw(n: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (n,), generator=generator).to(device)

    prompts = [draw(40), draw(1), draw(9)]
    which = [0, 1, 0, 2, 2, 0, 1]
    return [prompts[i] for i in which], [draw(n) for n in (5, 0, 31, 8, 1, 200, 17)]


@pytest.mark.parametrize("labels", ["gather", "roll"])
def test_packing_is_that_of_the_cpu(labels):
    here, there = (dualkv.pack(*rollouts(device), labels=labels) for device in ("cpu", "cuda"))
    assert there.device.type == there.layout.device.type == "cuda"
    assert here.layout == there.layout
    for name in ("input_ids", "position_ids", "predict_rows", "targets"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu()), name
    if labels == "roll":
        assert torch.equal(here.labels, there.labels.cpu())
    values = torch.randn(here.num_response_tokens, 2)
    assert torch.equal(here.unpack(values, "padded"), there.unpack(values.cuda(), "padded").cpu())
    for form in ("list", "nested"):
        rows = zip(here.unpack(values, form), there.unpack(values.cuda(), form), strict=True)
        assert all(torch.equal(a, b.cpu()) for a, b in rows)
    pairs = zip(here.unpack_sequences(here.input_ids), there.unpack_sequences(there.input_ids), strict=True)
    assert all(torch.equal(a, b.cpu()) for a, b in pairs)


@pytest.mark.parametrize("labels", ["gather", "roll"])
def test_logprobs_are_those_of_the_cpu_and_repeat_bitwise(labels):
    batch = dualkv.pack(*rollouts("cpu"), labels=labels)
    batch.layout.mark_used()  # hidden states of these tests come from no attention
    hidden = torch.randn(1, batch.layout.num_tokens, WIDTH, dtype=torch.float64)
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64) / 8

    def run(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in (hidden, head)]
        results = dualkv.response_logprobs(*leaves, batch.to(device), temperature=0.7, chunk_size=50)
        g = torch.linspace(-1, 1, len(results[0]), dtype=torch.float64).to(device, results[0].dtype)
        grads = torch.autograd.grad(results, leaves, (g, g.flip(0)))
        return [x.detach() for x in (*results, *grads)]

    expected, *runs = run("cpu", torch.float64), *(run("cuda", torch.float32) for _ in range(5))
    for got, want in zip(runs[0], expected, strict=True):
        assert (got.cpu() - want).norm() <= 1e-5 * want.norm()
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_logprobs_in_bf16_keep_logits(compiled):
    """Gradients are as near to fp64 with kept logits as without, and bitwise the same."""
    batch = dualkv.pack(*rollouts("cpu")).to("cuda")
    batch.layout.mark_used()
    vocabulary = 60_000
    hidden = torch.randn(batch.layout.num_tokens, 256, device="cuda", dtype=torch.bfloat16)
    head = torch.randn(vocabulary, 256, device="cuda", dtype=torch.bfloat16) / 16

    def run(dtype: torch.dtype, **options: int) -> tuple[list[torch.Tensor], int]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, head)]
        before = torch.cuda.memory_allocated()
        logp, _ = dualkv.response_logprobs(*leaves, batch, chunk_size=64, compiled=compiled, **options)
        held = torch.cuda.memory_allocated() - before
        logp.backward(torch.linspace(-1, 1, len(logp), device="cuda", dtype=logp.dtype))
        return [x.grad for x in leaves], held

    exact, _ = run(torch.float64)
    found, held = run(torch.bfloat16)
    for got, want in zip(found, exact, strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()
    kept, more = run(torch.bfloat16, kept_chunks=2)
    assert more >= held + 2 * 64 * vocabulary * 2
    assert all(map(torch.equal, kept, found))


def test_compiled_log_probs_in_many_forms_one_after_another():
    """Ten forms and more of one function; further temperatures compile nothing. A logit of -inf is never drawn."""
    few, more = (dualkv.pack([[1, 2]], [[[3] * n]]).to("cuda") for n in (1, 9))
    bias = torch.zeros(1000, device="cuda")
    bias[7] = -float("inf")
    forms = [(d, b, t) for d in (torch.float32, torch.bfloat16) for b in (few, more) for t in (1.0, 0.7)]
    forms += [(torch.float32, more, t) for t in (0.8, 0.9, 1.1, 1.2)]
    graphs = None
    for dtype, batch, temperature in forms:
        batch.layout.mark_used()
        hidden = torch.randn(batch.layout.num_tokens, 64, device="cuda", dtype=dtype, requires_grad=True)
        head = dualkv.Head(torch.randn(1000, 64, device="cuda", dtype=dtype) / 8, bias.to(dtype))
        for both in (False, True):
            found = []
            for compiled in (False, True):
                logp, entropy = dualkv.response_logprobs(hidden, head, batch, temperature, compiled=compiled)
                loss = logp.sum() + (entropy.sum() if both else 0)
                found.append([logp, entropy, *torch.autograd.grad(loss, hidden)])
            for ours, eager in zip(*found, strict=True):
                assert torch.isfinite(ours).all()
                near = 0.02 if dtype == torch.bfloat16 else 1e-4
                torch.testing.assert_close(ours, eager, rtol=near, atol=near)
        if temperature in (0.7, 0.8):
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_offloaded_layers_take_a_layout_of_either_device():
    accelerate = pytest.importorskip("accelerate")
    layout, ids = LAYOUT.to("cuda"), token_ids(LAYOUT).cuda()
    with torch.no_grad():
        wanted = enable(make_model()).cuda()(input_ids=ids, dualkv=layout).logits
        places = {"model.embed_tokens": 0, "model.layers.0": "cpu", "model.layers.1": 0, "model.norm": 0}
        places |= {"model.rotary_emb": 0, "lm_head": "cpu"}
        model = enable(accelerate.dispatch_model(make_model(), places, main_device=0))
        for of_rows in (layout, LAYOUT):
            torch.testing.assert_close(model(input_ids=ids, dualkv=of_rows).logits, wanted)


def test_counting_flop_waits_for_nothing():
    q, k, v = (torch.randn(LAYOUT.num_tokens, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    dualkv.attention(q.requires_grad_(), k, v, LAYOUT).sum().backward()  # plans are made at the first call
    found = []
    for device in ("cuda", "cpu"):
        q, k, v = (x.detach().to(device).requires_grad_() for x in (q, k, v))
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            with FlopCounterMode(display=False) as counter:
                dualkv.attention(q, k, v, LAYOUT).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(counter.get_total_flops())
    assert found[0] == found[1] > 0


def branching_rollouts():
    """120 sequences of one prompt and 2 x 3 turns, each continued on its own: a row is in up to 120 of them."""
    generator = torch.Generator().manual_seed(5)
    prompt, *turns = (torch.randint(0, VOCAB, (n,), generator=generator) for n in (50, *[30] * 8))
    paths = [torch.cat([prompt, turns[i % 2], turns[2 + i % 6]]) for i in range(120)]
    sequences = [torch.cat([p, torch.randint(0, VOCAB, (i % 9,), generator=generator)]) for i, p in enumerate(paths)]
    masks = [torch.rand(len(s), generator=generator) < 0.7 for s in sequences]
    for mask in masks:
        mask[0] = False
    return sequences, masks


def test_packed_trees_are_those_of_the_cpu_and_gradients_repeat_bitwise():
    sequences, masks = branching_rollouts()
    here = dualkv.pack_sequences(sequences, masks)
    there = dualkv.pack_sequences([s.cuda() for s in sequences], [m.cuda() for m in masks])
    assert there.device.type == there.layout.device.type == "cuda"
    assert here.layout == there.layout
    for name in ("input_ids", "position_ids", "predict_rows", "targets"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu()), name
    values, weights = torch.randn(2, max(len(here.targets), sum(here.trained_lens)))
    here.layout.mark_used()
    there.layout.mark_used()

    def run(batch, device: str) -> torch.Tensor:
        leaf = values[: len(here.targets)].to(device, copy=True).requires_grad_()
        (torch.cat(batch.unpack(leaf)) * weights[: sum(here.trained_lens)].to(device)).sum().backward()
        return leaf.grad.cpu()

    expected, *runs = run(here, "cpu"), *(run(there, "cuda") for _ in range(5))
    torch.testing.assert_close(runs[0], expected)
    assert all(torch.equal(again, runs[0]) for again in runs[1:])
    whole = zip(here.unpack(values[: len(here.targets)], whole=True), sequences, strict=True)
    assert all(len(row) == len(s) for row, s in whole)


def test_a_token_outside_the_vocabulary_is_found_on_the_cpu():
    batch = dualkv.pack(*rollouts("cpu"))
    batch.layout.mark_used()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        dualkv.response_logprobs(torch.zeros(batch.layout.num_tokens, 8), torch.zeros(10, 8), batch)


@pytest.mark.parametrize("layout", [LAYOUT, TREE], ids=["prompts", "tree"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, None)])
def test_a_model_packed_is_the_model_replicated(dtype, bound, layout):
    """bf16 has no bound of its own: its error against fp64 may be twice the replicated way's."""
    layout = layout.to("cuda")

    def run(dtype: torch.dtype, way: str) -> dict[str, torch.Tensor]:
        model = enable(make_model("qwen3", torch.float64)).to("cuda", dtype)
        losses = Losses(layout, token_ids(layout).cuda(), dtype)
        losses.weight = losses.weight.cuda()
        logp, loss = losses.packed(model) if way == "packed" else losses.replicated(model)[1:]
        loss.backward()
        return {"log-probs": logp.detach().double(), **{n: g.double() for n, g in gradients(model).items()}}

    truth, packed = run(torch.float64, "replicated"), run(dtype, "packed")
    noise = run(dtype, "replicated") if bound is None else {}
    for name, want in truth.items():
        error = (packed[name] - want).norm() / want.norm()
        allowed = 2 * (noise[name] - want).norm() / want.norm() + 1e-5 if bound is None else bound
        assert error <= allowed, (name, error.item(), float(allowed))

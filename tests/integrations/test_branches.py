"""Models walked over a tree a part at a time, against one pass over the whole tree."""

from __future__ import annotations

import pytest
import torch

import dualkv
from dualkv.data.parts import plan_parts
from dualkv.integrations.transformers import enable, recompute_layers
from tests.integrations.test_transformers import double_throughout
from tests.integrations.tiny import assert_close, gradients, make_model

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [5, 6, 7, 8, 9, 10]
SEQUENCES = [
    [*PROMPT, 11, 12, 13, 14, 15],
    [*PROMPT, 11, 12, 20, 21, 22, 23, 24, 25],
    [*PROMPT, 11, 12, 20, 21, 30],
    [*PROMPT, 40, 41],
    [*PROMPT[:3], 50, 51, 52],
    [60, 61, 62],
    [*PROMPT, 11, 12, 13, 14, 15],
]


def packed() -> dualkv.PackedSequences:
    masks = [[i > 0 and (i + k) % 3 > 0 for i in range(len(s))] for k, s in enumerate(SEQUENCES)]
    return dualkv.pack_sequences(SEQUENCES, masks)


def whole(model, batch, weights):
    hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
    logp, _ = dualkv.response_logprobs(hidden, model.lm_head.weight, batch)
    loss = (torch.cat(batch.unpack(logp)) * weights).sum()
    loss.backward()
    return loss.detach()


def walked(model, batch, weights, budget, found=None):
    def forward(ids, branch):
        return model.model(input_ids=ids, dualkv=branch).last_hidden_state

    def loss(hidden, part):
        logp, _ = dualkv.response_logprobs(hidden, model.lm_head.weight, part)
        if found is not None:
            found[part.places] = part.expand(logp).detach()
        return (part.expand(logp) * weights[part.places]).sum()

    return dualkv.walk(batch, budget, forward, loss)


def weights_of(batch, dtype):
    return torch.randn(sum(batch.trained_lens), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize("budget", [1, 4, 7, 100])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "llama"])
def test_walked_in_fp64_is_one_pass(name, budget):
    batch = packed()
    weights = weights_of(batch, torch.float64)
    with double_throughout(name):
        model, other = (enable(make_model(name, dtype=torch.float64)).train() for _ in range(2))
        wanted = whole(model, batch, weights)
        assert_close("loss", walked(other, batch, weights, budget), wanted, 1e-12)
        for parameter, gradient in gradients(model).items():
            assert_close(parameter, gradients(other)[parameter], gradient, 1e-12)


@pytest.mark.parametrize("keep", ["nothing", "attention"])
def test_walked_with_gradient_checkpointing(keep):
    batch = packed()
    weights = weights_of(batch, torch.float32)
    model, other = (enable(make_model()).train() for _ in range(2))
    wanted = whole(model, batch, weights)
    recompute_layers(other, keep)
    assert_close("loss", walked(other, batch, weights, 4), wanted, 1e-5)
    for parameter, gradient in gradients(model).items():
        assert_close(parameter, gradients(other)[parameter], gradient, 1e-5)


def test_log_probs_without_gradients_and_what_is_refused():
    batch = packed()
    weights = weights_of(batch, torch.float32)
    model = enable(make_model()).train()
    found = torch.full_like(weights, float("nan"))
    with torch.no_grad():
        hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
        wanted = torch.cat(batch.unpack(dualkv.response_logprobs(hidden, model.lm_head.weight, batch)[0]))
        walked(model, batch, weights, 5, found)
    assert_close("log-probs", found, wanted, 1e-5)
    assert all(p.grad is None for p in model.parameters())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=False"):
        walked(model, batch, weights, 5)


def test_frozen_projections():
    """Keys and values without gradients, as of a model whose attention is frozen: the others get theirs."""
    batch = packed()
    weights = weights_of(batch, torch.float32)
    model, other = (enable(make_model()).train() for _ in range(2))
    for one in (model, other):
        one.requires_grad_(False)
        one.model.layers[-1].mlp.requires_grad_()
    whole(model, batch, weights)
    walked(other, batch, weights, 4)
    kept = gradients(other)
    for parameter, gradient in gradients(model).items():
        assert_close(parameter, kept[parameter], gradient, 1e-5)


def test_recurrent_layers_are_refused():
    from dualkv.models import CONFIGS, load_model

    assert "tiny-hybrid" in CONFIGS
    model = enable(load_model("tiny-hybrid", torch.float32, torch.device("cpu"), 0))
    batch = packed()
    assert len(plan_parts(batch, 4)) > 1
    with pytest.raises(ValueError, match="recurrent layers"):
        walked(model, batch, weights_of(batch, torch.float32), 4)

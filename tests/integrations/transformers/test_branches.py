"""Models walked over a tree a part at a time, against one pass over the whole tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import dualkv
from dualkv.branches import Branch
from dualkv.integrations.transformers import enable, recompute_layers
from tests.integrations.doubled import double_throughout
from tests.integrations.tiny import assert_close, assert_gradients, gradients, make_model
from tests.integrations.transformers import test_recurrent

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


def forward_of(model):
    return lambda ids, branch: model.model(input_ids=ids, dualkv=branch).last_hidden_state


def values_of(model):
    return lambda hidden, part: part.expand(dualkv.response_logprobs(hidden, model.lm_head.weight, part)[0])


def walked(model, batch, weights, budget, found=None, **settings):
    values = values_of(model)

    def loss(hidden, part):
        logp = values(hidden, part)
        if found is not None:
            found[part.places] = logp.detach()
        return (logp * weights[part.places]).sum()

    return dualkv.walk(batch, budget, forward_of(model), loss, **settings)


def weights_of(batch, dtype):
    return torch.randn(sum(batch.trained_lens), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )


def check_walks(model, batch, budgets, bound, keeps=(None, "nothing", "attention")):
    """Compare walks with one pass, without checkpointing and with it."""
    weights = weights_of(batch, next(model.parameters()).dtype)
    wanted = whole(model, batch, weights)
    expected = {name: gradient.clone() for name, gradient in gradients(model).items()}
    for keep in keeps:
        if keep is not None:
            recompute_layers(model, keep)
        for budget in budgets:
            model.zero_grad()
            assert_close(f"loss, {keep}, {budget}", walked(model, batch, weights, budget), wanted, bound)
            assert_gradients(model, expected, bound)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "llama"])
def test_walked_in_fp64_is_one_pass(name):
    with double_throughout():
        check_walks(enable(make_model(name, dtype=torch.float64)).train(), packed(), (1, 4, 7, 100), 1e-12)


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
    model = enable(make_model()).train().requires_grad_(False)
    model.model.layers[-1].mlp.requires_grad_()
    check_walks(model, packed(), (4,), 1e-5, (None,))


def test_a_layer_that_runs_twice():
    model = make_model("llama", dtype=torch.float64)
    model.model.layers[1] = model.model.layers[0]
    with double_throughout():
        check_walks(enable(model).train(), packed(), (1, 4), 1e-12)


def test_a_recurrent_layer_that_runs_twice():
    with double_throughout():
        model = test_recurrent.make("qwen3_5_text", torch.float64)
        layers = [i for i, layer in enumerate(model.model.layers) if hasattr(layer, "linear_attn")]
        model.model.layers[layers[1]] = model.model.layers[layers[0]]
        check_walks(enable(model).train(), packed(), (3, 7), 1e-9, (None, "nothing"))


def test_stacks_that_run_in_cycles():
    """Modules of HRM run in loops, all with gradients here; modules that it runs without gradients are refused."""
    if not hasattr(transformers, "HrmTextConfig"):
        pytest.skip("this version of transformers has no HRM")
    batch = packed()

    def model(trained: list[int]):
        config = transformers.HrmTextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2,
            num_layers_per_stack=1, H_cycles=2, L_cycles=2, L_bp_cycles=trained, pad_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        return enable(transformers.HrmTextForCausalLM(config).double(), check=False).train()

    check_walks(model([2, 2]), batch, (4,), 1e-9, (None, "nothing"))
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        walked(model([1, 1]), batch, weights_of(batch, torch.float64), 4)


def test_a_forgotten_branch_is_refused():
    model, batch = enable(make_model()).train(), packed()
    with pytest.raises(ValueError, match="dualkv=branch"):
        dualkv.walk(batch, 4, lambda ids, branch: model.model(input_ids=ids).last_hidden_state)
    assert not batch.layout._segments.use.seen


# Layers of one kind are walked in one way: a family of each, two more that hold their states otherwise.
WALKED = ("qwen3_5_text", "kimi_linear", "nemotron_h", "falcon_h1", "zamba2", "lfm2", "minimax")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in WALKED else pytest.mark.slow) for name in test_recurrent.FAMILIES],
)
def test_recurrent_layers_in_fp64(family):
    """States and last inputs of convolutions come from the path, also where it is cut within a segment."""
    budgets = (1, 3, 7, 100) if family == "qwen3_5_text" else (3,)
    with double_throughout():
        check_walks(enable(test_recurrent.make(family, torch.float64)), packed(), budgets, 1e-9, (None,))


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "lfm2", "minimax"])
def test_long_recurrent_layers_with_gradient_checkpointing(family):
    """Segments longer than a chunk of the scans, shorter than a convolution, and cut at any row."""
    if family not in test_recurrent.FAMILIES:
        pytest.skip("this version of transformers hands no arguments on to its short convolutions")
    numbers = np.random.default_rng(0).integers(3, 90, 400).tolist()
    trunk = numbers[:150]
    sequences = [trunk, [*trunk[:80], *numbers[150:240]], [*trunk[:81], *numbers[240:250]], numbers[250:320]]
    sequences += [[*sequences[1][:100], 91], [*sequences[1][:100], 92, 93], [*trunk, *numbers[320:]], [*trunk, 94]]
    batch = dualkv.pack_sequences(sequences)
    budgets = (23, 90) if family == "qwen3_5_text" else (23,)
    with double_throughout():
        check_walks(enable(test_recurrent.make(family, torch.float64)), batch, budgets, 1e-9, ("nothing",))


def test_states_of_the_path_matter(monkeypatch):
    """The results differ without the states of the path: what the tests above compare depends on them."""
    batch = packed()
    weights = weights_of(batch, torch.float64)
    with double_throughout():
        model = enable(test_recurrent.make("qwen3_5_text", torch.float64))
        wanted = whole(model, batch, weights)
        keep = Branch.keep

        def zeros(self, key, *tensors):
            keep(self, key, *((x * 0 for x in tensors) if isinstance(key[0], tuple) else tensors))

        monkeypatch.setattr(Branch, "keep", zeros)
        assert (walked(model, batch, weights, 4) - wanted).abs() > 1e-4 * wanted.abs()

"""Models whose hidden states and log-probs have the same bits in every packing; others are refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.functional import pad
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import dualkv
from dualkv.fixed_rows import linear
from dualkv.integrations.transformers import disable, enable, head, invariant, selfcheck
from dualkv.integrations.transformers.invariant import differing_rows
from tests.integrations.transformers.test_media import make, rollouts

SMALL = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=16, **SMALL)),
    "biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "windows and a cap": lambda: Gemma2ForCausalLM(Gemma2Config(head_dim=16, sliding_window=70, **SMALL)),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def logprobs(model, prompt, responses):
    batch = dualkv.pack([prompt], [responses])
    hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
    return dualkv.response_logprobs(hidden, head(model), batch)[0]


def test_rows_have_the_same_bits_in_every_packing(model, monkeypatch):
    enable(model)
    with monkeypatch.context() as patch:
        lengths = 150, 30, 31, 31, 61, 61, 40, 130, 130
        parents = (parent for _, parent in invariant.LENGTHS)
        patch.setattr(invariant, "LENGTHS", tuple(zip(lengths, parents, strict=True)))
        assert differing_rows(model.model) > 0, "or the test could not fail"
    enable(model, batch_invariant=True)
    assert differing_rows(model.model) == 0
    disable(model)
    assert not any("dualkv_batch_invariant" in vars(module) for module in model.modules())


@torch.no_grad()
def test_log_probs_of_a_response_do_not_depend_on_the_others(model):
    """Lengths are multiples of 16, as the CPU's functions compute the last elements of a tensor by other code."""
    enable(model, batch_invariant=True)
    draw = torch.Generator().manual_seed(1)
    prompt, *responses = (torch.randint(9, 200, (n,), generator=draw).tolist() for n in (80, 32, 16, 48))
    together = logprobs(model, prompt, responses).split([32, 16, 48])
    for some, response in zip(together, responses, strict=True):
        assert torch.equal(logprobs(model, prompt, [response]), some)
    assert torch.equal(logprobs(model, prompt, responses[1:])[:16], together[1])


def test_gradients_are_those_of_other_packed_calls(model):
    found = []
    for asked in ({}, {"batch_invariant": True}):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        enable(model, **asked)
        logprobs(model, [5] * 40 + [7] * 8, [[9, 8, 7] * 5, [4] * 9]).sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    for name, want in found[0].items():
        torch.testing.assert_close(found[1][name], want, atol=2e-5 * float(want.abs().max()), rtol=1e-4)


def test_a_model_that_differs_is_refused(monkeypatch):
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    monkeypatch.setattr(invariant, "differing_rows", lambda *_, **__: 7)
    with pytest.raises(ValueError, match="Qwen3Model is not batch-invariant: 7 rows of a small copy have other bits"):
        enable(MODELS["qwen3"](), batch_invariant=True)


def test_a_call_without_a_layout_is_the_models_own(model):
    ids = torch.arange(9, 49)[None]
    want = model(input_ids=ids).logits
    enable(model, batch_invariant=True)
    assert torch.equal(model(input_ids=ids).logits, want)


def test_low_rank_adapters():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    for variant, refused in ({}, None), ({"use_dora": True}, "DoraLinearVariant"):
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **variant)
        adapted = peft.get_peft_model(MODELS["qwen3"](), config).eval()
        if refused is None:
            enable(adapted, batch_invariant=True)
            assert differing_rows(adapted.base_model.model.model) == 0
        else:
            with pytest.raises(ValueError, match=refused):
                enable(adapted, batch_invariant=True)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=2, **SMALL)), "MixtralTopKRouter"),
        (lambda: Lfm2ForCausalLM(Lfm2Config(layer_types=["conv", "full_attention"], **SMALL)), "recurrent"),
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=200, n_embd=64, n_layer=1, n_head=4)), "Conv1D"),
    ],
    ids=["experts", "recurrent", "other products"],
)
def test_what_is_not_known_to_be_so_is_refused(make, named):
    model = make().eval()
    enable(model)
    with pytest.raises(ValueError, match=f"batch_invariant is True.*{named}"):
        enable(model, batch_invariant=True)
    assert model.config._attn_implementation.startswith("dualkv"), "it stays enabled as it was"


def test_bad_input():
    model = MODELS["qwen3"]()
    with pytest.raises(TypeError, match="batch_invariant is a int, expected True or False"):
        enable(model, batch_invariant=1)
    with pytest.raises(ValueError, match="batch_invariant is True with fast=True"):
        enable(model, batch_invariant=True, fast=True)
    enable(model, batch_invariant=True, check=False)
    short = dualkv.pack([[1, 2]], [[[3, 4]]])
    hidden = model.model(input_ids=short.input_ids, dualkv=short.layout).last_hidden_state
    with pytest.raises(ValueError, match="compiled is True and the head is batch-invariant"):
        dualkv.response_logprobs(hidden, head(model), short, compiled=True)
    batch = dualkv.pack_sequences([[1, 2, 3, 4] * 6 + [5] * n for n in (9, 8)])
    with pytest.raises(ValueError, match="batch_invariant is True in a walk"):
        dualkv.walk(
            batch,
            16,
            lambda ids, branch: model.model(input_ids=ids, dualkv=branch)[0],
            lambda hidden, part: hidden.sum(),
        )


@pytest.mark.parametrize("shape", [(7, 24), (1, 40, 24), (0, 24)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_fixed_rows(shape, has_bias):
    x, weight, bias = torch.randn(shape), torch.randn(30, 24), torch.randn(30) if has_bias else None
    leaves = [y.double().requires_grad_() for y in (x, weight, *([bias] if has_bias else []))]
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    grad = torch.randn(*shape[:-1], 30).double()
    for got, want in zip(
        torch.autograd.grad(linear(*leaves, *[None] * (not has_bias)), leaves, grad),
        torch.autograd.grad(F.linear(*leaves), leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_images(family):
    """Rows behind images, and of images, whatever other images the tower gets in the same call."""
    prompts, responses, media = rollouts(family, ((1, 4, 8),), ((1, 4, 4), (1, 8, 12)), ((1, 16, 4),))
    responses = [torch.arange(20, 20 + 16 * (i % 3 + 1)) % 80 for i in range(len(responses))]
    prompts = [torch.cat([ids, torch.arange(5, 5 - len(ids) % 16 + 16)]) for ids in prompts]
    media = [
        entry
        | {"mm_token_type_ids": pad(entry["mm_token_type_ids"], (0, len(ids) - len(entry["mm_token_type_ids"][0])))}
        for ids, entry in zip(prompts, media, strict=True)
    ]
    model = make(family).eval()

    def hidden(some):
        batch = dualkv.pack(*([of[i] for i in some] for of in (prompts, responses)), media=[media[i] for i in some])
        states = model.model(input_ids=batch.input_ids, dualkv=batch.layout, **batch.media).last_hidden_state
        return batch.unpack_sequences(states)

    def differing():
        whole = hidden(range(len(prompts)))
        packings = [0, 3], [5, 1], [2], [4], [6, 5, 4]
        return sum(int((x != whole[i]).sum()) for some in packings for i, x in zip(some, hidden(some), strict=True))

    enable(model)
    assert differing() > 0, "or the test could not fail"
    enable(model, batch_invariant=True)
    assert differing() == 0


def test_towers_that_are_not_known_to_be_so():
    with pytest.raises(ValueError, match="batch_invariant is True of InternVLModel, whose images"):
        enable(make("InternVL"), batch_invariant=True)
    model = make("Qwen3VL")
    model.model.visual.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="the vision tower has attention 'flash_attention_2', expected one of"):
        enable(model, batch_invariant=True)

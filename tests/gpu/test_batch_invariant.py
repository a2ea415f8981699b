"""Rows whose bits depend on their path alone, whatever they are packed with; as exact as without."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import dualkv
from codegen.spec import forward_spec
from dualkv import Layout
from dualkv.integrations.transformers import enable, head, recompute_layers
from dualkv.integrations.transformers.invariant import LEAST_ROWS, differing_rows
from tests import oracle
from tests.gpu.test_forward import LAYOUTS, inputs
from tests.integrations.transformers.test_media import DEEP, rollouts
from tools.bench import invariance

CALLS = [(heads, dtype) for heads in invariance.HEADS for dtype in ("bf16", "fp16")]
WIDTHS = {"hidden_size": 1024, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
          "num_key_value_heads": 2}  # fmt: skip
TREE = Layout.from_segments([0, 150, 200, 260, 700, 710, 900], [-1, 0, 1, 1, 0, 4])


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    specs = [
        forward_spec(dtype, dim, heads // kv_heads, True, head_dim_v=dim_v)
        for (dim, dim_v, heads, kv_heads), dtype in [*CALLS, *((heads, "bf16") for heads in invariance.OTHERS)]
    ]
    specs += [forward_spec("bf16", 64, 4, True)]
    specs += [forward_spec("bf16", 128, 4, True, name, short) for name, short in invariance.FEATURES_OF_KERNELS]
    compile_all([*specs, *(forward_spec("bf16", 128, 4, trees) for trees in (False, True))])


@pytest.mark.parametrize(("heads", "dtype"), CALLS, ids=str)
def test_rows_have_the_same_bits_in_every_batch(heads, dtype):
    rng = random.Random(str((heads, dtype)))
    for seed in range(40):
        case = invariance.draw(rng, seed)._replace(heads=heads, dtype=dtype, features={})
        assert invariance.differing(case, "cuda", rng, batch_invariant=True)[0] == 0, case


@pytest.mark.parametrize("heads", invariance.OTHERS, ids=str)
def test_other_head_dims(heads):
    rng = random.Random(str(heads))
    for seed in range(10):
        case = invariance.draw(rng, seed)._replace(heads=heads, dtype="bf16", features={})
        assert invariance.differing(case, "cuda", rng, batch_invariant=True)[0] == 0, case


@pytest.mark.parametrize("features", invariance.FEATURES[1:], ids=str)
def test_features(features):
    rng = random.Random(str(features))
    for seed in range(30):
        case = invariance.draw(rng, seed)._replace(heads=(128, 128, 8, 2), dtype="bf16", features=features)
        assert invariance.differing(case, "cuda", rng, batch_invariant=True)[0] == 0, case


def test_without_it_bits_depend_on_the_batch():
    rng = random.Random(0)
    case = invariance.draw(rng, 0)._replace(
        lengths=(500, 333, 512, 77, 129), parent=(-1, 0, 0, 0, 0), heads=(128, 128, 8, 2), dtype="bf16", scale=8.0,
        features={},
    )  # fmt: skip
    assert invariance.differing(case, "cuda", rng)[0] > 0


@pytest.mark.parametrize("name", [*LAYOUTS, "tree", "silent prompts"])
def test_results_are_as_exact_as_without(name):
    """The bound is twice plain PyTorch's error against float64, as of every other call. Large scores take the recompute
    pass."""
    layout = {"tree": TREE, "silent prompts": LAYOUTS["one group"].without_prompt_queries()}.get(name) or LAYOUTS[name]
    layout = layout.to("cuda")
    for scale in (1.0, 30.0):
        q, k, v = inputs(layout)
        q = q * scale
        out, lse = dualkv.attention(q, k, v, layout, batch_invariant=True, return_lse=True)
        arguments = layout.offsets, layout.parent, 128**-0.5
        want, want_lse = oracle.attention(q.double(), k.double(), v.double(), *arguments)
        plain, _ = oracle.attention(q, k, v, *arguments)
        asks = torch.arange(len(q), device="cuda") >= (300 if name == "silent prompts" else 0)
        error, plain_error = ((x.double() - want)[asks] for x in (out, plain))
        assert error.abs().max() <= 2 * plain_error.abs().max() + 1e-5
        assert error.norm() <= 2 * plain_error.norm() + 1e-5 * want.norm()
        assert (lse - want_lse)[:, asks].abs().max() <= 1e-4 * max(1.0, want_lse.abs().max().item() / 100)


# ---------------------------------------------------------------- models
@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = Qwen3ForCausalLM(Qwen3Config(head_dim=128, **WIDTHS)).to(torch.bfloat16)
    recompute_layers(made)
    return made.train()


def ids(*lengths):
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(9, 80, (n,), generator=draw) for n in lengths]


def test_models(model):
    enable(model)
    assert differing_rows(model.model) > 0, "or the test could not fail"
    enable(model, batch_invariant=True)
    assert differing_rows(model.model) == 0


def test_log_probs_before_and_in_an_update(model):
    """Chunks of the head have all numbers of rows: in the whole group one is full, alone most have a few."""
    enable(model, batch_invariant=True)
    prompt, *responses = ids(300, 1030, 1, 2, 5, 17, 31, 64, 200, 511, 700, 1024, 1025)

    def logp(some):
        batch = dualkv.pack([prompt], [[responses[i] for i in some]], device="cuda")
        hidden = model.model(batch.input_ids, dualkv=batch.layout)[0]
        return batch.unpack(dualkv.response_logprobs(hidden, head(model), batch)[0])

    together = logp(range(len(responses)))
    assert together[0].requires_grad
    with torch.no_grad():
        for some in (*([i] for i in range(len(responses))), [7, 2], [1, 3, 4], [9, 8, 11, 0]):
            for i, again in zip(some, logp(some), strict=True):
                assert torch.equal(again, together[i].detach()), (some, len(responses[i]))


@torch.no_grad()
@pytest.mark.parametrize("rows", [LEAST_ROWS, 33, 48, 100, 1000])
def test_few_rows(model, rows):
    """Norms sum over columns with as many threads as rows leave."""
    enable(model, batch_invariant=True)
    prompt, response, *others = ids(rows - 2, 2, 3000, 5)
    alone = dualkv.pack([prompt], [[response]], device="cuda")
    beside = dualkv.pack([prompt, others[0]], [[response], [others[1]]], device="cuda")
    got, want = (model.model(x.input_ids, dualkv=x.layout)[0][0, :rows] for x in (alone, beside))
    assert torch.equal(got, want)


@torch.no_grad()
def test_too_few_rows(model):
    enable(model, batch_invariant=True)
    few = dualkv.pack([[5] * 9], [[[7] * 8]], device="cuda")
    with pytest.raises(ValueError, match="batch_invariant is True and the batch has 17 rows, expected at least 32"):
        model.model(few.input_ids, dualkv=few.layout)


@torch.no_grad()
def test_images():
    torch.manual_seed(0)
    prompts, _, media = rollouts("Qwen3VL", ((1, 16, 32),), ((1, 12, 34), (1, 40, 12)), ((1, 64, 80),))
    responses = ids(700, 3, 410, 1, 64, 333, 1500)
    places = {"image_token_id": 88, "video_token_id": 89, "vision_start_token_id": 90, "vision_end_token_id": 91}
    text = WIDTHS | {"head_dim": 128, "vocab_size": 96, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}}  # fmt: skip
    tower = DEEP | {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 1024}
    with torch.device("cuda"):
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower, **places))
    model = model.to(torch.bfloat16).eval()

    def hidden(some):
        batch = dualkv.pack(
            *([of[i] for i in some] for of in (prompts, responses)), media=[media[i] for i in some], device="cuda"
        )
        states = model.model(input_ids=batch.input_ids, dualkv=batch.layout, **batch.media).last_hidden_state
        return batch.unpack_sequences(states)

    def differing():
        whole = hidden(range(len(prompts)))
        packings = [0, 3], [5, 1], [2], [4, 1], [6, 5, 4]
        return sum(int((x != whole[i]).sum()) for some in packings for i, x in zip(some, hidden(some), strict=True))

    enable(model)
    assert differing() > 0, "or the test could not fail"
    enable(model, batch_invariant=True)
    assert differing() == 0

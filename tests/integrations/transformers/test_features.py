"""Models with sliding windows, chunks, sinks, softcapping: packed groups against every replicated sequence alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import dualkv

tf = pytest.importorskip("transformers")

from dualkv.integrations.transformers import enable, head, masks, recompute_layers, selfcheck  # noqa: E402
from tests.integrations.tiny import (  # noqa: E402
    FEATURED,
    FULL,
    LAYOUT,
    SIZES,
    SLIDING,
    TREE,
    assert_close,
    make_featured,
    paths,
    token_ids,
)
from tests.integrations.transformers.test_enabling import check_packed  # noqa: E402

# Windows and chunks of fewer tokens than a prompt has, than a response, and than both; of 4, they end at any depth.
CASES = {"both": (LAYOUT, 3), "either": (LAYOUT, 5), "response": (LAYOUT, 8), "tree": (TREE, 4)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FEATURED)
def test_packed_is_replicated(name: str, case: str) -> None:
    layout, window = CASES[case]
    check_packed(partial(make_featured, name, window), layout)


@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_with_recomputed_layers(name: str) -> None:
    check_packed(partial(make_featured, name, 5), prepare=lambda model: recompute_layers(model, "attention"))


@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_compiled_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model = enable(make_featured(name, 5), check=False)
    ids = token_ids(LAYOUT)
    expected = model(input_ids=ids, dualkv=LAYOUT).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids, dualkv=LAYOUT).logits, expected)


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("name", ["phimoe", "llama4"])
def test_enable_notices_a_window_that_is_off_by_one(name: str, off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read = masks.read

    def other(mask: Any, selects: bool) -> masks.Visible | None:
        found = read(mask, selects)
        return found and masks.Visible(*(size and size + off for size in found))

    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    enable(make_featured(name, 100))
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    monkeypatch.setattr(masks, "read", other)
    with pytest.raises(ValueError, match="differ by"):
        enable(make_featured(name, 100))


@pytest.mark.parametrize(("name", "field"), [("mistral", "sliding_window"), ("llama4", "attention_chunk_size")])
def test_the_size_of_windows_and_chunks(name: str, field: str) -> None:
    """Any from 1 on: one that is longer than every path hides nothing."""
    ids, logits = token_ids(LAYOUT), []
    for size in (1000, masks.LONGEST, 2**29, 10**9):
        model = enable(make_featured(name, size).eval(), check=False)
        logits.append(model(input_ids=ids, dualkv=LAYOUT).logits)
    assert all(torch.equal(one, logits[0]) for one in logits)
    for size in (-1, *([0] if name == "mistral" else [])):  # by 0 transformers itself divides, for chunks
        with pytest.raises(ValueError, match=f"{field} is {size}, expected 1 or more"):
            enable(make_featured(name, size))


def test_a_window_that_no_layer_has() -> None:
    """transformers writes the field into the configuration of a Llama, whose layers do not read it. Qwen2-MoE makes the
    mask too."""
    torch.manual_seed(0)
    assert enable(tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, sliding_window=0)))
    config = tf.Qwen2MoeConfig(**SIZES, use_sliding_window=False, num_experts=4)
    assert config.sliding_window == 0
    assert enable(tf.Qwen2MoeForCausalLM(config))


# ---------------------------------------------------------------- around the decoder
def test_log_probs_of_a_capped_head_without_logits() -> None:
    model = make_featured("gemma2", 5, final_logit_softcapping=0.5).eval()
    draw = torch.Generator().manual_seed(3)
    prompt, *responses = (torch.randint(3, 96, (n,), generator=draw) for n in (9, 4, 7))
    batch = dualkv.pack([prompt], [responses])
    hidden = enable(model).model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
    logp, _ = dualkv.response_logprobs(hidden, head(model), batch)
    for got, response in zip(batch.unpack(logp), responses, strict=True):
        logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0, 8:-1]
        torch.testing.assert_close(got, logits.log_softmax(-1).gather(1, response[:, None])[:, 0])


def test_a_model_that_makes_masks_for_its_decoder() -> None:
    """Gemma 3 with its vision tower hands the decoder masks, which say the windows of a packed call too."""
    torch.manual_seed(0)
    text = tf.Gemma3TextConfig(**SIZES, layer_types=[SLIDING, FULL], sliding_window=5)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = tf.Gemma3Config(text_config=text, vision_config=vision, image_token_index=95)
    model = enable(tf.Gemma3ForConditionalGeneration(config).eval())
    ids = token_ids(LAYOUT) % 90 + 3
    logits = model(input_ids=ids, dualkv=LAYOUT, position_ids=LAYOUT.position_ids[None]).logits[0]
    for path, _ in paths(LAYOUT):
        alone = model(input_ids=ids[:, path], use_cache=False).logits[0]
        assert_close(f"logits of rows {path}", logits[path], alone, 1e-5)
    with pytest.raises(ValueError, match="its token_type_ids is 1: expected 1 for the image_token_id 95"):
        model(input_ids=ids, dualkv=LAYOUT, token_type_ids=torch.ones_like(ids))

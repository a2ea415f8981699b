"""Models and calls that `dualkv.integrations.transformers` cannot compute raise one sentence, before anything runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import dualkv

tf = pytest.importorskip("transformers")

from dualkv.integrations.transformers import (  # noqa: E402
    disable,
    enable,
    experts,
    head,
    layers,
    recompute_layers,
    suspended,
)
from tests.integrations.tiny import (  # noqa: E402
    EXPERTS,
    LAYOUT,
    SIZES,
    assert_close,
    hooks,
    make_featured,
    make_model,
    paths,
    token_ids,
)


def tiny(family: str, head: str = "ForCausalLM", **settings: Any) -> Any:
    config = getattr(tf, f"{family}Config")(**{**SIZES, **settings})
    return getattr(tf, f"{family}{head}")(config)


def without_weights(config: Any, cls: str) -> Any:
    with torch.device("meta"):
        return getattr(tf, cls)._from_config(config)


class Drafter(tf.Qwen3ForCausalLM):
    def forward(self, inputs_embeds=None, shared_kv_states=None, **kwargs):
        raise NotImplementedError


REFUSED_MODELS = {
    "a recurrent layer of another kind": (
        lambda: tiny("Jamba", attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4, num_experts=1),
        r"layers\.0\.mamba \(JambaMambaMixer\) carries a recurrent state, and is of no kind that runs packed",
    ),
    "recurrent layers of another kind alone": (
        lambda: tiny("Mamba", state_size=4),
        r"backbone\.layers\.0\.mixer \(MambaMixer\) carries a recurrent state, and is of no kind that runs packed",
    ),
    "recurrent state": (
        lambda: tiny("Qwen3Next", layer_types=["full_attention"] * 2, **EXPERTS),
        r"Qwen3NextModel carries a recurrent state",
    ),
    "no registry": (lambda: tiny("Bloom", n_head=4, hidden_size=48), r"BloomForCausalLM has no causal attention layer"),
    "not causal": (lambda: tiny("Bert", "Model"), r"BertModel has no causal attention layer"),
    "encoder-decoder": (
        lambda: tiny("Bart", "ForConditionalGeneration", d_model=48, encoder_layers=1, decoder_layers=1),
        r"BartDecoder is an encoder-decoder model",
    ),
    "cross-attention": (
        lambda: tiny("GPT2", "LMHeadModel", n_embd=48, n_head=6, add_cross_attention=True),
        r"transformer\.h\.0\.crossattention \(GPT2Attention\) is not causal self-attention",
    ),
    "no call without images": (
        lambda: without_weights(tf.Blip2Config(), "Blip2ForConditionalGeneration"),
        r"^Blip2ForConditionalGeneration takes no call without pixel_values, which cannot run packed",
    ),
    "no call without another model's keys": (
        lambda: Drafter(tf.Qwen3Config(**SIZES)),
        r"^Drafter takes no call without shared_kv_states, which cannot run packed",
    ),
    "no model": (lambda: nn.Linear(2, 2), r"Linear has no causal attention layer"),
    "layers of a head dim of 520": (
        lambda: tf.Gemma4ForCausalLM._from_config(
            tf.Gemma4TextConfig(**SIZES, layer_types=["sliding_attention", "full_attention"], global_head_dim=520)
        ),
        r"model\.layers\.1\.self_attn \(Gemma4TextAttention\) has head dim 520, dualkv\.attention computes up to 512",
    ),
    "a head dim of 520": (
        lambda: tiny("Llama", head_dim=520),
        r"model\.layers\.0\.self_attn \(LlamaAttention\) has head dim 520, dualkv\.attention computes up to 512",
    ),
    "attention weights": (
        lambda: make_model(attention="eager", output_attentions=True),
        r"Qwen3Model is configured with output_attentions=True",
    ),
}


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_models_that_cannot_be_packed_are_refused(case: str) -> None:
    build, message = REFUSED_MODELS[case]
    model = build()
    with pytest.raises(ValueError, match=message):
        enable(model)
    assert hooks(model) == 0


@pytest.mark.skipif(not hasattr(tf.modeling_layers, "MtpModel"), reason="an earlier transformers")
def test_prediction_layers_are_refused() -> None:
    """Layers of multi-token prediction take the next row for the next token. transformers runs them to draft tokens."""
    model = tiny("Llama", num_mtp_layers=1)
    drafter = tf.modeling_layers.MtpModel(model, 1)
    with pytest.raises(ValueError, match=r"^MtpModel takes no call without last_hidden_states"):
        enable(drafter)
    enable(model)
    ids, positions = token_ids(LAYOUT), LAYOUT.position_ids[None]
    hidden = model.model(ids, dualkv=LAYOUT)[0]
    with pytest.raises(ValueError, match=r"^layer 0 \(LlamaAttention\) got "):
        drafter.forward_layer(0, hidden, positions, None, input_ids=ids.roll(-1), dualkv=LAYOUT)


def test_padding_that_positions_skip_is_refused() -> None:
    model = enable(tiny("Roberta", is_decoder=True, pad_token_id=1)).eval()
    ids, positions = token_ids(LAYOUT).clone().clamp(min=2), LAYOUT.position_ids[None]
    assert torch.equal(model(ids, dualkv=LAYOUT).logits, model(ids, position_ids=positions, dualkv=LAYOUT).logits)
    ids[0, -1] = 1
    with pytest.raises(ValueError, match=r"^a token is RobertaModel's pad_token_id \(1\), which its positions skip"):
        model(ids, dualkv=LAYOUT)


@pytest.mark.parametrize("name", ["deterministic", "check", "fast", "batch_invariant"])
@pytest.mark.parametrize("given", [None, 1, "yes"])
def test_settings_are_bools(name: str, given: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} is a {type(given).__name__}, expected True or False"):
        enable(make_model(), **{name: given})


@pytest.mark.parametrize("given", ["qwen3", None, tf.Qwen3ForCausalLM])
def test_what_is_no_model_is_named(given: Any) -> None:
    batch = dualkv.pack([[1]], [[[2]]])
    for call in (
        enable, disable, head, recompute_layers, experts.routers,
        lambda model: suspended(model).__enter__(),
        lambda model: experts.replay_routes(model, torch.zeros(1, 2, 1)).__enter__(),
        lambda model: experts.load_balancing_loss(model, [], batch),
        lambda model: dualkv.packed_vs_separate(model, batch),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"model is {repr(given)[:13]}.*expected a torch.nn.Module"):
            call(given)


def test_a_layer_of_another_kind_is_refused() -> None:
    model = make_model()

    class Mixer(nn.Module):
        pass

    model.model.layers[1].self_attn = Mixer()
    with pytest.raises(ValueError, match=r"model\.layers\.1 \(Qwen3DecoderLayer\) has no causal attention that goes"):
        enable(model)


def test_an_attention_layer_with_a_forward_of_its_own_is_refused() -> None:
    """A wrapper runs the forward that it wraps; another forward need not go through the registry."""
    model = tiny("Qwen3")
    layer = model.model.layers[1].self_attn
    own = layer.forward
    layer.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
    disable(enable(model))
    layer.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn \(Qwen3Attention\) has a forward of its own"):
        enable(model)


def test_dropout_in_training_is_refused() -> None:
    model = enable(make_model("mistral", attention_dropout=0.1).train(), check=False)
    with pytest.raises(ValueError, match=r"layer 0 \(MistralAttention\) uses attention dropout \(dropout=0\.1\)"):
        model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)


def change(name: str, **fields: Any) -> Any:
    """A tiny model of FEATURED whose second layer has other attributes."""
    model = make_featured(name, 5)
    for field, value in fields.items():
        setattr(model.model.layers[1].self_attn, field, value)
    return model


CONTRADICTIONS = {
    "a window beside a mask of all keys": (
        lambda: change("gpt_oss", sliding_window=5),
        r"layer 1 \(GptOssAttention\) uses sliding_window=5, and its mask says all keys: expected one meaning",
    ),
    "a window that is no integer": (
        lambda: change("gpt_oss", sliding_window=(5, 0)),
        r"layer 1 \(GptOssAttention\) uses sliding_window=\(5, 0\), and its mask says all keys: expected one meaning",
    ),
    "a window of another size than the mask's": (
        lambda: change("ministral", sliding_window=4),
        r"layer 1 \(MinistralAttention\) uses sliding_window=4, and its mask says all keys",
    ),
    "sinks that are not handed on": (
        lambda: change("mistral", sinks=torch.zeros(6)),
        r"layer 1 \(MistralAttention\) has sinks of shape \(6,\) and hands s_aux=None to its attention function",
    ),
    "a cap that is not handed on": (
        lambda: change("phi3", attn_logit_softcapping=30.0),
        r"layer 1 \(Phi3Attention\) has attn_logit_softcapping=30\.0 and hands softcap=None to its attention function",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_layers_that_contradict_themselves_are_refused(case: str) -> None:
    build, message = CONTRADICTIONS[case]
    model = enable(build(), check=False)
    with pytest.raises(ValueError, match=message):
        model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)


@pytest.mark.parametrize(
    "rule", ["or_mask_function", "and_mask_function", "block_sequence_ids", "allow_is_causal_skip"]
)
def test_a_mask_with_a_rule_of_its_own_is_refused(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modeling, make = tf.models.qwen3.modeling_qwen3, tf.masking_utils.create_causal_mask
    values = {"block_sequence_ids": token_ids(LAYOUT), "allow_is_causal_skip": False}
    extra = {rule: values.get(rule, lambda batch, head, q, k: q >= k)}
    monkeypatch.setattr(modeling, "create_causal_mask", lambda **given: make(**given, **extra))
    with pytest.raises(ValueError, match=r"layer 0 \(Qwen3Attention\) gets a mask with a rule of the model's own"):
        enable(make_model(), check=False)(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)


def test_a_model_that_drops_keyword_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(make_model())
    layer, forward = model.model.layers[1], model.model.layers[1].self_attn.forward
    monkeypatch.setattr(layer.self_attn, "forward", lambda *, dualkv, **kwargs: forward(**kwargs))
    with pytest.raises(ValueError, match=r"layer 1 \(Qwen3Attention\) is not handed the layout"):
        model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)


def test_dropout_is_no_matter_in_evaluation() -> None:
    model = enable(make_model("mistral", attention_dropout=0.1).eval())
    expected = enable(make_model("mistral"))(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits
    assert torch.equal(model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits, expected)


IDS, POSITIONS = token_ids(LAYOUT), LAYOUT.position_ids[None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS.expand(2, -1)}, r"input_ids has shape \(2, 45\), expected \[1, T\]"),
        ({"input_ids": IDS[:, 1:]}, "given 44 tokens, the layout has 45"),
        ({"input_ids": None}, "neither input_ids nor inputs_embeds|exactly one of input_ids or inputs_embeds"),
        ({"attention_mask": torch.ones_like(IDS)}, "attention_mask came together with dualkv"),
        ({"use_cache": True}, "past_key_values or use_cache came together with dualkv"),
        ({"past_key_values": tf.DynamicCache()}, "past_key_values or use_cache came together with dualkv"),
        ({"cache": tf.DynamicCache()}, "past_key_values or use_cache came together with dualkv"),
        ({"position_ids": torch.arange(45)[None]}, r"position_ids\[0, 11\] is 11, the layout's is 7"),
        (
            {"position_ids": POSITIONS.expand(2, 1, -1)},
            r"position_ids has shape \(2, 1, 45\) on cpu, expected \(1, 45\)",
        ),
        ({"output_attentions": True}, "a call of Qwen3Model uses attention weights as an output"),
        ({"cu_seq_lens_q": torch.tensor([0, 45])}, "a call of Qwen3Model uses sequence lengths next to"),
        ({"max_length_q": 45}, "a call of Qwen3Model uses the argument max_length_q=45"),
        ({"head_mask": torch.ones(6)}, r"a call of Qwen3Model uses a head mask \(head_mask of shape \(6,\)\)"),
        ({"softcap": 30.0}, r"a call of Qwen3Model uses the argument softcap=30\.0"),
        ({"s_aux": torch.ones(6)}, r"a call of Qwen3Model uses the argument s_aux of shape \(6,\)"),
        ({"position_bias": torch.ones(1, 6, 45, 45)}, "a call of Qwen3Model uses a position bias"),
        ({"temperatures": 2.0}, r"a call of Qwen3Model uses the argument temperatures=2\.0"),
        ({"num_logits_to_keep": 1}, "a call of Qwen3Model uses the argument num_logits_to_keep=1"),
        ({"logits_to_keep": 1}, r"logits_to_keep is 1 together with dualkv.* batch\.predict_rows"),
        ({"logits_to_keep": torch.tensor(1)}, r"logits_to_keep is a tensor of shape \(\) together with dualkv"),
        ({"is_causal": False}, r"layer 0 \(Qwen3Attention\) is not causal self-attention"),
    ],
)
def test_calls_that_are_not_computed_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = enable(make_model())
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": IDS, "dualkv": LAYOUT, **arguments})


def test_labels_by_position_are_refused_as_by_name() -> None:
    model = enable(make_model())
    at = layers.arguments(type(model)).index("labels")
    with pytest.raises(ValueError, match="labels came together with dualkv and would be shifted by one row"):
        model(IDS, *[None] * (at - 1), IDS, dualkv=LAYOUT)
    loss = model(IDS, *[None] * (at - 1), IDS, shift_labels=IDS, dualkv=LAYOUT).loss
    logits = model(input_ids=IDS, dualkv=LAYOUT).logits
    assert_close("loss", loss, nn.functional.cross_entropy(logits[0], IDS[0]), 1e-6)


class LossOfTrainer(tf.Trainer):
    """A stand-in for transformers' Trainer, as far as it computes a loss."""

    def __init__(self, model: Any, **arguments: Any) -> None:
        self.args = tf.TrainingArguments(report_to=[], use_cpu=True, average_tokens_across_devices=False, **arguments)
        super().__init__(model, self.args)


@pytest.mark.parametrize("given", [{"labels": IDS}, {"labels": IDS, "shift_labels": IDS}], ids=lambda x: "+".join(x))
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_of_the_trainer_is_refused(given: Any, smoothing: float, tmp_path: Any) -> None:
    """Trainer takes labels out of such a call and shifts rows itself."""
    model = enable(make_model())
    trainer = LossOfTrainer(model, output_dir=str(tmp_path), label_smoothing_factor=smoothing)
    inputs = {"input_ids": IDS, "dualkv": LAYOUT, **given}
    if not smoothing and "shift_labels" in given:
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(IDS.numel()))
        assert_close("loss", loss, model(input_ids=IDS, dualkv=LAYOUT, labels=IDS, shift_labels=IDS).loss, 1e-6)
        return
    with pytest.raises(ValueError, match="came together with dualkv and"):
        trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(IDS.numel()))


def test_dualkv_that_is_no_layout() -> None:
    with pytest.raises(TypeError, match=r"dualkv is a dict, expected a dualkv\.Layout"):
        enable(make_model())(input_ids=IDS, dualkv={})


def test_positional_arguments_with_a_layout() -> None:
    model = enable(make_model()).model
    with pytest.raises(ValueError, match="Qwen3Model got 3 positional arguments, expected only input_ids"):
        model(IDS, None, POSITIONS, dualkv=LAYOUT)


def test_an_implementation_set_later_is_noticed() -> None:
    model = enable(make_model())
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="was set to 'eager' after dualkv was enabled: enable the model again"):
        model(input_ids=IDS, dualkv=LAYOUT)
    enable(model)(input_ids=IDS, dualkv=LAYOUT)
    assert disable(model).config._attn_implementation == "eager"


def test_a_model_that_shares_the_config_but_was_not_enabled() -> None:
    model = enable(make_model())
    other = tf.Qwen3ForCausalLM(model.config)
    with pytest.raises(ValueError, match="got a layout outside a call of its enabled model"):
        other(input_ids=IDS, dualkv=LAYOUT)


def test_a_model_that_adds_to_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = tf.models.qwen3.modeling_qwen3
    make = modeling.create_causal_mask
    monkeypatch.setattr(modeling, "create_causal_mask", lambda **kwargs: torch.cat([make(**kwargs)] * 6, 1))
    with pytest.raises(ValueError, match="or the model makes its own attention mask or position bias"):
        enable(make_model(), check=False)(input_ids=IDS, dualkv=LAYOUT)


def test_a_model_that_makes_its_own_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(layers, "OWN_MASKS", (type(model.model).__name__,))
    with pytest.raises(ValueError, match=r"makes masks with a rule of its own, .* enable its text model"):
        enable(model)


def test_a_model_without_an_attention_implementation_is_refused() -> None:
    model = make_model()
    model.config._attn_implementation_internal = None
    with pytest.raises(ValueError, match="has no attention implementation set, call set_attn_implementation first"):
        enable(model)


def test_a_head_of_each_token_stays() -> None:
    torch.manual_seed(0)
    model = enable(tiny("Llama", "ForTokenClassification", num_labels=3).eval())
    ids = token_ids(LAYOUT)
    labels = (ids % 3).masked_fill(ids % 5 == 0, -100)  # of each row, which this head does not shift
    out = model(input_ids=ids, labels=labels, dualkv=LAYOUT)
    assert_close("loss", out.loss, nn.functional.cross_entropy(out.logits[0], labels[0]), 1e-6)
    for path, _ in paths(LAYOUT):
        assert_close("logits", out.logits[0, path], model(input_ids=ids[:, path], use_cache=False).logits[0], 1e-5)


@pytest.mark.parametrize(
    "less", [LAYOUT.without_prompt_queries(), LAYOUT.without_queries([1])], ids=["prompts", "rows"]
)
def test_a_layout_without_some_queries_is_refused(less: Any) -> None:
    """Rows without queries are zeros where kernels run, and the next layer would read keys and values of them."""
    model = enable(make_model("qwen3"))
    for run in (model, model.model):
        with pytest.raises(ValueError, match=r"without some queries .* expected one of all rows"):
            run(input_ids=token_ids(LAYOUT), dualkv=less)

"""`head(model)`: log-probs and gradients are those of the model's own logits, with adapters too, or it is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

tf = pytest.importorskip("transformers")

import dualkv  # noqa: E402
from dualkv.heads import KNOWN, Head  # noqa: E402
from dualkv.integrations.transformers import enable, head, heads, layers  # noqa: E402
from tests.documents import blocks  # noqa: E402
from tests.integrations.tiny import SIZES  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402
from tools import matrix, zoo  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {**SIZES, "num_hidden_layers": 1}
CAPPED = {"final_logit_softcapping": 3.0}
# Models whose heads are more than a weight, and what is beside it.
MORE: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "phi": ("Phi", "PhiForCausalLM", {"num_key_value_heads": 6}, ["a bias"]),
    "gemma2": ("Gemma2", "Gemma2ForCausalLM", CAPPED, ["the cap 3.0"]),
    "cohere": ("Cohere", "CohereForCausalLM", {"logit_scale": 0.3}, ["the scale 0.3"]),
    "granite": ("Granite", "GraniteForCausalLM", {"logits_scaling": 4.0}, ["the scale 0.25"]),
    "minicpm3": (
        "MiniCPM3", "MiniCPM3ForCausalLM",
        {"dim_model_base": 20, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
         "qk_rope_head_dim": 8, "v_head_dim": 8},
        ["Times in front of the head"],
    ),
    "modernbert": (
        "ModernBertDecoder", "ModernBertDecoderForCausalLM", {"cls_token_id": 1, "sep_token_id": 2},
        ["a bias", "ModernBertDecoderPredictionHead in front of the head"],
    ),
}  # fmt: skip


def tiny(name: str = "qwen3", **settings: Any) -> Any:
    family, cls, extra, _ = MORE.get(name, ("Qwen3", "Qwen3ForCausalLM", {}, []))
    torch.manual_seed(0)
    model = getattr(tf, cls)(getattr(tf, f"{family}Config")(**{**SMALL, **extra, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def rollouts() -> tuple[torch.Tensor, list[torch.Tensor], Any]:
    draw = torch.Generator().manual_seed(3)
    prompt, *responses = (torch.randint(3, 96, (n,), generator=draw) for n in (9, 4, 7))
    return prompt, responses, dualkv.pack([prompt], [responses])


def grads(model: nn.Module, logp: torch.Tensor, entropy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute the gradients of a loss that is not linear in the log-probs."""
    model.zero_grad()
    weight = torch.linspace(-1, 2, len(logp))
    (logp * weight + logp.exp() + entropy).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def own(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the model's own logits, each sequence run by itself."""
    prompt, responses, _ = rollouts()
    logps, entropies = [], []
    for response in responses:
        z = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        z = (z.float() / 0.8).log_softmax(-1)
        logps.append(z.gather(1, response[:, None])[:, 0])
        entropies.append(-(z.exp() * z).sum(1))
    return torch.cat(logps), torch.cat(entropies)


def through_head(model: Any, plain: Any | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probs and entropies from packed rows by `response_logprobs`; plain: the model without wrappers."""
    _, _, batch = rollouts()
    base = (plain or model).base_model
    hidden = base(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
    logp, entropy = dualkv.response_logprobs(hidden, head(model), batch, 0.8, chunk_size=3)
    return torch.cat(batch.unpack(logp)), torch.cat(batch.unpack(entropy))


def assert_same(
    model: nn.Module, got: Any, plain: nn.Module, want: Any, names: Callable[[str], str] = lambda name: name
) -> None:
    """Compare log-probs, entropies and gradients with those of a plain model with equal weights. names: turns a name of
    the first model's parameters into one of the second's."""
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    found = grads(model, *got)
    of_model = {names(name): g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}
    of_plain = grads(plain, *want)
    assert of_model.keys() == of_plain.keys()
    largest = max(float(gradient.norm()) for gradient in of_plain.values())
    for name, gradient in of_plain.items():
        assert float((of_model[name] - gradient).norm()) <= 1e-4 * (float(gradient.norm()) + 1e-2 * largest), name


def check(model: Any, plain: Any | None = None) -> None:
    enable(model, check=False)
    assert_same(model, through_head(model, plain), model, own(model))


# ---------------------------------------------------------------- models
@pytest.mark.parametrize("name", MORE)
def test_a_head_that_is_more_than_its_weight(name: str) -> None:
    model = tiny(name)
    assert head(model).beside_weight == MORE[name][3]
    check(model)
    _, _, batch = rollouts()
    hidden = model.base_model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
    weight = model.get_output_embeddings().weight
    with pytest.raises(ValueError, match=r"head is a weight \[96, 48\] of \w+, .*" + MORE[name][3][0]):
        dualkv.response_logprobs(hidden, weight, batch)
    assert dualkv.response_logprobs(hidden, Head(weight), batch)  # a caller that says so gets the weight alone


def test_a_head_that_is_its_weight() -> None:
    model = tiny()
    check(model)
    assert head(model).beside_weight == []
    assert head(model).weight is model.lm_head.weight
    _, _, batch = rollouts()
    hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
    results = [dualkv.response_logprobs(hidden, x, batch) for x in (head(model), model.lm_head.weight)]
    assert all(map(torch.equal, *results))


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("muse_glimmer", "llama4")]


@pytest.mark.parametrize("kind", ["nemotron_h", "opt", "ovis2", *SLOW])
def test_types_of_the_zoo(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tools.matrix` runs all: a hybrid; a projection in the decoder; a tied weight of another width; a scale
    and a cap; no base model."""
    monkeypatch.setattr(matrix, "WAYS", {"head": matrix.head})
    assert matrix.examine(kind)["head"]["outcome"] == zoo.EXACT


def test_parts_of_a_model_that_was_loaded_in_16_bits() -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
    config = tf.Qwen3VLConfig(text_config=SMALL, vision_config=vision)
    for part in (config, config.text_config, config.vision_config):  # as `from_pretrained` leaves them
        part.dtype = torch.bfloat16
    model = tf.Qwen3VLForConditionalGeneration._from_config(config)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert head(model).weight is model.lm_head.weight


def test_fields_that_change_after_the_proof_are_seen() -> None:
    model = tiny("gemma2")
    assert head(model).softcap == 3.0
    for cap in (2.0, None):
        model.config.final_logit_softcapping = cap
        assert head(model).softcap == cap
        check(model)


def test_fields_that_a_class_does_not_read_change_nothing() -> None:
    assert head(tiny(lm_head_multiplier=0.5, final_logit_softcapping=1.0)).beside_weight == []


class Other(tf.Qwen3ForCausalLM):
    """A model whose logits no field explains."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 0.9
        return out


class Failing(tf.Qwen3ForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("cls", "why"),
    [(Other, "no scale and cap.*soft.*cap.* it has lm_head_multiplier"), (Failing, "KeyError: 'no such thing'")],
)
def test_what_is_not_proved_is_refused(cls: type[Any], why: str) -> None:
    model, batch = enable(cls(tf.Qwen3Config(**SMALL, lm_head_multiplier=0.5))), rollouts()[2]
    message = rf"{cls.__name__}.*{why}.*logits_to_keep.*dualkv\.Head\(module="
    with pytest.raises(ValueError, match=message):
        head(model)
    with pytest.raises(ValueError, match=message):
        dualkv.response_logprobs(torch.zeros(1, batch.layout.num_tokens, 48), model.lm_head.weight, batch)


def test_logits_that_are_left_out_are_refused() -> None:
    """A vocabulary that is padded in the weight: seen on the copy, whatever both sizes shrink to."""

    class Padded(tf.Qwen3ForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits[..., : self.config.unpadded_vocab_size]
            return out

    for unpadded in (96, 90):
        model = Padded(tf.Qwen3Config(**SMALL, unpadded_vocab_size=unpadded))
        if unpadded == 96:
            assert head(model).weight is model.lm_head.weight
        else:
            with pytest.raises(ValueError, match=r"Padded.*logits_to_keep"):
                head(model)


def test_models_without_a_head_are_refused() -> None:
    for model in (nn.Linear(3, 4), tf.Qwen3ForTokenClassification(tf.Qwen3Config(**SMALL))):
        with pytest.raises(ValueError, match=rf"{type(model).__name__}.*get_output_embeddings.*dualkv\.Head\(module="):
            head(model)


def test_a_module_that_is_not_linear_alone_is_called() -> None:
    """A hook, and a layer of another class."""
    model = tiny()
    model.lm_head.register_forward_hook(lambda _module, _args, out: out * 0.5)
    assert head(model).weight is None
    check(model)
    model = tiny()
    model.lm_head = nn.Sequential(nn.Linear(48, 96), nn.Tanh())
    check(model)


# ---------------------------------------------------------------- which weights are known
def test_known_weights_keep_no_model_alive_and_survive_moves() -> None:
    model = enable(tiny("phi"))
    before = len(KNOWN)
    assert model.lm_head.weight in KNOWN
    assert model.to(torch.float64).lm_head.weight in KNOWN
    assert head(copy.deepcopy(model)).bias is not None
    del model
    gc.collect()
    assert len(KNOWN) < before


# ---------------------------------------------------------------- adapters
def adapters() -> dict[str, Any]:
    peft = pytest.importorskip("peft")
    both, alone = {"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["lm_head"]}
    of_lm = {"task_type": "CAUSAL_LM"}
    tokens = {"trainable_token_indices": {"embed_tokens": [5, 6, 7], "lm_head": [5, 6]}}
    return {
        "lora": peft.LoraConfig(**of_lm, **both),
        "lora with bias": peft.LoraConfig(**of_lm, **both, lora_bias=True, use_rslora=True),
        "dora": peft.LoraConfig(**of_lm, **both, use_dora=True),
        "ia3": peft.IA3Config(**of_lm, **both, feedforward_modules=[]),
        "loha": peft.LoHaConfig(**both),
        "lokr": peft.LoKrConfig(**both),
        "adalora": peft.AdaLoraConfig(**of_lm, **both, total_step=100),
        "vera": peft.VeraConfig(**alone),
        "oft": peft.OFTConfig(**alone, r=0, oft_block_size=8),
        "modules_to_save": peft.LoraConfig(**of_lm, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "trainable tokens": peft.LoraConfig(**of_lm, target_modules=["q_proj"], **tokens),
    }


def wrapped(model: Any, adapter: Any) -> Any:
    """Wrap a model with random adapters."""
    model = pytest.importorskip("peft").get_peft_model(model, adapter)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [
    "lora", "lora with bias", "dora", "ia3", "loha", "lokr", "adalora", "vera", "oft", "modules_to_save",
    "trainable tokens",
])  # fmt: skip
def test_adapters_on_the_head_run_and_are_trained(name: str, tied: bool) -> None:
    """All gradients of the model's own loss are there in training mode."""
    model = wrapped(tiny(tie_word_embeddings=tied), adapters()[name]).train()
    check(model, model.get_base_model())
    base = model.get_base_model()
    assert (head(model).module is None) == (name == "modules_to_save")
    weights = [p for n, p in base.named_parameters() if n.startswith("lm_head") and p.shape == (96, 48)]
    _, _, batch = rollouts()
    hidden = torch.zeros(1, batch.layout.num_tokens, 48)
    refused = 0
    for weight in weights:  # the weight under the adapter, whenever it was put on; the trained copy is the head
        if weight is not head(model).weight:
            with pytest.raises(ValueError, match=r"pass dualkv\.integrations\.transformers\.head"):
                dualkv.response_logprobs(hidden, weight, batch)
            refused += 1
    assert refused or tied


def test_adapters_of_a_scaled_and_biased_head() -> None:
    for name in ("phi", "granite", "minicpm3", "gemma2"):
        model = wrapped(tiny(name), adapters()["lora"].__class__(target_modules=["lm_head"], task_type="CAUSAL_LM"))
        check(model, model.get_base_model())


def test_adapters_that_are_off_or_merged() -> None:
    model = wrapped(tiny(), adapters()["lora"])
    enable(model, check=False)
    values = []
    for state in (nullcontext, model.disable_adapter, lambda: nullcontext(model.merge_adapter())):
        with torch.no_grad(), state():
            got, want = through_head(model, model.get_base_model()), own(model)
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            values.append(got[0])
    assert (values[1] - values[0]).abs().max() > 1e-2
    torch.testing.assert_close(values[2], values[0], rtol=1e-4, atol=1e-4)


def test_dropout_on_the_head_is_refused_in_training() -> None:
    adapter = adapters()["lora"]
    adapter.lora_dropout = 0.25
    model = wrapped(tiny(), adapter)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has dropout 0\.25 in training.*logits_to_keep"):
        head(model.train())
    check(model.eval(), model.get_base_model())


# ---------------------------------------------------------------- rows of logits
@pytest.mark.parametrize("name", ["qwen3", *MORE])
def test_logits_to_keep_are_the_rows_that_predict(name: str) -> None:
    model = enable(tiny(name), check=False)
    _, _, batch = rollouts()
    out = model(input_ids=batch.input_ids, dualkv=batch.layout, logits_to_keep=batch.predict_rows)
    z = (out.logits[0].float() / 0.8).log_softmax(-1)
    logp = z.gather(1, batch.targets[:, None])[:, 0]
    found = [torch.cat(batch.unpack(x)) for x in (logp, -(z.exp() * z).sum(1))]
    assert_same(model, found, model, own(model))


def on_a_rank(rank: int) -> None:
    """Heads whose columns lie on two ranks, by the recipe of docs/fsdp.md; their weights are refused elsewhere."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,))
    recipe: dict[str, Any] = {"torch": torch}
    (block,) = (block for block in blocks("fsdp.md", {"python"}) if "vocabulary_parallel" in block)
    exec(block, recipe)
    _, _, batch = rollouts()
    for name in ("qwen3", "cohere"):
        whole, split = enable(tiny(name)), enable(tiny(name))
        split.lm_head.weight = nn.Parameter(split.lm_head.weight.detach().clone())  # else it is the embedding's
        whole.lm_head.weight = nn.Parameter(whole.lm_head.weight.detach().clone())
        hidden = whole.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
        want, _ = dualkv.response_logprobs(hidden, head(whole), batch)
        parallelize_module(split, mesh, {"lm_head": ColwiseParallel(output_layouts=Shard(-1))})
        got = recipe["logprobs"](split, batch)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for logp in (want, got):
            (logp * torch.linspace(-1, 2, len(logp))).sum().backward()
        for (parameter, theirs), ours in zip(whole.named_parameters(), split.parameters(), strict=True):
            gradient = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
            torch.testing.assert_close(gradient, theirs.grad, rtol=1e-4, atol=1e-5, msg=parameter)
        with pytest.raises(ValueError, match=r"DTensor \(96, 48\).*logits_to_keep"):
            head(split)
        with pytest.raises(ValueError, match=r"DTensor \(96, 48\).*logits_to_keep"):
            dualkv.response_logprobs(hidden, split.lm_head.weight, batch)
    split = parallelize_module(tiny("modernbert"), mesh, {"lm_head.dense": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"DTensor \(48, 48\).*logits_to_keep"):
        head(split)
    whole, split = enable(tiny("modernbert")), enable(tiny("modernbert"))
    fully_shard(split.lm_head, mesh=mesh)  # in front of the head, and called
    hidden = whole.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state.detach()
    want, got = (dualkv.response_logprobs(hidden, head(model), batch)[0] for model in (whole, split))
    torch.testing.assert_close(got, want)
    hooked = tiny()
    fully_shard(hooked.lm_head, mesh=mesh)
    heads.refuse_adapter(hooked, "", "")  # FSDP2's own hooks change nothing
    hooked.lm_head.register_forward_hook(lambda _module, _args, out: out * 0.5)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        heads.refuse_adapter(hooked, "", "")
    dist.destroy_process_group()


def test_a_vocabulary_over_ranks() -> None:
    on_ranks(2, "tests.integrations.transformers.test_heads:on_a_rank")


def test_every_rule_is_of_the_outermost_model() -> None:
    """A wrapper is looked through; layers.decoders finds the states that the head takes."""
    model = tiny("phi")
    assert head(nn.Sequential(model)).bias is model.lm_head.bias
    assert layers.decoders(model) == [model.model]
    assert heads.output(model) is model.lm_head

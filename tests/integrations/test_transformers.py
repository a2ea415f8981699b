"""`dualkv.integrations.transformers`: packed groups against the same model run on every replicated sequence alone."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dualkv

tf = pytest.importorskip("transformers")

from transformers.masking_utils import AttentionMaskInterface  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface  # noqa: E402

from dualkv.integrations import transformers as integration  # noqa: E402
from dualkv.integrations.transformers import disable, enable  # noqa: E402

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # large: attention must matter
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
ARCHITECTURES = {
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "granite": ("Granite", {"attention_multiplier": 0.2}),  # softmax scale of its own
}
# Ragged groups: an empty response, prompts of one token, a group of one, a group without responses, a shared part of 0.
LAYOUT = dualkv.Layout.from_lengths([7, 1, 5, 3, 0], [[4, 0, 9], [2, 6], [3], [], [3, 2]])


def make_model(
    name: str = "qwen3", dtype: torch.dtype = torch.float32, attention: str = "sdpa", **settings: Any
) -> Any:
    """A tiny model with random weights: equal arguments, equal weights."""
    family, extra = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(tf, f"{family}Config")(**{**SIZES, **extra, **settings}, attn_implementation=attention)
    model = getattr(tf, f"{family}ForCausalLM")(config).to(dtype)
    if dtype == torch.float64 and name == "qwen3_moe":
        model.set_experts_implementation("eager")  # grouped_mm takes no fp64
    return model


def token_ids(layout: dualkv.Layout, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, layout.num_tokens), generator=torch.Generator().manual_seed(seed))


def paths(layout: dualkv.Layout) -> list[tuple[list[int], int]]:
    """The packed rows of every replicated sequence that has a token, and how many of them are its prompt."""
    offsets, parent = layout.offsets.tolist(), layout.parent.tolist()
    segments = [list(range(*ends)) for ends in itertools.pairwise(offsets)]
    found = [(segments[p] + segments[s], len(segments[p])) for s, p in enumerate(parent) if p >= 0]
    found += [(segments[s], len(segments[s])) for s, p in enumerate(parent) if p < 0 and s not in parent]
    return [(rows, shared) for rows, shared in found if rows]


class Losses:
    """A weighted sum of response log-probs; each token has its own weight."""

    def __init__(self, layout: dualkv.Layout, ids: torch.Tensor, dtype: torch.dtype) -> None:
        self.layout, self.ids = layout, ids
        self.weight = torch.randn(layout.num_tokens, generator=torch.Generator().manual_seed(9)).to(dtype)

    def logprobs(self, logits: torch.Tensor, predicts: list[int], rows: list[int]) -> torch.Tensor:
        return logits[0, predicts].log_softmax(-1).gather(-1, self.ids[0, rows, None])[:, 0]

    def packed(self, model: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs in path order, loss."""
        return self.of_packed(model(input_ids=self.ids, dualkv=self.layout, **kwargs))

    def of_packed(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        predicts, rows = [], []
        for path, shared in paths(self.layout):
            at = range(max(shared, 1), len(path))
            predicts += [path[i - 1] for i in at]
            rows += [path[i] for i in at]
        logp = self.logprobs(out.logits, predicts, rows)
        return logp, (logp * self.weight[rows]).sum()

    def replicated(self, model: Any) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Hidden states of each path, log-probs and loss, each sequence run by itself."""
        hidden, logps, loss = [], [], torch.zeros((), dtype=self.weight.dtype)
        for path, shared in paths(self.layout):
            out = model(input_ids=self.ids[:, path], output_hidden_states=True, use_cache=False)
            at = range(max(shared, 1), len(path))
            logp = self.logprobs(out.logits, [i - 1 for i in at], [path[i] for i in at])
            hidden.append(out.hidden_states[-1][0])
            logps.append(logp)
            loss = loss + (logp * self.weight[[path[i] for i in at]]).sum()
        return hidden, torch.cat(logps), loss


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (got - expected).norm().item()
    assert error <= tolerance * expected.norm().item(), f"{name}: {error} against a norm of {expected.norm().item()}"


@contextmanager
def double_throughout(name: str) -> Iterator[None]:
    """transformers computes norms and routers in float32 whatever the model's dtype; here they stay in float64."""

    class Torch:
        float32 = float = torch.float64

        def __getattr__(self, attribute: str) -> Any:
            return getattr(torch, attribute)

    module = getattr(tf.models, name)
    modeling = getattr(module, f"modeling_{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "torch", Torch())
        yield


@functools.cache
def replicated(name: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states of every path, log-probs and gradients of the plain model, each sequence alone."""
    model = make_model(name, dtype).train()
    hidden, logp, loss = Losses(LAYOUT, token_ids(LAYOUT), dtype).replicated(model)
    loss.backward()
    return hidden, logp.detach(), gradients(model)


def check_against_replicated(
    name: str, dtype: torch.dtype, tolerance: float, prepare: Callable[[Any], Any] = lambda model: model
) -> None:
    hidden, logp, expected = replicated(name, dtype)
    model = make_model(name, dtype).train()
    losses = Losses(LAYOUT, token_ids(LAYOUT), dtype)
    out = prepare(enable(model))(input_ids=losses.ids, dualkv=LAYOUT, output_hidden_states=True)
    got_hidden, (got_logp, loss) = out.hidden_states[-1][0], losses.of_packed(out)
    loss.backward()
    for (path, _), reference in zip(paths(LAYOUT), hidden, strict=True):
        assert_close(f"hidden states of rows {path}", got_hidden[path], reference, tolerance)
    assert_close("log-probs", got_logp, logp, tolerance)
    assert expected
    for parameter, gradient in gradients(model).items():
        assert_close(parameter, gradient, expected[parameter], tolerance)


def checkpointed(model: Any, use_reentrant: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in later versions
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    return model


# ---------------------------------------------------------------- with a layout
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_is_replicated_float64(name: str) -> None:
    with double_throughout(name):
        check_against_replicated(name, torch.float64, 1e-10)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_is_replicated_float32(name: str) -> None:
    check_against_replicated(name, torch.float32, 1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradient_checkpointing(name: str) -> None:
    check_against_replicated(name, torch.float32, 1e-5, lambda model: checkpointed(model, use_reentrant=False))


def test_reentrant_gradient_checkpointing() -> None:
    check_against_replicated("qwen3", torch.float32, 1e-5, lambda model: checkpointed(model, use_reentrant=True))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_does_not_depend_on_the_own_implementation(attention: str) -> None:
    with double_throughout("qwen3"):
        logits = enable(make_model(dtype=torch.float64, attention=attention))(
            input_ids=token_ids(LAYOUT), position_ids=LAYOUT.position_ids[None], dualkv=LAYOUT
        ).logits
        same = enable(make_model(dtype=torch.float64))(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits
    assert torch.equal(logits, same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    logp, loss = Losses(LAYOUT, token_ids(LAYOUT), dtype).packed(enable(model := make_model(dtype=dtype)))
    loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    assert logp.dtype == dtype
    assert_close("log-probs", logp.float(), replicated("qwen3", torch.float32)[1], 0.05)


def test_inputs_embeds_and_no_position_ids() -> None:
    model, ids = enable(make_model()), token_ids(LAYOUT)
    expected = model(input_ids=ids, position_ids=LAYOUT.position_ids[None], dualkv=LAYOUT).logits
    out = model(inputs_embeds=model.get_input_embeddings()(ids), dualkv=LAYOUT)
    assert torch.equal(out.logits, expected)
    assert out.past_key_values is None  # although the config says use_cache=True
    assert torch.equal(model.model(ids, dualkv=LAYOUT).last_hidden_state, model.model(ids, dualkv=LAYOUT)[0])


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_no_mask_of_t_by_t_is_made(attention: str) -> None:
    layout = dualkv.Layout.from_lengths([200, 90], [[40] * 3, [30] * 3])
    model, ids, t = enable(make_model(attention=attention)), token_ids(layout), layout.num_tokens
    with LargestTensor() as packed:
        model(input_ids=ids, dualkv=layout).logits.sum().backward()
    assert t * VOCAB <= packed.numel < t * t
    with LargestTensor() as own, torch.no_grad():
        model(input_ids=ids, position_ids=layout.position_ids[None], use_cache=False)
    assert own.numel >= t * t  # what would have been made


def test_deterministic_reaches_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def spy(*args: Any, deterministic: bool, **kwargs: Any) -> torch.Tensor:
        seen.append(deterministic)
        return dualkv.attention(*args, deterministic=deterministic, **kwargs)

    monkeypatch.setattr(integration, "attention", spy)
    model = enable(enable(make_model()), deterministic=True)
    model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
    enable(model)(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
    assert seen == [True, True, False, False]


def test_shift_labels_give_the_packed_loss() -> None:
    model, ids = enable(make_model()), token_ids(LAYOUT)
    labels = torch.full_like(ids, -100)
    for path, shared in paths(LAYOUT):
        labels[0, path[shared:-1]] = ids[0, path[shared + 1 :]]
    out = model(input_ids=ids, dualkv=LAYOUT, labels=labels, shift_labels=labels)
    expected = nn.functional.cross_entropy(out.logits[0], labels[0], ignore_index=-100)
    torch.testing.assert_close(out.loss, expected)


# ---------------------------------------------------------------- torch.compile
def other_layouts() -> list[dualkv.Layout]:
    cases = [([6, 2], [[4, 0, 9], [2, 6]]), ([9], [[3, 5]]), ([4, 8, 1], [[3], [1, 2], [6]]), ([11], [[3, 0, 4, 7]])]
    return [dualkv.Layout.from_lengths(*case) for case in cases]


@pytest.mark.parametrize(("dynamic", "checkpoint"), [(None, False), (True, True)], ids=["stored", "checkpointed"])
def test_one_graph_for_all_layouts(dynamic: bool | None, checkpoint: bool) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stats = torch._dynamo.utils.counters["stats"]
    model, eager = (enable(make_model(num_hidden_layers=1).train()) for _ in range(2))
    if checkpoint:
        checkpointed(model, use_reentrant=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    graphs = []
    for layout in [LAYOUT, *other_layouts()]:
        model.zero_grad(), eager.zero_grad()
        losses = Losses(layout, token_ids(layout), torch.float32)
        kwargs = {"position_ids": layout.position_ids[None], "use_cache": False}
        logp, loss = losses.packed(compiled, **kwargs)
        expected, expected_loss = losses.packed(eager, **kwargs)
        loss.backward(), expected_loss.backward()
        assert_close("log-probs", logp, expected, 1e-5)
        for parameter, gradient in gradients(eager).items():
            assert_close(parameter, gradients(model)[parameter], gradient, 1e-5)
        graphs.append(stats["unique_graphs"])
    assert graphs[-1] <= (1 if dynamic else 2), f"graphs after each batch: {graphs}"
    assert graphs[1:] == [graphs[1]] * (len(graphs) - 1), f"graphs after each batch: {graphs}"


def test_a_compiled_model_checks_every_batch() -> None:
    torch._dynamo.reset()
    model = torch.compile(enable(make_model(num_hidden_layers=1)), backend="eager", fullgraph=True, dynamic=True)
    ids, positions = token_ids(LAYOUT), LAYOUT.position_ids[None]
    model(input_ids=ids, position_ids=positions, dualkv=LAYOUT)
    with pytest.raises(ValueError, match=r"position_ids\[0, 4\] is 0, the layout's is 4"):
        model(input_ids=ids, position_ids=positions.remainder(4), dualkv=LAYOUT)
    with pytest.raises(ValueError, match="given 44 tokens, the layout has 45"):
        model(input_ids=ids[:, 1:], position_ids=positions[:, 1:], dualkv=LAYOUT)


# ---------------------------------------------------------------- without a layout
def padded_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[2, :2] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def plain_outputs(model: Any) -> list[torch.Tensor]:
    """What a model does without a layout: padded, with gradients, packed by position, from a cache, generation."""
    batch = padded_batch()
    model.zero_grad()
    out = model(**batch)
    out.logits.square().sum().backward()
    results = [out.logits.detach(), *gradients(model).values()]
    static_cache = {"cache_implementation": "static", "disable_compile": True}
    with torch.no_grad():
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]])
        results.append(model(input_ids=batch["input_ids"][:1], position_ids=positions, use_cache=False).logits)
        first = model(input_ids=batch["input_ids"][1:2, :7])
        results.append(model(input_ids=batch["input_ids"][1:2, 7:], past_key_values=first.past_key_values).logits)
        results.append(model.generate(**batch, max_new_tokens=5, do_sample=False))
        results.append(model.generate(**batch, max_new_tokens=3, do_sample=False, **static_cache))
    return [x.clone() for x in results]


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_without_a_layout_nothing_changes(name: str, attention: str) -> None:
    model = make_model(name, attention=attention)
    before = plain_outputs(model)
    enabled = plain_outputs(enable(model))
    model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
    after_a_packed_call = plain_outputs(model)
    disabled = plain_outputs(disable(model))
    assert model.config._attn_implementation == attention
    for results in (enabled, after_a_packed_call, disabled):
        assert len(results) == len(before)
        assert all(torch.equal(a, b) for a, b in zip(results, before, strict=True))


def test_sliding_windows_still_work_without_a_layout() -> None:
    model = make_model("mistral", sliding_window=3)
    before = plain_outputs(model)
    assert all(torch.equal(a, b) for a, b in zip(plain_outputs(enable(model)), before, strict=True))
    assert not torch.equal(before[0], plain_outputs(make_model("mistral"))[0])  # the window matters


def test_models_with_different_implementations_in_one_process() -> None:
    models = {name: enable(make_model(attention=name)) for name in ("eager", "sdpa")}
    for name, model in models.items():
        out = model(**padded_batch(), output_attentions=True)
        assert len(out.attentions) == (2 if name == "eager" else 0)  # only eager attention returns weights
        assert torch.equal(out.logits, make_model(attention=name)(**padded_batch()).logits)


def test_an_implementation_of_the_user_sees_its_own_name(request: pytest.FixtureRequest) -> None:
    """As FlashAttention's function does, which chooses its kernels by the name in the module's config."""
    seen = []

    def recording(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append((module.config._attn_implementation, module.config.hidden_size, module.num_key_value_groups))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)

    AttentionInterface.register("recording", recording)
    request.addfinalizer(lambda: AttentionInterface._global_mapping.pop("recording"))
    AttentionMaskInterface.register("recording", AttentionMaskInterface()["sdpa"])
    request.addfinalizer(lambda: AttentionMaskInterface._global_mapping.pop("recording"))
    model = enable(make_model(attention="recording"))
    assert torch.equal(model(**padded_batch()).logits, make_model()(**padded_batch()).logits)
    assert seen == [("recording", 48, 3)] * 2
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**padded_batch()).logits, make_model()(**padded_batch()).logits)


# ---------------------------------------------------------------- enable, disable, copies, wrappers
def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_pre_hooks_with_kwargs) for m in model.modules())


def test_enable_and_disable_twice() -> None:
    model = make_model()
    assert disable(model) is model
    assert enable(model) is model
    name, count = model.config._attn_implementation, hooks(model)
    assert enable(model) is model
    assert (model.config._attn_implementation, hooks(model)) == (name, count)
    assert disable(disable(model)) is model
    assert model.config._attn_implementation == "sdpa"
    assert hooks(model) == 0


def test_deepcopy_is_enabled_by_itself() -> None:
    model = enable(make_model())
    expected = model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits
    reference = copy.deepcopy(model)
    disable(model)
    assert torch.equal(reference(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits, expected)
    disable(reference)
    assert hooks(reference) == 0
    assert torch.equal(reference(**padded_batch()).logits, model(**padded_batch()).logits)


def test_pickle_keeps_it_enabled() -> None:
    model, file = enable(make_model()), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    expected = model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits
    assert torch.equal(loaded(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits, expected)


def test_a_saved_model_loads_anywhere(tmp_path: Any) -> None:
    model = enable(make_model())
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "dualkv" not in json.dumps(saved)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(**padded_batch()).logits, model(**padded_batch()).logits)


class Wrapper(nn.Module):
    """Adapters wrap like this: they call `forward`, so hooks of the wrapped model itself do not run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, **kwargs: Any) -> Any:
        return self.base_model.forward(**kwargs)


def test_wrapped_models() -> None:
    expected = enable(make_model())(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits
    for wrapped in (enable(Wrapper(make_model())), Wrapper(enable(make_model()))):
        assert torch.equal(wrapped(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits, expected)
    decoder = Wrapper(enable(make_model()).model)  # here the hook that prepares the call is passed by
    with pytest.raises(ValueError, match="got a layout but not by a call of its enabled model"):
        decoder(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_data_parallel_wrappers_pass_the_layout_on(wrap: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def prepare(model: Any) -> Any:
        if wrap == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    expected = replicated("qwen3", torch.float32)[2]
    model = make_model().train()
    Losses(LAYOUT, token_ids(LAYOUT), torch.float32).packed(prepare(enable(model)))[1].backward()
    for parameter, gradient in gradients(model).items():
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert_close(parameter, whole, expected[parameter], 1e-5)
    enable(model)  # again, after the wrapping


# ---------------------------------------------------------------- what is refused
def tiny(family: str, head: str = "ForCausalLM", **settings: Any) -> Any:
    config = getattr(tf, f"{family}Config")(**{**SIZES, **settings})
    return getattr(tf, f"{family}{head}")(config)


REFUSED_MODELS = {
    "sliding layers": (lambda: tiny("Gemma2"), r"layer 0 of Gemma2Model is sliding_attention"),
    "softcapping": (
        lambda: tiny("Gemma2", layer_types=["full_attention"] * 2),
        r"model\.layers\.0\.self_attn \(Gemma2Attention\) uses logit softcapping \(attn_logit_softcapping=50\.0\)",
    ),
    "sinks": (
        lambda: tiny("GptOss", layer_types=["full_attention"] * 2, num_local_experts=2, num_experts_per_tok=1),
        r"model\.layers\.0\.self_attn \(GptOssAttention\) uses attention sinks \(sinks of shape \(6,\)\)",
    ),
    "linear attention": (
        lambda: tiny("Qwen3Next", layer_types=["linear_attention", "full_attention"], **EXPERTS),
        r"layer 0 of Qwen3NextModel is linear_attention",
    ),
    "recurrent state": (
        lambda: tiny("Qwen3Next", layer_types=["full_attention"] * 2, **EXPERTS),
        r"Qwen3NextModel carries a recurrent state",
    ),
    "convolutions": (
        lambda: tiny("Lfm2", layer_types=["full_attention", "conv"]),
        r"layer 1 of Lfm2Model is conv, dualkv\.attention computes full_attention only",
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
    "no model": (lambda: nn.Linear(2, 2), r"Linear has no causal attention layer"),
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


def test_a_layer_of_another_kind_is_refused() -> None:
    model = make_model()

    class Mixer(nn.Module):
        pass

    model.model.layers[1].self_attn = Mixer()
    with pytest.raises(ValueError, match=r"model\.layers\.1 \(Qwen3DecoderLayer\) has no causal attention that goes"):
        enable(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sliding_window": 3}, r"layer 0 \(MistralAttention\) uses a sliding window \(sliding_window=3\)"),
        ({"attention_dropout": 0.1}, r"layer 0 \(MistralAttention\) uses attention dropout \(dropout=0\.1\)"),
    ],
)
def test_features_that_show_in_a_call_are_refused(settings: dict[str, Any], message: str) -> None:
    model = enable(make_model("mistral", **settings).train())
    with pytest.raises(ValueError, match=message):
        model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)


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
        ({"position_ids": torch.arange(45)[None]}, r"position_ids\[0, 11\] is 11, the layout's is 7"),
        (
            {"position_ids": POSITIONS.expand(3, 1, -1)},
            r"position_ids has shape \(3, 1, 45\) on cpu, expected \(1, 45\)",
        ),
        ({"labels": IDS}, "labels came together with dualkv and would be shifted by one row"),
        ({"output_attentions": True}, r"layer 0 \(Qwen3Attention\) uses attention weights as an output"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 45])},
            r"layer 0 \(Qwen3Attention\) uses sequence lengths next to",
        ),
        ({"head_mask": torch.ones(6)}, r"layer 0 \(Qwen3Attention\) uses a head mask \(head_mask of shape \(6,\)\)"),
        ({"softcap": 30.0}, r"layer 0 \(Qwen3Attention\) uses logit softcapping \(softcap=30\.0\)"),
        ({"s_aux": torch.ones(6)}, r"layer 0 \(Qwen3Attention\) uses attention sinks"),
        ({"position_bias": torch.ones(1, 6, 45, 45)}, r"layer 0 \(Qwen3Attention\) uses a position bias"),
        ({"temperatures": 2.0}, r"layer 0 \(Qwen3Attention\) uses the argument temperatures=2\.0"),
        ({"is_causal": False}, r"layer 0 \(Qwen3Attention\) is not causal self-attention"),
    ],
)
def test_calls_that_are_not_computed_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = enable(make_model())
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": IDS, "dualkv": LAYOUT, **arguments})


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
    with pytest.raises(ValueError, match="got a layout but not by a call of its enabled model"):
        other(input_ids=IDS, dualkv=LAYOUT)


def test_a_model_that_adds_to_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = tf.models.qwen3.modeling_qwen3
    make = modeling.create_causal_mask
    monkeypatch.setattr(modeling, "create_causal_mask", lambda **kwargs: torch.cat([make(**kwargs)] * 6, 1))
    with pytest.raises(ValueError, match="or the model makes its own attention mask or position bias"):
        enable(make_model())(input_ids=IDS, dualkv=LAYOUT)

"""`dualkv.integrations.transformers`: packed groups against the same model run on every replicated sequence alone."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dualkv

tf = pytest.importorskip("transformers")

from transformers.masking_utils import AttentionMaskInterface  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface  # noqa: E402

from dualkv import packed_rows  # noqa: E402
from dualkv.integrations.transformers import (  # noqa: E402
    KEEP,
    disable,
    enable,
    media,
    recompute_layers,
)
from tests.dispatched import Dispatched  # noqa: E402
from tests.integrations.doubled import double_throughout  # noqa: E402
from tests.integrations.tiny import (  # noqa: E402
    ARCHITECTURES,
    LAYOUT,
    TREE,
    VOCAB,
    Losses,
    assert_close,
    assert_gradients,
    gradients,
    hooks,
    make_model,
    paths,
    token_ids,
)
from tests.ranks import one_rank  # noqa: E402
from tools import zoo  # noqa: E402


def check_packed(
    make: Callable[..., Any],
    layout: dualkv.Layout = LAYOUT,
    dtype: torch.dtype = torch.float64,
    prepare: Callable[[Any], Any] = lambda model: model,
) -> None:
    """Compare logits and gradients of a packed call with those of sequences alone. make: takes a dtype, and makes equal
    models."""
    wide = dtype == torch.float64
    with double_throughout() if wide else nullcontext():
        expected = zoo.replicated(make(dtype=dtype).train(), layout)
        model = enable(make(dtype=dtype).train(), check=not wide)  # the check is in fp32
        got = zoo.packed(prepare(model), layout)
    assert zoo.difference(got, expected) < (1e-10 if wide else 2e-5)


def checkpointed(model: Any, use_reentrant: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in later versions
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    return model


# ---------------------------------------------------------------- with a layout
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", [LAYOUT, TREE], ids=["groups", "tree"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_is_replicated(name: str, layout: dualkv.Layout, dtype: torch.dtype) -> None:
    check_packed(partial(make_model, name), layout, dtype)


CHECKPOINTING: dict[str, Callable[[Any], Any]] = {
    "not reentrant": lambda model: checkpointed(model, use_reentrant=False),
    "reentrant": lambda model: checkpointed(model, use_reentrant=True),
    **{keep: lambda model, keep=keep: recompute_layers(model, keep) for keep in KEEP},
}


@pytest.mark.parametrize("way", CHECKPOINTING)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_gradient_checkpointing(name: str, way: str) -> None:
    check_packed(partial(make_model, name), TREE, torch.float32, CHECKPOINTING[way])


class Count(TorchDispatchMode):
    """A mode that counts how often some ops run."""

    def __init__(self, *ops: Any) -> None:
        super().__init__()
        self.ops, self.count = ops, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.ops
        return func(*args, **(kwargs or {}))


def test_kept_attention_and_products_are_not_computed_again() -> None:
    """Two layers of seven products each, of which a recomputation leaves out the last: no backward reads its result."""
    attention, products = torch.ops.dualkv.fwd.default, torch.ops.aten.mm.default
    losses, grads = Losses(LAYOUT, token_ids(LAYOUT), torch.float32), []
    for keep, layers, again in (
        ("nothing", None, (2, 12)), ("attention", 1, (1, 12)), ("attention", None, (0, 12)), ("products", 1, (0, 6)),
        ("products", None, (0, 0)), ("all", 1, (0, 0)), ("all", None, (0, 0)),
    ):  # fmt: skip
        model = recompute_layers(enable(make_model().train()), keep, layers=layers)
        _, loss = losses.packed(model)
        with Count(attention) as attentions, Count(products) as mms:
            loss.backward()
        backward = 2 * (2 * 7 + 1)  # of the layers and of the head, two for each
        assert (attentions.count, mms.count - backward) == again, keep
        grads.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, grads[-1], grads[0])), keep


def test_recomputation_is_refused_where_it_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="keep is 'most', expected one of nothing, attention, products, all"):
        recompute_layers(make_model(), "most")

    def liger(*_: Any) -> None: ...

    liger.__module__ = "liger_kernel.transformers.rope"
    for name in ("llama", "qwen3"):
        monkeypatch.setattr(getattr(getattr(tf.models, name), f"modeling_{name}"), "apply_rotary_pos_emb", liger)
    recompute_layers(make_model("qwen3"), "products")  # its norms lie between
    recompute_layers(make_model("llama"), "attention")
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn \(LlamaAttention\) rotates its projections"):
        recompute_layers(make_model("llama"), "products")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_does_not_depend_on_the_own_implementation(attention: str) -> None:
    with double_throughout():
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
    _, expected, _ = Losses(LAYOUT, token_ids(LAYOUT), torch.float32).replicated(make_model())
    assert_close("log-probs", logp.float(), expected, 0.05)


def test_inputs_embeds_and_no_position_ids() -> None:
    model, ids = enable(make_model()), token_ids(LAYOUT)
    expected = model(input_ids=ids, position_ids=LAYOUT.position_ids[None], dualkv=LAYOUT).logits
    out = model(inputs_embeds=model.get_input_embeddings()(ids), dualkv=LAYOUT)
    assert torch.equal(out.logits, expected)
    assert out.past_key_values is None  # although the config says use_cache=True
    assert torch.equal(model.model(ids, dualkv=LAYOUT).last_hidden_state, model.model(ids, dualkv=LAYOUT)[0])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_no_mask_of_t_by_t_is_made(attention: str) -> None:
    layout = dualkv.Layout.from_lengths([200, 90], [[40] * 3, [30] * 3])
    model, ids, t = enable(make_model(attention=attention)), token_ids(layout), layout.num_tokens
    with Dispatched() as packed:
        model(input_ids=ids, dualkv=layout).logits.sum().backward()
    assert t * VOCAB <= packed.largest < t * t
    with Dispatched() as own, torch.no_grad():
        model(input_ids=ids, position_ids=layout.position_ids[None], use_cache=False)
    assert own.largest >= t * t  # what would have been made


def test_deterministic_reaches_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def spy(*args: Any, deterministic: bool, **kwargs: Any) -> torch.Tensor:
        seen.append(deterministic)
        return dualkv.attention(*args, deterministic=deterministic, **kwargs)

    monkeypatch.setattr(packed_rows, "attention", spy)
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
    return [*(dualkv.Layout.from_lengths(*case) for case in cases), TREE]


@pytest.mark.parametrize(
    ("dynamic", "checkpoint", "backend"),
    [(None, False, "aot_eager"), (True, True, "eager")],
    ids=["stored", "checkpointed"],
)
def test_one_graph_for_all_layouts(dynamic: bool | None, checkpoint: bool, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    media._FAMILY.clear(), media._CONTAINS.clear()  # the first call of a process is a compiled one
    stats = torch._dynamo.utils.counters["stats"]
    model, eager = (enable(make_model(num_hidden_layers=1).train()) for _ in range(2))
    if checkpoint:
        checkpointed(model, use_reentrant=False)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    graphs = []
    for layout in [LAYOUT, *other_layouts()]:
        model.zero_grad(), eager.zero_grad()
        losses = Losses(layout, token_ids(layout), torch.float32)
        kwargs = {"position_ids": layout.position_ids[None], "use_cache": False}
        logp, loss = losses.packed(compiled, **kwargs)
        expected, expected_loss = losses.packed(eager, **kwargs)
        loss.backward(), expected_loss.backward()
        assert_close("log-probs", logp, expected, 1e-5)
        assert_gradients(model, gradients(eager), 1e-5)
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
    """Run a model without a layout: padded, with gradients, packed by position, from a cache, generation."""
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
    assert all(torch.equal(a, b) for a, b in zip(plain_outputs(enable(model, check=False)), before, strict=True))
    assert not torch.equal(before[0], plain_outputs(make_model("mistral"))[0])  # the window matters


def test_models_with_different_implementations_in_one_process() -> None:
    models = {name: enable(make_model(attention=name)) for name in ("eager", "sdpa")}
    for name, model in models.items():
        out = model(**padded_batch(), output_attentions=True)
        assert len(out.attentions) == (2 if name == "eager" else 0)  # only eager attention returns weights
        assert torch.equal(out.logits, make_model(attention=name)(**padded_batch()).logits)


def test_an_implementation_of_the_user_sees_its_own_name(request: pytest.FixtureRequest) -> None:
    """A function of the user reads its own name in the module's config, as FlashAttention's does to choose kernels."""
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
    with pytest.raises(ValueError, match="got a layout outside a call of its enabled model"):
        decoder(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)


@one_rank()
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

    losses, alone, model = Losses(LAYOUT, token_ids(LAYOUT), torch.float32), make_model(), make_model().train()
    losses.replicated(alone)[2].backward()
    losses.packed(prepare(enable(model)))[1].backward()
    expected = gradients(alone)
    for parameter, gradient in gradients(model).items():
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert_close(parameter, whole, expected[parameter], 1e-5)
    enable(model)  # again, after the wrapping


def test_a_compiled_step_may_be_the_first_to_ask_for_positions() -> None:
    model = enable(make_model("qwen3"))
    ids = token_ids(LAYOUT)

    def step(layout: dualkv.Layout) -> torch.Tensor:
        return model.model(input_ids=ids, position_ids=layout.position_ids[None], dualkv=layout).last_hidden_state

    fresh = copy.deepcopy(LAYOUT)
    assert torch.equal(torch.compile(step, backend="eager")(fresh), step(LAYOUT))
    assert type(fresh.position_ids) is torch.Tensor

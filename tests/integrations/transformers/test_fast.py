"""`enable(fast=True)` and what it is made of: fused pieces, and checkpointed layers that keep results."""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial, wraps
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from dualkv.integrations import patching
from dualkv.integrations.transformers import checkpointing, disable, enable, fused, recompute_layers, suspended
from tests.integrations.tiny import LAYOUT, make_model, token_ids


def make_deep(layers: int) -> Any:
    model = make_model("qwen3", num_hidden_layers=layers)
    return model.train()


def kept(model: Any) -> list[str]:
    """Read what each layer of a model or decoder keeps now."""

    def kind(layer: Any) -> str:
        if not layer.gradient_checkpointing:
            return "all"
        contexts = layer._gradient_checkpointing_func.keywords.get("context_fn")
        return next(name for name, ops in checkpointing.KEEP.items() if ops == (contexts.args[0] if contexts else []))

    return [kind(layer) for layer in (model if hasattr(model, "layers") else model.get_decoder()).layers]


@pytest.mark.parametrize(
    ("keep", "layers", "kinds"),
    [
        ("attention", None, ["attention"] * 3),
        ("attention", 1, ["nothing", "nothing", "attention"]),
        ("products", 2, ["attention", "products", "products"]),
        ("products", 3, ["products"] * 3),
        ("all", 1, ["products", "products", "all"]),
        ("all", None, ["all"] * 3),
    ],
)
def test_layers_keep_what_they_are_told_also_in_a_trainer(keep: str, layers: int | None, kinds: list[str]) -> None:
    """The last layers keep more, the others what comes before. A trainer switches checkpointing on anew."""
    model = recompute_layers(enable(make_deep(3)), keep, layers=layers)
    assert kept(model) == kinds
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.no_grad():
        model(token_ids(LAYOUT), dualkv=LAYOUT)
    assert kept(model) == ["nothing"] * 3
    model(token_ids(LAYOUT), dualkv=LAYOUT)
    assert kept(copy.deepcopy(model)) == kept(model) == kinds
    model.gradient_checkpointing_disable()
    model(token_ids(LAYOUT), dualkv=LAYOUT)
    assert kept(model) == ["all"] * 3
    recompute_layers(model)
    model(token_ids(LAYOUT), dualkv=LAYOUT)
    assert kept(model) == ["nothing"] * 3


def test_numbers_of_layers_that_mean_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_deep(2)
    for keep, layers, message in (
        ("products", 3, "layers is 3, expected 1 to the 2 layers of Qwen3Model"),
        ("products", 0, "layers is 0, expected 1 or more"),
        ("nothing", 1, "layers is 1 with keep='nothing', expected one of attention, products, all"),
    ):
        with pytest.raises(ValueError, match=message):
            recompute_layers(model, keep, layers=layers)
    for layers in (True, 1.5, "2"):
        with pytest.raises(TypeError, match=f"layers is {layers!r}, expected an integer"):
            recompute_layers(model, "products", layers=layers)  # type: ignore[arg-type]
    monkeypatch.setattr(checkpointing, "_overwritten_products", lambda _: "Liger's kernel rotates them in place")
    with pytest.raises(ValueError, match="rotates them in place"):
        recompute_layers(model, "all", layers=1)  # the other keeps products
    monkeypatch.setattr(checkpointing, "checkpointed_layers", lambda _: [])
    with pytest.raises(ValueError, match="layers is 1 for Qwen3Model, whose layers are not checkpointed one by one"):
        recompute_layers(model, "attention", layers=1)
    assert not any(layer.gradient_checkpointing for layer in model.get_decoder().layers)


def rotaries(model: Any) -> list[Any]:
    """The rotary embedding that each attention layer calls."""
    attention = [m for name, m in model.named_modules() if name.endswith("self_attn")]
    return [inspect.unwrap(m.forward).__globals__[fused.ROTARY] for m in attention]


def test_fast_is_undone() -> None:
    """Fusing changes one model, not others of its type, and can be undone."""
    model, other = make_deep(2), make_deep(2)
    before, rotary = {name: dict(vars(m)) for name, m in model.named_modules()}, rotaries(model)[0]
    enable(model, fast=True)
    assert fused.is_fused(model)
    assert len({*rotaries(model)} - {rotary}) == 1
    assert rotaries(other) == [rotary] * 2
    pieces = {n.rpartition(".")[2] for n, m in model.named_modules() if "forward" in vars(m)}
    assert pieces == {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm", "mlp", "self_attn"}
    copied = copy.deepcopy(model)
    for each in (copied, model):
        layer = each.get_decoder().layers[1]
        for module in (layer.self_attn, layer.mlp, layer.input_layernorm):
            assert module.forward.__self__ is module
    pickled = pickle.loads(pickle.dumps(layer.mlp))
    assert pickled.forward.__self__ is pickled
    for some in (copied, model):
        disable(some)
        assert not fused.is_fused(some)
        assert not any("forward" in vars(m) for m in some.modules())
        assert rotaries(some) == [rotary] * 2
    for name, module in model.get_decoder().layers.named_modules():  # transformers' notes of checkpointing stay
        noted = {"_gradient_checkpointing_func", "gradient_checkpointing"}
        assert vars(module).keys() - noted == before[f"model.layers.{name}" if name else "model.layers"].keys(), name


def test_decorators_of_a_forward_stay() -> None:
    """Some decorators of transformers rename arguments."""

    def renames(old: str) -> Any:
        def decorate(function: Any) -> Any:
            @wraps(function)
            def call(*args: Any, **given: Any) -> Any:
                return function(*args, **{"cache" if name == old else name: x for name, x in given.items()})

            return call

        return decorate

    @renames("past_key_values")
    @renames("cache_params")
    def forward(x: int, *, cache: int = 0) -> Any:
        return copy.copy((x, cache))

    assert patching.with_globals(partial(forward), {}) is None
    assert patching.with_globals(wraps(forward)(lambda *given: given), {}) is None
    own = patching.with_globals(forward, {"copy": type("", (), {"copy": list})})
    assert own is not None
    assert (own(1, past_key_values=2), own(1, cache_params=3), own(4)) == ([1, 2], [1, 3], [4, 0])
    assert (forward(1, past_key_values=2), inspect.unwrap(own).__kwdefaults__) == ((1, 2), {"cache": 0})


def test_fast_keeps_attention_unless_something_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep attention where a trainer checkpoints them. Reentrant checkpointing can keep nothing."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = enable(make_deep(2), fast=True)
    tokens = token_ids(LAYOUT)

    def after_a_call() -> list[str]:
        model(tokens, dualkv=LAYOUT)
        return kept(model)

    assert after_a_call() == ["all"] * 2
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with torch.no_grad():
            assert after_a_call() == ["nothing"] * 2
        assert after_a_call() == ["nothing" if reentrant else "attention"] * 2
    for keep in ("nothing", "products"):
        recompute_layers(model, keep)
        assert after_a_call() == [keep] * 2
        enable(model, fast=True)
        assert after_a_call() == [keep] * 2
    disable(enable(other := make_deep(2), fast=True))
    other.gradient_checkpointing_enable({"use_reentrant": False})
    other(tokens)
    assert kept(other) == ["nothing"] * 2


@pytest.fixture
def nothing_compiled() -> None:
    torch.compiler.reset()
    patching.with_own_code.cache_clear()


@pytest.mark.usefixtures("nothing_compiled")
def test_each_form_of_a_call_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second form would not compile beyond a limit: PyTorch would run the piece as it is, and say so in a log at
    most. One layer has transformers' norms, one PyTorch's."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = make_deep(2)
    layer = model.get_decoder().layers[1]
    for name, module in list(layer.named_modules()):
        if name.endswith("norm"):
            layer.set_submodule(name, torch.nn.LayerNorm(module.weight.numel()))
    enable(model, check=False, fast=True)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for grad in (True, False):
            for batch, rows in ((1, 1), (1, 5), (1, 9), (2, 1), (3, 7), (5, 2)):
                with torch.set_grad_enabled(grad):
                    model(input_ids=torch.ones(batch, rows, dtype=torch.int64))
            with torch.set_grad_enabled(grad):
                model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)


@pytest.mark.usefixtures("nothing_compiled")
def test_fusing_again_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The TRL trainer does so at every generation. PyTorch keeps what it has compiled for good."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    counts = []
    for _ in range(3):
        model = enable(make_deep(2), fast=True)
        model(input_ids=torch.ones(2, 5, dtype=torch.int64)).logits.sum().backward()
        disable(model)
        counts.append(len(compiled))
    assert counts[0] > 0
    assert counts == [counts[0]] * 3


def state(model: Any) -> dict[str, Any]:
    """Collect what `enable` and `recompute_layers` have set, but for fused layers."""
    modules = dict(model.named_modules())
    hooks = {(name, kind): list(getattr(m, kind).items()) for name, m in modules.items()
             for kind in ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs")}  # fmt: skip
    noted = {(name, key): vars(m)[key] for name, m in modules.items() for key in vars(m) if "checkpointing" in key}
    return hooks | noted | {"name": model.config._attn_implementation, "kept": kept(model)}


@pytest.mark.parametrize("fails", [False, True])
def test_a_suspended_model_is_itself_and_then_enabled_as_before(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = enable(make_deep(3), deterministic=True, fast=True)
    recompute_layers(model, "products", layers=2)
    before, fused_before = state(model), {n for n, m in model.named_modules() if "forward" in vars(m)}
    try:
        with suspended(model):
            assert model.config._attn_implementation == "sdpa"
            assert not any("forward" in vars(m) for m in model.modules())
            with pytest.raises(ValueError, match="Qwen3Model was set to 'sdpa' after dualkv was enabled"):
                model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
            model.set_attn_implementation("eager")  # as continuous batching does
            model.eval()
            with torch.no_grad():
                model(input_ids=torch.ones(1, 10, dtype=torch.int64))
            model.train()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert state(model) == before
    assert before["kept"] == ["attention", "products", "products"]
    assert before["name"] == "dualkv-deterministic|sdpa"
    assert {n for n, m in model.named_modules() if "forward" in vars(m)} == fused_before
    model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits.sum().backward()


def test_a_model_that_is_not_enabled_can_be_suspended() -> None:
    model = make_model("qwen3")
    with suspended(model):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"


def test_hooks_that_came_later_stay() -> None:
    """Accelerate's replace the forward of a module."""
    model = enable(make_deep(1), fast=True)
    mlp, forward = model.get_decoder().layers[0].mlp, lambda x: x
    mlp.forward = forward
    disable(model)
    assert mlp.forward is forward


def test_ligers_rotary_embedding_is_that_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger puts it, and classes of its own, into transformers' modeling file."""
    model, other = make_model("llama"), make_model("llama")
    file, rotary = fused.sys.modules[type(model).__module__], rotaries(model)[0]
    names = dict(vars(file))

    def liger(*_: Any) -> None: ...

    liger.__module__ = "liger_kernel.transformers.rope"
    monkeypatch.setattr(
        fused, "_by_liger", lambda *_: vars(file).update({fused.ROTARY: liger, "LlamaMLP": None}) or True
    )
    fused.fuse(model)
    assert vars(file) == names
    assert rotaries(model) == [liger] * 2
    assert rotaries(other) == [rotary] * 2
    assert checkpointing._overwritten_products(model) is not None
    assert checkpointing._overwritten_products(other) is None
    patching.undo(model, "fast")
    assert rotaries(model) == [rotary] * 2


def test_fast_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces are traced; the GPU suite has the compiler's kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    grads = []
    for fast in (False, True):
        model = enable(make_deep(1), fast=fast)
        logits = model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits
        logits.square().mean().backward()
        grads.append([logits.detach(), *(p.grad for p in model.parameters())])
        if fast:  # and compiled as a whole, into one graph
            whole = torch.compile(model, fullgraph=True)
            torch.testing.assert_close(whole(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits, logits)
    for plain, quick in zip(*grads, strict=True):
        torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-5)

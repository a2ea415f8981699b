"""`enable(fast=True)` and what it is made of: fused pieces, and layers left out of checkpointing by memory."""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from dualkv.integrations import patching
from dualkv.integrations.transformers import checkpointing, disable, enable, fused, recompute_layers, suspended
from tests.dispatched import Dispatched
from tests.integrations.tiny import LAYOUT, make_featured, make_model, token_ids

GIB = 2**30


class Memory:
    """The memory of a pretended GPU: a layer keeps 1 byte a row where it is recomputed, 2 with its products, 3 where it
    is left out of checkpointing; a step takes 40 more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows, self.start = 0, 100
        self.now, self.peak = self.start, 0
        monkeypatch.setattr(checkpointing, "_refuse_memory", lambda *_: None)
        monkeypatch.setattr(checkpointing, "_allocated", lambda _: self.now)
        monkeypatch.setattr(checkpointing, "_peak", lambda _: self.peak)

    def watch(self, model: Any) -> None:
        (self.fit,) = checkpointing._fits(model.get_decoder())
        for at, layer in enumerate(model.get_decoder().layers):
            layer.register_forward_hook(partial(self._after, at), prepend=True)

    def _after(self, at: int, layer: Any, args: Any, output: Any) -> None:
        level = self.fit.levels[at]
        assert layer.gradient_checkpointing == (level != checkpointing.LEFT_OUT)
        self.now += self.rows * (1 + level)

    def step(self, model: Any, rows: int, logits: bool = False) -> list[int]:
        """Run a step. Returns what each layer kept; the peak is that of the last layer's backward."""
        self.rows, self.now = rows, self.start
        out = model(input_ids=torch.arange(rows)[None] % 7, use_cache=False).logits
        self.lent = checkpointing.memory_for_logits(model) if logits else None
        self.peak = max(self.peak, self.now + 40 * rows)
        out.sum().backward()
        return self.fit.levels


def make_deep(layers: int) -> Any:
    model = make_model("qwen3", num_hidden_layers=layers)
    return model.train()


def test_as_much_as_the_limit_allows_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_deep(6)
    memory = Memory(monkeypatch)
    # 100 at the start, 5 * 1 + 3 + 40 bytes a row with one layer left out: 580 for ten rows. Products add 10 a layer.
    recompute_layers(model, "attention", memory=(580 + 70) / GIB)
    memory.watch(model)
    assert memory.step(model, 10) == [0, 0, 0, 0, 0, 2]
    assert memory.step(model, 10) == [0, 0, 1, 1, 1, 2]  # products counted as everything: 20
    assert memory.step(model, 10) == [1, 1, 1, 2, 2, 2]
    assert memory.peak == 650
    assert memory.step(model, 11) == [0, 0, 0, 1, 1, 2]  # 100 + 528, and 11 for each layer's products
    assert memory.step(model, 5) == [2] * 6  # 100 + 384, and 10 for each layer left out
    assert memory.step(model, 1000) == [0, 0, 0, 0, 0, 2]
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    assert memory.step(model, 5) == [0, 0, 0, 0, 0, 2]  # the long batch's peak is all that is known
    recompute_layers(model, "attention")
    assert all(layer.gradient_checkpointing for layer in model.get_decoder().layers)
    assert not checkpointing._fits(model.get_decoder())


def test_a_forward_without_a_backward_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_deep(3)
    memory = Memory(monkeypatch)
    recompute_layers(model, "attention", memory=10**4 / GIB)
    memory.watch(model)
    for _ in range(2):
        memory.rows, memory.now = 10, memory.start
        model(input_ids=torch.zeros(1, 10, dtype=torch.long), use_cache=False)
        assert memory.fit.levels == [0, 0, 2]
    assert [memory.step(model, 10) for _ in range(2)] == [[0, 0, 2], [1, 1, 2]]


def test_hooks_of_layers_that_run_again_measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of transformers checkpoint a layer's call and not its forward, which runs the hooks again."""
    model = make_deep(3)
    memory = Memory(monkeypatch)
    recompute_layers(model, "attention", memory=10**4 / GIB)
    memory.watch(model)
    for layer in model.get_decoder().layers:
        layer.register_full_backward_hook(lambda layer, *_: (memory.fit._mark(), memory.fit._end(layer, (), None))[0])
    assert [memory.step(model, 10, logits=True) for _ in range(4)][-1] == [1, 1, 1]
    assert len(memory.fit.marks) == 3


def test_the_head_gets_what_layers_leave_once_their_need_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_deep(4)
    assert checkpointing.memory_for_logits(model) is None
    memory = Memory(monkeypatch)
    recompute_layers(model, "attention", memory=10**4 / GIB)
    memory.watch(model)
    lent = []
    for rows in (10, 10, 10, 11, 11):
        levels = memory.step(model, rows, logits=True)
        lent.append(memory.lent)
    assert lent == [None, None, 10**4 / GIB, None, 10**4 / GIB]
    assert levels == [1, 1, 1, 1]


def test_products_that_are_overwritten_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_deep(3)
    memory = Memory(monkeypatch)
    monkeypatch.setattr(checkpointing, "_overwritten_products", lambda _: "Liger's kernel rotates them in place")
    recompute_layers(model, "attention", memory=(100 + 10 * 45 + 20) / GIB)
    memory.watch(model)
    assert [memory.step(model, 10) for _ in range(2)] == [[0, 0, 2], [0, 2, 2]]
    with pytest.raises(ValueError, match="rotates them in place"):
        recompute_layers(model, "products")


@pytest.mark.parametrize("keep", ["nothing", "attention", "products"])
def test_gradients_do_not_depend_on_the_limit(monkeypatch: pytest.MonkeyPatch, keep: str) -> None:
    grads, products, kept, rows = [], [], [], LAYOUT.num_tokens
    least = 100 + 45 * rows
    for limit in (None, least, least + 2 * rows, 10**9):
        model = enable(make_deep(3))
        memory = Memory(monkeypatch)
        recompute_layers(model, keep, memory=limit and limit / GIB)
        if limit:
            memory.watch(model)
        for _ in range(3):
            model.zero_grad()
            memory.now, memory.rows = memory.start, rows
            loss = model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits.square().sum()
            memory.peak = memory.now + 40 * rows
            with Dispatched() as backward:
                loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        products.append(backward.products)
        kept.append(memory.fit.levels if limit else None)
    for other in grads[1:]:
        assert all(map(torch.equal, grads[0], other))
    assert kept[1:] == [[0, 0, 2], [0, 2, 2] if keep == "products" else [1, 1, 2], [2, 2, 2]]
    # Six products of seven are computed again: nothing reads the last one's result.
    assert [products[0] - n for n in products[1:]] == ([0, 0, 0] if keep == "products" else [6, 18, 18])


@pytest.mark.parametrize(("kind", "kept"), [("qwen3", 6), ("gemma2", 7)])
def test_a_last_product_is_kept_only_where_a_backward_reads_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, kept: int
) -> None:
    """Gemma 2 has a norm behind it."""
    contexts, saved = checkpointing.kept.contexts, list[bool]()

    def watched(ops: Any, keeps: Any) -> Any:
        def says(op: Any) -> bool:
            said: bool = keeps(op)
            if op in checkpointing._PRODUCTS:
                saved.append(said)
            return said

        return contexts(ops, says)

    monkeypatch.setattr(checkpointing.kept, "contexts", watched)
    model = (make_featured(kind, 5) if kind == "gemma2" else make_model(kind)).train()
    memory = Memory(monkeypatch)
    recompute_layers(model, "attention", memory=1.0)
    memory.watch(model)
    memory.step(model, 10)
    saved.clear()
    monkeypatch.setattr(memory.fit, "_fitting", lambda *_: [checkpointing.PRODUCTS] * 2)
    memory.step(model, 10)
    assert saved[:7] == [True] * kept + [False] * (7 - kept)


def test_limits_that_mean_nothing_are_refused() -> None:
    with pytest.raises(TypeError, match="memory is a str, expected a number of GiB"):
        recompute_layers(make_model(), memory="40")
    with pytest.raises(ValueError, match="memory is -1, expected a finite number of GiB above 0"):
        recompute_layers(make_model(), memory=-1)
    for memory in (float("inf"), float("nan"), np.float32(0)):
        with pytest.raises(ValueError, match=r"memory is .*, expected a finite number of GiB above 0"):
            recompute_layers(make_model(), memory=memory)
    with pytest.raises(TypeError, match="memory is a bool, expected a number of GiB"):
        recompute_layers(make_model(), memory=True)
    with pytest.raises(ValueError, match="memory is 40 GiB for a model on cpu, expected a model on a GPU"):
        recompute_layers(make_model(), memory=40)


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


def test_layers_keep_attention_again_until_something_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep attention also after a trainer's own call of `gradient_checkpointing_enable`. Reentrant checkpointing
    can keep nothing."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = enable(make_deep(2), fast=True)
    tokens = token_ids(LAYOUT)

    def kept() -> list[bool]:
        model(tokens, dualkv=LAYOUT)
        return ["context_fn" in layer._gradient_checkpointing_func.keywords for layer in model.get_decoder().layers]

    assert kept() == [True] * 2
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with torch.no_grad():
            assert kept() == [False] * 2
        assert kept() == [not reentrant] * 2
    recompute_layers(model, "nothing")
    assert kept() == [False] * 2
    disable(enable(model, fast=True))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(tokens)
    assert not any("context_fn" in m._gradient_checkpointing_func.keywords for m in model.get_decoder().layers)


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
    (fit,) = checkpointing._fits(model.get_decoder())
    return hooks | noted | {"name": model.config._attn_implementation, "fit": fit, "measured": copy.copy(vars(fit))}


@pytest.mark.parametrize("fails", [False, True])
def test_a_suspended_model_is_itself_and_then_enabled_as_before(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = enable(make_deep(3), deterministic=True, fast=True)
    memory = Memory(monkeypatch)
    recompute_layers(model, "products", memory=10**4 / GIB)
    memory.watch(model)
    for _ in range(3):
        memory.step(model, 10)
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
    after = state(model)
    after["measured"]["call"] = before["measured"]["call"]  # of the last call, without gradients
    assert after == before
    assert before["fit"].learned == 3
    assert before["name"] == "dualkv-deterministic|sdpa"
    assert {n for n, m in model.named_modules() if "forward" in vars(m)} == fused_before
    memory.rows = 0
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

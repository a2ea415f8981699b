"""Kept results that a layer overwrites: gradients are those of layers that keep everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

transformers = pytest.importorskip("transformers")

import dualkv  # noqa: E402
from dualkv.integrations.transformers import (  # noqa: E402
    KEEP,
    enable,
    kept,
    recompute_layers,
)
from tests.dispatched import Dispatched  # noqa: E402
from tests.integrations.tiny import LAYOUT, token_ids  # noqa: E402
from tests.ranks import one_rank  # noqa: E402

ROWS, WIDTH = 6, 8
Layer = Callable[..., torch.Tensor]


class Projections(nn.Module):
    """Two products; what happens to the first one's result in between is `write`."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.second(y + 1)
        self.write(y)
        return z.cos() * y.square()


class Squared(torch.autograd.Function):
    """x * x, whose backward writes into x, as Liger's gated MLP does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.data.mul_(2 * grad)  # past the version counter, as a kernel would


def rows_written(y: torch.Tensor) -> None:
    y[:, 2:4] = y[:, :2].tanh()


@torch.no_grad()
def listed(y: torch.Tensor) -> None:
    torch._foreach_mul_([y, torch.ones(3)], 0.5)


@torch.no_grad()
def handed_out(y: torch.Tensor) -> None:
    torch.mul(y, 0.5, out=y)


def received(y: torch.Tensor) -> None:
    """A collective of one rank, whose schema does not say that it writes."""
    dist.scatter(y.data, [torch.full_like(y, 0.3)])


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


def gradients(layer: Layer, context_fn: Any = None, after: Callable[[torch.Tensor], Any] = lambda _: None) -> Any:
    """Compute the gradients of two backwards through one graph, and the products that they compute. after: is given the
    layer's result."""
    x = torch.linspace(-1, 1, ROWS * WIDTH).reshape(1, ROWS, WIDTH).requires_grad_()
    parameters = [x, *(layer.parameters() if isinstance(layer, nn.Module) else ())]
    out = layer(x) if context_fn is None else checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)
    after(out)
    loss, found, products = out.sin().sum(), [], []
    for _ in range(2):
        with Dispatched() as seen:
            found += torch.autograd.grad(loss, parameters, retain_graph=True)
        products.append(seen.products)
    return found, products


PRODUCTS = partial(kept.contexts, KEEP["products"])
WRITES = {
    "nothing": lambda y: None,
    "clamped": lambda y: y.clamp_(-0.2, 0.2),
    "a view": lambda y: y.view(ROWS, 2, WIDTH // 2)[:, 1].mul_(3),
    "rows": rows_written,
    "data": lambda y: y.data.mul_(3),
    "a list": listed,
    "out": handed_out,
    "a collective": received,
    "twice": lambda y: y.mul_(3).add_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_changes_no_gradient_and_computes_no_product_again(write: str, group: None) -> None:
    layer = Projections(WRITES[write])
    (expected, backward), (found, again) = gradients(layer), gradients(layer, PRODUCTS)
    assert all(map(torch.equal, found, expected))
    assert again[0] == backward[0]
    assert again[1] > backward[1]  # what was kept has been given


def test_a_write_after_the_layer_computes_the_product_again() -> None:
    """A write after the layer comes too late for a copy. Without checkpointing PyTorch raises here."""
    linear, leaked = nn.Linear(WIDTH, WIDTH, bias=False), list[torch.Tensor]()

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        leaked.append(y.detach())
        return y.square()

    expected, backward = gradients(layer)
    for writes in (False, True):
        found, products = gradients(layer, PRODUCTS, lambda _, writes=writes: leaked[-1].mul_(3) if writes else None)
        assert all(map(torch.equal, found, expected))
        assert products == [backward[0] + writes, backward[1] + 1]


def test_compiled_code_that_writes() -> None:
    """The GPU suite has the compiler's own kernels, whose writes show in version counters alone."""

    @partial(torch.compile, backend="aot_eager")
    @torch.no_grad()
    def compiled(y: torch.Tensor) -> None:
        y.mul_(3)

    layer = Projections(lambda y: compiled(y.detach()))
    (expected, _), (found, _) = gradients(layer), gradients(layer, PRODUCTS)
    assert all(map(torch.equal, found, expected))


def test_a_backward_that_writes_what_it_is_given() -> None:
    linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return Squared.apply(linear(x.sin()))

    def plain(x: torch.Tensor) -> torch.Tensor:
        return linear(x.sin()).square()

    x = torch.linspace(-1, 1, ROWS * WIDTH).reshape(1, ROWS, WIDTH).requires_grad_()
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    out = checkpoint(layer, x, use_reentrant=False, context_fn=PRODUCTS).sum()
    for _ in range(2):
        (found,) = torch.autograd.grad(out, x, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_tensors_of_subclasses(group: None) -> None:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    weight = torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)

    def layer(x: torch.Tensor) -> torch.Tensor:
        x, w = (DTensor.from_local(one, mesh, [Replicate()]) for one in (x, weight))
        y = x @ w
        z = y.sin()
        y.to_local().data.clamp_(-0.2, 0.2)
        return (z.cos() * y.square()).to_local()

    (expected, _), (found, _) = gradients(layer), gradients(layer, PRODUCTS)
    assert all(map(torch.equal, found, expected))


def test_a_layer_that_computes_something_else_again_is_refused() -> None:
    linear, calls = nn.Linear(WIDTH, WIDTH, bias=False), [0]

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return (torch.bmm(x, x.mT) if calls[0] > 1 else linear(x)).sin()

    with pytest.raises(RuntimeError, match=r"again calls aten.bmm.default where its forward called aten.mm.default"):
        gradients(layer, PRODUCTS)


# ---------------------------------------------------------------- memory
class Live(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        return sum(size for ref, size in self.storages.values() if not ref.expired())


def test_kept_products_cost_one_copy_until_they_are_given() -> None:
    """Kept products cost as much as with PyTorch's own contexts, which keep an alias, whether the layer writes or
    not."""
    pytorch = partial(create_selective_checkpoint_contexts, KEEP["products"])
    for write in ("nothing", "clamped"):
        layer, x, sizes = Projections(WRITES[write]), torch.ones(1, ROWS, WIDTH, requires_grad=True), list[int]()
        for contexts in (PRODUCTS, pytorch, partial(kept.contexts, [])):
            with Live() as live:
                out = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            sizes.append(live.bytes())
            if contexts is PRODUCTS:
                torch.autograd.grad(out.sum(), x, retain_graph=True)
                sizes.append(live.bytes())
        own, given, alias, nothing = sizes
        product = 4 * ROWS * WIDTH
        assert [own, given] == [alias, nothing] == [nothing + 2 * product, nothing]


# ---------------------------------------------------------------- attention
@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("written", [0, 1])
def test_attention_that_is_overwritten_raises_as_without_checkpointing(keep: str, written: int) -> None:
    """The backward of attention reads its result, so PyTorch raises there; the hooks of checkpointing must not hide
    that."""
    q, k, v = torch.randn(3, LAYOUT.num_tokens, 2, WIDTH).requires_grad_()

    def layer(gate: torch.Tensor) -> torch.Tensor:
        result = dualkv.attention(q, k, v, LAYOUT, return_lse=True)
        result[written].mul_(gate)
        return result[0].sin() * result[0].cos() + result[1].sin().sum()

    gate = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        layer(gate).sum().backward()
    contexts = partial(kept.contexts, KEEP[keep])
    with pytest.raises(RuntimeError, match=rf"{['out', 'lse'][written]} of dualkv.attention .* 1 times"):
        checkpoint(layer, gate, use_reentrant=False, context_fn=contexts).sum().backward()


# ---------------------------------------------------------------- models
def copies(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Fills with the shape of each kept result that becomes a copy."""
    found, copy = list[torch.Size](), kept._Kept.copy

    def watched(result: kept._Kept) -> None:
        found.append(result.tensor.shape)
        copy(result)

    monkeypatch.setattr(kept._Kept, "copy", watched)
    return found


def test_a_model_that_is_compiled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.OlmoConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, clip_qkv=0.01
    )
    model = enable(transformers.OlmoForCausalLM(config).train())
    found = []
    for backend in (None, "eager", "aot_eager"):
        call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        model.zero_grad()
        call(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits.square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        recompute_layers(model, "products")
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


pytest.importorskip("peft")

from dualkv.integrations.transformers import adapters  # noqa: E402
from tests.integrations.transformers.test_adapters import config_of, lora, with_adapter  # noqa: E402
from tests.integrations.transformers.test_selfcheck import without_weights  # noqa: E402
from tools import matrix, zoo  # noqa: E402

CLIPS = ("dbrx", "olmo", "olmoe")  # types with `clip_qkv`
OVERWRITE = ("olmo", "olmoe", "gpt_oss", "gemma3n_text", "llama4_text", "llama4")  # types that write into products
DRAWN = OVERWRITE[:4]
KINDS = [*DRAWN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(zoo.exact_before() - {*DRAWN}))]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_type_do_not_depend_on_what_is_kept(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for whole in without_weights(kind):
        if next(matrix.layers.objections(whole), None) is not None:
            continue
        settings = getattr(whole.config, "attn_config", whole.config)
        if kind in CLIPS:
            assert hasattr(settings, "clip_qkv")
            settings.clip_qkv = 0.1
        compare(monkeypatch, matrix.case(type(whole), whole.config), kind in OVERWRITE)


def compare(monkeypatch: pytest.MonkeyPatch, case: matrix.Case, overwrites: bool | None = None) -> None:
    copied = copies(monkeypatch)
    for keep in KEEP:
        try:
            expected = case.packed(enable(case.model(), check=False).train())
            found = matrix.checkpointed(keep)(case)
        except ValueError as error:
            if "checkpointing" not in str(error) and "when training" not in str(error):
                raise
            return  # no checkpointing of this type, or no training with text alone
        assert zoo.difference(found, expected) == 0.0, keep
        assert keep == "products" or not copied
    assert overwrites is None or bool(copied) == overwrites


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_with_a_bias(monkeypatch: pytest.MonkeyPatch, experts: str) -> None:
    """transformers adds it in place to what the last two compute."""
    config = zoo.configuration("gpt_oss")
    config._experts_implementation = experts
    compare(monkeypatch, matrix.case(transformers.GptOssForCausalLM, config), experts != "eager")


# ---------------------------------------------------------------- adapters
# Types that need scikit-learn or trained adapters, or add none to a linear layer.
OTHERS = ("ADAMSS", "ADAPTION_PROMPT", "TRAINABLE_TOKENS", "XLORA")
EXACT = [name for name, reason in adapters.TYPES.items() if reason == adapters.EXACT and name not in OTHERS]
ADAPTERS: dict[str, Callable[[], Any]] = {name: partial(config_of, name) for name in EXACT} | {
    "DoRA": partial(lora, use_dora=True),
    "rsLoRA": partial(lora, use_rslora=True),
    "bias": partial(lora, lora_bias=True),
}


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.filterwarnings("ignore")
def test_gradients_of_every_adapter_do_not_depend_on_what_is_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = enable(with_adapter(ADAPTERS[name]()), check=False)
    model.enable_input_require_grads()
    copied, found = copies(monkeypatch), []
    for keep in (None, *KEEP):
        if keep is not None:
            recompute_layers(model, keep)
        model.zero_grad()
        torch.manual_seed(2)
        model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits.square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert any(float(x.abs().max()) > 0 for x in found[0])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))
    assert bool(copied) == (name in ("ADALORA", "C3A", "GRALORA")), copied

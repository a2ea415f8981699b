"""`enable(fast=True)` and what it is made of: fused pieces, and layers left out of checkpointing by memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from dualkv.integrations import checkpointing, fused
from dualkv.integrations.transformers import disable, enable, recompute_layers
from tests.integrations.tiny import LAYOUT, make_model, token_ids

GIB = 2**30


class Memory:
    """Of a pretended GPU: each layer keeps 3 bytes a row where it is left out, 1 where not; a step takes 40 more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows, self.start = 0, 100
        self.now, self.peak = self.start, 0
        monkeypatch.setattr(checkpointing, "_refuse_memory", lambda *_: None)
        monkeypatch.setattr(checkpointing, "_allocated", lambda _: self.now)
        monkeypatch.setattr(checkpointing, "_peak", lambda _: self.peak)

    def watch(self, model: Any) -> None:
        for layer in model.get_decoder().layers:
            layer.register_forward_hook(self._after, prepend=True)

    def _after(self, layer: Any, args: Any, output: Any) -> None:
        self.now += self.rows * (1 if layer.gradient_checkpointing else 3)

    def step(self, model: Any, rows: int) -> int:
        """The layers that were left out. The peak is that of the last layer's backward."""
        self.rows, self.now = rows, self.start
        out = model(input_ids=torch.arange(rows)[None] % 7, use_cache=False).logits
        left_out = sum(not layer.gradient_checkpointing for layer in model.get_decoder().layers)
        self.peak = max(self.peak, self.now + 40 * rows)
        out.sum().backward()
        return left_out


def make_deep(layers: int) -> Any:
    model = make_model("qwen3", num_hidden_layers=layers)
    return model.train()


def test_as_many_layers_as_the_limit_allows_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_deep(6)
    memory = Memory(monkeypatch)
    # 100 at the start, 6 * 1 + 2 + 40 bytes a row with one layer left out: 580 for ten rows. A further one adds 20.
    recompute_layers(model, "attention", memory=(580 + 50) / GIB)
    memory.watch(model)
    assert [memory.step(model, 10) for _ in range(3)] == [1, 3, 3]
    assert memory.peak <= 630
    assert memory.step(model, 11) == 1  # 100 + 528, and 22 for one further
    assert memory.step(model, 5) == 6  # 100 + 384, and 10 for each further
    assert memory.step(model, 1000) == 1
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    assert memory.step(model, 5) == 1  # the long batch's peak is all that is known
    recompute_layers(model, "attention")
    assert all(layer.gradient_checkpointing for layer in model.get_decoder().layers)
    assert not any(isinstance(h, checkpointing._Fit) for h in model.get_decoder()._forward_pre_hooks.values())


def test_gradients_do_not_depend_on_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = []
    for limit in (None, 400, 10**9):
        model = enable(make_deep(3))
        memory = Memory(monkeypatch)
        recompute_layers(model, "attention", memory=limit and limit / GIB)
        memory.watch(model)
        for _ in range(2):
            model.zero_grad()
            memory.now, memory.rows, memory.peak = 100, LAYOUT.num_tokens, 10**4
            model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert sum(not layer.gradient_checkpointing for layer in model.get_decoder().layers) == 3
    for other in grads[1:]:
        assert all(map(torch.equal, grads[0], other))


def test_limits_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="memory is -1, expected a positive number of GiB"):
        recompute_layers(make_model(), memory=-1)
    with pytest.raises(ValueError, match="memory is 40 GiB for a model on cpu, expected a model on a GPU"):
        recompute_layers(make_model(), memory=40)


def test_fast_is_undone() -> None:
    model = make_deep(2)
    file = fused.sys.modules[type(model.get_decoder()).__module__]
    rotary, before = file.apply_rotary_pos_emb, {name: dict(vars(m)) for name, m in model.named_modules()}
    enable(model, fast=True)
    assert fused.is_fused(model)
    assert file.apply_rotary_pos_emb is not rotary
    pieces = {n.rpartition(".")[2] for n, m in model.named_modules() if m._compiled_call_impl is not None}
    assert pieces == {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm", "mlp"}
    copied = copy.deepcopy(model)
    for some in (copied, model):
        disable(some)
        assert not fused.is_fused(some)
        assert all(m._compiled_call_impl is None for m in some.modules())
    assert file.apply_rotary_pos_emb is rotary
    for name, module in model.get_decoder().layers.named_modules():  # transformers' notes of checkpointing stay
        noted = {"_gradient_checkpointing_func", "gradient_checkpointing"}
        assert vars(module).keys() - noted == before[f"model.layers.{name}" if name else "model.layers"].keys(), name


def test_fast_computes_the_same() -> None:
    """By the compiler, to the rounding of its kernels."""
    grads = []
    for fast in (False, True):
        model = enable(make_deep(1), fast=fast)
        logits = model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits
        logits.square().mean().backward()
        grads.append([logits.detach(), *(p.grad for p in model.parameters())])
        disable(model)
    for plain, quick in zip(*grads, strict=True):
        torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-5)

"""Gradient checkpointing of a model's layers that keeps what is worth its memory.

A packed group has fewer rows than its replicated sequences, and leaves memory for results that checkpointing would
compute again. :func:`recompute_layers` says what each layer keeps: attention's, all products', or everything.
"""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from dualkv.arrays import check_model, positive
from dualkv.integrations import patching
from dualkv.integrations.transformers import fused, kept
from dualkv.integrations.transformers.layers import decoder_layers, decoders

Model = TypeVar("Model", bound=nn.Module)

_ATTENTION = [torch.ops.dualkv.fwd.default]
_aten = torch.ops.aten
_PRODUCTS = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._grouped_mm.default]
KEEP: dict[str, list[Any]] = {  # operations whose results a checkpointed layer keeps
    "nothing": [],
    "attention": _ATTENTION,
    "products": [*_ATTENTION, *_PRODUCTS],
}
KINDS = (*KEEP, "all")  # each keeps more than the one before
KEPT = "dualkv_kept"  # attribute of a decoder: the kind of each of its layers, by `recompute_layers`


def recompute_layers(model: Model, keep: str = "nothing", *, layers: int | None = None) -> Model:
    """Gradient checkpointing of every layer, with some results kept and not computed again.

    Packed groups have fewer rows and so leave memory for kept results. Attention is the first to keep: its output and
    log-sum-exp are small for the time that they take. Results do not depend on `keep` or `layers`. A trainer that calls
    `gradient_checkpointing_enable` afterwards, with `use_reentrant=False`, leaves what layers keep.

    Args:
        model: a transformers model, changed in place. Wrappers (FSDP, PEFT) may be applied before or after. Ranks that
            share weights need equal arguments.
        keep: "nothing" keeps only the input of each layer. "attention" also keeps out and lse of
            :func:`dualkv.attention`: T * H * (2 * Dv + 4) bytes a layer in bf16. "products" also keeps the results of
            all matrix products, so that only elementwise operations are computed again: T rows of every projection,
            about 86 kB a row and layer for Qwen3-8B. Where a model writes into one of them in place (`clip_qkv`,
            biases of grouped experts, adapters such as AdaLoRA), what is kept does not change
            (:mod:`dualkv.integrations.transformers.kept`). Kernels that write past PyTorch, launched without an
            operator and without `mark_dirty`, are not seen; of these Liger's rotary embedding is known, and refused.
            "all" computes nothing again: the layer is not checkpointed.
        layers: how many of a decoder's layers keep that, the last ones; the others keep what the name before `keep` in
            this list says. None: all layers. So a setting that fits into memory has a neighbour that takes one layer's
            results more: "attention" of all layers, "products" of 1 layer, of 2 layers, and so on.

    Returns:
        The same model.

    Raises:
        ValueError: another `keep`; "products", in any layer, for a model whose rotary embedding overwrites them
            (Liger's, in a model without norms of q and k); `layers` with "nothing", below 1, above the number of
            layers, or for a model whose layers are not checkpointed one by one.
        TypeError: `model` is no module, `layers` no integer.
    """
    check_model(model)
    if keep not in KINDS:
        raise ValueError(f"keep is {keep!r}, expected one of {', '.join(KINDS)}")
    others = keep
    if layers is not None:
        layers = positive("layers", layers)
        if keep == "nothing":
            raise ValueError(f"layers is {layers} with keep='nothing', expected one of {', '.join(KINDS[1:])}")
        others = KINDS[KINDS.index(keep) - 1]
    found = [(decoder, _kinds(decoder, keep, others, layers)) for decoder in decoders(model)]
    if "products" in (keep, others) and (overwritten := _overwritten_products(model)):
        raise ValueError(overwritten)
    for decoder, _ in found:
        patching.undo(decoder, "kept")
    _checkpoint(model, others)
    for decoder, kinds in found:
        changes = patching.of(decoder, "kept")
        changes.replace(KEPT, kinds)
        if {*kinds} != {"nothing"}:
            changes.before(keep_again)
        for layer, kind in zip(checkpointed_layers(decoder), kinds, strict=False):
            if kind != others:
                _keep(layer, kind, "kept")
    return model


def _checkpoint(model: Any, kind: str) -> None:
    """Let all layers keep this, also those of towers."""
    # transformers renamed both methods within version 5.
    if kind == "all":
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        return
    arguments: dict[str, Any] = {"use_reentrant": False}
    if KEEP[kind]:
        arguments["context_fn"] = partial(kept.contexts, KEEP[kind])
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(arguments)


def _kinds(decoder: nn.Module, keep: str, others: str, layers: int | None) -> tuple[str, ...]:
    """Choose the kind of each layer of a decoder that is checkpointed by itself; one for all where none is."""
    count, name = len(checkpointed_layers(decoder)), type(decoder).__name__
    if layers is None:
        return (keep,) * max(count, 1)
    if not count:
        raise ValueError(
            f"layers is {layers} for {name}, whose layers are not checkpointed one by one: expected None, or layers of"
            " transformers' GradientCheckpointingLayer"
        )
    if layers > count:
        raise ValueError(f"layers is {layers}, expected 1 to the {count} layers of {name}")
    return (others,) * (count - layers) + (keep,) * layers


def keep_again(decoder: nn.Module, _args: Any, _kwargs: Any) -> None:
    """A forward pre-hook of a decoder: layers keep what :func:`recompute_layers` said also after a trainer's own call
    of `gradient_checkpointing_enable`. (Reentrant checkpointing can keep nothing.)"""
    _set_again(decoder, decoder.__dict__[KEPT], "kept")


def keep_attention(decoder: nn.Module, _args: Any, _kwargs: Any) -> None:
    """A forward pre-hook of a decoder: checkpointed layers keep attention unless :func:`recompute_layers` said what
    they keep."""
    if KEPT not in decoder.__dict__:
        _set_again(decoder, ("attention",) * len(checkpointed_layers(decoder)), "enable")


def _set_again(decoder: nn.Module, kinds: tuple[str, ...], part: str) -> None:
    for layer, kind in zip(checkpointed_layers(decoder) if torch.is_grad_enabled() else [], kinds, strict=False):
        how: Any = layer._gradient_checkpointing_func if layer.gradient_checkpointing else None
        is_bare = isinstance(how, partial) and how.keywords.get("use_reentrant") is False
        if kind != "nothing" and is_bare and "context_fn" not in how.keywords:
            _keep(layer, kind, part)


@torch.compiler.disable
def _keep(layer: Any, kind: str, part: str) -> None:
    if kind == "all":
        patching.of(layer, part).replace("gradient_checkpointing", False)
    else:
        how = partial(layer._gradient_checkpointing_func, context_fn=partial(kept.contexts, KEEP[kind]))
        patching.of(layer, part).replace("_gradient_checkpointing_func", how)


@torch.compiler.disable
def keep_all(decoder: nn.Module, share: float, until: ExitStack) -> None:
    """Lets a share of the checkpointed layers, the last ones, keep all that their backward needs, until `until` is
    closed."""
    layers = [layer for layer in checkpointed_layers(decoder) if layer.gradient_checkpointing] if share else []
    for layer in layers[math.ceil(len(layers) * (1 - share)) :]:
        until.enter_context(patching.Changes(layer)).replace("gradient_checkpointing", False)


def checkpointed_layers(decoder: nn.Module) -> list[Any]:
    """The layers that transformers checkpoints one by one, in order."""
    return [m for m in decoder.modules() if m is not decoder and isinstance(m, GradientCheckpointingLayer)]


def _overwritten_products(model: nn.Module) -> str | None:
    """Say why products cannot be kept: Liger's kernel rotates q and k in place, unseen by PyTorch, here twice. None if
    they can."""
    for name, module, _ in decoder_layers(model):
        rotate = inspect.unwrap(module.forward).__globals__.get(fused.ROTARY)
        if getattr(rotate, "__module__", "").startswith("liger_kernel") and not hasattr(module, "q_norm"):
            return (
                f"{name} ({type(module).__name__}) rotates its projections in place by Liger's kernel, which keep="
                "'products' would do twice: use keep='attention', or Liger with rope=False"
            )
    return None

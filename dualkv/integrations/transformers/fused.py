"""Norms, rotary embeddings and MLPs of a model in fused kernels: Liger's where they are, compiled pieces otherwise."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from codegen import packages
from dualkv.integrations import patching
from dualkv.integrations.transformers import layers

ROTARY = "apply_rotary_pos_emb"
FUSED = "dualkv_fused"  # attribute of a fused decoder


def is_fused(model: nn.Module) -> bool:
    """Whether :func:`fuse` has changed the model."""
    return any(FUSED in vars(decoder) for decoder in layers.decoders(model))


def fuse(model: nn.Module) -> None:
    """Runs the elementwise parts of every layer in fused kernels, with the rounding of these kernels.

    They are Liger's where `liger_kernel` is installed, knows the model's type and the model is on a GPU. Otherwise
    norms, gated MLPs and the rotary embedding go through `torch.compile`, each by itself. Other models of the process
    do not change. The part "fast" of :func:`dualkv.integrations.patching.undo` is what this function does.
    """
    patching.undo(model, "fast")
    for decoder in layers.decoders(model):
        file = sys.modules[type(decoder).__module__]
        # Liger replaces functions and classes of all models.
        with patching.Changes(file) as names, names.watched(), patching.watched(decoder, "fast"):
            by_liger = _by_liger(model, decoder)
            rotary = vars(file).get(ROTARY) if by_liger else None
        if not by_liger:
            _compile(_pieces(decoder))
        _set_rotary(decoder, rotary)
        patching.of(decoder, "fast").replace(FUSED, True)


def _by_liger(model: nn.Module, decoder: nn.Module) -> bool:
    """Puts Liger's kernels in place; False if there are none for this model here."""
    if packages.lacking("liger-kernel") or next(decoder.parameters()).device.type != "cuda":
        return False
    from liger_kernel.transformers import monkey_patch as liger

    owner: Any = next((m for m in model.modules() if hasattr(m, "config") and decoder in m.children()), decoder)
    apply = liger.MODEL_TYPE_TO_APPLY_LIGER_FN.get(owner.config.model_type)
    if apply is None:
        return False
    losses = [name for name in inspect.signature(apply).parameters if name.endswith("cross_entropy")]
    apply(model=owner, **dict.fromkeys(losses, False))
    return True


def _compile(modules: Iterable[nn.Module]) -> None:
    """Compiles each module by itself. One whose forward has been replaced already (Accelerate's hooks) stays as it is.

    Sizes of parameters are compiled in, so norms of hidden states and of heads do not share code.
    """
    compiled = cache(_by_form)  # one for modules of one class and these sizes
    for module in modules:
        forward = type(module).forward
        if "forward" not in vars(module) and isinstance(forward, FunctionType):
            sizes = tuple(p.shape for p in module.parameters())
            patching.of(module, "fast").replace("forward", MethodType(compiled(forward, sizes), module))


def _by_form(function: Callable[..., Any], sizes: tuple[torch.Size, ...] = ()) -> Callable[..., Any]:
    """The function, compiled for each form of its tensors. `sizes`: of its module's parameters.

    `torch.compile` compiles one code eight times at most; further calls run as they are. It compiles anew with and
    without gradients, and for sizes of 0 and 1. So each such form has code of its own.
    """
    forms: dict[Any, Callable[..., Any]] = {}

    @wraps(function, updated=())  # a bound method is pickled by its name
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a model that is compiled as a whole
            return function(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        form = torch.is_grad_enabled(), *((x.requires_grad, *(min(n, 2) for n in x.shape)) for x in tensors)
        if form not in forms:
            forms[form] = torch.compile(patching.with_own_code(function, sizes, form), dynamic=True)
        return forms[form](*args, **kwargs)

    return call


def _set_rotary(decoder: nn.Module, rotary: Any = None) -> None:
    """Lets the attention layers of this model alone call another rotary embedding.

    It is a global name of transformers' modeling file. So each layer's forward becomes the same code with global names
    of its own. A layer whose forward has been replaced already (Accelerate's hooks) stays as it is.

    rotary: the file's own, compiled, if it is None.
    """
    compiled = cache(_by_form)  # one for all layers
    for module in layers.attention_modules(decoder):
        forward = type(module).forward
        inner = inspect.unwrap(forward)
        if "forward" in vars(module) or not isinstance(inner, FunctionType) or ROTARY not in inner.__code__.co_names:
            continue
        names = dict(inner.__globals__)
        names[ROTARY] = rotary or compiled(names[ROTARY])
        del names["__name__"]  # a model that is compiled as a whole would look in the file instead
        if (own := patching.with_globals(forward, names)) is not None:
            patching.of(module, "fast").replace("forward", MethodType(own, module))


def _pieces(decoder: nn.Module) -> Iterator[nn.Module]:
    """Norms and gated MLPs. A mixture of experts is none: its shapes depend on the routes."""
    for name, module in decoder.named_modules():
        gated = all(
            isinstance(getattr(module, part, None), nn.Linear) for part in ("gate_proj", "up_proj", "down_proj")
        )
        if gated or "norm" in name.rpartition(".")[2]:
            yield module
